"""The files of deploy/ name options, paths and metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

DEPLOY = Path(__file__).parents[1] / "deploy"


def options_of_serve() -> set[str]:
    from surefoot.cli.app import app

    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    return set(re.findall(r"--[a-z][a-z-]+", shown))


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "surefoot.service", "README.md"])
def test_options_exist(name: str) -> None:
    text = (DEPLOY / name).read_text()
    lines = [line for line in text.splitlines() if "surefoot" in line or "--api-key" in line or "serve" in line]
    used = {option for line in lines for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    used -= {
        "--no-cache-dir",
        "--extra-index-url",
        "--create-home",
        "--uid",
        "--from",
        "--now",
        "--head",
        "--address",
        "--chown",
    }
    assert used <= options_of_serve(), used - options_of_serve()
    assert name in ("compose.yaml", "README.md") or used


def test_yaml_and_json_are_well_formed() -> None:
    for path in (*DEPLOY.glob("*.yaml"), *DEPLOY.glob("*.yml")):
        assert yaml.safe_load(path.read_text()), path
    assert json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "nothing is open to others unasked"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./") and source != "./key":
                assert (DEPLOY / source).exists(), source


def test_the_containers_user_is_not_root_and_leaves_time_to_drain() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER surefoot$", text, re.M)
    assert "HEALTHCHECK" in text
    unit = (DEPLOY / "surefoot.service").read_text()
    drain = int(re.findall(r"--drain (\d+)", unit)[0])
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > drain
    assert "NoNewPrivileges=yes" in unit


def test_the_configuration_for_ray_makes_replicas_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.engine.options import EngineOptions
    from surefoot.serving import replicas
    from surefoot.serving.settings import ServeSettings

    (application,) = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())["applications"]
    assert application["import_path"] == f"{replicas.__name__}:{replicas.build.__name__}"
    made: list[Any] = []
    monkeypatch.setattr(replicas, "application", lambda *arguments: made.append(arguments))
    replicas.build(application["args"])
    ((options, settings, count, threads, metrics_port),) = made
    assert options.pop("model") == "qwen2.5-coder-0.5b"
    assert EngineOptions(**options).max_num_seqs == 16  # every other one is an engine's
    assert isinstance(settings, ServeSettings)
    assert (count, threads, metrics_port) == (2, 1, 8001)

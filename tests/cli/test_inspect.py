"""`surefoot inspect` on targets, drafters, pairs of them, and the machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.profiling import hardware
from surefoot.speculation.calibration import Calibration, Provenance
from tests.cli.conftest import strict_json


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("dtype", None, "–"),
        ("servable", True, "yes"),
        ("num_bytes", 3 * 2**30, "3.0 GiB"),
        ("bytes", 5 * 2**19, "2.5 MiB"),
        ("kv_bytes_per_token", 12288, "12.0 KiB"),
        ("bytes", 100, "100"),
        ("parameters", 1234567, "1 234 567"),
        ("windows", (512, 512, None), "2 sliding over 512 tokens, 1 full"),
        ("target_layer_ids", [1, 3], "1, 3"),
        ("stream_gb_s", 20.56, "20.6 GB/s"),
    ],
)
def test_facts_are_readable(name: str, value: Any, shown: str) -> None:
    from surefoot.cli.inspect import readable

    assert readable(name, value) == shown


def test_nothing_to_inspect_is_an_error(run: Callable[..., Any]) -> None:
    result = run("inspect")
    assert result.exit_code == 2
    assert "--hardware" in result.stderr


def test_prompt_lookup_fits_everything(run: Callable[..., Any]) -> None:
    assert strict_json(run("inspect", "prompt-lookup", "--json").stdout)["checkpoint"]["fits"] is True


def test_hardware_as_json_and_as_text(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_NATIVE", "0")
    monkeypatch.setattr(hardware, "stream_rate", lambda: 20.5e9)
    found = strict_json(run("inspect", "--hardware", "--json").stdout)["hardware"]
    assert found["stream_gb_s"] == pytest.approx(20.5)
    assert 1 <= found["physical_cores"] <= found["logical_cores"]
    assert found["native_kernels"] is False
    assert found["native_reason"] == "switched off by SUREFOOT_NATIVE=0"
    text = run("inspect", "--hardware").stdout
    assert "20.5 GB/s" in text


def test_a_target_is_described_without_its_weights(run: Callable[..., Any], checkpoints: Path) -> None:
    result = run("inspect", str(checkpoints / "target"), "--json")
    assert result.exit_code == 0
    found = strict_json(result.stdout)["checkpoint"]
    assert found["role"] == "target"
    assert (found["num_layers"], found["hidden_size"], found["servable"]) == (2, 32, True)
    text = run("inspect", str(checkpoints / "target")).stdout
    assert "2 full" in text
    assert found["weights"] == "float32 safetensors"
    assert "float32 safetensors" in text
    assert "LlamaForCausalLM" in text


def test_a_target_that_cannot_be_served_says_why_and_exits_with_1(run: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    sizes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mamba_d_ssm": 16,
        "mamba_n_heads": 2,
        "mamba_d_head": 8,
    }
    config = FalconH1Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, **sizes)
    FalconH1ForCausalLM(config).save_pretrained(tmp_path)
    result = run("inspect", str(tmp_path), "--json")
    assert result.exit_code == 1
    found = strict_json(result.stdout)["checkpoint"]
    assert found["servable"] is False
    assert found["reason"]


def test_a_drafter_that_fits(run: Callable[..., Any], checkpoints: Path) -> None:
    drafter, target = str(checkpoints / "drafter"), str(checkpoints / "target")
    result = run("inspect", drafter, "--target", target)
    assert result.exit_code == 0
    assert f"fits {target}" in " ".join(result.stdout.split()).replace("- ", "-")
    found = strict_json(run("inspect", drafter, "--target", target, "--json").stdout)["checkpoint"]
    assert (found["role"], found["gamma"], found["fits"], found["problems"]) == ("drafter", 3, True, [])


def test_a_drafter_that_does_not_fit_says_why_and_exits_with_1(run: Callable[..., Any], checkpoints: Path) -> None:
    drafter, target = str(checkpoints / "stranger"), str(checkpoints / "target")
    result = run("inspect", drafter, "--target", target)
    assert result.exit_code == 1
    assert "drafter reads hidden size 40, target has 32" in result.stdout
    found = strict_json(run("inspect", drafter, "--target", target, "--json").stdout)["checkpoint"]
    assert found["fits"] is False
    assert len(found["problems"]) == 1


def test_a_drafter_without_a_target_is_only_described(run: Callable[..., Any], checkpoints: Path) -> None:
    result = run("inspect", str(checkpoints / "stranger"))
    assert result.exit_code == 0
    assert "fit" not in result.stdout


def test_the_calibration_beside_a_drafter_is_read(run: Callable[..., Any], checkpoints: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(checkpoints / "drafter", drafter)
    assert "make one with 'surefoot calibrate -d " in " ".join(run("inspect", str(drafter)).stdout.split())
    Calibration([1.5, 1.0, 0.5], Provenance(dataset="lullabies")).save(drafter / "calibration.json")
    assert "made from lullabies prompts" in run("inspect", str(drafter)).stdout
    Calibration([1.5, 1.0]).save(drafter / "calibration.json")  # of another gamma
    result = run("inspect", str(drafter))
    assert result.exit_code == 1
    assert "cannot be used" in result.stdout
    assert "surefoot calibrate" in " ".join(result.stdout.split())


def test_a_truncated_drafter_is_one_line_with_the_remedy(
    run: Callable[..., Any], checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints / "drafter", tmp_path / "drafter")
    weights = tmp_path / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    result = run("inspect", str(tmp_path / "drafter"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "again" in result.stderr


def test_what_is_nothing_is_one_line_with_the_remedy(run: Callable[..., Any]) -> None:
    result = run("inspect", "./no-such-model")
    assert result.exit_code == 2
    assert "no-such-model" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_drafter_is_not_inspected_as_a_target_and_not_served_as_one(
    run: Callable[..., Any], checkpoints: Path
) -> None:
    drafter = str(checkpoints / "drafter")
    result = run("generate", "x", "--model", drafter)
    assert result.exit_code == 2
    assert "is a drafter (" in result.stderr
    assert f"--drafter {drafter}" in result.stderr


@pytest.mark.parametrize(
    "command", [("generate", "x"), ("chat",), ("profile",), ("bench", "decode"), ("bench", "throughput"), ("demo",)]
)
def test_every_command_takes_the_remedy_for_checkpoints_with_code(
    run: Callable[..., Any], tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Refused without the option, whatever standard input says; with it, the code is looked for (and is not there)."""
    config = {"model_type": "own-model", "auto_map": {"AutoConfig": "own.OwnConfig"}, "architectures": ["Own"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    trace = tmp_path / "the-code-ran"
    (tmp_path / "own.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).touch()\n")
    refused = run(*command, "--model", str(tmp_path), stdin="y\n" * 9)
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1
    assert "--trust-remote-code" in refused.stderr
    assert not trace.exists()
    assert run(*command, "--model", str(tmp_path), "--trust-remote-code").exit_code == 2  # `own.py` has no OwnConfig
    assert trace.exists()


def test_a_target_has_no_target(run: Callable[..., Any], checkpoints: Path) -> None:
    target = str(checkpoints / "target")
    result = run("inspect", target, "--target", target)
    assert result.exit_code == 2
    assert "leave --target out" in result.stderr

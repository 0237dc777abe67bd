"""Python code that lies in a checkpoint runs only for a user who asked for it: never for a "yes" on standard input."""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.errors import ModelError
from surefoot.targets.loading import describe_target, load_target, load_untouched

from .flat import random_model

_CODE = """
from pathlib import Path
Path({trace!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-model"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file that exists after the checkpoint's code has run."""
    return tmp_path / "the-code-ran"


@pytest.fixture(autouse=True)
def eager_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`yes | surefoot ...`, with transformers' copies of remote code in a place of their own."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def with_code(tmp_path: Path, trace: Path) -> Path:
    """A Llama under a name that transformers does not know, with the code that knows it."""
    directory = tmp_path / "checkpoint"
    random_model("llama").save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["model_type"] = "own-model"
    config["architectures"] = ["OwnForCausalLM"]
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(_CODE.format(trace=str(trace)))
    return directory


@pytest.mark.parametrize("load", [load_target, describe_target, load_untouched])
def test_a_checkpoint_with_code_is_refused_and_its_code_does_not_run(load: Callable[[str], Any], with_code, trace):
    with pytest.raises(
        ModelError,
        match=r"needs Python code that lies in its checkpoint: pass trust_remote_code \(--trust-remote-code\)",
    ) as e:
        load(str(with_code))
    assert "\n" not in str(e.value)
    assert not trace.exists()
    assert sys.stdin.read(1) == "y"  # nobody was asked


def test_with_the_option_the_code_runs(with_code, trace):
    target = load_target(str(with_code), trust_remote_code=True)
    assert trace.exists()
    assert type(target.model).__name__ == "OwnForCausalLM"
    assert describe_target(str(with_code), trust_remote_code=True).servable


def test_code_beside_a_known_model_does_not_run(tmp_path, trace):
    """transformers prefers such code to its own when it is trusted; untrusted, the known model is served."""
    random_model("llama").save_pretrained(tmp_path / "known")
    config = json.loads((tmp_path / "known" / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "known" / "config.json").write_text(json.dumps(config))
    (tmp_path / "known" / "own.py").write_text(_CODE.format(trace=str(trace)))
    assert type(load_target(str(tmp_path / "known")).model).__name__ == "LlamaForCausalLM"
    assert not trace.exists()


def test_a_tokenizer_with_code_is_refused(tmp_path, trace):
    directory = tmp_path / "checkpoint"
    random_model("llama").save_pretrained(directory)
    (directory / "vocab.txt").write_text("a\nb\n")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}})
    )
    (directory / "own.py").write_text(_CODE.format(trace=str(trace)))
    try:
        load_target(str(directory))
    except ModelError as refusal:  # or, for a Llama, transformers' own tokenizer class: either is right
        assert "\n" not in str(refusal)  # noqa: PT017
    assert not trace.exists()


class _Exploit:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_a_pickle_that_holds_more_than_tensors_is_refused(tmp_path, trace, protocol):
    directory = tmp_path / "checkpoint"
    model = random_model("llama")
    model.save_pretrained(directory)
    (directory / "model.safetensors").unlink()
    content = {**model.state_dict(), "more": _Exploit(trace)}
    if protocol == "torch":
        torch.save(content, directory / "pytorch_model.bin")
    else:
        (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Exploit(trace)))
    with pytest.raises(
        ModelError, match=r"pickle that holds more than tensors .*choose a checkpoint with \.safetensors"
    ) as e:
        load_target(str(directory))
    assert "\n" not in str(e.value)
    assert not trace.exists()


def test_a_pickle_of_tensors_is_read(tmp_path):
    model = random_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    target = load_target(str(tmp_path))
    assert torch.equal(target.lm_head.weight, model.lm_head.weight)
    assert target.weights == "PyTorch pickle"

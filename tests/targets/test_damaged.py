"""Damaged checkpoints: one line that names the file, what is wrong with it and what to do, and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ModelError
from surefoot.targets.loading import describe_target, load_target
from tests.tiny_tokenizers import byte_level_tokenizer

from .flat import random_model
from .test_sources import write_gguf


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    random_model("qwen3").save_pretrained(directory)
    return directory


def one_line(load: Callable[[str], Any], directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(directory))
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ("[]", "holds a list, not a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": "model.safetensors"}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "puts a into 3, which is no file name"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "which is no file name"),
        ('{"weight_map": {"a": null}}', "which is no file name"),
        ('{"weight_map": {"a": "missing.safetensors"}}', "is missing"),
        ("\ud800", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_damaged_index_of_shards(checkpoint, content, reason):
    (checkpoint / INDEX).write_bytes(content.encode("utf-8", "surrogatepass"))
    for load in (load_target, describe_target):
        message = one_line(load, checkpoint)
        assert reason in message
        assert "copy or download it again" in message


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '"text"', "3", "null", "{}", '{"model_type": 3}', '{"model_type": null}']
)
def test_a_damaged_configuration(checkpoint, content):
    (checkpoint / "config.json").write_text(content)
    for load in (load_target, describe_target):
        one_line(load, checkpoint)


@pytest.mark.parametrize("value", ["many", None, [], {}, -1, 0, 1.5, True, [[]]])
@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim", "layer_types",
     "rope_parameters", "rms_norm_eps", "architectures", "torch_dtype", "quantization_config"],
)  # fmt: skip
def test_wrong_types_in_a_configuration(checkpoint, key, value):
    """Whatever a key holds: a description, or one line; a target, or one line."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    for load in (describe_target, load_target):
        try:
            load(str(checkpoint))
        except ModelError as refusal:
            assert "\n" not in str(refusal)  # noqa: PT017
            assert len(str(refusal)) < 2000  # noqa: PT017


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1000, -1])
def test_truncated_weights(checkpoint, keep):
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:keep])
    for load in (load_target, describe_target):
        assert "model.safetensors is truncated or corrupt" in one_line(load, checkpoint)


def test_a_header_that_is_noise(checkpoint):
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[8:200] = bytes(range(192))
    weights.write_bytes(content)
    assert "truncated or corrupt" in one_line(load_target, checkpoint)


def test_weights_of_another_shape(checkpoint):
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    one_line(load_target, checkpoint)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"model": 3}', '{"version": "1.0", "model": {"type": "BPE"}}']
)
def test_a_damaged_tokenizer_is_named_with_the_reason(checkpoint, content):
    """Not "has no tokenizer", which is said of a checkpoint without one."""
    byte_level_tokenizer().save_pretrained(checkpoint)
    assert load_target(str(checkpoint)).tokenizer is not None
    (checkpoint / "tokenizer.json").write_text(content)
    message = one_line(load_target, checkpoint)
    assert "its tokenizer (tokenizer.json) cannot be read (" in message
    assert "copy or download it again" in message
    described = describe_target(str(checkpoint))
    assert not described.servable
    assert "its tokenizer (tokenizer.json) cannot be read (" in str(described.reason)
    (checkpoint / "tokenizer.json").unlink()  # what the message says as well: token ids only
    for file in checkpoint.glob("*vocab*"):
        file.unlink()
    assert load_target(str(checkpoint)).tokenizer is None


def test_a_damaged_gguf_metadata(tmp_path, monkeypatch):
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "damaged.gguf"
    write_gguf(path)
    content = path.read_bytes()
    for cut in (4, 20, 200, 3000, len(content) // 2):
        path.write_bytes(content[:cut])
        for load in (load_target, describe_target):
            one_line(load, path)


@pytest.mark.slow
def test_two_processes_with_an_empty_cache_both_get_the_target(tmp_path):
    path, cache = tmp_path / "shared.gguf", tmp_path / "cache"
    write_gguf(path)
    program = (
        "import sys; from surefoot.targets.sources import locate, prepare; "
        "print(prepare(locate(sys.argv[1]), quiet=True))"
    )
    import os

    environment = {**os.environ, "SUREFOOT_CACHE": str(cache)}
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = {process.communicate(timeout=300)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(answers) == 1
    assert [entry.name for entry in (cache / "targets").iterdir()] == [Path(answers.pop()).name]

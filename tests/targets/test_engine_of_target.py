"""What an engine says about the target it was loaded with: its weights, its limits, its options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot import LLM, SamplingParams
from surefoot.errors import ConfigurationError, RequestError

from .flat import random_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    random_model("llama").save_pretrained(directory)  # 128 positions
    return directory


def test_every_description_of_an_engine_names_the_weights(checkpoint):
    with LLM(str(checkpoint), dtype="bfloat16", cost_table="none") as llm:
        described = llm.describe()
    assert described["target"] == str(checkpoint)
    assert described["target_weights"] == "float32 safetensors"


@pytest.mark.parametrize(
    ("max_model_len", "remedy"),
    [
        (32, r"shorten it, or raise max_model_len \(--max-model-len\) to at most 128"),
        (None, "shorten it; the model itself"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_what_helps(checkpoint, max_model_len, remedy):
    """Raising the limit is advice only where the model allows it: followed, it works."""
    prompt = [3] * (max_model_len or 128)
    with LLM(str(checkpoint), cost_table="none", max_model_len=max_model_len) as llm:
        with pytest.raises(RequestError, match=rf"the prompt has {len(prompt)} tokens, .*: {remedy}") as caught:
            llm.engine.add_request(prompt, SamplingParams(max_tokens=1))
        if max_model_len is None:
            assert "--max-model-len" not in str(caught.value)
    with LLM(str(checkpoint), cost_table="none", max_model_len=128) as llm:
        if max_model_len is not None:
            assert len(llm.generate([prompt], SamplingParams(max_tokens=1), progress=False)[0].token_ids) == 1
    with pytest.raises(ConfigurationError, match="128"):
        LLM(str(checkpoint), cost_table="none", max_model_len=129)


def test_trust_is_a_yes_or_a_no(checkpoint):
    with pytest.raises(ConfigurationError, match="trust_remote_code"):
        LLM(str(checkpoint), trust_remote_code="yes")  # type: ignore[arg-type]


def test_float8_weights_are_served(tmp_path):
    """Through the optimisation pass and the engine: the same tokens as the same weights stored unquantised."""
    from safetensors.torch import load_file, save_file

    random_model("llama").save_pretrained(tmp_path / "plain")
    random_model("llama").save_pretrained(tmp_path / "float8")
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    stored = dict(weights)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scale = weights[name].abs().max() / 448
        stored[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        stored[name + "_scale"] = scale
        weights[name] = stored[name].float() * scale
    save_file(weights, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, tmp_path / "float8" / "model.safetensors", metadata={"format": "pt"})
    answers = []
    for name in ("plain", "float8"):
        with LLM(str(tmp_path / name), dtype="float32", cost_table="none") as llm:
            params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
            answers.append(llm.generate([[5, 6, 7, 8, 5, 6]], params, progress=False)[0].token_ids)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 3

"""Rotary scaling of GGUF files, against frequencies computed from the formulas' definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config

from surefoot.errors import ModelError
from surefoot.kernels import native
from surefoot.targets.loading import describe_target, load_target
from surefoot.targets.rope_scaling import apply_rope_scaling, rope_parameters

from .test_sources import write_gguf

_BASE, _DIM, _CONTEXT = 10000.0, 8, 64  # of `write_gguf`
_PLAIN = _BASE ** -(np.arange(0, _DIM, 2) / _DIM)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.available()
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))


def llama3_divisors(frequencies: np.ndarray, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What Llama 3.1 divides its frequencies by: nothing for short waves, `factor` for long ones, between them a ramp."""
    divisors = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def yarn_frequencies(factor: float, original: int, fast: float = 32.0, slow: float = 1.0) -> np.ndarray:
    """YaRN's own: dimensions that turn often are kept, those that turn rarely are interpolated, between them a ramp."""

    def dimension(turns: float) -> float:
        return _DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(_BASE))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), _DIM - 1)
    ramp = np.clip((np.arange(_DIM // 2) - low) / max(high - low, 0.001), 0, 1)
    return _PLAIN / factor * ramp + _PLAIN * (1 - ramp)


_DIVISORS = llama3_divisors(_PLAIN, 8.0, 1.0, 4.0, 32)


def linear(writer: Any) -> None:
    writer.add_rope_scaling_type(_types().LINEAR)
    writer.add_rope_scaling_factor(4.0)


def old_linear(writer: Any) -> None:
    writer.add_float32("qwen2.rope.scale_linear", 4.0)


def yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(_types().YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def llama3(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", _DIVISORS)


def none(writer: Any) -> None:
    writer.add_rope_scaling_type(_types().NONE)
    writer.add_rope_scaling_factor(4.0)


def _types() -> Any:
    import gguf

    return gguf.RopeScalingType


@pytest.mark.parametrize(
    ("prepare", "frequencies", "scale"),
    [
        (linear, _PLAIN / 4, 1.0),
        (old_linear, _PLAIN / 4, 1.0),
        (yarn, yarn_frequencies(4.0, 16), 0.1 * math.log(4.0) + 1),
        (llama3, _PLAIN / _DIVISORS, 1.0),
        (none, _PLAIN, 1.0),
    ],
)
def test_the_target_turns_by_the_files_frequencies(
    tmp_path: Path, prepare: Callable[[Any], None], frequencies: np.ndarray, scale: float
) -> None:
    path = tmp_path / "scaled.gguf"
    write_gguf(path, prepare=prepare)
    target = load_target(str(path), dtype="float32", quiet=True)
    rotary = target.model.model.rotary_emb
    np.testing.assert_allclose(rotary.inv_freq.numpy(), frequencies, rtol=1e-5)
    assert rotary.attention_scaling == pytest.approx(scale)
    assert target.max_model_len == _CONTEXT
    assert describe_target(str(path)).max_model_len == _CONTEXT
    cosine = rotary(torch.zeros(1, 1, _DIM), torch.tensor([[37]]))[0][0, 0, : _DIM // 2]
    np.testing.assert_allclose(cosine.numpy(), np.cos(37 * frequencies) * scale, rtol=0, atol=1e-5)


def test_the_scalings_of_these_tests_differ_from_none() -> None:
    for scaled in (_PLAIN / 4, yarn_frequencies(4.0, 16), _PLAIN / _DIVISORS):
        assert np.abs(scaled / _PLAIN - 1).max() > 0.5


def test_divisors_agree_with_transformers_own_llama_3() -> None:
    """The tensor that converters write, against transformers' formula for the checkpoint it was written from."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 131072}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    official = LlamaConfig(**sizes, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling})
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    divisors = llama3_divisors(plain, 8.0, 1.0, 4.0, 8192)
    read = rope_parameters({}, {"rope_freqs.weight": divisors}, 131072, "test")
    ours = LlamaConfig(**sizes, rope_parameters={"rope_theta": 500000.0, **read})
    torch.testing.assert_close(
        LlamaRotaryEmbedding(ours).inv_freq, LlamaRotaryEmbedding(official).inv_freq, rtol=1e-6, atol=0
    )
    assert LlamaRotaryEmbedding(ours).attention_scaling == 1.0


def header(path: Path, architecture: str, fill: Callable[[Any], None]) -> Path:
    """A file with metadata alone."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gemma_3_scales_its_global_layers_alone(tmp_path: Path) -> None:
    def fill(writer: Any) -> None:
        linear(writer)
        writer.add_rope_scaling_factor  # noqa: B018 - the factor is in `linear`
        writer.add_rope_freq_base(1_000_000.0)

    config = Gemma3TextConfig(num_hidden_layers=6, max_position_embeddings=131072)
    apply_rope_scaling(config, header(tmp_path / "gemma.gguf", "gemma3", fill), "gemma")
    assert config.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0}
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}


def test_phi_3_reads_both_lists(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 4, dtype=np.float32), np.linspace(2, 5, 4, dtype=np.float32)

    def fill(writer: Any) -> None:
        writer.add_rope_scaling_orig_ctx_len(4096)
        writer.add_rope_scaling_attn_factors(1.19)
        writer.add_tensor("rope_factors_short.weight", short)
        writer.add_tensor("rope_factors_long.weight", long)

    config = Phi3Config(hidden_size=32, num_attention_heads=4, max_position_embeddings=131072, pad_token_id=0)
    apply_rope_scaling(config, header(tmp_path / "phi.gguf", "phi3", fill), "phi")
    parameters = config.rope_parameters
    assert parameters["rope_type"] == "longrope"
    assert parameters["short_factor"] == pytest.approx(short.tolist())
    assert parameters["long_factor"] == pytest.approx(long.tolist())
    assert parameters["original_max_position_embeddings"] == 4096
    assert parameters["attention_factor"] == pytest.approx(1.19)
    config.validate_rope()


@pytest.mark.parametrize(
    ("stated", "tensors", "reason"),
    [
        ({"scaling.type": "spiral", "scaling.factor": 2.0}, {}, "type 'spiral' is not known"),
        ({"scaling.type": "longrope", "scaling.factor": 2.0}, {}, "longrope scaling without rope_factors"),
        ({"scaling.type": "yarn", "scaling.factor": 2.0}, {"rope_freqs.weight": _DIVISORS}, "rope_freqs and yarn"),
        ({}, {"rope_factors_long.weight": _DIVISORS}, "one context length only"),
        ({"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.yarn_log_multiplier": 0.1}, {}, "of its own"),
    ],
)
def test_what_cannot_be_expressed_is_refused(stated: Any, tensors: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        rope_parameters(stated, tensors, 4096, "test")


def test_scaling_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    with pytest.raises(ModelError, match=r"which GPT2Config has not; choose the checkpoint in Hugging Face layout"):
        apply_rope_scaling(GPT2Config(), header(tmp_path / "gpt.gguf", "gpt2", linear), "gpt")

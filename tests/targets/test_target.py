"""A target on flat, ragged, scattered rows gives what the stock model gives for each request alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch
from surefoot.errors import ConfigurationError
from surefoot.targets.target import Target

from .flat import CONFIGS, FlatRunner, random_model, twins

PROMPTS = {0: 17, 2: 9, 3: 23}  # state slot -> length


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest) -> tuple[object, Target]:
    return twins(request.param)


def sequences() -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {slot: torch.randint(3, 64, (length,), generator=generator) for slot, length in PROMPTS.items()}


def run(target: Target, runner: FlatRunner, batch: FlatBatch) -> Tensor:
    return target.forward(batch, runner.cache).logits


@torch.no_grad()
def stock_logits(stock: object, tokens: Tensor) -> Tensor:
    return stock(tokens[None]).logits[0]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max())))


def test_ragged_prefill_and_decode_equal_the_stock_model(pair):
    """Prefill in chunks, then blocks of an anchor and drafts, of different requests in shared passes with padding."""
    stock, target = pair
    runner, tokens = FlatRunner(target), sequences()
    passes = [
        [(0, 0, 5), (3, 0, 11)],
        [(2, 0, 8), (0, 5, 9), (3, 11, 7)],  # another request joins; windows of 5 and 6 are crossed
        [(3, 18, 4), (0, 14, 1), (2, 8, 1)],
        [(0, 15, 2), (3, 22, 1)],
    ]
    seen: dict[int, list[Tensor]] = {slot: [] for slot in tokens}
    for number, pieces in enumerate(passes):
        batch = runner.batch([(s, p, tokens[s][p : p + n].tolist()) for s, p, n in pieces], padding=number)
        rows = run(target, runner, batch).split([n for _, _, n in pieces])
        for (slot, _, _), logits in zip(pieces, rows, strict=True):
            seen[slot].append(logits)
    for slot, ids in tokens.items():
        assert_close(torch.cat(seen[slot]), stock_logits(stock, ids))


def test_a_rejected_draft_leaves_no_trace(pair):
    """Rewinding is setting a length: rows run on drafts that were rejected are overwritten by the next pass."""
    stock, target = pair
    runner, ids = FlatRunner(target), sequences()[3]
    run(target, runner, runner.batch([(1, 0, ids[:9].tolist())]))
    run(target, runner, runner.batch([(1, 9, [60, 61, 62, 63])]))
    logits = run(target, runner, runner.batch([(1, 9, ids[9:15].tolist())]))
    assert_close(logits, stock_logits(stock, ids[:15])[9:])


def test_captured_features_are_the_hidden_states_of_the_stock_model(pair):
    stock, target = pair
    runner, ids = FlatRunner(target), sequences()[0]
    layers = (1, -1, 0)
    output = target.forward(runner.batch([(2, 0, ids.tolist())], padding=3), runner.cache, layers)
    with torch.no_grad():
        hidden = stock(ids[None], output_hidden_states=True).hidden_states
    assert output.features is not None
    assert output.features.shape == (len(ids) + 3, len(layers) * target.hidden_size)
    for part, layer in zip(output.features[: len(ids)].chunk(len(layers), dim=-1), layers, strict=True):
        assert_close(part, hidden[layer + 1][0])


def test_the_output_of_the_last_layer_is_captured_before_the_final_norm():
    stock, target = twins("qwen3")
    runner, ids = FlatRunner(target), sequences()[2]
    features = target.forward(runner.batch([(0, 0, ids.tolist())]), runner.cache, (2,)).features
    assert features is not None
    with torch.no_grad():
        assert_close(stock.lm_head(stock.model.norm(features)), stock_logits(stock, ids))


def test_only_the_rows_asked_for_get_logits(pair):
    _, target = pair
    runner, ids = FlatRunner(target), sequences()[0].tolist()
    everything = run(target, runner, runner.batch([(0, 0, ids)]))
    rows = torch.tensor([3, len(ids) - 1])
    assert_close(run(target, runner, runner.batch([(0, 0, ids)], padding=2, rows=rows)), everything[rows])


def test_windows_come_from_the_model():
    assert [spec.window for spec in twins("gemma3")[1].layers] == [5, None, 5]
    assert [spec.window for spec in twins("gpt-oss")[1].layers] == [5, None, 5]
    assert [spec.window for spec in twins("qwen2-window")[1].layers] == [None, 5, 5]
    assert [spec.window for spec in twins("mistral-window")[1].layers] == [6, 6, 6]
    assert [spec.window for spec in twins("llama")[1].layers] == [None] * 3


def test_a_window_counts_its_own_position():
    """With window W the token W positions back is invisible in one layer, and the one W - 1 back is not."""
    from transformers import AutoModelForCausalLM, MistralConfig

    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(config).float())
    runner = FlatRunner(target)

    def last_row(changed: int) -> Tensor:
        ids = list(range(10, 20))
        ids[changed] = 40
        return run(target, runner, runner.batch([(0, 0, ids)]))[-1]

    untouched = last_row(changed=0)
    assert torch.equal(last_row(changed=5), untouched)
    assert not torch.equal(last_row(changed=6), untouched)


def test_target_describes_itself():
    target = twins("gemma3")[1]
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (64, 32, 3)
    assert target.layers[0].entry == ((2, 16), (2, 16))
    assert target.eos_token_ids == {2}
    assert target.max_model_len == 128
    assert target.dtype == torch.float32
    assert target.device == torch.device("cpu")
    assert target.name == "gemma3"


def test_embedding_and_head_are_those_of_the_model():
    stock, target = twins("gemma3")
    ids = torch.tensor([[5, 6]])
    with torch.no_grad():
        assert torch.equal(target.embed_tokens(ids), stock.model.embed_tokens(ids))
        hidden = torch.randn(3, 32)
        assert torch.equal(target.lm_head(hidden), stock.lm_head(hidden))


def test_unknown_feature_layer_is_refused():
    target = twins("llama")[1]
    runner = FlatRunner(target)
    with pytest.raises(ConfigurationError, match=r"feature layer 3 of llama: allowed are -1 .* to 2"):
        target.forward(runner.batch([(0, 0, [5])]), runner.cache, (3,))


def test_no_mask_is_built(monkeypatch):
    """A mask over all rows would cost O(T^2); none of transformers' mask functions may be called."""
    from transformers.masking_utils import AttentionMaskInterface

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a mask was built")

    target = twins("gemma3")[1]
    for name in list(AttentionMaskInterface._global_mapping):
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, refuse)
    runner = FlatRunner(target)
    assert run(target, runner, runner.batch([(0, 0, list(range(40)))])).shape == (40, 64)


def test_rope_scaling_that_depends_on_the_batch_is_frozen():
    """Dynamic rotary scaling looks at the longest row of the batch; a long neighbour must not change a short row."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )  # fmt: skip
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(config).float())
    assert target.max_model_len == 16
    runner, ids = FlatRunner(target), list(range(3, 12))
    alone = run(target, runner, runner.batch([(0, 0, ids)]))
    long = list(range(3, 43))
    together = run(target, runner, runner.batch([(0, 0, ids), (1, 0, long)]))[: len(ids)]
    assert_close(together, alone)


def test_the_random_models_react_to_what_the_tests_vary():
    """The parity tests could pass on a model that ignores its context; these do not."""
    for kind in CONFIGS:
        model = random_model(kind)
        ids = sequences()[3]
        changed = ids.clone()
        changed[-2] = (changed[-2] + 1) % 64
        assert (stock_logits(model, ids)[-1] - stock_logits(model, changed)[-1]).abs().max() > 1e-3, kind

"""Token buckets: padding is invisible, captured passes read nothing old, and what cannot be compiled still runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.engine.graphs import CAPTURE_SIZES, CompiledRunner, CudaGraphRunner, EagerRunner, runner_for
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.targets.target import TargetOutput
from tests.engine.cheap_target import CheapTarget
from tests.engine.engines import QueueDevice, build
from tests.tiny_models import tiny_target

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 6] * 5, [7], [2, 7, 1, 8] * 3]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0)


def texts(requests: Any) -> list[Any]:
    return [(r.output.token_ids, [e.logprob for e in r.output.logprobs]) for r in requests]


class PoisonedPadding(EagerRunner):
    """Padding rows carry garbage: any token, any position."""

    padded = 0

    def run(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...]) -> TargetOutput:
        real = int((batch.kv_lens > 0).sum())
        self.padded += batch.num_rows - real
        assert not batch.kv_lens[real:].any()
        assert all(bool((slots[real:] < cache.block_size).all()) for slots in batch.cache_slots)
        tokens, positions = batch.token_ids.clone(), batch.positions.clone()
        tokens[real:], positions[real:] = 5, 17
        for key, value in cache.target_kv:
            key[: cache.block_size], value[: cache.block_size] = float("nan"), float("nan")
        return super().run(replace(batch, token_ids=tokens, positions=positions), cache, feature_layers)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "dspark"])
@pytest.mark.parametrize("device", [None, QueueDevice()])
def test_garbage_in_padding_changes_not_a_bit(drafter: str, device: Any) -> None:
    target = CheapTarget()  # its rows are computed one by one, so equal means equal bits
    plain = build(target, drafter, width="0,3,1,4").run(PROMPTS, GREEDY)
    runner = PoisonedPadding(target, (8, 16, 32))
    padded = build(target, drafter, width="0,3,1,4", runner=runner, device=device).run(PROMPTS, GREEDY)
    assert texts(padded) == texts(plain)
    assert runner.padded > 20


class FakeGraphs:
    """`capture` on a CPU: a graph is a closure over the static buffers whose results land in the same tensors."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replays = 0

    def __call__(self, run: Callable[[], TargetOutput]) -> tuple[Callable[[], None], TargetOutput]:
        outputs = run()
        self.captured.append(outputs.logits.shape[0])

        def replay() -> None:
            self.replays += 1
            new = run()
            outputs.logits.copy_(new.logits)
            if outputs.features is not None:
                assert new.features is not None
                outputs.features.copy_(new.features)

        return replay, outputs


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "dspark"])
def test_captured_passes_give_what_eager_ones_give(drafter: str) -> None:
    target = CheapTarget()
    graphs = FakeGraphs()
    runner = CudaGraphRunner(target, (4, 24, 12), graphs)
    plain = build(target, drafter).run(PROMPTS, GREEDY)
    engine = build(target, drafter, runner=runner, device=QueueDevice())
    assert graphs.captured == [24, 12, 4], "largest first: the smaller ones fit into its memory"
    assert texts(engine.run(PROMPTS, GREEDY)) == texts(plain)
    assert graphs.replays > 5
    used = engine.stats()
    assert used["graph_hits"] == graphs.replays
    assert used["eager_steps"] > 0, "the prompts' step is larger than the largest bucket"


def test_a_smaller_pass_never_sees_rows_of_a_larger_one_before_it() -> None:
    """Every row of the bucket is written: what the passes read is what they were given, padding and all."""
    target = CheapTarget()
    seen: list[FlatBatch] = []
    honest = target.forward

    def watched(batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        seen.append(batch)
        return honest(batch, cache, feature_layers)

    target.forward = watched  # type: ignore[method-assign]
    engine = build(target, "none", runner=CudaGraphRunner(target, (4, 8), FakeGraphs()), max_num_seqs=8)
    addresses = {b.num_rows: b.token_ids.data_ptr() for b in seen}
    seen.clear()
    engine.run([[1]] * 7, [SamplingParams(temperature=0, max_tokens=2 + i) for i in range(7)])
    sizes = [b.num_rows for b in seen]
    assert sizes[0] == 8
    assert sizes[-1] == 4
    for batch in seen:
        assert batch.token_ids.data_ptr() == addresses[batch.num_rows]
        assert batch.block_tables is engine.cache.block_tables
    last = seen[-1]  # one request is left in a bucket of four
    assert last.kv_lens.tolist()[1:] == [0, 0, 0]
    assert [slots.tolist()[1:] for slots in last.cache_slots] == [[0, 0, 0]] * len(last.cache_slots)
    assert last.logit_rows.tolist() == [0, 0, 0, 0]


def test_state_is_written_in_place() -> None:
    """A graph holds addresses: nothing a pass reads may move while requests come and go."""
    engine = build(tiny_target("gemma3"), "dspark", num_blocks=40)

    def addresses() -> list[int]:
        cache, state = engine.cache, engine.state
        tensors = [*cache.block_tables, *(t for kv in (*cache.target_kv, *cache.drafter_kv) for t in kv)]
        return [t.data_ptr() for t in (*tensors, state.history, state.lengths)]

    before = addresses()
    engine.run(PROMPTS * 3, GREEDY)
    assert addresses() == before


def test_which_runner() -> None:
    target = tiny_target("llama")
    assert isinstance(runner_for(target, "auto", 512), EagerRunner)
    assert runner_for(target, "eager", 512).bucket(37) == 37
    with pytest.raises(ConfigurationError, match="graphs is 'fast'; allowed: auto, eager"):
        runner_for(target, "fast", 512)  # type: ignore[arg-type]
    graphs = CudaGraphRunner(target, CAPTURE_SIZES, FakeGraphs())
    assert [graphs.bucket(rows) for rows in (1, 3, 17, 256, 257)] == [1, 4, 24, 256, 257]


def test_compiled_layers_fall_back_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target.__wrapped__("llama")

    def no_compiler(forward: Any, dynamic: bool) -> Any:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no C++ compiler\nand a long trace")

        return fail

    engine = build(target, "none", runner=CompiledRunner(target, (8, 16), compile=no_compiler))
    with caplog.at_level(logging.WARNING):
        got = engine.run(PROMPTS, GREEDY)
    warnings = [record.getMessage() for record in caplog.records if "eagerly" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].endswith("RuntimeError: no C++ compiler")
    assert texts(got) == texts(build(tiny_target("llama"), "none").run(PROMPTS, GREEDY))


@pytest.mark.slow
def test_compiled_layers_serve_the_same_texts() -> None:
    target = tiny_target.__wrapped__("llama")
    engine = build(target, "prompt-lookup", runner=CompiledRunner(target, (8, 64)), max_num_seqs=4)
    got = engine.run(PROMPTS, GREEDY)
    assert engine.runner._compiled, "fell back"
    plain = build(tiny_target("llama"), "prompt-lookup", max_num_seqs=4).run(PROMPTS, GREEDY)
    assert [r.output.token_ids for r in got] == [r.output.token_ids for r in plain]
    for one, other in zip(got, plain, strict=True):
        for a, b in zip(one.output.logprobs, other.output.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_graphs_is_an_option_of_the_engine() -> None:
    target = tiny_target.__wrapped__("llama")
    assert isinstance(build(target, "none").runner, EagerRunner)
    with pytest.raises(ConfigurationError, match="graphs is 'always'"):
        build(target, "none", graphs="always")
    assert isinstance(build(target, "none", graphs="compiled").runner, CompiledRunner)

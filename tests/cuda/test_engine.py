"""Engines on a GPU: the same tokens however a step is run, no wait inside a step, clocks that tick, and the target's law."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("engines on CUDA are NOT tested here: there is no GPU", allow_module_level=True)

from surefoot.engine.device import CudaDevice, Pending, Step
from surefoot.engine.graphs import CudaGraphRunner, EagerRunner
from surefoot.engine.loading import combine
from surefoot.engine.messages import StepInputs
from surefoot.engine.trace import StepReport
from surefoot.kernels import triton_support
from surefoot.kernels.row_linear import RowLinear
from surefoot.profiling.profile import profile
from surefoot.sampling import SamplingParams
from surefoot.targets.optimise import optimise
from surefoot.targets.target import Target
from tests.engine.engines import EngineUnderTest, build, tiny_drafter
from tests.tiny_models import tiny_target

CUDA = torch.device("cuda", torch.cuda.current_device())
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 6] * 9, [7], [2, 7, 1, 8] * 5, [3, 1, 4, 1, 5, 9, 2, 6, 5], [9, 9, 8] * 4]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={3: 0.5},
    logprobs=2,
    max_tokens=10,
)


@pytest.fixture(autouse=True)
def _nothing_fell_back() -> Iterator[None]:
    yield
    assert triton_support.works(), triton_support._problems


_targets: dict[tuple[str, str, int], Target] = {}


def target_on_cuda(architecture: str, dtype: str = "bfloat16", vocab_size: int = 64) -> Target:
    """A tiny target as `build_engine` prepares it."""
    key = (architecture, dtype, vocab_size)
    if key not in _targets:
        target = tiny_target.__wrapped__(architecture, vocab_size=vocab_size, dtype=dtype)
        target.model.to(CUDA)
        optimise(target.model)
        _targets[key] = target
    return _targets[key]


def engine_on(target: Target, drafter: str, *, device: Any = None, **settings: Any) -> EngineUnderTest:
    if drafter.startswith("combined-"):
        chosen: Any = combine(target, tiny_drafter(target, drafter.removeprefix("combined-"), 4), 4)
        chosen.bind(target)
    else:
        chosen = tiny_drafter(target, drafter, 4)
    trained = getattr(chosen, "trained", chosen)
    if hasattr(trained, "model"):
        trained.model.to(target.device)
    return build(target, chosen, device=device or CudaDevice(CUDA), check_layout=False, **settings)


def tokens(engine: EngineUnderTest, params: Any = GREEDY, prompts: Any = PROMPTS) -> list[list[int]]:
    texts = [request.output.token_ids for request in engine.run(prompts, params)]
    engine.assert_clean()
    return texts


def test_the_whole_target_gives_a_row_the_same_bits_in_every_batch() -> None:
    """Prompts read one by one, all at once, and in chunks: the same log-probs to the last bit."""
    target = target_on_cuda("qwen3")
    assert isinstance(target.lm_head, RowLinear)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    found = []
    for seqs, rows in ((1, 64), (8, 128), (3, 18)):
        engine = engine_on(target, "none", graphs="eager", max_num_seqs=seqs, max_num_batched_tokens=rows)
        requests = engine.run(PROMPTS, params)
        found.append([[(entry.token_id, entry.logprob) for entry in r.output.logprobs] for r in requests])
    assert found[0] == found[1] == found[2]


SIZES = (4, 16, 48)
"""Few buckets: every capture takes a moment."""


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_the_same_tokens_however_a_step_is_run(architecture: str) -> None:
    target = target_on_cuda(architecture)
    plain = tokens(engine_on(target, "none", graphs="eager", overlap=False))
    for drafter, width in (("prompt-lookup", "0,3,1,4"), ("dspark", 4), ("dspark", 0), ("combined-dspark", "0,3,1,4")):
        for graphs, settings in (
            (False, {"overlap": False}),
            (True, {"overlap": False}),
            (True, {"max_num_seqs": 3, "max_num_batched_tokens": 24}),
        ):
            runner = CudaGraphRunner(target, SIZES) if graphs else EagerRunner(target)
            engine = engine_on(target, drafter, width=width, runner=runner, **settings)
            assert tokens(engine) == plain, (drafter, width, graphs, settings)
            if graphs:
                assert runner.sizes == SIZES, "the passes could not be captured"
                assert engine.stats()["graph_hits"] > 0


def test_preempted_requests_go_on_as_if_nothing_had_been() -> None:
    target, params = target_on_cuda("gemma3"), SamplingParams(temperature=0, max_tokens=60)
    plain = tokens(engine_on(target, "none", graphs="eager"), params)
    engine = engine_on(target, "dspark", width=4, num_blocks=45, max_num_seqs=6, runner=CudaGraphRunner(target, SIZES))
    requests = engine.run(PROMPTS, params)
    assert [request.output.token_ids for request in requests] == plain
    assert sum(request.preemptions for request in requests) > 0


def test_which_runner_cuda_gets() -> None:
    target = target_on_cuda("llama")
    engine = engine_on(target, "prompt-lookup", max_num_seqs=2, max_num_batched_tokens=16)
    assert isinstance(engine.runner, CudaGraphRunner)
    assert engine.runner.sizes == (1, 2, 4, 8, 16)
    assert tokens(engine) == tokens(engine_on(target, "none", graphs="eager"))


def test_float32_targets_run_as_torch_wrote_them() -> None:
    target = target_on_cuda("llama", "float32")
    assert not isinstance(target.lm_head, RowLinear)
    plain = tokens(engine_on(target, "none", graphs="eager"))
    assert tokens(engine_on(target, "dspark", width="0,3,1,4")) == plain


class StrictDevice(CudaDevice):
    """A step that waits for the device raises."""

    strict = False

    def submit(self, step: Step, inputs: StepInputs) -> Pending:
        torch.cuda.set_sync_debug_mode("error" if self.strict else "default")
        try:
            return super().submit(step, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "dspark", "dspark-reduced", "combined-dspark"])
def test_no_step_waits_for_the_device(drafter: str) -> None:
    device = StrictDevice(CUDA)
    engine = engine_on(target_on_cuda("gemma3"), drafter, device=device, max_num_seqs=3, max_num_batched_tokens=24)
    params = [EVERYTHING, GREEDY, SamplingParams(temperature=0, max_tokens=8, gamma=1), EVERYTHING, GREEDY, GREEDY]
    engine.run(PROMPTS, params)  # what is compiled or allocated once may wait
    device.strict = True
    engine.run(PROMPTS, params)
    engine.assert_clean()


def test_the_detector_detects() -> None:
    device = StrictDevice(CUDA)
    device.strict = True
    with pytest.raises(RuntimeError, match="synchroniz"):
        device.submit(lambda inputs: torch.ones(3, device=CUDA).sum().item(), None)  # type: ignore[arg-type,return-value]


def test_stages_take_time() -> None:
    engine = engine_on(target_on_cuda("qwen3"), "dspark", width=4)
    reports: list[StepReport] = []
    engine.add_observer(reports.append)
    tokens(engine)
    stages = {"update", "draft", "plan", "pack", "target", "accept", "extend"}
    for report in reports:
        assert set(report.outputs.laps) == stages
        assert all(ms >= 0 for ms in report.outputs.laps.values())
        assert 0 < report.outputs.laps["target"] < report.outputs.device_ms
        assert sum(report.outputs.laps.values()) == pytest.approx(report.outputs.device_ms, rel=0.5, abs=0.3)


def test_sampled_texts_follow_the_targets_law() -> None:
    """Pairs of tokens of many seeds, with a drafter and without: the same distribution (chi-squared, 5 sigma)."""
    target, count = target_on_cuda("qwen3", vocab_size=8), 3000
    seen: list[Counter[tuple[int, ...]]] = []
    for drafter in ("none", "dspark"):
        settings: dict[str, Any] = {} if drafter == "none" else {"width": 4}
        runner = CudaGraphRunner(target, (64, 320))
        engine = engine_on(target, drafter, max_num_seqs=64, max_num_batched_tokens=1024, runner=runner, **settings)
        first = 0 if drafter == "none" else count
        params = [SamplingParams(temperature=1, max_tokens=3, seed=first + i) for i in range(count)]
        seen.append(Counter(tuple(text[1:]) for text in tokens(engine, params, [[1, 2, 3]] * count)))
    statistic, freedom = 0.0, -1
    rest = [0, 0]
    for pair in set(seen[0]) | set(seen[1]):
        a, b = seen[0][pair], seen[1][pair]
        if a + b < 20:
            rest[0], rest[1] = rest[0] + a, rest[1] + b
        else:
            statistic, freedom = statistic + (a - b) ** 2 / (a + b), freedom + 1
    if sum(rest):
        statistic, freedom = statistic + (rest[0] - rest[1]) ** 2 / sum(rest), freedom + 1
    assert freedom > 3
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_the_cost_of_a_step_can_be_profiled() -> None:
    engine = engine_on(target_on_cuda("qwen3"), "prompt-lookup", max_num_seqs=4, max_model_len=256)
    found = profile(engine, budget_s=1.0)
    table = found.table
    assert all(ms > 0 for curve in table.verify_ms for ms in curve)
    assert table.fixed_overhead_ms >= 0
    assert table.fingerprint["device"] == torch.cuda.get_device_name(CUDA)
    assert tokens(engine) == tokens(engine_on(target_on_cuda("qwen3"), "none", max_model_len=256))


def test_training_reads_hidden_states_as_the_cpu_does() -> None:
    import numpy as np

    from surefoot.training.corpus import Document
    from surefoot.training.features import TargetReader

    documents = [Document(0, 5, np.arange(1, 40) % 64), Document(1, 20, np.arange(7, 90) % 64)]
    rows = []
    for target in (tiny_target.__wrapped__("qwen3"), target_on_cuda("qwen3", "float32")):
        words = torch.arange(0, 64, 2)
        rows.append(TargetReader(target, (-1, 0, 1), words, 256, torch.float32).read([documents])[0])
    here, there = rows
    assert there.features.device.type == there.labels.device.type == "cuda"
    assert torch.equal(here.positions, there.positions.cpu())
    torch.testing.assert_close(there.features.cpu(), here.features, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(there.labels.cpu(), here.labels, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif("SUREFOOT_CUDA_TARGET" not in os.environ, reason="SUREFOOT_CUDA_TARGET names no model directory")
def test_a_real_target_says_the_same_at_every_width() -> None:
    from surefoot import LLM

    name, drafter = os.environ["SUREFOOT_CUDA_TARGET"], os.environ.get("SUREFOOT_CUDA_DRAFTER", "prompt-lookup")
    texts = [
        "def fibonacci(n):\n    ",
        "Write a Python class for a bank account with deposit, withdraw and a history.\n\nclass",
        "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i in",
        "The three laws of robotics are",
    ]
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    settings: dict[str, Any] = {"device": "cuda", "cost_table": "none", "max_num_seqs": 8, "max_model_len": 512}
    settings["max_num_batched_tokens"] = 512
    plain = LLM(name, drafter="none", graphs="eager", **settings)
    expected = [output.token_ids for output in plain.generate(texts, params, progress=False)]
    alone = [plain.generate(text, params, progress=False)[0].token_ids for text in texts]
    assert alone == expected, "a request's tokens depend on who else is in the batch"
    for width, graphs in ((7, "eager"), (7, "auto"), (0, "auto"), ("0,7,3,1", "auto")):
        llm = LLM(plain.target, drafter=drafter, width=width, graphs=graphs, **settings)
        got = [output.token_ids for output in llm.generate(texts, params, progress=False)]
        assert got == expected, (width, graphs)
        print(f"width {width}, graphs {graphs}: {llm.stats().get('graph_hits')} graph hits")

"""One request at a time: transformers' own `generate`, and this engine without drafts, with them, and on int8 weights.

All arms answer the same prompts in turn, beginning with another one each time. Of every answer the decode speed counts: tokens
after the first, by the time from the first to the last. A plain read of memory takes its turns among them: every weight
has to be read for every token of an arm without drafts, so that rate by the bytes of the weights is the most it can do.

Greedy tokens of two implementations may part where two candidates (nearly) tie, because they sum in different orders; each
such place is reported with its distance. Arms of this engine must not part at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from surefoot.engine.fingerprint import packed_layers
from surefoot.errors import ConfigurationError
from surefoot.kernels import native
from surefoot.llm import LLM
from surefoot.sampling import SamplingParams

TRANSFORMERS, TARGET_ONLY, SPECULATIVE, INT8 = "transformers", "target-only", "speculative", "int8"
STREAM_BYTES = 256 * 2**20
"""Read at once to measure the stream rate: far beyond any cache."""


@dataclass(frozen=True)
class Difference:
    """Where greedy texts of transformers and of this engine part."""

    prompt: int
    token: int  # index in the answer
    gap: float  # of their logits, by transformers' pass over the common text
    ulps: float  # the same in steps of bfloat16 (float32 models: of float32) at that size


@dataclass
class ArmAnswers:
    """One arm over all prompts."""

    arm: str
    speeds: list[float] = field(default_factory=list)  # decode tokens/s of every answer
    texts: list[list[int]] = field(default_factory=list)
    weight_bytes: int | None = None  # read for every pass

    @property
    def tokens_per_s(self) -> float:
        return median(self.speeds)


@dataclass(frozen=True)
class Decode:
    """All arms, what the memory allows, and where texts part."""

    rows: list[ArmAnswers]
    stream_gb_s: float | None  # None without native kernels
    differences: list[Difference]
    drafted: int  # tokens, in all answers of the speculative arm

    def row(self, arm: str) -> ArmAnswers:
        return next(row for row in self.rows if row.arm == arm)

    def ratio(self, arm: str, to: str) -> float:
        """Median over the prompts of the two arms' speeds on the same prompt."""
        return median(a / b for a, b in zip(self.row(arm).speeds, self.row(to).speeds, strict=True))

    def floor_share(self, arm: str) -> float | None:
        """Part of the memory's speed that an arm without drafts reaches."""
        row = self.row(arm)
        if self.stream_gb_s is None or not row.weight_bytes or arm == SPECULATIVE:
            return None
        return row.tokens_per_s * row.weight_bytes / (self.stream_gb_s * 1e9)

    @property
    def identical(self) -> bool:
        """Whether speculation changed no token."""
        return self.row(TARGET_ONLY).texts == self.row(SPECULATIVE).texts

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [
                {
                    "arm": row.arm,
                    "tokens_per_s": row.tokens_per_s,
                    "of_transformers": self.ratio(row.arm, TRANSFORMERS),
                    "of_target_only": self.ratio(row.arm, TARGET_ONLY),
                    "of_memory_floor": self.floor_share(row.arm),
                    "weight_bytes": row.weight_bytes,
                    "tokens": sum(map(len, row.texts)),
                    "speeds": row.speeds,
                }
                for row in self.rows
            ],
            "stream_gb_s": self.stream_gb_s,
            "answers": len(self.rows[0].texts),
            "equal_to_transformers": len(self.rows[0].texts) - len(self.differences),
            "differences": [asdict(difference) for difference in self.differences],
            "speculation_identical": self.identical,
            "drafted": self.drafted,
        }


def measure_decode(
    plain: Any,
    engine: LLM,
    quantized: LLM | None,
    prompts: Sequence[list[int]],
    max_tokens: int,
    progress: Callable[[float], None],
) -> Decode:
    """Answer every prompt in every arm.

    Args:
        plain: the model as transformers makes it, with the weights of `engine`.
        quantized: an engine on int8 weights, if that is wanted.
        prompts: token ids.
        max_tokens: of every answer, 2 at least. The speed of answers that end at their first token is left out.
        progress: called with the share of the answers that are done, those that only warm up among them.

    Raises:
        ConfigurationError: `max_tokens` is too small, or every answer ended at its first token.
    """
    if max_tokens < 2:
        raise ConfigurationError(f"max_tokens is {max_tokens}; allowed: 2 or more, for the speed after the first token")
    plain.generation_config = GenerationConfig()  # else `generate` fills gaps with the model's own, penalties and all
    rows = [
        ArmAnswers(TRANSFORMERS),
        ArmAnswers(TARGET_ONLY, weight_bytes=_read_bytes(engine)),
        ArmAnswers(SPECULATIVE),
    ]
    if quantized is not None:
        rows.append(ArmAnswers(INT8, weight_bytes=_read_bytes(quantized)))
    eos, drafted = sorted(engine.target.eos_token_ids), 0

    def answer(arm: str, prompt: list[int], length: int) -> tuple[list[int], float]:
        nonlocal drafted
        if arm == TRANSFORMERS:
            # On the engine's thread, which has its team of OpenMP threads: a second team would slow both down.
            return engine.loop.call(lambda _: _generate(plain, prompt, length, eos))
        llm = quantized if arm == INT8 else engine
        assert llm is not None
        params = SamplingParams(temperature=0.0, max_tokens=length, speculative=arm == SPECULATIVE)
        output = llm.generate([prompt], params, progress=False)[0]
        drafted += output.statistics.drafted
        return output.token_ids, output.timing.tokens_per_s

    data = torch.ones(STREAM_BYTES, dtype=torch.int8) if native.available() else None
    streams: list[float] = []
    total, done = len(rows) * (len(prompts) + 1), 0
    for row in rows:  # compiles kernels, touches every weight; not measured
        answer(row.arm, prompts[0], 4)
        done += 1
        progress(done / total)
    for index, prompt in enumerate(prompts):
        speeds: dict[str, float] = {}
        for turn in range(len(rows)):
            row = rows[(index + turn) % len(rows)]
            tokens, speed = answer(row.arm, prompt, max_tokens)
            row.texts.append(tokens)
            if len(tokens) > 1:
                speeds[row.arm] = speed
            if data is not None:
                streams.append(engine.loop.call(lambda _: _stream_gb_s(data)))
            done += 1
            progress(done / total)
        if len(speeds) == len(rows):
            for row in rows:
                row.speeds.append(speeds[row.arm])
    if not rows[0].speeds:
        raise ConfigurationError("every answer ended at its first token: give other prompts, or a model tuned for them")
    ours, theirs = rows[1].texts, rows[0].texts
    differences = [
        found
        for index, prompt in enumerate(prompts)
        if (found := difference(plain, index, prompt, theirs[index], ours[index])) is not None
    ]
    return Decode(rows, median(streams) if streams else None, differences, drafted)


@torch.inference_mode()
def _generate(model: Any, prompt: list[int], length: int, eos: list[int]) -> tuple[list[int], float]:
    """Greedy tokens by transformers, and tokens after the first per second."""
    times: list[float] = []

    def watch(input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    settings = GenerationConfig(
        max_new_tokens=length,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=settings, stopping_criteria=[watch]
    )
    tokens = output[0, len(prompt) :].tolist()
    elapsed = times[-1] - times[0]
    return tokens, (len(tokens) - 1) / elapsed if elapsed > 0 else math.nan


@torch.inference_mode()
def difference(
    model: Any, index: int, prompt: list[int], theirs: Sequence[int], ours: Sequence[int]
) -> Difference | None:
    """The first token that is not the same, and how far apart the two candidates stand; None where texts agree."""
    at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
    if at is None:
        if len(theirs) == len(ours):
            return None
        at = min(len(theirs), len(ours))  # one goes on: no two candidates to compare
        return Difference(index, at, math.inf, math.inf)
    logits = model(torch.tensor([[*prompt, *theirs[:at]]])).logits[0, -1]
    one, other = logits[theirs[at]].float(), logits[ours[at]].float()
    step = torch.finfo(logits.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(one.item()), 1e-30)))
    gap = abs(one.item() - other.item())
    return Difference(index, at, gap, gap / step)


def _read_bytes(llm: LLM) -> int | None:
    """Bytes of all packed weights of the target: what one pass has to read."""
    return sum(layer.num_bytes for layer in packed_layers(llm.target)) or None


def _stream_gb_s(data: Tensor) -> float:
    start = time.perf_counter()
    torch.ops.surefoot.stream(data)
    return data.nbytes / (time.perf_counter() - start) / 1e9

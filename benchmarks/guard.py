"""`python benchmarks/guard.py`: what the guard saves where speculation does not pay, and what it costs where it does.

Three parts, each on one engine over the default target:

* **random**: the shipped drafter's network with random weights. Blocks of steps with drafts and target-only requests take
  turns; says after how many steps the guard acts, and how fast the engine is then, as a share of target-only.
* **sleep**: the shipped drafter sleeps in every pass, after its cost was measured without it. The same; then the sleep ends, and
  it says after how many steps the guard has noticed.
* **shipped**: the shipped drafter as it is, with the guard and without, in turns on the same prompts.

Every text is compared with the target-only one. A missing cost table is measured before, without the faults.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from surefoot import LLM, SamplingParams
from surefoot.bench.prompts import BUILT_IN


def prompts(llm: LLM) -> list[list[int]]:
    return [prompt.tokens(llm.tokenizer) for prompt in BUILT_IN]


class Watch:
    """Steps, tokens and time of the turns with drafts."""

    def __init__(self, llm: LLM, max_tokens: int) -> None:
        self.llm, self.max_tokens = llm, max_tokens
        self.steps = 0
        self.off_at: int | None = None
        llm.loop.add_observer(self._step)

    def _step(self, report: Any) -> None:
        if report.plan.arm is not None:
            self.steps += 1
            if self.off_at is None and report.plan.decision.reason.value == "guard_off":
                self.off_at = self.steps

    @property
    def guard(self) -> dict[str, Any]:
        return self.llm.stats()["guard"]  # type: ignore[no-any-return]

    def run(self, prompt: list[int], gamma: int | None) -> tuple[float, list[int]]:
        """Tokens per second after the first token, and the tokens."""
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True, gamma=gamma)
        output = self.llm.generate(prompt, params)[0]
        return output.timing.tokens_per_s, output.token_ids


def faulty(watch: Watch, most: int, say: str) -> None:
    """Run until the guard acts, and then compare with target-only in turns."""
    texts, cycle, spent = prompts(watch.llm), 0, [0.0, 0.0]
    while watch.steps < 200 or (watch.guard["on"] and watch.steps < most):
        speed, tokens = watch.run(texts[cycle % len(texts)], None)
        spent = [spent[0] + len(tokens), spent[1] + len(tokens) / speed]
        cycle += 1
    acted = "never switched off" if watch.off_at is None else f"switched off at step {watch.off_at}"
    print(f"{say}: {acted}; {spent[0] / spent[1]:.1f} tok/s over the first {watch.steps} steps")
    for load in watch.guard["loads"]:
        print("   ", load)
    pairs, same = [], True
    for turn in range(12):
        prompt = texts[turn % len(texts)]
        pair: dict[int | None, Any] = {}
        for gamma in (None, 0) if turn % 2 else (0, None):
            pair[gamma] = watch.run(prompt, gamma)
        pairs.append((pair[None][0], pair[0][0]))
        same &= pair[None][1] == pair[0][1]
    ratios = [ours / target_only for ours, target_only in pairs]
    seconds = [sum(1 / speed for speed in arm) for arm in zip(*pairs, strict=True)]
    print(
        f"{say}: then {statistics.median(ratios):.3f} of target-only (median of {len(ratios)} pairs, {min(ratios):.3f} to "
        f"{max(ratios):.3f}; {seconds[1] / seconds[0]:.3f} of all of it), texts {'identical' if same else 'DIFFER'}; "
        f"{watch.guard['trial_steps']} steps of trials"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--sleep-ms", type=float, default=150.0)
    parser.add_argument("--parts", default="random,sleep,shipped")
    parser.add_argument("--cost-table", default="auto")
    options = parser.parse_args()
    parts = options.parts.split(",")
    made: dict[str, Any] = {"max_num_seqs": 8, "seed": 1, "cost_table": options.cost_table}

    def ready(llm: LLM) -> LLM:
        if llm.lacks_cost_table and options.cost_table == "auto":
            llm.profile()
        return llm

    if "random" in parts:
        with ready(LLM(drafter="qwen2.5-coder-0.5b", **made)) as llm:
            drafter: Any = llm.loop.call(lambda engine: engine.drafter)
            torch.manual_seed(0)
            drafter.copying = None  # copies from the text need no weights
            for parameter in drafter.model.parameters():
                if parameter.is_floating_point():
                    parameter.data.normal_(std=0.02)
            faulty(Watch(llm, options.max_tokens), 2000, "random")

    if "sleep" in parts:
        with ready(LLM(**made)) as llm:
            drafter = llm.loop.call(lambda engine: engine.drafter)
            propose, asleep = drafter.propose, [True]

            def slow(*arguments: Any) -> Any:
                time.sleep(asleep[0] * options.sleep_ms / 1e3)
                return propose(*arguments)

            drafter.propose = slow
            watch = Watch(llm, options.max_tokens)
            faulty(watch, 2000, f"sleep of {options.sleep_ms:g} ms")
            asleep[0] = False
            texts, gone, cycle = prompts(llm), watch.steps, 0
            while not watch.guard["on"] and watch.steps < gone + 5000:
                watch.run(texts[cycle % len(texts)], None)
                cycle += 1
            print(
                f"sleep: on again {watch.steps - gone} steps after it ended" if watch.guard["on"] else "sleep: never on"
            )

    if "shipped" in parts:
        with ready(LLM(**made)) as llm:
            watch = Watch(llm, options.max_tokens)
            guard = llm.loop.call(lambda engine: engine.policy.guard)

            def use(chosen: Any) -> None:
                def put(engine: Any) -> None:
                    engine.policy.guard = engine.policy.learner._guard = chosen

                llm.loop.call(put)

            ratios = []
            for prompt in prompts(llm):  # a guard's first window comes early
                watch.run(prompt, None)
            for repeat in range(options.repeats):
                for number, prompt in enumerate(prompts(llm)):
                    pair = {}
                    for arm in (True, False) if (repeat + number) % 2 else (False, True):
                        use(guard if arm else None)
                        pair[arm] = watch.run(prompt, None)
                    assert pair[True][1] == pair[False][1], "the guard has changed a text"
                    ratios.append(pair[True][0] / pair[False][0])
            use(guard)
            print(
                f"shipped: {statistics.median(ratios):.4f} of the speed without the guard (median of {len(ratios)} pairs); "
                f"{watch.guard['window_steps']} of {watch.steps} steps in windows, on: {watch.guard['on']}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

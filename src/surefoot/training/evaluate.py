"""Stage *evaluate*: acceptance, calibration and discrimination in the real loop, per workload and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.drafters.checkpoint import describe_checkpoint
from surefoot.drafters.locations import find_calibration, weights_digest
from surefoot.errors import CalibrationError, ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.speculation.calibration import Calibration
from surefoot.speculation.json_files import read_object, write_object
from surefoot.targets.target import Target
from surefoot.training.measure import VerifiedBlocks, arms_of, describe_blocks, speculation_engine, watch
from surefoot.training.plots import acceptance_plot, reliability_plot
from surefoot.training.progress import StageProgress
from surefoot.training.prompts import Prompt, read_prompts, tokenizer_of

GROUPS = {"humaneval": "code", "mbpp": "code", "gsm8k": "math", "math500": "math", "mt-bench": "chat"}
"""Group of each public benchmark; any other file is a workload of its own."""
MANIFEST = "manifest.json"


def load_workloads(path: Path, limit: int | None = None) -> dict[str, list[Prompt]]:
    """Prompts by workload: a file is one, a folder has one per file.

    Raises:
        ConfigurationError: no such path, or no prompt in it.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise ConfigurationError(f"prompts {path}: no such file, or a folder without *.jsonl: give one or the other")
    found = {file.stem: list(read_prompts(file, file.stem))[:limit] for file in files}
    if not any(found.values()):
        raise ConfigurationError(f"no prompts in {path}: one JSON object a line with 'turns', 'text' or 'tokens'")
    return {name: prompts for name, prompts in found.items() if prompts}


def check_unseen(drafter: Path, workloads: dict[str, list[Prompt]]) -> str:
    """Check that no prompt was trained on, and return a sentence that says what was checked.

    Raises:
        ConfigurationError: some were; names their number and the first one.
    """
    manifest = drafter / MANIFEST
    if not manifest.exists():
        return "not checked: the drafter has no training manifest"
    trained = set(read_object(manifest, ConfigurationError).get("prompt_digests", ()))
    seen = [p for prompts in workloads.values() for p in prompts if p.digest in trained]
    if seen:
        raise ConfigurationError(
            f"{len(seen)} of these prompts were trained on, the first is {seen[0].text[:60]!r}: "
            f"evaluate on others (digests are in {manifest})"
        )
    count = sum(len(prompts) for prompts in workloads.values())
    return f"none of the {count} prompts is among the {len(trained)} of the training manifest"


def load_calibration(drafter: Path, gamma: int, path: Path | None = None) -> Calibration | None:
    """The drafter's calibration, None where it has none.

    Raises:
        CalibrationError: the calibration was fitted for another gamma or other weights.
    """
    file = path or find_calibration(drafter)
    if file is None:
        return None
    calibration = Calibration.load(file, gamma)
    fitted_for = calibration.provenance.drafter
    if fitted_for.startswith("sha256:") and fitted_for != weights_digest(drafter):
        raise CalibrationError(f"{file} was fitted for other weights than {drafter} has: run the calibration again")
    return calibration


def evaluate(
    target: Target,
    drafter: Path,
    workloads: dict[str, list[Prompt]],
    output: Path,
    progress: StageProgress,
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_tokens: int = 128,
    batch: int = 16,
    calibration: Path | None = None,
) -> dict[str, Any]:
    """Measure a drafter and write `evaluation.json`, `card.md` and the plots to `output`; returns the report.

    Blocks are verified at full width, without a planner, so that every position is observed as often as possible.
    """
    check = check_unseen(drafter, workloads)
    encode = tokenizer_of(target)
    tokens = {name: [encode(prompt) for prompt in prompts] for name, prompts in workloads.items()}
    longest = max(len(ids) for texts in tokens.values() for ids in texts)
    fitted = load_calibration(drafter, describe_checkpoint(drafter).gamma, calibration)
    engine = speculation_engine(
        target, drafter, batch=batch, max_model_len=longest + max_tokens + 1, calibration=calibration
    )
    report: dict[str, Any] = {
        "format": "surefoot-evaluation",
        "version": 1,
        "target": target.name,
        "target_weights": target.weights,
        "drafter": str(drafter),
        "weights": weights_digest(drafter),
        "gamma": engine.gamma,
        "max_tokens": max_tokens,
        "prompts": {name: len(prompts) for name, prompts in workloads.items()},
        "unseen": check,
        "calibrated": fitted is not None,
        "draft_sharpness": None if fitted is None or fitted.sharpness is None else fitted.sharpness.tolist(),
        "copying": None if fitted is None or fitted.copying is None else fitted.copying.tolist(),
        "results": {},
    }
    everything: dict[str, VerifiedBlocks] = {}
    for number, temperature in enumerate(temperatures):
        span = (number / len(temperatures), (number + 1) / len(temperatures))
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        blocks = watch(engine, tokens, params, progress, span=span)
        for name, group in _grouped(blocks).items():
            report["results"].setdefault(name, {})[f"{temperature:g}"] = describe_blocks(group, fitted)
            everything[f"{name} at {temperature:g}"] = group
    output.mkdir(parents=True, exist_ok=True)
    write_object(output / "evaluation.json", report)
    (output / "card.md").write_text(card(report), encoding="utf-8")
    acceptance_plot(everything, output / "acceptance.png")
    pooled = VerifiedBlocks(engine.gamma)
    for name, group in everything.items():
        if name.startswith("all at "):
            pooled.merge(group)
    if pooled.logits:
        arms = {arm: pooled.quality(judge) for arm, judge in arms_of(pooled, fitted).items()}
        reliability_plot(arms, output / "reliability.png")
    return report


def _grouped(blocks: dict[str, VerifiedBlocks]) -> dict[str, VerifiedBlocks]:
    """Blocks by workload, by group of workloads, and of all workloads together."""
    gamma = next(iter(blocks.values())).gamma
    found: dict[str, VerifiedBlocks] = dict(blocks)
    for name, part in blocks.items():
        for pool in {GROUPS.get(name), "all"} - {None, name}:
            found.setdefault(str(pool), VerifiedBlocks(gamma)).merge(part)
    return found


def card(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    gamma = report["gamma"]
    lines = [
        f"# {Path(report['drafter']).name}: a drafter for {report['target']}",
        "",
        f"gamma {gamma}, weights `{report['weights'][:19]}`, texts of {report['max_tokens']} tokens. "
        f"Training data: {report['unseen']}." + _drawing(report),
        "",
        "## Acceptance in the real loop",
        "",
        "Accepted length counts draft tokens; the bonus token adds one. Then the acceptance of each position, given that "
        "the one before was accepted.",
        "",
        "| workload | temperature | blocks | accepted length | with bonus | "
        + " | ".join(f"{k}" for k in range(1, gamma + 1))
        + " |",
        "|---|---|---|---|---|" + "---|" * gamma,
    ]
    for name, temperatures in report["results"].items():
        for temperature, figures in temperatures.items():
            lines.append(
                f"| {name} | {temperature} | {figures['blocks']} | {_text(figures['accepted_length'])} | "
                f"{_text(figures['accepted_length_with_bonus'])} | "
                + " | ".join(_text(rate) for rate in figures["conditional_acceptance"])
                + " |"
            )
    measured = report["results"]["all"]
    if any("ece_before" in figures for figures in measured.values()):
        lines += [
            "",
            "## Confidence, all workloads",
            "",
            "Expected calibration error (15 bins) and area under the curve of the survival at each position. By chance: the "
            "error that a perfect calibration would show in as many blocks.",
            "",
            "| temperature | figure | " + " | ".join(f"{k}" for k in range(1, gamma + 1)) + " |",
            "|---|---|" + "---|" * gamma,
        ]
        for temperature, figures in measured.items():
            for key in ("labelled", "ece_before", "ece_after", "ece_by_chance_after", "auc_before", "auc_after"):
                if key in figures:
                    cells = " | ".join(str(v) if key == "labelled" else _text(v, 4) for v in figures[key])
                    lines.append(f"| {temperature} | {key.replace('_', ' ')} | {cells} |")
    return "\n".join(lines) + "\n"


def _drawing(report: dict[str, Any]) -> str:
    """Sharpness and copying shares of the calibration, as sentences."""
    text = ""
    if sharp := report.get("draft_sharpness"):
        values = ", ".join(f"{value:g}" for value in (sharp[:1] if len(set(sharp)) == 1 else sharp))
        text += f" Drafts at temperatures above 0 are drawn at the temperature divided by {values}."
    if shares := report.get("copying"):
        values = ", ".join(f"{share:.2f}" for share in shares[1:])
        text += f" Copies have these shares of a draft distribution, by match length from 1 on: {values}."
    return text


def _text(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def prompts_of_rows(rows: Sequence[dict[str, Any]], limit: int) -> dict[str, list[Prompt]]:
    """Held-out prompts of the pipeline (token ids) by workload, at most `limit` in total."""
    found: dict[str, list[Prompt]] = {}
    for row in rows[:limit]:
        found.setdefault(str(row["workload"]), []).append(Prompt("", str(row["workload"]), tokens=tuple(row["tokens"])))
    return found

"""All stages over a tiny target that has no tokenizer: prompts are token ids."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.errors import CalibrationError, ConfigurationError
from surefoot.speculation.calibration import Calibration
from surefoot.training import builtin, measure
from surefoot.training.corpus import Corpus, Document, read_shard, write_shard
from surefoot.training.evaluate import check_unseen, evaluate, load_calibration, load_workloads
from surefoot.training.files import Workplace
from surefoot.training.initial import read_traits
from surefoot.training.options import Budget, DataOptions, DrafterShape, TrainingOptions
from surefoot.training.pipeline import STAGES, Pipeline, TrainingRun
from surefoot.training.progress import StageProgress
from surefoot.training.prompts import Prompt, collect_prompts, digest, read_prompts
from surefoot.training.regenerate import bulk, bulk_sampler, generation_engine, regenerate
from tests.tiny_models import tiny_target
from tests.training.stage import silent


def write_prompts(path: Path, count: int, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    rows = [{"tokens": rng.integers(0, 64, rng.integers(3, 9)).tolist(), "workload": f"w{i % 2}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def a_run(prompts: Path, **changes: Any) -> TrainingRun:
    settings: dict[str, Any] = {
        "shape": DrafterShape(layers=1, gamma=3, rank=4, vocab=50),
        "data": DataOptions(sources=(str(prompts),), held_out=0.3, max_prompt=12, max_new=16, batch=8),
        "training": TrainingOptions(
            row_tokens=64, row_anchors=8, batch_rows=2, held_batches=4, reuse=2, lr=3e-3, precision="float32"
        ),
        "budget": Budget(anchors=300),
    }
    return TrainingRun(**{**settings, **changes})


def pipeline(run: TrainingRun, output: Path) -> Pipeline:
    target = tiny_target()
    return Pipeline(target, read_traits(target, run.shape.layers), run, output, show=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a drafter (`drafter`) made by all stages in one go."""
    home = tmp_path_factory.mktemp("trained")
    pipeline(a_run(write_prompts(home / "prompts.jsonl", 24)), home / "drafter").run()
    return home


def test_one_command_makes_a_calibrated_and_measured_drafter(trained: Path) -> None:
    place = Workplace(trained / "drafter")
    manifest = json.loads(place.manifest.read_text())
    stages = manifest["stages"]
    assert list(stages) == list(STAGES)
    assert stages["regenerate"]["documents"] == stages["prompts"]["prompts"] == 17
    assert stages["train"]["anchors"] >= 300
    assert stages["train"]["curve"][-1]["length_1"] > 1
    assert stages["features"]["words"] == 50
    assert Calibration.load(place.calibration, gamma=3).provenance.drafter == measure.weights_digest(place.output)
    assert len(manifest["prompt_digests"]) == 17
    assert set(manifest["data"]) >= {"prompts.jsonl", "held_out.jsonl", "words.safetensors"}
    assert manifest["versions"]["torch"] == torch.__version__
    for file in ("evaluation.json", "card.md", "acceptance.png", "reliability.png"):
        assert (place.evaluation / file).stat().st_size > 100, file
    assert (place.evaluation / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_the_drafter_serves_and_its_figures_add_up(trained: Path) -> None:
    report = json.loads((trained / "drafter" / "evaluation" / "evaluation.json").read_text())
    figures = report["results"]["all"]
    assert set(figures) == {"0", "1"}
    assert set(report["results"]) == {"w0", "w1", "all"}
    for name in figures:
        one = figures[name]
        assert one["accepted_length_with_bonus"] == pytest.approx(one["accepted_length"] + 1, abs=1e-4)
        assert one["blocks"] == one["reached"][0] == sum(report["results"][w][name]["blocks"] for w in ("w0", "w1"))
        assert len(one["ece_after"]) == len(one["auc_before"]) == 3
    assert report["calibrated"]
    card = (trained / "drafter" / "evaluation" / "card.md").read_text()
    assert f"| {figures['0']['accepted_length']:.3f} |" in card


def test_a_second_run_does_nothing_and_more_anchors_go_on(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(trained / "prompts.jsonl")
    before = (trained / "drafter" / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        for stage in STAGES:
            patch.setattr(Pipeline, f"_{stage}", lambda self, progress: pytest.fail("ran again"))
        pipeline(run, trained / "drafter").run()
    record = pipeline(replace(run, budget=Budget(anchors=400)), trained / "drafter").run()
    assert record["train"]["anchors"] >= 400
    assert record["calibrate"]["weights"] == record["evaluate"]["weights"] == record["train"]["weights"]
    assert (trained / "drafter" / "model.safetensors").read_bytes() != before
    with pytest.raises(ConfigurationError, match="gamma=3, now it is 4"):
        pipeline(replace(run, shape=replace(run.shape, gamma=4)), trained / "drafter").run()


def test_fine_tuning_begins_with_the_drafter_it_is_given(trained: Path, tmp_path: Path) -> None:
    run = replace(a_run(trained / "prompts.jsonl"), init=str(trained / "drafter"), budget=Budget(anchors=50))
    tuned = pipeline(run, tmp_path / "tuned")
    tuned.run(["prompts", "regenerate", "features"])
    given = pipeline(a_run(trained / "prompts.jsonl"), trained / "drafter").trainer()
    fresh = tuned.trainer()
    assert torch.equal(fresh.model.fc.weight, given.model.fc.weight)
    assert torch.equal(fresh.vocabulary.draft, given.vocabulary.draft)
    record = tuned.run(["train"])
    assert record["train"]["anchors"] >= 50
    assert record["train"]["drafter"]["block_size"] == 3


@pytest.mark.parametrize(("layout", "storage"), [("speculators", "native"), ("deepspec", "int8")])
def test_layout_and_storage_are_as_asked(trained: Path, tmp_path: Path, layout: Any, storage: str) -> None:
    from surefoot.drafters.checkpoint import describe_checkpoint

    run = a_run(trained / "prompts.jsonl", layout=layout, budget=Budget(anchors=20))
    if layout == "speculators":  # it cannot say that features are normalised
        with pytest.raises(Exception, match="feature_norm"):
            pipeline(run, tmp_path / "out").run(STAGES[:4])
        return
    pipeline(replace(run, shape=replace(run.shape, storage=storage)), tmp_path / "out").run(STAGES[:4])
    assert describe_checkpoint(tmp_path / "out").config.weight_storage == storage


def test_a_stage_whose_input_is_missing_says_which_to_run_first(tmp_path: Path) -> None:
    run = a_run(write_prompts(tmp_path / "prompts.jsonl", 4))
    for stage, first in (("regenerate", "prompts"), ("train", "features"), ("calibrate", "train")):
        with pytest.raises(ConfigurationError, match=f"'{first}' first"):
            pipeline(run, tmp_path / "out").run([stage])
    with pytest.raises(ConfigurationError, match="allowed are prompts"):
        pipeline(run, tmp_path / "out").run(["polish"])


# -- prompts and text --------------------------------------------------------------------------------------------------


def test_prompts_come_from_json_lines_text_and_source_trees(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"turns": ["first", "second"]}\n{"text": "plain", "workload": "own"}\n')
    (tmp_path / "b.md").write_text("one paragraph\n\n" + "word " * 400)
    (tmp_path / "c.py").write_text('def f(x):\n    """Give x back, as it was given."""\n    y = x\n    return y\n')
    (tmp_path / "d.bin").write_bytes(b"\x00\x01")
    found = list(read_prompts(tmp_path))
    assert found[:2] == [Prompt("first", "a", chat=True), Prompt("plain", "own")]
    assert [prompt.workload for prompt in found[2:]] == ["text", "code"]
    assert "f" in found[-1].text
    with pytest.raises(ConfigurationError, match="allowed are folders"):
        list(read_prompts(tmp_path / "d.bin"))
    (tmp_path / "e.jsonl").write_text('{"turns": []}\n')
    with pytest.raises(ConfigurationError, match=r"e\.jsonl line 1"):
        list(read_prompts(tmp_path / "e.jsonl"))


def test_duplicates_and_excluded_text_are_dropped_and_parts_do_not_overlap(tmp_path: Path) -> None:
    from types import SimpleNamespace

    long = " ".join(f"word{i}" for i in range(30))
    texts = ["Same Text", "same  text", f"before {long} behind", *(f"prompt number {i}" for i in range(20))]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": [f"another beginning {long}"]}) + "\n")
    target: Any = SimpleNamespace(name="t", tokenizer=lambda text: {"input_ids": [len(text), 1]})
    options = DataOptions(
        sources=(str(tmp_path / "p.jsonl"),), exclude=(str(tmp_path / "eval.jsonl"),), held_out=0.25, max_prompt=1
    )
    place = Workplace(tmp_path / "out")
    counts = collect_prompts(target, options, place)
    assert counts["duplicates"] == counts["excluded"] == 1
    parts = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in (place.prompts, place.held_out_prompts)
    ]
    digests = [{row["digest"] for row in part} for part in parts]
    assert (len(digests[0]), len(digests[1])) == (16, 5)
    assert not digests[0] & digests[1]
    assert digest("same text") in digests[0] | digests[1]
    assert all(row["tokens"] == [1] for row in parts[0])  # a long prompt keeps its end


def test_chat_prompts_go_through_the_template() -> None:
    from types import SimpleNamespace

    from surefoot.training.prompts import tokenizer_of

    class Tokenizer:
        chat_template = "yes"

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1]}

        def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, list[int]]:
            assert messages == [{"role": "user", "content": "hello"}]
            assert options["add_generation_prompt"]
            return {"input_ids": [2, 3]}

    encode = tokenizer_of(SimpleNamespace(name="t", tokenizer=Tokenizer()))
    assert encode(Prompt("hello", chat=True)) == [2, 3]
    assert encode(Prompt("hello")) == [1]
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        tokenizer_of(SimpleNamespace(name="t", tokenizer=None))(Prompt("hello"))


def test_built_in_collectors_find_code_text_math_and_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    import json as module
    import textwrap

    monkeypatch.setattr(builtin, "library_files", lambda: [Path(textwrap.__file__), Path(module.__file__)])
    for name, (_, collect) in builtin.COLLECTORS.items():
        found, again = list(collect()), list(collect())
        assert found == again, name
        assert len(found) > 8, name
        assert all(text.strip() for text, _ in found)
    assert any("def " in text for text, _ in builtin.library_code())


def test_passages_join_to_the_text_they_were_cut_from() -> None:
    text = "short\n\n" + "line of words\n" * 400 + "\n\nend"
    pieces = list(builtin.passages(text, 500))
    assert max(map(len, pieces)) < 1600
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_shards_come_back_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    text = [Document(3, 1, np.array([1, 2])), Document(0, 2, np.array([3, 4, 5]))]
    write_shard(tmp_path / "b.safetensors", text[:1])
    write_shard(tmp_path / "a.safetensors", text[1:])
    write_shard(tmp_path / "read" / "x.safetensors", [Document(0, 1, np.array([6, 7, 8, 9, 10]))])
    corpus = Corpus.load(tmp_path, tmp_path / "read", tmp_path / "missing")
    assert [d.tokens.tolist() for d in corpus] == [[3, 4, 5], [1, 2], [6, 7, 8, 9, 10]]
    pieces = corpus.split(2)
    assert [(d.start, d.tokens.tolist()) for d in pieces] == [(1, [1, 2]), (1, [6, 7]), (1, [8, 9])]


def test_interrupted_regeneration_ends_with_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.training.regenerate.SHARD", 4)
    run = a_run(write_prompts(tmp_path / "prompts.jsonl", 20))
    pipeline(run, tmp_path / "out").run(["prompts"])
    prompts, target = Workplace(tmp_path / "out").prompts, tiny_target()

    def text(folder: Path) -> list[list[int]]:
        return [document.tokens.tolist() for document in Corpus.load(folder)]

    engine = generation_engine(target, run.data)
    regenerate(engine, prompts, tmp_path / "whole", run.data, silent())
    engine = generation_engine(target, run.data)
    steps = 0

    class Interrupted(StageProgress):
        def update(self, *_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps > 20:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(engine, prompts, tmp_path / "parts", run.data, Interrupted("test", enabled=False))
    assert not engine.requests
    kept = sum(len(read_shard(shard)) for shard in (tmp_path / "parts").glob("*"))
    assert 0 < kept < 14
    found = regenerate(generation_engine(target, run.data), prompts, tmp_path / "parts", run.data, silent())
    assert found["documents"] == 14
    assert text(tmp_path / "parts") == text(tmp_path / "whole")


def test_bulk_regeneration_can_be_interrupted_and_agrees_with_the_engine(tmp_path: Path) -> None:
    run = a_run(write_prompts(tmp_path / "prompts.jsonl", 20))
    pipeline(run, tmp_path / "out").run(["prompts"])
    prompts, target = Workplace(tmp_path / "out").prompts, tiny_target()

    def text(folder: Path, remainder: int | None = None) -> list[list[int]]:
        return [d.tokens.tolist() for d in Corpus.load(folder) if remainder is None or d.index % 2 == remainder]

    assert not bulk(target), "on a CPU the engine generates"
    regenerate(generation_engine(target, run.data), prompts, tmp_path / "engine", run.data, silent())
    regenerate(bulk_sampler(target, run.data), prompts, tmp_path / "bulk", run.data, silent())
    assert run.data.temperatures[0] == 0
    assert text(tmp_path / "bulk", 0) == text(tmp_path / "engine", 0)  # those at temperature 0
    small = dataclasses.replace(run.data, batch=2)
    regenerate(bulk_sampler(target, small), prompts, tmp_path / "parts", small, silent(), deadline=0.0)
    assert len(text(tmp_path / "parts")) < len(text(tmp_path / "bulk"))
    for shard in (tmp_path / "parts").glob("*"):
        shard.unlink()  # cut short by the deadline; whole ones follow
    regenerate(bulk_sampler(target, small), prompts, tmp_path / "parts", small, silent())
    assert text(tmp_path / "parts") == text(tmp_path / "bulk")


# -- evaluation ----------------------------------------------------------------------------------------------------------


def test_prompts_of_the_training_manifest_are_refused(trained: Path, tmp_path: Path) -> None:
    drafter = trained / "drafter"
    workloads = load_workloads(write_prompts(tmp_path / "fresh.jsonl", 5, seed=9))
    assert check_unseen(drafter, workloads) == "none of the 5 prompts is among the 17 of the training manifest"
    with pytest.raises(ConfigurationError, match="17 of these prompts were trained on"):
        evaluate(tiny_target(), drafter, load_workloads(trained / "prompts.jsonl"), tmp_path, silent())
    (tmp_path / "bare").mkdir()
    assert "not checked" in check_unseen(tmp_path / "bare", workloads)


def test_a_calibration_of_other_weights_is_refused(trained: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained / "drafter", tmp_path / "copy")
    assert load_calibration(tmp_path / "copy", 3) is not None
    with pytest.raises(CalibrationError, match="gamma"):
        load_calibration(tmp_path / "copy", 4)
    weights = tmp_path / "copy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CalibrationError, match="other weights"):
        load_calibration(tmp_path / "copy", 3)


def test_the_real_loop_accepts_what_teacher_forcing_promises(trained: Path, tmp_path: Path) -> None:
    """Acceptance of x_1 at temperature 1, counted in the loop, is the mean of 1 - TV that training computes."""
    home, target = trained / "drafter", tiny_target()
    workloads = load_workloads(write_prompts(tmp_path / "fresh.jsonl", 60, seed=5))
    report = evaluate(target, home, workloads, tmp_path / "out", silent(), temperatures=(1.0,), max_tokens=24, batch=32)
    figures = report["results"]["all"]["1"]
    one = pipeline(a_run(trained / "prompts.jsonl", budget=Budget(anchors=400)), home).trainer()
    promised = one.validate()["by_position_1"][0]
    error = (0.25 / figures["reached"][0]) ** 0.5
    assert figures["conditional_acceptance"][0] == pytest.approx(promised, abs=4 * error + 0.05)

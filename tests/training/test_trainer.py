"""The training loop on a tiny target: it learns, resumes, shares its work, and trains what the engine serves."""

from __future__ import annotations

import copy
import faulthandler
import weakref
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from surefoot.drafters.checkpoint import load_drafter, save_drafter
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.targets.optimise import optimise
from surefoot.targets.target import Target
from surefoot.training.batches import Anchors, collate, pick_anchors, plan
from surefoot.training.corpus import Corpus, Document
from surefoot.training.features import TargetReader, choose_vocabulary
from surefoot.training.initial import head_matrix
from surefoot.training.network import block_hidden
from surefoot.training.optimiser import choose_precision, learning_rate
from surefoot.training.options import DrafterShape
from surefoot.training.trainer import Ranks, Trainer
from tests.drafters.dense import block_mask, dense_hidden
from tests.engine.engines import build, stock_logits, tiny_dspark
from tests.tiny_models import tiny_target
from tests.training.stage import SHAPE, drafter_model, options, silent, some_text, trainer

SHAPES = {
    "vanilla": SHAPE,
    "gated": replace(SHAPE, head="gated", layers=2),
    "rnn": replace(SHAPE, head="rnn"),
    "dflash": replace(SHAPE, head="none"),
    "narrow": replace(SHAPE, hidden_size=16, vocab=40),
    "whole-vocabulary": replace(SHAPE, vocab=64, gamma=5),
}

RANKS_WITHIN_S = 300


def weights(of: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in of.parameters]


@pytest.mark.parametrize("name", SHAPES)
def test_loss_falls_and_acceptance_rises(name: str) -> None:
    one = trainer(shape=SHAPES[name], reuse=4, lr=1e-2, average=0.5 if name == "gated" else 0.0)
    one.total = 800
    first = [one.step() for _ in range(4)]
    before = one.validate()
    for _ in range(36):
        last = one.step()
    after = one.validate()
    assert last["loss"] < 0.97 * np.mean([entry["loss"] for entry in first])
    assert after["length_1"] > before["length_1"] > 1
    assert one.anchors > 40


def test_muon_trains_the_hidden_matrices() -> None:
    one = trainer(optimizer="muon", reuse=4, lr=1e-2)
    assert [type(optimiser).__name__ for optimiser in one.optimisers] == ["AdamW", "Muon"]
    one.total = 800
    first = one.step()["loss"]
    for _ in range(20):
        last = one.step()["loss"]
    assert last < first


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "average": 0.9, "accumulate": 2, "reuse": 3}])
def test_resume_gives_the_weights_of_an_uninterrupted_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    def fresh() -> Trainer:
        made = trainer(**changes)
        made.total = 200
        return made

    whole = fresh()
    for _ in range(9):
        whole.step()
    broken = fresh()
    for _ in range(4):
        broken.step()
    broken.save_state(tmp_path / "state.pt")
    resumed = fresh()
    resumed.load_state(tmp_path / "state.pt")
    for _ in range(5):
        resumed.step()
    assert (resumed.number, resumed.anchors) == (whole.number, whole.anchors)
    for one, other in zip([*weights(whole), *whole.average], [*weights(resumed), *resumed.average], strict=True):
        assert torch.equal(one, other)


def test_another_run_s_state_is_refused(tmp_path: Path) -> None:
    trainer().save_state(tmp_path / "state.pt")
    with pytest.raises(ConfigurationError, match=r"lr=0\.003, now it is 0\.5"):
        trainer(lr=0.5).load_state(tmp_path / "state.pt")
    with pytest.raises(ConfigurationError, match="another shape"):
        trainer(shape=replace(SHAPE, rank=8)).load_state(tmp_path / "state.pt")
    (tmp_path / "state.pt").write_bytes(b"half a file")
    with pytest.raises(ConfigurationError, match="delete it"):
        trainer().load_state(tmp_path / "state.pt")


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()
    one.total = 100
    one.save_state(tmp_path / "state.pt")
    old = (tmp_path / "state.pt").read_bytes()
    one.step()

    def interrupted(state: Any, file: Path) -> None:
        Path(file).write_bytes(b"the first half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.save_state(tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def test_accumulated_micro_batches_equal_one_batch() -> None:
    once, parts = trainer(batch_rows=4), trainer(batch_rows=4, accumulate=4)
    for one in (once, parts):
        one.total = 1000
        for _ in range(3):
            one.step()
    for a, b in zip(weights(once), weights(parts), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def _rank(rank: int, folder: str) -> None:
    faulthandler.dump_traceback_later(RANKS_WITHIN_S, exit=True)  # whoever waits for ever says where
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2, timeout=timedelta(seconds=RANKS_WITHIN_S)
    )
    _three_steps(rank, folder)
    Ranks.current().leave()


def _three_steps(rank: int, folder: str) -> None:
    one = trainer(batch_rows=4, accumulate=2)
    one.total = 1000
    losses = [one.step()["loss"] for _ in range(3)]
    torch.save((weights(one), losses, one.anchors), f"{folder}/{rank}.pt")


def test_two_gloo_ranks_equal_one(tmp_path: Path) -> None:
    spawned = mp.get_context("spawn")
    ranks = [spawned.Process(target=_rank, args=(rank, str(tmp_path)), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    alone = trainer(batch_rows=4)
    alone.total = 1000
    for _ in range(3):
        alone.step()
    (first, _, anchors), (second, _, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert anchors == alone.anchors
    for one, other, expected in zip(first, second, weights(alone), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, atol=2e-5, rtol=1e-4)


def test_trainers_are_gone_when_their_ranks_part(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()
    one.itself, gone, seen = one, weakref.ref(one), []  # type: ignore[attr-defined]
    del one
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append(gone()))
    Ranks.leave()
    assert seen == [None]


def test_ranks_that_cannot_share_a_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "current", classmethod(lambda cls: cls(0, 3)))
    with pytest.raises(ConfigurationError, match="3 ranks"):
        trainer()


# -- training sees what serving sees -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_blocks_of_packed_rows_equal_dense_masks(architecture: str) -> None:
    """`block_hidden` is `dense_hidden` with `block_mask`, windows and several documents included."""
    one = trainer(architecture, replace(SHAPE, layers=2))
    if architecture == "gemma3":
        assert "sliding_attention" in one.config.layer_types
        one.model.config = one.config = one.config.model_copy(update={"sliding_window_non_causal": False})
    corpus = one.corpus.documents
    rows = one.reader.read([corpus[:2], corpus[2:3]])
    starts = [[d.start for d in corpus[:2]], [corpus[2].start]]
    rng = np.random.default_rng(0)
    anchors = [pick_anchors(corpus[:2], 6, 3, 4.0, rng), pick_anchors(corpus[2:3], 6, 3, 4.0, rng)]
    batch = collate(rows, starts, anchors, one.compact)
    masks = {
        window: block_mask(one.config, batch.positions, batch.anchor_positions, window, batch.owner, batch.anchor_owner)
        for window in {one.config.window(i) for i in range(2)}
    }
    with torch.no_grad():
        found = block_hidden(one.model, batch)
        wanted = dense_hidden(one.model, batch.features, batch.positions, batch.anchors, batch.anchor_positions, masks)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_features_and_labels_of_packed_rows_are_the_target_s() -> None:
    target = tiny_target("gemma3")  # windows of eight
    text = some_text(target, 3, longest=30).documents
    vocabulary = torch.arange(5, 45)
    (row,) = TargetReader(target, (-1, 1), vocabulary, 96, torch.float32).read([text])
    first, label = 0, 0
    for document in text:
        logits = stock_logits(target, torch.from_numpy(document.tokens)[None])[0]
        expected = logits.softmax(-1)[document.start :, 5:45]
        count = len(expected)
        torch.testing.assert_close(row.labels[label : label + count], expected, atol=1e-4, rtol=1e-3)
        assert row.features.shape[1] == 2 * target.hidden_size
        first, label = first + len(document.tokens), label + count
    assert (first, label) == (row.tokens.shape[0], row.labels.shape[0])


@pytest.mark.parametrize("at_once", [2, 3])
def test_rows_read_in_one_pass_are_those_read_alone(at_once: int) -> None:
    target = tiny_target("gemma3")
    text = list(some_text(target, 7))
    rows = [text[:3], text[3:4], text[4:6], text[6:]]
    alone = TargetReader(target, (0, 1), torch.arange(30), 160, torch.float32).read(rows)
    together = TargetReader(target, (0, 1), torch.arange(30), 160, torch.float32, rows=at_once).read(rows)
    assert len(together) == len(rows)
    for one, other in zip(alone, together, strict=True):
        for name in ("tokens", "positions", "owner", "features", "labels"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_training_and_serving_give_the_same_hidden_states_logits_and_confidences(head: str) -> None:
    """Every block the engine drafts, compared with the trainer's pass over the finished text."""
    shape = replace(SHAPE, head=head, layers=2)
    one = trainer(shape=shape)
    one.total = 1000
    for _ in range(5):
        one.step()
    drafter = one.drafter()
    drafter.bind(one.target)
    seen: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    plain = drafter.propose

    def spy(context: Any, sampler: Any) -> Any:
        class Spy:
            def __init__(self) -> None:
                self.logits: list[torch.Tensor] = []

            def temperatures(self) -> None:
                return None

            def draw(self, k: int, logits: torch.Tensor) -> torch.Tensor:
                self.logits.append(logits.clone())
                return sampler.draw(k, logits)

        spied = Spy()
        draft = plain(context, spied)
        seen.append(
            (int(context.lengths[0]), torch.stack(spied.logits, 1)[0], draft.confidence_logits[0], draft.tokens[0])
        )
        return draft

    drafter.propose = spy  # type: ignore[method-assign]
    engine = build(one.target, drafter, width=3, max_num_seqs=1)
    (request,) = engine.run([[3, 1, 4, 1, 5]], SamplingParams(temperature=0.0, max_tokens=30))
    text = np.array([*request.prompt_token_ids, *request.output.token_ids])
    for anchor, logits, confidences, tokens in seen:
        known = np.concatenate([text[: anchor + 1], tokens.numpy()])
        (row,) = one.reader.read([[Document(0, anchor, known)]])
        weight = np.ones((1, shape.gamma), dtype=np.float32)
        batch = collate([row], [[anchor]], [Anchors(np.array([anchor]), weight)], one.compact)
        with torch.no_grad():
            hidden = block_hidden(one.model, batch)[0]
            embedded = one.model.markov_head.embed(batch.previous[0])
            latent = one.model.markov_head.latents(embedded, hidden)
            expected = one.model.logits(hidden) + one.model.markov_head.bias(latent)
            expected_confidence = one.model.confidence_head(hidden, embedded)
        torch.testing.assert_close(logits, expected[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(confidences, expected_confidence[0], atol=1e-4, rtol=1e-4)
    assert len(seen) > 5


def test_a_saved_drafter_is_the_trained_one(tmp_path: Path) -> None:
    one = trainer()
    one.total = 100
    one.step()
    save_drafter(one.drafter(), tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter")
    loaded.bind(one.target)
    seen = one.vocabulary.seen
    table = loaded.model.markov_head.markov_w1.weight
    assert torch.equal(table[seen], one.model.markov_head.markov_w1.weight)
    assert torch.equal(loaded.model.fc.weight, one.model.fc.weight)
    assert torch.equal(loaded.vocabulary, one.vocabulary.draft)


def test_a_drafter_begins_as_its_target_s_last_layers() -> None:
    target = tiny_target("gemma3", seed=3)
    vocabulary, _ = choose_vocabulary(some_text(target, 4), some_text(target, 2, seed=1), 64, 50)
    model = drafter_model(target, vocabulary, replace(SHAPE, layers=2))
    layer, own = target.model.model.layers[1], model.layers[1]
    assert torch.equal(own.mlp.down_proj.weight, layer.mlp.down_proj.weight)
    # Gemma stores the distance from 1.
    torch.testing.assert_close(own.input_layernorm.weight, 1 + layer.input_layernorm.weight)
    torch.testing.assert_close(model.norm.weight, 1 + target.model.model.norm.weight)
    assert torch.equal(model.fc.weight[:, -32:], torch.eye(32))
    assert model.config.sandwich_norms
    assert model.config.embedding_scale == pytest.approx(32**0.5, rel=1e-3)
    assert float(model.markov_head.markov_w1.weight[vocabulary.seen].detach().std()) > 0


def test_a_smaller_feed_forward_keeps_the_strongest_neurons() -> None:
    target = tiny_target()
    vocabulary, _ = choose_vocabulary(some_text(target, 4), some_text(target, 2, seed=1), 64, 50)
    model = drafter_model(target, vocabulary, replace(SHAPE, inner=16))
    mlp = target.model.model.layers[1].mlp
    strength = mlp.gate_proj.weight.norm(dim=1) * mlp.up_proj.weight.norm(dim=1) * mlp.down_proj.weight.norm(dim=0)
    kept = sorted(strength.argsort(descending=True)[:16].tolist())
    own = model.layers[0].mlp
    assert torch.equal(own.gate_proj.weight, mlp.gate_proj.weight[kept])
    assert torch.equal(own.down_proj.weight, mlp.down_proj.weight[:, kept])
    assert torch.equal(model.layers[0].self_attn.q_proj.weight, target.model.model.layers[1].self_attn.q_proj.weight)


# -- plans and options -------------------------------------------------------------------------------------------------


def test_every_batch_is_read_once_and_used_as_often_as_asked() -> None:
    lengths = np.full(40, 20)
    steps = list(islice(plan(lengths, options(reuse=3, held_batches=7)), 200))
    uses = Counter(step.batch for step in steps)
    assert all(uses[batch] == 3 for batch in range(50))
    for step in steps:
        assert step.batch - step.oldest < 7
    first = [next(i for i, step in enumerate(steps) if step.batch == batch) for batch in range(50)]
    assert first == sorted(first)
    for batch in range(50):  # no use of a batch after it may have been dropped
        assert not any(step.batch == batch for step in steps if step.oldest > batch)
    documents = Counter(i for step in steps if step.batch < 10 for row in step.rows for i in row)
    assert set(documents.values()) == {3}  # ten batches of two rows of two documents are one epoch


def test_anchors_lie_in_the_continuation_and_blocks_end_with_the_text() -> None:
    text = [Document(0, 4, np.arange(7)), Document(1, 2, np.arange(5))]
    found = pick_anchors(text, 8, 3, 2.0, np.random.default_rng(0))
    assert found.index[:6].tolist() == [4, 5, 6, 7 + 2, 7 + 3, 7 + 4]
    assert found.count == 6
    assert ((found.weight > 0).sum(1)).tolist() == [3, 2, 1, 3, 2, 1, 0, 0]
    np.testing.assert_allclose(found.weight[0], np.exp(-np.arange(3) / 2), rtol=1e-6)


def test_the_vocabulary_holds_the_most_frequent_emitted_tokens() -> None:
    corpus = Corpus([Document(0, 1, np.array([9, 7, 7, 7, 3, 3, 5]))])
    held_out = Corpus([Document(0, 1, np.array([9, 7, 8]))])
    vocabulary, counts = choose_vocabulary(corpus, held_out, 10, 3, always=[0])
    assert vocabulary.draft.tolist() == [0, 3, 7]
    assert vocabulary.seen.tolist() == [0, 3, 5, 7, 8, 9]
    assert counts["held_out_coverage"] == 0.5
    assert choose_vocabulary(corpus, held_out, 10, 10)[0].draft is None


def test_learning_rate_warms_up_and_falls() -> None:
    rates = [learning_rate(done, options(warmup=0.1, lr=1.0)) for done in (0.0, 0.05, 0.1, 0.5, 1.0, 2.0)]
    assert rates[0] < rates[1] < rates[2] == 1.0
    assert 1.0 > rates[3] > rates[4] == rates[5] == pytest.approx(0.05)


def test_precision_is_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    times = {torch.bfloat16: 1.0, torch.float32: 2.0}
    monkeypatch.setattr("surefoot.training.optimiser._seconds", lambda dtype: times[dtype])
    assert choose_precision("auto", cpu) is torch.bfloat16
    times[torch.bfloat16] = 3.0
    assert choose_precision("auto", cpu) is torch.float32
    assert choose_precision("bfloat16", cpu) is torch.bfloat16


def test_bfloat16_products_train_as_well() -> None:
    one = trainer(precision="bfloat16", reuse=4, lr=1e-2)
    one.total = 800
    first = one.step()["loss"]
    for _ in range(20):
        last = one.step()["loss"]
    assert last < first


def test_a_budget_in_minutes_becomes_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()
    one.run(silent(), minutes=0.02)
    assert one.total is not None
    assert one.anchors >= one.total > 0
    assert one.curve[-1]["anchors"] == one.anchors or one.curve


@pytest.mark.parametrize("changes", [{"gamma": 16}, {"layers": 0}, {"head": "tail"}, {"vocab": 1}, {"storage": "int3"}])
def test_shapes_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="allowed"):
        DrafterShape(**changes)


def test_a_head_packed_for_serving_gives_its_matrix_to_training() -> None:
    """Of a target whose head is its own, for a drafter that uses all of its words."""
    target = Target(copy.deepcopy(tiny_target("llama").model))  # others are served the shared one as it is
    assert isinstance(target.lm_head, torch.nn.Linear)
    matrix = target.lm_head.weight.clone()
    drafter = tiny_dspark(target, 3)
    optimise(target.model)
    assert torch.equal(head_matrix(drafter.model, target), matrix.float())

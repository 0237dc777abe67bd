"""What the engine asks of a drafter, and how little a drafter of one's own has to say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surefoot.drafters import Draft, DraftContext, Drafter, DraftSampler
from surefoot.drafters.base import check_protocol
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.engine.fingerprint import fingerprint
from surefoot.engine.loading import combine, load_drafter_for
from surefoot.errors import CalibrationError, DrafterError
from surefoot.sampling import SamplingParams
from surefoot.speculation.estimator import HeadConfidence, SignalConfidence
from surefoot.speculation.live_cost import LiveCost
from tests.engine.engines import build, greedy_oracle, tiny_dspark
from tests.tiny_models import tiny_target


class Repeater(Drafter):
    """Proposes the anchor again and again: everything a drafter of one's own has to say."""

    name, gamma = "repeater", 3

    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        anchor = context.history[context.slots, context.lengths]
        tokens = anchor.unsqueeze(1).expand(-1, self.gamma).contiguous()
        return Draft(tokens, signal=torch.zeros(tokens.shape), point_mass=True)


def test_a_page_of_code_is_served_and_changes_no_token() -> None:
    target, prompt = tiny_target("llama"), [3, 17, 29, 17]
    engine = build(target, Repeater())
    request = engine.run([prompt], SamplingParams(temperature=0, max_tokens=20))[0]
    assert request.token_ids[len(prompt) :] == greedy_oracle(target, [prompt], 20)[0]
    assert engine.statistics.blocks.drafted > 0
    assert isinstance(engine.policy.confidence, SignalConfidence)


def test_an_object_that_lacks_members_is_refused_by_their_names() -> None:
    duck: Any = SimpleNamespace(name="duck", gamma=2, propose=Repeater.propose)
    with pytest.raises(DrafterError, match=r"SimpleNamespace lacks bind, .*model_gamma.*surefoot.drafters.Drafter"):
        load_drafter_for(tiny_target("llama"), duck, None)
    check_protocol(Repeater())


def test_the_base_class_reads_the_confidence_of_a_head_or_of_a_signal(tmp_path: Any) -> None:
    with pytest.raises(CalibrationError, match="repeater has no confidence head"):
        Repeater().confidence_source("cpu", tmp_path / "calibration.json")
    headed = Repeater()
    headed.has_confidence_head = True
    assert isinstance(headed.confidence_source("cpu"), HeadConfidence)


def test_what_each_drafter_says_about_itself() -> None:
    target = tiny_target("llama")
    lookup, trained = PromptLookupDrafter(5), tiny_dspark(target, 4)
    both = combine(target, trained)
    facts = [(d.sources, d.model_gamma, d.rests, dict(d.identity)) for d in (lookup, trained, both)]
    config = vars(trained.config)
    assert facts == [
        (("prompt-lookup", "prediction"), None, False, {}),
        ((), 4, False, config),
        (("prompt-lookup", "dspark", "prediction"), 4, True, config),
    ]


def test_drafters_of_another_shape_have_another_fingerprint() -> None:
    target = tiny_target("llama")

    def digest(drafter: Drafter) -> Any:
        return fingerprint(target, drafter, max_num_seqs=1, block_size=16)["drafter_config"]

    one, other = tiny_dspark(target, 4), tiny_dspark(target, 4, intermediate_size=56)
    assert digest(one) == digest(combine(target, one)) != digest(other)
    assert digest(PromptLookupDrafter(4)) is None
    # A table measured before the protocol had `identity` is still found.
    from surefoot.engine.fingerprint import _digest

    assert digest(one) == _digest(vars(one.config))


def test_a_separate_drafter_shares_weights_and_learns_alone() -> None:
    target = tiny_target("llama")
    shared = combine(target, tiny_dspark(target, 4))
    other = shared.separate()
    assert isinstance(other, CombinedDrafter)
    assert (other.trained, other.lookup) == (shared.trained, shared.lookup)
    assert other.choice is not shared.choice
    assert Repeater.separate(alone := Repeater()) is alone
    shared.use_costs(costs := LiveCost())
    assert shared.choice.costs is costs is not other.choice.costs
    shared.draft_always(True)
    assert (shared.choice.only_trained, other.choice.only_trained) == (True, False)


def test_packing_reaches_the_model_of_a_combined_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    trained, packed = tiny_dspark(target, 4), []
    monkeypatch.setattr(type(trained.model), "pack", lambda model: packed.append(model))
    combine(target, trained).pack()
    assert packed == [trained.model]

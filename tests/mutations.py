"""Break surefoot on purpose, one line at a time, and see that the tests notice.

    python tests/mutations.py              # all of them, two at a time: about half an hour
    python tests/mutations.py cache        # those whose name or file contains "cache"
    python tests/mutations.py --list

A mutation replaces one piece of source by another that serves a wrong distribution, loses tokens or shares what must not be
shared. The tests named beside it must fail on the copy that has it, and pass on a copy that has not. The working tree is never
touched. It is no part of the suite, because it runs parts of the suite some fifty times.

Exit status: 0 where every mutation was noticed, 1 where one survived, 2 where one no longer applies or the tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 900


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # below src/surefoot
    before: str  # occurs exactly once
    after: str
    tests: tuple[str, ...]  # files or test ids, one of which must fail


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "cache: the last token of a prefix hit never runs",
        "cache/blocks.py",
        "self._keys(token_ids[:-1])",
        "self._keys(token_ids)",
        ("tests/cache/test_blocks.py",),
    ),
    Mutation(
        "cache: a block's key forgets what comes before it",
        "cache/blocks.py",
        "key=parent, digest_size=16",
        "digest_size=16",
        ("tests/cache/test_blocks.py",),
    ),
    Mutation(
        "cache: a partly written block is shared",
        "cache/blocks.py",
        "(len(sequence.keys) + 1) * size <= length",
        "(len(sequence.keys) + 1) * size <= length + 1",
        ("tests/cache/test_blocks.py",),
    ),
    Mutation(
        "cache: a window frees a block too early",
        "cache/layers.py",
        "max(0, length - self.window + 1) //",
        "max(0, length - self.window + 2 + block_size) //",
        ("tests/cache/test_blocks.py",),
    ),
    Mutation(
        "cache: a shared block goes back to the free list while another request holds it",
        "cache/blocks.py",
        "if self._references[block] == 0:",
        "if self._references[block] <= 1:",
        ("tests/cache/test_blocks.py",),
    ),
    Mutation(
        "cache: a block that is handed out again keeps its old name",
        "cache/blocks.py",
        "        if key is not None:\n            del self._block_of[key]",
        "        if key is not None:\n            self._key_of[block] = key",
        ("tests/cache/test_blocks.py",),
    ),
    Mutation(
        "cache: a prefix is matched where a compressed group has no whole block",
        "cache/blocks.py",
        "        count -= count % self._unit\n",
        "",
        ("tests/cache/test_blocks.py",),
    ),
    Mutation(
        "cache: a window overwrites the committed state",
        "cache/states.py",
        "offset.clamp(min=0) + 1) % self.places",
        "offset.clamp(min=0)) % self.places",
        ("tests/cache/test_states.py",),
    ),
    Mutation(
        "cache: a request inherits the state of the one before it",
        "cache/states.py",
        "            states[slot, 0].zero_()",
        "            pass",
        ("tests/cache/test_states.py",),
    ),
    Mutation(
        "step: a state is committed one row too far",
        "cache/states.py",
        "rows = lengths - self.first.index_select(0, slots)",
        "rows = lengths - self.first.index_select(0, slots) + 1",
        ("tests/engine/test_stateful_layers.py",),
    ),
    Mutation(
        "packing: a chunk that does not emit leaves no state",
        "engine/packing.py",
        "        first[inputs.num_emitting :] -= 1",
        "        first[inputs.num_emitting :] -= 0",
        ("tests/engine/test_stateful_layers.py",),
    ),
    Mutation(
        "cache: a compressed entry is found by its position",
        "cache/paged.py",
        "entries = positions if stride == 1 else positions // stride",
        "entries = positions",
        ("tests/cache/test_states.py",),
    ),
    Mutation(
        "drafter: the confidence head sees the token it judges",
        "drafters/dspark.py",
        "previous = torch.cat([anchor.unsqueeze(1), tokens[:, :-1]], 1)",
        "previous = tokens",
        ("tests/drafters/test_dspark.py",),
    ),
    Mutation(
        "drafter: the confidence head gets the token one position earlier",
        "drafters/dspark.py",
        "previous = torch.cat([anchor.unsqueeze(1), tokens[:, :-1]], 1)",
        "previous = torch.cat([anchor.unsqueeze(1), anchor.unsqueeze(1), tokens[:, :-2]], 1)[:, :depth]",
        ("tests/drafters/test_dspark.py",),
    ),
    Mutation(
        "drafter: the sequential head always corrects by the anchor",
        "drafters/dspark.py",
        "latent, state = markov.step(markov.embed(previous), block[:, first + k], state)",
        "latent, state = markov.step(markov.embed(anchor), block[:, first + k], state)",
        ("tests/drafters/test_dspark.py",),
    ),
    Mutation(
        "drafter: context is written one slot late",
        "drafters/dspark.py",
        "slots = batch.cache_slots[cache.drafter_group]",
        "slots = batch.cache_slots[cache.drafter_group] + 1",
        ("tests/drafters/test_dspark.py",),
    ),
    Mutation(
        "drafter: the context is rotated one position late",
        "drafters/dspark.py",
        "self.model.context_key_values(features, batch.positions, ",
        "self.model.context_key_values(features, batch.positions + 1, ",
        ("tests/drafters/test_dspark.py",),
    ),
    Mutation(
        "drafter: the last slot of a block is not attended",
        "drafters/dspark.py",
        "ends = (context.lengths + size).clamp(max=capacity)",
        "ends = (context.lengths + size - 1).clamp(max=capacity)",
        ("tests/drafters/test_dspark.py",),
    ),
    Mutation(
        "drafter: a position is drawn as sharply as the one before",
        "drafters/dspark.py",
        "sampler.draw(k + 1, logits, sharpness[k])",
        "sampler.draw(k + 1, logits, sharpness[k - 1])",
        ("tests/drafters/test_sequential.py",),
    ),
    Mutation(
        "copying: the match's own last token is copied",
        "drafters/copying.py",
        "self._text.gather(1, (best + 1).clamp(max=width - 1))",
        "self._text.gather(1, best.clamp(max=width - 1))",
        ("tests/drafters/test_copying.py",),
    ),
    Mutation(
        "copying: a match does not grow with the block",
        "drafters/copying.py",
        "self._matched = (before + 1) *",
        "self._matched = before *",
        ("tests/drafters/test_copying.py",),
    ),
    Mutation(
        "copying: the block's own tokens are not appended to the text",
        "drafters/copying.py",
        "self._text = self._text.scatter(1, self._end, tokens.unsqueeze(1))",
        "self._text = self._text",
        ("tests/drafters/test_copying.py",),
    ),
    Mutation(
        "copying: a copy gets its odds as its share",
        "drafters/copying.py",
        "(own + share / (1 - share)).log()",
        "(own + share).log()",
        ("tests/drafters/test_copying.py",),
    ),
    Mutation(
        "lookup: the continuation starts at the match itself",
        "drafters/prompt_lookup.py",
        "tokens = text.gather(1, (best + 1 + ahead)",
        "tokens = text.gather(1, (best + ahead)",
        ("tests/drafters/test_prompt_lookup.py",),
    ),
    Mutation(
        "combined: a looked-up block is judged by the model's distribution",
        "drafters/combined.py",
        "drawn=torch.where(looked_up, -1, drawn),",
        "drawn=drawn.clamp(min=0),",
        ("tests/drafters/test_combined.py",),
    ),
    Mutation(
        "combined: the model draws for the wrong requests",
        "drafters/combined.py",
        "                sampler.only(rows)\n",
        "                sampler.only(torch.arange(count))\n",
        ("tests/drafters/test_combined.py",),
    ),
    Mutation(
        "confidence: the calibration is not applied",
        "speculation/estimator.py",
        "return self.calibration.calibrated(raw, evidence.signal, evidence.temperature)",
        "return raw.float()",
        ("tests/engine/test_calibrated_confidence.py",),
    ),
    Mutation(
        "confidence: every request is calibrated as if greedy",
        "engine/step.py",
        "draft = replace(self.drafter.propose(context, sampler), temperature=temperature)",
        "draft = replace(self.drafter.propose(context, sampler), temperature=None)",
        ("tests/engine/test_calibrated_confidence.py",),
    ),
    Mutation(
        "confidence: the head is calibrated by the match length",
        "drafters/combined.py",
        "signal=spread(trained.signal),",
        "signal=spread(found.signal[:count, :gamma]),",
        ("tests/engine/test_calibrated_confidence.py",),
    ),
    Mutation(
        "confidence: the weights of temperature 0 and 1 are exchanged",
        "speculation/calibration.py",
        "weights = torch.lerp(weights, both[1],",
        "weights = torch.lerp(both[1], weights,",
        ("tests/speculation/test_estimator.py",),
    ),
    Mutation(
        "confidence: the head learns from the wrong blocks",
        "speculation/sources.py",
        "own = evidence.first(self.trained.gamma).rows(torch.from_numpy(drawn))",
        "own = evidence.first(self.trained.gamma).rows(torch.from_numpy(drawn).flip(0))",
        ("tests/drafters/test_combined.py",),
    ),
    Mutation(
        "estimator: positions that were never verified count as rejected",
        "speculation/estimator.py",
        "labelled = (position < np.minimum(accepted + 1, widths)[:, None]) & np.isfinite(signal)",
        "labelled = (position < (accepted + 1)[:, None]) & np.isfinite(signal)",
        ("tests/speculation/test_estimator.py",),
    ),
    Mutation(
        "drafter: what was drawn from NaN counts as a draft",
        "engine/distribution.py",
        "        sound = self._draft_ids >= 0\n",
        "        sound = self._draft_ids >= -1\n",
        ("tests/engine/test_invalid_logits.py",),
    ),
    Mutation(
        "checkpoint: speculators' layer ids are taken as outputs",
        "drafters/layouts.py",
        "tuple(i - 1 for i in layer_ids)",
        "tuple(layer_ids)",
        ("tests/drafters/test_speculators_parity.py",),
    ),
    Mutation(
        "checkpoint: SpecForge's DSpark is read as predicting nothing at the anchor",
        "drafters/layouts.py",
        'bool(stated("shift_label", kind == "dspark"))',
        'bool(stated("shift_label", False))',
        ("tests/drafters/test_checkpoint.py",),
    ),
    Mutation(
        "calibration: the one of other weights is used",
        "drafters/locations.py",
        'f"{checkpoint.name}-{digest}.json"',
        'f"{checkpoint.name}-any.json"',
        ("tests/cli/test_calibrate.py",),
    ),
    Mutation(
        "acceptance: q is ignored",
        "speculation/acceptance.py",
        "(accept_uniforms * q < p)",
        "(accept_uniforms < p)",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "acceptance: p is squared in the test",
        "speculation/acceptance.py",
        "(accept_uniforms * q < p)",
        "(accept_uniforms * q < p * p)",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "acceptance: a draft beyond the window is accepted",
        "speculation/acceptance.py",
        "    accepted = leading_ones((accept_uniforms * q < p) & (k < widths.unsqueeze(1)))",
        "    accepted = leading_ones((accept_uniforms * q < p) & (k <= widths.unsqueeze(1)))",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "acceptance: greedy accepts beyond the window",
        "speculation/acceptance.py",
        "    accepted = leading_ones((argmax[rows] == drafts) & (k < widths.unsqueeze(1)))",
        "    accepted = leading_ones((argmax[rows] == drafts) & (k <= widths.unsqueeze(1)))",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "acceptance: the recovered token comes from p",
        "speculation/acceptance.py",
        "residual = (weights[:drafted] - q_row).clamp_(min=0)",
        "residual = weights[:drafted].clone()",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "acceptance: the bonus token comes from the residual",
        "speculation/acceptance.py",
        "    rejected = accepted < widths\n",
        "    rejected = accepted <= widths\n",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "acceptance: the recovered token may be the rejected point mass",
        "speculation/acceptance.py",
        "torch.where(point, 0.0, mass)",
        "torch.where(point, mass, mass)",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "acceptance: the recovered token is drawn a row too late",
        "speculation/acceptance.py",
        "weights = target_probs[anchor_row + _of_all(accepted, anchor_row.shape[0])]",
        "weights = target_probs[(anchor_row + _of_all(accepted, anchor_row.shape[0]) + 1).clamp(max=target_probs.shape[0] - 1)]",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "acceptance: an empty residual emits nothing",
        "speculation/acceptance.py",
        "torch.where(empty, weights[:drafted], residual)",
        "torch.where(empty, residual, residual)",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "acceptance: a later token counts after a rejection",
        "speculation/acceptance.py",
        "return flags.to(torch.int64).cumprod(-1).sum(-1)",
        "return flags.to(torch.int64).sum(-1)",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutation(
        "uniforms: a step repeats the draws of the step before",
        "speculation/uniforms.py",
        "z = _mix(_mix(streams * golden + 1) + steps * golden)",
        "z = _mix(_mix(streams * golden + 1) + (steps // 2) * golden)",
        ("tests/engine/test_exactness.py", "tests/engine/test_seeds.py"),
    ),
    Mutation(
        "uniforms: acceptance reads the uniform that drew the draft",
        "speculation/uniforms.py",
        "positions * 8 + int(purpose)",
        "(positions + (int(purpose) == 2)) * 8 + max(1, int(purpose) - 2 * (int(purpose) == 2))",
        ("tests/engine/test_exactness.py", "tests/engine/test_seeds.py"),
    ),
    Mutation(
        "uniforms: requests with one seed share a stream",
        "speculation/uniforms.py",
        "seed if number == 0 else _mixed(_mixed(seed) + number * _GOLDEN)",
        "seed",
        ("tests/engine/test_seeds.py",),
    ),
    Mutation(
        "allocation: a position is served before its predecessor",
        "speculation/allocation.py",
        "index[:budget] % requests",
        "index[:budget] // gamma",
        ("tests/speculation/test_allocation.py",),
    ),
    Mutation(
        "allocation: more is verified than the limit",
        "speculation/allocation.py",
        "torch.where(position < limits, rank_key, -1.0)",
        "torch.where(position <= limits, rank_key, -1.0)",
        ("tests/speculation/test_allocation.py",),
    ),
    Mutation(
        "allocation: the order of requests follows token values, not slots",
        "speculation/allocation.py",
        "sort(descending=True, stable=True)",
        "flip(0).sort(descending=True, stable=True)",
        ("tests/speculation/test_allocation.py",),
    ),
    Mutation(
        "planner: the stale planner takes current survivals",
        "speculation/planner.py",
        "        if not isinstance(published, PublishedSurvival):",
        "        if published is None:",
        ("tests/speculation/test_planner.py",),
    ),
    Mutation(
        "planner: the causal rule searches globally",
        "speculation/planner.py",
        "budget = floor + int(worse[0]) if worse.size else full",
        "budget = floor + int(rate[floor:].argmax())",
        ("tests/speculation/test_exactness.py",),
    ),
    Mutation(
        "planner: the stopping rule sees the survivals of positions it has not reached",
        "speculation/stopping.py",
        "expected = problem.model.expect(next_position, problem.survival.ravel()).reshape(requests, gamma, gamma)",
        "expected = np.repeat(problem.survival[:, None, :], gamma, 1)",
        ("tests/speculation/test_exactness.py", "tests/speculation/test_planner.py"),
    ),
    Mutation(
        "planner: this step's survivals teach before they are used",
        "speculation/stopping.py",
        "        decision = self.settled(load, full) or self._search(survival, load, limits, full)\n"
        "        self.model.observe(survival, limits)",
        "        self.model.observe(survival, limits)\n"
        "        decision = self.settled(load, full) or self._search(survival, load, limits, full)",
        ("tests/speculation/test_planner.py", "tests/speculation/test_exactness.py"),
    ),
    Mutation(
        "planner: a survival of this very step can be read back",
        "speculation/survival.py",
        "while self._pending and self._pending[0].step < step:",
        "while self._pending and self._pending[0].step <= step:",
        ("tests/speculation/test_survival.py",),
    ),
    Mutation(
        "planner: a new request inherits its slot's survivals",
        "speculation/survival.py",
        "        self._epoch[slot] += 1\n        self._values[slot] = 1.0\n        self._owner[slot] = -1\n",
        "",
        ("tests/speculation/test_survival.py",),
    ),
    Mutation(
        "ranking: a position is judged by the survival of the next one",
        "speculation/ranking.py",
        "    values = key = survival.T.ravel()",
        "    survival = np.concatenate([survival[:, 1:], survival[:, -1:]], axis=1)\n    values = key = survival.T.ravel()",
        ("tests/speculation/test_exactness.py",),
    ),
    Mutation(
        "ranking: allocation judges a position by the survival of the next one",
        "speculation/allocation.py",
        "    rank_key = survival.t() if",
        "    survival = torch.cat([survival[:, 1:], survival[:, -1:]], 1)\n    rank_key = survival.t() if",
        ("tests/speculation/test_exactness.py",),
    ),
    Mutation(
        "ranking: mandatory positions are ranked like all others",
        "speculation/ranking.py",
        "np.minimum(limits, min_width), 2.0, inside)",
        "np.minimum(limits, min_width), inside, inside)",
        ("tests/speculation/test_exactness.py", "tests/speculation/test_planner.py"),
    ),
    Mutation(
        "planner: ties take the larger budget",
        "speculation/planner.py",
        "best = floor + int(rate[floor:].argmax())  # the first maximum: ties keep the smaller K",
        "best = len(rate) - 1 - int(rate[floor:][::-1].argmax())",
        ("tests/speculation/test_planner.py",),
    ),
    Mutation(
        "planner: the seal of published survivals is not looked at",
        "speculation/survival.py",
        "        if seal is not _SEAL:",
        "        if seal is _SEAL is None:",
        ("tests/speculation/test_survival.py", "tests/speculation/test_planner.py"),
    ),
    Mutation(
        "continuation: positions that were never drafted are learned from",
        "speculation/continuation.py",
        "known = (position[:, None] <= position) & (position < lengths[:, None, None])",
        "known = (position[:, None] <= position) & (lengths[:, None, None] >= 0)",
        ("tests/speculation/test_planner.py",),
    ),
    Mutation(
        "loop: a step may run before the mailbox of its request is known",
        "engine/loop.py",
        """            self._boxes.update(dict.fromkeys(names, box))  # first: the loop may step before this thread goes on
            self._commands.put(lambda: self._admit(groups))
""",
        """            self._commands.put(lambda: self._admit(groups))
            self._boxes.update(dict.fromkeys(names, box))
""",
        ("tests/engine/test_loop.py",),
    ),
    Mutation(
        "breaker: it opens for the good drafts",
        "speculation/breaker.py",
        "self._accepted < self.min_acceptance * self._proposed",
        "self._accepted > self.min_acceptance * self._proposed",
        ("tests/speculation/test_breaker.py",),
    ),
    Mutation(
        "depth: no whole block is drafted any more",
        "speculation/depth.py",
        "        if not self._steps:\n            return None\n",
        "",
        ("tests/speculation/test_depth.py",),
    ),
    Mutation(
        "depth: a depth chosen by another table is kept",
        "speculation/depth.py",
        "        if table is not self._chosen_by:",
        "        if table is None:",
        ("tests/speculation/test_depth.py",),
    ),
    Mutation(
        "costs: step costs of an older table are kept",
        "speculation/planner.py",
        "self._kept_version != self.costs.version or",
        "self.costs.version < 0 or",
        ("tests/speculation/test_planner.py", "tests/speculation/test_live_cost.py"),
    ),
    Mutation(
        "ranks: the decision in the middle of a step stays on its rank",
        "engine/broadcast.py",
        "        group.broadcast(to_plain(decision))\n",
        "",
        ("tests/engine/test_broadcast.py",),
    ),
    Mutation(
        "sampling: top-p applies only if all requests want it",
        "engine/distribution.py",
        "            top_p=any(top_p),",
        "            top_p=all(top_p),",
        ("tests/engine/test_mixed_sampling.py",),
    ),
    Mutation(
        "sampling: min-p applies only if all requests want it",
        "engine/distribution.py",
        "            min_p=any(min_p),",
        "            min_p=all(min_p),",
        ("tests/engine/test_mixed_sampling.py",),
    ),
    Mutation(
        "sampling: a batch with one greedy request is greedy",
        "engine/distribution.py",
        "            greedy=all(greedy),",
        "            greedy=any(greedy),",
        ("tests/engine/test_mixed_sampling.py",),
    ),
    Mutation(
        "sampling: penalties of one request are lost in a mixed batch",
        "engine/distribution.py",
        "            penalties=any(penalties),",
        "            penalties=all(penalties),",
        ("tests/engine/test_mixed_sampling.py",),
    ),
    Mutation(
        "sampling: min_tokens of one request is lost in a mixed batch",
        "engine/distribution.py",
        "            min_tokens=any(min_tokens),",
        "            min_tokens=all(min_tokens),",
        ("tests/engine/test_mixed_sampling.py", "tests/engine/test_masks.py"),
    ),
    Mutation(
        "sampling: penalties do not see the drafts of the block",
        "engine/step.py",
        "history, rows.slots, rows.positions + 1)",
        "history, rows.slots, torch.minimum(rows.positions, self.state.lengths[rows.slots]) + 1)",
        ("tests/engine/test_exactness.py",),
    ),
    Mutation(
        "sampling: the output counts as prompt",
        "engine/distribution.py",
        "output = visible & (at >= params.prompt_len[slots].unsqueeze(1))",
        "output = visible & (at > params.prompt_len[slots].unsqueeze(1))",
        ("tests/engine/test_exactness.py",),
    ),
    Mutation(
        "sampling: frequency counts once",
        "engine/distribution.py",
        "logits = logits - counts * params.frequency",
        "logits = logits - (counts > 0) * params.frequency",
        ("tests/engine/test_mixed_sampling.py",),
    ),
    Mutation(
        "sampling: end tokens may come one token early",
        "engine/distribution.py",
        "early = (seen - params.prompt_len[slots] < params.min_tokens[slots])",
        "early = (seen - params.prompt_len[slots] + 1 < params.min_tokens[slots])",
        ("tests/engine/test_masks.py",),
    ),
    Mutation(
        "sampling: drafts are never drawn sharper",
        "engine/distribution.py",
        "temperature if sharpness is None else temperature / sharpness",
        "temperature",
        ("tests/engine/test_block_draw.py",),
    ),
    Mutation(
        "sampling: a draft is drawn sharper than its q says",
        "engine/distribution.py",
        "            index = sample_rows(self._probs[:, k - 1], u)\n",
        "            sharp = probs if sharpness is None else probs.square() / probs.square().sum(-1, keepdim=True)\n"
        "            index = sample_rows(sharp, u)\n",
        ("tests/engine/test_block_draw.py",),
    ),
    Mutation(
        "sampling: drafts drawn without penalties",
        "engine/distribution.py",
        "        if flags.follows_the_text or flags.bias:\n            return None\n",
        "",
        ("tests/engine/test_exactness.py", "tests/engine/test_block_draw.py"),
    ),
    Mutation(
        "step: the commit forgets the bonus token",
        "engine/step.py",
        "lengths[:emitting] += verdict.accepted + 1",
        "lengths[:emitting] += verdict.accepted.clamp(min=1)",
        ("tests/engine/test_exactness.py",),
    ),
    Mutation(
        "step: the next token stands one place too far",
        "engine/step.py",
        "self.state.history[slots[:emitting], lengths[:emitting]] = verdict.next_token",
        "self.state.history[slots[:emitting], lengths[:emitting] - (verdict.accepted > 1)] = verdict.next_token",
        ("tests/engine/test_exactness.py",),
    ),
    Mutation(
        "step: the drafter's context lacks the rows of a step with drafts",
        "engine/step.py",
        "if self.drafter is not None and output.features is not None:",
        "if self.drafter is not None and output.features is not None and not inputs.num_drafting:",
        ("tests/engine/test_exactness.py", "tests/engine/test_batching.py"),
    ),
    Mutation(
        "packing: padding rows see the cache",
        "cache/flat_batch.py",
        "visible, places = visible * real, [place * real for place in places]",
        "places = [place * real for place in places]",
        ("tests/engine/test_packing.py",),
    ),
    Mutation(
        "packing: a row attends one position too many",
        "cache/flat_batch.py",
        "visible = positions + 1\n",
        "visible = positions + 2\n",
        ("tests/engine/test_packing.py",),
    ),
    Mutation(
        "scheduler: a preempted request takes what it had computed for cached",
        "engine/scheduler.py",
        "request.slot, request.num_cached, request.status = slot, cached, Status.RUNNING",
        "request.slot, request.status = slot, Status.RUNNING\n"
        "        request.num_cached = len(request.token_ids) - 1 if request.num_output else cached",
        ("tests/engine/test_batching.py",),
    ),
    Mutation(
        "scheduler: after a preemption the output counts as prompt",
        "engine/scheduler.py",
        "len(request.prompt_token_ids),\n",
        "len(request.token_ids),\n",
        ("tests/engine/test_mixed_sampling.py", "tests/engine/test_batching.py", "tests/engine/test_transactions.py"),
    ),
    Mutation(
        "scheduler: a prefix hit is one token longer than the cache",
        "engine/scheduler.py",
        "request.slot, request.num_cached, request.status = slot, cached, Status.RUNNING",
        "request.slot, request.num_cached, request.status = slot, cached + (cached > 0), Status.RUNNING",
        ("tests/engine/test_batching.py",),
    ),
    Mutation(
        "drafting: a slot keeps the prediction of the request that had it before",
        "engine/state.py",
        "        self.predictions.pop(slot, None)\n",
        "",
        ("tests/engine/test_prediction.py",),
    ),
    Mutation(
        "drafting: a prediction is read one token too far",
        "drafters/prompt_lookup.py",
        "return text[said : said + self.gamma], self.max_match",
        "return text[said + 1 : said + 1 + self.gamma], self.max_match",
        ("tests/engine/test_prediction.py",),
    ),
    Mutation(
        "collection: recovered tokens are called a bonus",
        "engine/collection.py",
        "RECOVERED if accepted < width else BONUS",
        "BONUS if accepted < width else RECOVERED",
        ("tests/engine/test_prediction.py", "tests/serving"),
    ),
    Mutation(
        "grammar: a draft that broke the form is held against the text that replaces it",
        "engine/grammar.py",
        "        if count <= self._broken:\n            self._broken = -1\n",
        "",
        ("tests/engine/test_grammar.py",),
    ),
    Mutation(
        "grammar: rejected drafts stay in the matcher",
        "engine/grammar.py",
        "                if back > 0:\n                    self._matcher.rollback(back)\n",
        "",
        ("tests/engine/test_grammar.py",),
    ),
    Mutation(
        "grammar: the text after the end of the reasoning is not read",
        "engine/grammar.py",
        "return None if place < 0 else text[place + len(self._end) :]",
        "return None if place < 0 else text[place + len(self._end) + 1 :]",
        ("tests/engine/test_grammar.py",),
    ),
    Mutation(
        "grammar: the answer may end anywhere",
        "engine/grammar.py",
        "return torch.from_numpy(bits).view(torch.bool)",
        "return torch.from_numpy(bits).view(torch.bool) | torch.eye(self._vocab_size, dtype=torch.bool)[300]",
        ("tests/engine/test_grammar.py",),
    ),
)


def copy_of_source(folder: Path) -> Path:
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", folder)  # a test of the package's files reads it beside them
    return folder / "src"


def run(source: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of the tests against the package in `source`."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "the tests did not end"  # a mutation that hangs is noticed
    return done.returncode, done.stdout + done.stderr


def judge(mutation: Mutation) -> tuple[str, str]:
    """`noticed`, `SURVIVED` or `stale`, and why."""
    with tempfile.TemporaryDirectory(prefix="surefoot-mutation-") as folder:
        path = copy_of_source(Path(folder)) / "surefoot" / mutation.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.before) != 1:
            return "stale", f"{mutation.file} contains the piece {text.count(mutation.before)} times"
        path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
        status, output = run(Path(folder) / "src", mutation.tests)
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    if status in (1, 2) or status < 0:  # failed, could not be collected, or died
        return "noticed", lines[-1] if lines else output.strip()[-120:]
    return ("SURVIVED", "") if status == 0 else ("stale", f"pytest ended with {status}: {output.strip()[-200:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default="", help="part of a mutation's name or file")
    parser.add_argument("--list", action="store_true", help="show the mutations and run nothing")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.filter in m.name or options.filter in m.file]
    if options.list or not chosen:
        print("\n".join(f"{m.file}: {m.name}" for m in chosen) or f"no mutation contains {options.filter!r}")
        return 0 if chosen else 2
    tests = sorted({test for mutation in chosen for test in mutation.tests})
    with tempfile.TemporaryDirectory(prefix="surefoot-mutation-") as folder:
        status, output = run(copy_of_source(Path(folder)), tests)
    if status:
        print(output[-3000:], "\nthe tests fail without any mutation: mend that first", sep="")
        return 2
    start, verdicts = time.monotonic(), []
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutation, (verdict, why) in zip(chosen, pool.map(judge, chosen), strict=True):
            verdicts.append(verdict)
            print(f"{verdict:9} {mutation.name}  {why[:160]}", flush=True)
    counts = {verdict: verdicts.count(verdict) for verdict in ("noticed", "SURVIVED", "stale")}
    print(f"{counts} in {time.monotonic() - start:.0f} s")
    return 2 if counts["stale"] else 1 if counts["SURVIVED"] else 0


if __name__ == "__main__":
    sys.exit(main())

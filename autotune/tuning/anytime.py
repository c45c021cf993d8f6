"""Propose levers on measured candidates, alone and together, once a search has its first answer.

A lever is a setting that may speed a training up, such as CUDA graphs; a candidate is an arm (the values of all levers)
at a batch. Levers interact, so every measured candidate is a place to try one: with graphs another precision may be the
fastest, and compiled a larger batch fits. This module lists candidates; ``worth`` in ``autotune.tuning.policy`` values
them as all others: expected improvement, times the probability that they run and fit, by the seconds of a trial.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from autotune.core.candidate import Arm, Candidate
from autotune.core.units import format_seconds
from autotune.estimate.chance import Chances
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History, Tried, speed_of
from autotune.estimate.speed_model import SpeedModel, extra_seconds
from autotune.space.arms import changed, excluding, levers_of, with_lever, without
from autotune.space.levers import BY_NAME, LEVERS, PRIORS, Lever, faster_precision
from autotune.space.space import Space
from autotune.store.records import LeftOut
from autotune.tuning.policy import is_beaten, worth

_MOST_SECONDS = 120.0
"""No trial of a lever is begun where trials with levers would then take longer than this in total. A choice."""
_LEAST_LIMIT_SECONDS, _LIMIT_TIMES = 60.0, 3.0
"""A trial of a lever may take these seconds, plus so many times what it is expected to take. A choice."""
_MOST_ROOTS = 8
"""Levers are considered on so many of the fastest candidates. A choice."""
_SURELY, _PERHAPS = 0.9, 0.3
"""A lever that fails with the first probability is left out; from the second on, a substitute for it may be tried.
Choices."""
_ALONG = frozenset(("unpadded", "non_blocking"))
"""Levers that every other lever is tried together with, so that messages do not name them."""
_GRAPHS, _FEWER_LAYERS, _EXPANDABLE = "cuda_graphs", "checkpointed_layers", "expandable_segments"


@dataclass(frozen=True)
class Idea:
    """A candidate that may be faster than the best so far, and what is expected of it."""

    candidate: Candidate
    root: Candidate
    """The measured candidate that it differs from."""
    gain: float
    """By which factor it may be faster than the best so far: the upper end of the expected interval."""
    seconds: float
    """Expected seconds of its trial."""

    @property
    def limit_seconds(self) -> float:
        """Time limit of its trial, which ends a compiler that hangs."""
        return _LEAST_LIMIT_SECONDS + _LIMIT_TIMES * self.seconds

    @property
    def name(self) -> str:
        """The levers, batch or checkpointing by which the candidate differs from its root, in words."""
        # A lever that is part of another one, as a compiler's mode, names both.
        one, arm, before = self.candidate, self.candidate.arm, self.root.arm
        new = {name for name in PRIORS if getattr(arm, name) != getattr(before, name)} & levers_of(arm, PRIORS)
        wholes = {BY_NAME[name].part_of for name in new}
        named = sorted(name for name in new - wholes if name not in _ALONG or new <= _ALONG)
        called = [PRIORS[name].called for name in named if name != _GRAPHS]
        words = " and ".join(called) or (PRIORS[_GRAPHS].called if named else "another batch with it")
        if called and _GRAPHS in named:
            words = f"{words} in {PRIORS[_GRAPHS].called}"
        if before.gradient_checkpointing and not arm.gradient_checkpointing:
            return f"{words} without checkpointing"
        is_other_batch = one.per_device_train_batch_size != self.root.per_device_train_batch_size
        if is_other_batch and named:
            return f"{words} at {one.per_device_train_batch_size} × {one.gradient_accumulation_steps}"
        return words

    def describe(self) -> str:
        """Return ``CUDA graphs may give up to 1.60 ×, about 4 s``."""
        return f"{self.name} may give up to {self.gain:.2f} ×, about {format_seconds(self.seconds)}"


class Anytime:
    """Proposes levers for the best candidates of a search that has its first answer."""

    def __init__(self, space: Space) -> None:
        self._space = space
        # Pinning to a core comes last, see ``Plan._next_due``.
        self._levers = space.late - {"cpu_affinity"}
        self._saving = frozenset(space.saving.arms) if space.saving is not None else frozenset()

    def leave_out(self, levers: Collection[str]) -> None:
        """Propose these levers no more, since a trial showed that they change the training."""
        self._levers -= set(levers)

    @property
    def has_levers(self) -> bool:
        """Whether there is any lever to try."""
        return bool(self._levers)

    def is_late(self, candidate: Candidate) -> bool:
        """Return whether a candidate has levers that are only tried after the first answer.

        Levers that merely save memory do not count: the search takes them before, where nothing fits without.
        """
        arm = without(candidate.arm, self._levers & {_EXPANDABLE})
        return bool(levers_of(arm, self._levers)) and arm not in self._saving

    def has_time(self, seconds: float, spent_seconds: float) -> bool:
        """Return whether a trial of ``seconds`` may begin after all trials with levers took ``spent_seconds``."""
        return spent_seconds + seconds <= _MOST_SECONDS

    def arms_that_save(self, history: History, among: Collection[Candidate]) -> list[Arm]:
        """Return the best candidate's arm with each lever that saves memory, so that their memory is predicted.

        Empty where memory is no limit: the arm does not recompute, and its next larger batch may fit. The best is
        ``among`` the candidates that may be recommended.
        """
        best = history.winner(among)
        if best is None or not self._space.resorts:
            return []
        arm, larger = best.candidate.arm, self._neighbours(best.candidate, larger=True)
        if not arm.gradient_checkpointing and not any(map(Chances(history).rules_out, larger[:1])):
            return []
        return [changed(arm, **{name: True}) for name in sorted(self._space.resorts)]

    def next(
        self, history: History, among: Collection[Candidate], *, usual_seconds: float, spent_seconds: float
    ) -> Idea | None:
        """Return the candidate with the largest expected gain for its time; ``None`` where none is worth its trial.

        ``among`` are the candidates that may be recommended. A trial without levers takes ``usual_seconds``; all trials
        with levers have taken ``spent_seconds`` so far.
        """
        best = history.winner(among)
        if best is None or history.pending:
            return None
        model, largest_worth, chosen = SpeedModel(history), 0.0, best.candidate
        roots, further = dict[Candidate, Tried](), self.candidates(history, among)
        # To the best change, one lever more is added as long as that promises more for the time of the trial.
        while found := [
            each for each in further if self.has_time(usual_seconds + extra_seconds(history, each), spent_seconds)
        ]:
            values = worth(history, model, found, speed_of(best), usual_seconds)
            at = int(values.argmax())
            if values[at] <= largest_worth:
                break
            largest_worth, chosen = float(values[at]), found[at]
            roots |= further
            further = self._with_one_more(history, chosen, roots[chosen])
        if chosen not in roots:
            return None
        # Logarithms of the seconds a sample that GPU and host need, less their errors: a step takes the longer of both.
        gpu, gpu_error, host, host_error = (float(each[0]) for each in model.times([chosen]))
        most = 1 / (speed_of(best) * max(math.exp(gpu - gpu_error), math.exp(host - host_error)))
        return Idea(chosen, roots[chosen].candidate, most, usual_seconds + extra_seconds(history, chosen))

    def candidates(self, history: History, among: Collection[Candidate]) -> dict[Candidate, Tried]:
        """Return the candidates that may be tried, each with the measured candidate that it differs from.

        A candidate that ran and left too little memory is also tried in expandable segments, and with levers at the
        next smaller batch.
        """
        judge, (failed, doubtful) = Judge(self._space, history), _failing(history)
        roots = sorted(history.believed(set(among)), key=speed_of, reverse=True)[:_MOST_ROOTS]
        over_line = [tried for tried in history.tried if tried.measurement is not None and history.is_over(tried)]
        pairs = [(root, each) for root in roots for each in self._variants(history, root.candidate, failed, doubtful)]
        for root in roots:
            # Host-bound steps say little about precisions: in a CUDA graph, the faster one on the GPU may win.
            for other in self._in_other_precisions(root.candidate):
                # Without a lever, a candidate is the business of the policy.
                pairs += [(root, other)] if levers_of(other.arm, self._levers) else []
                pairs += [(root, each) for each in self._variants(history, other, failed, doubtful)]
        if _EXPANDABLE not in failed:
            pairs += [(root, each) for root in over_line if (each := judge.in_expandable_segments(root))]
        for root in over_line:
            if levers_of(root.candidate.arm, self._levers):
                pairs += [(root, each) for each in self._neighbours(root.candidate, larger=False, any_level=True)[:1]]
        found: dict[Candidate, Tried] = {}
        for root, each in pairs:
            if each not in found and self._may_be_tried(history, judge, root, each):
                found[each] = root
        return found

    def _with_one_more(self, history: History, candidate: Candidate, root: Tried) -> dict[Candidate, Tried]:
        """Return the variants of a candidate with one further lever, as keys whose values are all ``root``."""
        judge, (failed, doubtful) = Judge(self._space, history), _failing(history)
        further = (
            self._with_lever(candidate, row, failed) for row in self._further_levers(candidate, failed, doubtful)
        )
        return {each: root for each in further if self._may_be_tried(history, judge, root, each)}

    def _may_be_tried(self, history: History, judge: Judge, root: Tried, candidate: Candidate) -> bool:
        """Return whether a candidate with a lever, which differs from the measured ``root``, is worth considering.

        It is not where it is outside of the space, surely fails, is tried already, or cannot be the fastest.
        """
        arm = candidate.arm
        is_compiled_anew = arm.torch_compile and not root.candidate.arm.torch_compile
        if is_compiled_anew and root.measurement and root.measurement.allocation_retries:
            # The allocator met the cap. With Qwen3-32B and QLoRA, what the compiler needs in addition did not fit then.
            return False
        # Each new length may compile anew, so that lengths have to be padded to few.
        compiles_often = self._space.shapes_vary and arm.torch_compile and arm.length_multiple is None
        if excluding(arm) or (compiles_often and "length_multiple" in self._levers):
            return False
        return self._space.contains(candidate) and judge.is_open(candidate) and not is_beaten(history, candidate)

    def _in_other_precisions(self, candidate: Candidate) -> list[Candidate]:
        """Return a candidate in each other precision of the space of which the space has no faster equivalent."""
        precisions = {arm.precision for arm in self._space.arms}
        others = [changed(candidate.arm, precision=each) for each in sorted(precisions - {candidate.arm.precision})]
        return [
            replace(candidate, arm=arm) for arm in others if faster_precision(arm) not in precisions - {arm.precision}
        ]

    def _variants(
        self, history: History, candidate: Candidate, failed: frozenset[str], doubtful: frozenset[str]
    ) -> Iterator[Candidate]:
        """Yield variants of a candidate: one or two levers more, fewer recomputing layers, the next batch up or down.

        ``failed`` are the levers that surely fail here, ``doubtful`` those that may.
        """
        rows = self._further_levers(candidate, failed, doubtful)
        for row in rows:
            with_one = self._with_lever(candidate, row, failed)
            yield with_one
            if candidate.arm.gradient_checkpointing:
                yield replace(with_one, arm=changed(with_one.arm, gradient_checkpointing=False))
            for is_larger in (True, False):
                yield from self._neighbours(with_one, larger=is_larger)[:1]
        for one, other in combinations(rows, 2):
            yield self._with_lever(self._with_lever(candidate, one, failed), other, failed)
        if _FEWER_LAYERS in self._levers - failed and candidate.arm.gradient_checkpointing:
            for count in range(1, candidate.arm.checkpointed_layers or history.layers):
                yield replace(candidate, arm=changed(candidate.arm, checkpointed_layers=count))
        if levers_of(candidate.arm, self._levers):
            for is_larger in (True, False):
                yield from self._neighbours(candidate, larger=is_larger)[:1]
            if candidate.arm.gradient_checkpointing:
                # A step that no longer waits for the host needs no batch for which it has to recompute.
                keeps = replace(candidate, arm=changed(candidate.arm, gradient_checkpointing=False))
                yield from (keeps, *self._neighbours(keeps, larger=False))

    def _with_lever(self, candidate: Candidate, row: Lever, failed: frozenset[str]) -> Candidate:
        """Return a candidate with a lever, and with ``unpadded`` and ``non_blocking`` unless they ``failed`` here."""
        arm, usable = candidate.arm, self._levers - failed
        if PRIORS[row.name].is_unmasked:
            # Tracing a step makes the attention mask explicit, which slows attention: without padding it is dropped.
            may_unpad = "unpadded" in usable and arm.length_multiple is None and not arm.padding_free
            # Not pinned to a core: a compiler has processes of its own, and a replayed graph needs no fast host.
            arm = changed(arm, cpu_affinity=False, unpadded=arm.unpadded or may_unpad)
        # With ``non_blocking`` the host does not wait for the GPU. It costs nothing, and hides the host's time.
        arm = changed(arm, non_blocking=arm.non_blocking or "non_blocking" in usable)
        return replace(candidate, arm=with_lever(arm, row.name, self._levers, self._space.multiples))

    def _further_levers(self, candidate: Candidate, failed: frozenset[str], doubtful: frozenset[str]) -> list[Lever]:
        """Return the rows of the levers that a candidate may be given besides its own."""
        rows = [row for row in LEVERS if row.name not in (*failed, _FEWER_LAYERS, _EXPANDABLE)]
        return [row for row in rows if self._can_add(row, candidate, doubtful)]

    def _can_add(self, row: Lever, candidate: Candidate, doubtful: frozenset[str]) -> bool:
        """Return whether a lever is searched, new to the candidate, and has an effect beside the candidate's settings.

        A substitute for another lever is only added where the other one cannot be, or is ``doubtful``.
        """
        late = {name for name in (row.name, row.part_of) if name in self._levers}
        if row.prior is None or not late or levers_of(candidate.arm, late | {row.name}):
            return False
        if candidate.accumulates and not row.prior.accumulates:
            return False
        if row.part_of == "gradient_checkpointing" and not candidate.arm.gradient_checkpointing:
            return False
        return row.stands_in_for is None or not self._can_have(row.stands_in_for, candidate, doubtful)

    def _can_have(self, name: str, candidate: Candidate, doubtful: frozenset[str]) -> bool:
        """Return whether a lever is searched, probably works, and goes with the candidate's settings."""
        row = BY_NAME[name]
        with_it = changed(candidate.arm, **{name: row.values[1]})
        return not self._levers.isdisjoint({name, row.part_of}) and name not in doubtful and not excluding(with_it)

    def _neighbours(self, candidate: Candidate, *, larger: bool, any_level: bool = False) -> list[Candidate]:
        """Return a candidate's arm at the larger or the smaller batches of the space, the nearest first.

        Without ``any_level``, only at multiples of the same power of two or a larger one.
        """
        batches, batch = self._space.batches, candidate.per_device_train_batch_size
        levels = [level for level in batches.levels() if any_level or level >= batches.level(batch)]
        ladder = sorted(each for level in levels for each in batches.at_level(level))
        beside = [each for each in ladder if each > batch] if larger else [e for e in reversed(ladder) if e < batch]
        return [self._space.candidate(candidate.arm, each) for each in beside]

    def left_out(self, history: History) -> tuple[LeftOut, ...]:
        """Return the levers that are taken to fail, each with the message of a trial."""
        return tuple(LeftOut((PRIORS[name].called,), why) for name, why in Chances(history).failing().items())


def _failing(history: History) -> tuple[frozenset[str], frozenset[str]]:
    """Return the levers that are surely broken, and the levers that may be broken."""
    chances = Chances(history)
    return frozenset(chances.failing(_SURELY)), frozenset(chances.failing(_PERHAPS))


def gain_given(idea: Idea, history: History, among: Collection[Candidate]) -> float | None:
    """Return the speed-up that an idea's trial measured, as a factor; ``None`` where the trial has no speed.

    It is relative to the idea's root or, where the root left too little memory, to the best of ``among``.
    """
    latest, root = (next(reversed(history.outcomes_of(c)), None) for c in (idea.candidate, idea.root))
    if latest is None or latest.measurement is None or root is None or root.measurement is None:
        return None
    best = history.winner({*among} - {idea.candidate}) if history.is_over(root) else None
    return _samples_per_second(history, latest) / _samples_per_second(history, best or root)


def _samples_per_second(history: History, tried: Tried) -> float:
    """Return a candidate's speed over all its trials; that of ``tried`` alone where it left too little memory."""
    pooled = history.speed(tried.candidate)
    return pooled.samples_per_second if pooled is not None else speed_of(tried)

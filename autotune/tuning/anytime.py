"""Propose levers on measured candidates, alone and together, once a search has its first answer.

A lever is a setting that may speed a training up, such as CUDA graphs; a candidate is an arm (the values of all levers)
at a batch. Levers interact, so every measured candidate is a place to try one: with graphs another precision may be the
fastest, and compiled a larger batch fits. This module lists candidates; ``worth`` in ``autotune.tuning.policy`` values
them as all others: expected improvement, times the probability that they run and fit, by the seconds of a trial.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autotune.core.candidate import Arm, Candidate
from autotune.core.units import format_seconds
from autotune.estimate.chance import LEAST_CHANCE, Chances
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
_DOUBTFUL = 0.4
"""A lever that is this likely to fail is not added to others, and a substitute for it may be tried. A choice."""
_MOST_ROOTS = 8
"""Levers are considered on so many of the fastest candidates. A choice."""
_ALONG = frozenset(("unpadded", "non_blocking"))
"""Levers that every other lever is tried together with, so that messages do not name them."""
_FEWER_LAYERS, _EXPANDABLE = "checkpointed_layers", "expandable_segments"


@dataclass(frozen=True)
class Idea:
    """A candidate that may be faster than the best so far, and what is expected of it."""

    candidate: Candidate
    root: Candidate
    """The measured candidate that it differs from."""
    best: float
    """Samples a second of the best so far."""
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
        """The levers, precision, checkpointing and batch by which the candidate differs from its root, in words."""
        arm, before, batch = self.candidate.arm, self.root.arm, self.candidate.per_device_train_batch_size
        new = {name for name in levers_of(arm, PRIORS) if getattr(arm, name) != getattr(before, name)}
        # A lever that is part of another one, as a compiler's mode, names both.
        named = new - {BY_NAME[name].part_of for name in new}
        called = [PRIORS[name].called for name in sorted(named - _ALONG or named, reverse=True)]
        words = " and ".join(called) or "the same levers"
        words += f" in {arm.precision}" if arm.precision != before.precision else ""
        words += " without checkpointing" if before.gradient_checkpointing and not arm.gradient_checkpointing else ""
        is_at_another = batch != self.root.per_device_train_batch_size
        return words + (f" at {batch} × {self.candidate.gradient_accumulation_steps}" if is_at_another else "")

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
        arm, beside = best.candidate.arm, self._neighbours(best.candidate)
        if not arm.gradient_checkpointing and not any(map(Chances(history).rules_out, beside)):
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
        model, largest_worth, chosen, root = SpeedModel(history), 0.0, best.candidate, None
        further = self.candidates(history, among)
        # To the best change, one lever more is added as long as that promises more for the time of the trial.
        while found := [
            each for each in further if self.has_time(usual_seconds + extra_seconds(history, each), spent_seconds)
        ]:
            values = worth(history, model, found, speed_of(best), usual_seconds)
            at = int(values.argmax())
            if values[at] <= largest_worth:
                break
            largest_worth, chosen = float(values[at]), found[at]
            root = further[chosen]
            one_more = self._with_one_more(chosen, Chances(history).failing(_DOUBTFUL))
            further = self._open(history, dict.fromkeys(one_more, root))
        if root is None:
            return None
        # Logarithms of the seconds a sample that GPU and host need, less their errors: a step takes the longer of both.
        gpu, gpu_error, host, host_error = (float(each[0]) for each in model.times([chosen]))
        most = 1 / (speed_of(best) * max(math.exp(gpu - gpu_error), math.exp(host - host_error)))
        seconds = usual_seconds + extra_seconds(history, chosen)
        return Idea(chosen, root.candidate, speed_of(best), most, seconds)

    def candidates(self, history: History, among: Collection[Candidate]) -> dict[Candidate, Tried]:
        """Return the candidates that may be tried, each with the measured candidate that it differs from.

        They differ in one or two changes, or in the number of recomputing layers. A candidate with levers that left too
        little memory is changed as well, and any that did is tried in expandable segments.
        """
        judge = Judge(self._space, history)
        doubtful = judge.chances.failing(_DOUBTFUL)
        over_line = [tried for tried in history.tried if tried.measurement and history.is_over(tried)]
        roots = sorted(history.believed(set(among)), key=speed_of, reverse=True)[:_MOST_ROOTS]
        found: dict[Candidate, Tried] = {}
        for root in (*roots, *(t for t in over_line if levers_of(t.candidate.arm, self._levers))):
            for same in self._in_each_precision(root.candidate):
                changes = self._recomputing_less(history, same)
                for one in (same, *self._with_one_more(same, doubtful)):
                    less = self._recomputing_less(history, one)[:1]
                    changes += [one, *self._neighbours(one), *less, *self._with_one_more(one, doubtful)]
                found = dict.fromkeys(changes, root) | found
        found |= {each: root for root in over_line if (each := judge.in_expandable_segments(root))}
        return self._open(history, found)

    def _open(self, history: History, found: Mapping[Candidate, Tried]) -> dict[Candidate, Tried]:
        """Return the candidates with levers, each with its measured root, that are worth considering.

        One is not where it is outside of the space, surely fails, is tried already, or cannot be the fastest.
        """
        judge = Judge(self._space, history)
        return {
            each: root
            for each, root in found.items()
            # Without a lever, a candidate is the business of the policy.
            if levers_of(each.arm, self._levers)
            and self._can_be(each.arm, root)
            and self._space.contains(each)
            and judge.is_open(each)
            and not is_beaten(history, each)
            and judge.chances.runs(each) > LEAST_CHANCE
        }

    def _can_be(self, arm: Arm, root: Tried) -> bool:
        """Return whether the settings of an arm go together, and it compiles no more often than it has room for."""
        is_compiled_anew = arm.torch_compile and not root.candidate.arm.torch_compile
        if is_compiled_anew and root.measurement and root.measurement.allocation_retries:
            # The allocator met the cap. With Qwen3-32B and QLoRA, what the compiler needs in addition did not fit then.
            return False
        # Each new length may compile anew, so that lengths have to be padded to few.
        compiles_often = self._space.shapes_vary and arm.torch_compile and arm.length_multiple is None
        return not excluding(arm) and not (compiles_often and "length_multiple" in self._levers)

    def _in_each_precision(self, candidate: Candidate) -> list[Candidate]:
        """Return a candidate in each precision of the space of which the space has no faster equivalent, its own first.

        Host-bound steps say little about precisions: in a CUDA graph, the faster one on the GPU may win.
        """
        precisions = {arm.precision for arm in self._space.arms}
        others = [changed(candidate.arm, precision=each) for each in sorted(precisions - {candidate.arm.precision})]
        arms = [arm for arm in others if faster_precision(arm) not in precisions - {arm.precision}]
        return [candidate, *(replace(candidate, arm=arm) for arm in arms)]

    def _with_one_more(self, candidate: Candidate, doubtful: Collection[str]) -> list[Candidate]:
        """Return a candidate with each further lever."""
        rows = [row for row in LEVERS if self._can_add(row, candidate, doubtful)]
        return [replace(candidate, arm=self._with_lever(candidate.arm, row, doubtful)) for row in rows]

    def _batches_beside(self, candidate: Candidate) -> tuple[list[int], list[int]]:
        """Return the smaller and the larger batches of the space, the nearest first.

        They are multiples of the same power of two or a larger one.
        """
        batches, batch = self._space.batches, candidate.per_device_train_batch_size
        levels = [level for level in batches.levels() if level >= batches.level(batch)]
        ladder = sorted(each for level in levels for each in batches.at_level(level))
        return [each for each in reversed(ladder) if each < batch], [each for each in ladder if each > batch]

    def _neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Return a candidate's arm at the next smaller and the next larger batch."""
        return [self._space.candidate(candidate.arm, b) for side in self._batches_beside(candidate) for b in side[:1]]

    def _recomputing_less(self, history: History, candidate: Candidate) -> list[Candidate]:
        """Return a candidate that recomputes no more, at its batch and smaller ones, and with fewer recomputing layers.

        A step that no longer waits for the host needs no batch for which it has to recompute.
        """
        arm, batch = candidate.arm, candidate.per_device_train_batch_size
        if not arm.gradient_checkpointing:
            return []
        keeps, smaller = changed(arm, gradient_checkpointing=False), self._batches_beside(candidate)[0]
        counts = range(1, (arm.checkpointed_layers or history.layers) if _FEWER_LAYERS in self._levers else 1)
        fewer = [replace(candidate, arm=changed(arm, checkpointed_layers=count)) for count in counts]
        return [*(self._space.candidate(keeps, each) for each in (batch, *smaller)), *fewer]

    def _with_lever(self, arm: Arm, row: Lever, doubtful: Collection[str]) -> Arm:
        """Return an arm with a lever, and with ``unpadded`` and ``non_blocking`` unless they are ``doubtful``."""
        usable = self._levers.difference(doubtful)
        if PRIORS[row.name].is_unmasked:
            # Tracing a step makes the attention mask explicit, which slows attention: without padding it is dropped.
            may_unpad = "unpadded" in usable and arm.length_multiple is None and not arm.padding_free
            # Not pinned to a core: a compiler has processes of its own, and a replayed graph needs no fast host.
            arm = changed(arm, cpu_affinity=False, unpadded=arm.unpadded or may_unpad)
        # With ``non_blocking`` the host does not wait for the GPU. It costs nothing, and hides the host's time.
        arm = changed(arm, non_blocking=arm.non_blocking or "non_blocking" in usable)
        return with_lever(arm, row.name, self._levers, self._space.multiples)

    def _can_add(self, row: Lever, candidate: Candidate, doubtful: Collection[str]) -> bool:
        """Return whether a lever is searched, new to the candidate, and has an effect beside the candidate's settings.

        A substitute for another lever is only added where the other one cannot be, or is ``doubtful``.
        """
        late = {name for name in (row.name, row.part_of) if name in self._levers}
        if row.prior is None or not late or row.name in (_FEWER_LAYERS, _EXPANDABLE):
            return False
        if levers_of(candidate.arm, late | {row.name}) or (candidate.accumulates and not row.prior.accumulates):
            return False
        if row.part_of == "gradient_checkpointing" and not candidate.arm.gradient_checkpointing:
            return False
        better = BY_NAME.get(row.stands_in_for or "")
        if better is None or better.name in doubtful or self._levers.isdisjoint({better.name, better.part_of}):
            return True
        return excluding(changed(candidate.arm, **{better.name: better.values[1]})) is not None

    def left_out(self, history: History) -> tuple[LeftOut, ...]:
        """Return the levers that are taken to fail, each with the message of a trial."""
        return tuple(LeftOut((PRIORS[name].called,), why) for name, why in Chances(history).failing().items())

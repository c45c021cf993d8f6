"""Go on once a search has its first answer: try levers on its best candidates, the one that promises most first.

What a lever may give follows from what was measured of the candidate that it is tried on, and from what it gave where
it was tried before in this search. A lever is worth a trial while that is more than the tolerance, and more than its
trial costs in time. Levers interact, so every measured candidate is a place to try one: with graphs another precision
may be the fastest, and compiled a larger batch fits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Failed
from autotune.core.stop import LeftOut
from autotune.core.units import format_seconds
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History, Tried
from autotune.estimate.lever_gains import gain_of, gain_of_fewer_layers
from autotune.space.levers import BY_NAME, changed, compiles, excluding, levers_of
from autotune.space.space import Space

_GAIN_A_SECOND = 0.001
"""Gain in speed for which a second of search is worth it: a minute has to promise 6 %. A choice."""
_MOST_SECONDS = 120.0
"""No trial of a lever is begun that would end later after the first answer than this. A choice."""
_LARGER_BATCH = 1.1
"""What a larger batch may gain with levers, where the step was host-bound without; else half of that. A choice."""
_FUSED_LOSS = 1.03
"""What a loss without logits may gain beside memory: logits are written and read several times. A choice."""
_ROOM = 1.2
"""What memory that a fused loss frees may gain where activations are recomputed or a larger batch did not fit."""
_MOST_FAILURES = 2
"""Ways to compile that may fail before none is tried any more."""


@dataclass(frozen=True)
class Idea:
    """A candidate that may be faster than the best so far, and what is expected of it."""

    candidate: Candidate
    lever: str
    """What is new about it: a way to use levers, or ``batch``."""
    root: Candidate
    """The measured candidate that it differs from by the lever."""
    gain: float
    """The most by which it may be faster than the best so far, as a factor."""
    root_gain: float
    """The same over its root, before what was learned of the lever."""
    seconds: float
    """What its trial is expected to take."""

    @property
    def is_worth_it(self) -> bool:
        """Whether it promises more than its trial costs."""
        return self.gain - 1 > self.seconds * _GAIN_A_SECOND

    @property
    def name(self) -> str:
        """What the lever is called."""
        return _NAMES[self.lever]

    def describe(self) -> str:
        """Return ``CUDA graphs may give up to 1.6 ×, about 4 s``."""
        return f"{self.name} may give up to {self.gain:.2f} ×, about {format_seconds(self.seconds)}"


_NAMES = {
    "torch_compile": "compiling",
    "torch_compile_mode": "compiling with reduce-overhead",
    "regional_compilation": "compiling by layer",
    "cuda_graphs": "CUDA graphs",
    "checkpointed_layers": "checkpointing fewer layers",
    "unpadded": "passing no mask",
    "fused_loss": "a fused loss",
    "batch": "another batch with it",
}
_WAYS_TO_COMPILE = ("torch_compile", "torch_compile_mode", "regional_compilation")
_WAYS = (*_WAYS_TO_COMPILE, "cuda_graphs", "checkpointed_layers", "unpadded", "fused_loss")


def way_of(arm: Arm) -> str | None:
    """Return the name of the most telling lever that an arm has; ``None`` where it has none."""
    tellings = (
        *reversed(_WAYS_TO_COMPILE), "cuda_graphs", "fused_loss", "checkpointed_layers", "unpadded",
    )  # fmt: skip
    return next((name for name in tellings if levers_of(arm, [name])), None)


class Anytime:
    """Proposes levers for the best candidates of a search that has its first answer."""

    def __init__(self, space: Space, layers: int | None) -> None:
        self._space = space
        self._layers = layers
        self._late = space.late - {"cpu_affinity"}
        self._given: dict[str, list[float]] = {}
        """By lever, what it gave over what was expected of it."""

    @property
    def has_levers(self) -> bool:
        """Whether there is any lever to try."""
        return bool(self._late)

    def uses_levers(self, candidate: Candidate) -> bool:
        """Return whether a candidate has a late setting."""
        return bool(levers_of(candidate.arm, self._late))

    def next(
        self, history: History, among: Collection[Candidate], *, usual_seconds: float, spent_seconds: float
    ) -> Idea | None:
        """Return what promises most for its time; ``None`` where nothing is worth its trial.

        ``among`` are the candidates that may be recommended. A trial without a lever takes ``usual_seconds``, and those
        with one have taken ``spent_seconds`` so far.
        """
        best = history.winner(among)
        if best is None or history.pending:
            return None
        judge = Judge(self._space, history)
        ideas = [
            idea
            for idea in self.ideas(history, among, best, usual_seconds)
            if idea.is_worth_it
            and idea.gain > 1 + history.tolerance
            and idea.seconds + spent_seconds <= _MOST_SECONDS
            and judge.is_open(idea.candidate)
        ]
        return max(ideas, key=lambda idea: math.log(idea.gain) / idea.seconds, default=None)

    def ideas(
        self, history: History, among: Collection[Candidate], best: Tried, usual_seconds: float
    ) -> Iterator[Idea]:
        """Yield every lever on every measured candidate, with what is expected of it."""
        fastest = _speed(best)
        for root in history.believed(set(among)):
            for way, candidate, gain in self._changes(history, root):
                if candidate == root.candidate or excluding(candidate.arm) or not self._space.contains(candidate):
                    continue
                expected = gain * self._learned(way) * _speed(root) / fastest
                seconds = usual_seconds + self._extra_seconds(history, candidate.arm)
                yield Idea(candidate, way, root.candidate, expected, gain, seconds)

    def _changes(self, history: History, root: Tried) -> Iterator[tuple[str, Candidate, float]]:
        """Yield ways to change a measured candidate, what becomes of it, and the most that this may gain."""
        candidate, measured = root.candidate, root.measurement
        assert measured is not None
        arm = candidate.arm
        # A compiler has processes of its own, and what is replayed needs no host to be fast.
        loose = changed(arm, cpu_affinity=False, unpadded=arm.unpadded or "unpadded" in self._late)
        is_plain = not arm.torch_compile and not arm.cuda_graphs
        failed = self.failures(history)
        for way in _WAYS:
            prior = BY_NAME[way].prior
            if prior is None or way in failed:
                continue
            if way in _WAYS_TO_COMPILE and is_plain and "torch_compile" in self._late:
                compiled = changed(
                    loose,
                    torch_compile=True,
                    torch_compile_mode="reduce-overhead" if way == "torch_compile_mode" else None,
                    regional_compilation=way == "regional_compilation",
                )
                # Accumulated gradients of a tied embedding are overwritten by the next run of a graph.
                if not (way == "torch_compile_mode" and candidate.accumulates):
                    yield way, replace(candidate, arm=compiled), gain_of(prior, measured)
            elif way == "cuda_graphs" and is_plain and way in self._late:
                yield way, replace(candidate, arm=changed(loose, cuda_graphs=True)), gain_of(prior, measured)
            elif way == "unpadded" and not arm.unpadded and way in self._late:
                yield way, replace(candidate, arm=changed(arm, unpadded=True)), gain_of(prior, measured)
            elif way == "fused_loss" and not arm.fused_loss and way in self._late:
                is_short = arm.gradient_checkpointing or self._larger_did_not_fit(history, candidate)
                fused = changed(arm, fused_loss=True)
                yield way, replace(candidate, arm=fused), _FUSED_LOSS
                if is_short:
                    roomier = changed(fused, gradient_checkpointing=False)
                    larger = candidate if arm.gradient_checkpointing else self._beside(candidate, 1)
                    if larger is not None:
                        yield way, replace(larger, arm=roomier), _ROOM
            elif way == "checkpointed_layers" and arm.gradient_checkpointing and way in self._late:
                fewer = self._fewest_layers(history, candidate)
                if fewer is not None and fewer != arm.checkpointed_layers:
                    before = arm.checkpointed_layers or self._layers or 1
                    gain = gain_of_fewer_layers(fewer, self._layers or 1) / gain_of_fewer_layers(
                        before, self._layers or 1
                    )
                    yield way, replace(candidate, arm=changed(arm, checkpointed_layers=fewer)), gain
        if self.uses_levers(candidate):
            for step in (1, -1):
                other = self._beside(candidate, step)
                if other is not None and self._may_fit(history, root, other):
                    yield "batch", other, self._gain_of_batch(history, candidate, other)

    def _beside(self, candidate: Candidate, step: int) -> Candidate | None:
        """Return the candidate at the next larger or smaller batch; ``None`` where there is none."""
        batches = self._space.batches
        batch = candidate.per_device_train_batch_size
        ladder = batches.at_level(batches.level(batch))
        beside = [b for b in ladder if (b > batch if step > 0 else b < batch)]
        return self._space.candidate(candidate.arm, beside[0 if step > 0 else -1]) if beside else None

    def _larger_did_not_fit(self, history: History, candidate: Candidate) -> bool:
        larger = self._beside(candidate, 1)
        return larger is not None and history.is_ruled_out(larger)

    def _may_fit(self, history: History, root: Tried, other: Candidate) -> bool:
        """Return whether a batch beside a measured one is expected to fit: its peak in proportion, at most."""
        measured = root.measurement
        assert measured is not None
        times = other.per_device_train_batch_size / root.candidate.per_device_train_batch_size
        plain, larger = (replace(c, arm=self._space.plain(c.arm)) for c in (root.candidate, other))
        peak = float(measured.judged_bytes(root.candidate.arm))
        memory = history.memory
        before, after = (memory.prediction(plain), memory.prediction(larger)) if memory is not None else (None, None)
        more = after.peak_allocated_bytes - before.peak_allocated_bytes if before and after else peak * (times - 1)
        return peak + more <= history.ceiling.line_bytes

    def _gain_of_batch(self, history: History, candidate: Candidate, other: Candidate) -> float:
        """Return what another batch may gain: as much as it did without levers, where both were measured."""
        plain = [history.speed(replace(c, arm=self._space.plain(c.arm))) for c in (candidate, other)]
        if plain[0] is not None and plain[1] is not None:
            return plain[1].samples_per_second / plain[0].samples_per_second
        if other.per_device_train_batch_size < candidate.per_device_train_batch_size:
            return 1.0
        is_host_bound = history.is_host_bound(candidate)
        return _LARGER_BATCH if is_host_bound else 1 + (_LARGER_BATCH - 1) / 2

    def _fewest_layers(self, history: History, candidate: Candidate) -> int | None:
        """Return how few layers have to recompute for a batch to fit; ``None`` where that is not predicted.

        Memory is affine in their number, between the predictions with none and with all of them.
        """
        memory, layers = history.memory, self._layers
        if memory is None or not layers:
            return None
        arms = (changed(candidate.arm, checkpointed_layers=count) for count in range(1, layers))
        fewer = (replace(candidate, arm=arm) for arm in arms)
        fitting = (each for each in fewer if memory.likely_fits(each) and not history.is_ruled_out(each))
        fewest = next(fitting, None)
        return fewest.arm.checkpointed_layers if fewest is not None else None

    def failures(self, history: History) -> dict[str, str]:
        """Return the levers that failed, each with its message; several ways to compile fail together."""
        found: dict[str, str] = {}
        for tried in history.tried:
            way = way_of(tried.candidate.arm) if self.uses_levers(tried.candidate) else None
            if way is not None and isinstance(tried.outcome, Failed):
                found.setdefault(way, " ".join(tried.outcome.message.split()))
        compiling = [way for way in _WAYS_TO_COMPILE if way in found]
        if "torch_compile" in compiling or len(compiling) >= _MOST_FAILURES:
            found |= dict.fromkeys((way for way in _WAYS_TO_COMPILE if way not in found), found[compiling[0]])
        return found

    def left_out(self, history: History) -> tuple[LeftOut, ...]:
        """Return the levers that failed, with the reason of each."""
        return tuple(LeftOut((_NAMES[way],), why) for way, why in self.failures(history).items())

    def learn(self, idea: Idea, history: History) -> float | None:
        """Take in the end of an idea's trial; return its speed over that of its root, ``None`` if it has none."""
        one, root = history.speed(idea.candidate), history.speed(idea.root)
        if one is None or root is None:
            return None
        gain = one.samples_per_second / root.samples_per_second
        self._given.setdefault(idea.lever, []).append(gain / idea.root_gain)
        return gain

    def _learned(self, way: str) -> float:
        """Return how much of what was expected of a lever it gave where it was tried; 1.0 where it was not yet."""
        given = self._given.get(way)
        return statistics.median(given) if given else 1.0

    def _extra_seconds(self, history: History, arm: Arm) -> float:
        """Return what a trial takes beyond a usual one: what the last one like it took to compile, else the prior."""
        way = way_of(arm)
        took = [
            t.measurement.compile_seconds
            for t in history.tried
            if t.measurement and t.measurement.compile_seconds is not None and way_of(t.candidate.arm) == way
        ]
        if took and compiles(arm):
            return took[-1]
        prior = BY_NAME[way].prior if way is not None else None
        return prior.seconds if prior is not None else 0.0


def _speed(tried: Tried) -> float:
    return tried.measurement.samples_per_second if tried.measurement else 0.0

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
from autotune.estimate.bottleneck import gain_of, gain_of_fewer_layers
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History, Tried, speed_of
from autotune.estimate.memory import MemoryModel
from autotune.estimate.speed_model import extra_seconds
from autotune.space.levers import BY_NAME, LEVERS, PRIORS, Lever, changed, excluding, levers_of, with_lever, without
from autotune.space.space import Space

_GAIN_A_SECOND = 0.001
"""Gain in speed for which a second of search is worth it: a minute has to promise 6 %. A choice."""
_MOST_SECONDS = 120.0
"""No trial of a lever is begun that would end later after the first answer than this. A choice."""
_LEAST_LIMIT_SECONDS, _LIMIT_TIMES = 60.0, 3.0
"""A trial of a lever is ended after so many times what it is expected to take. A choice."""
_LARGER_BATCH = 1.1
"""What a larger batch may gain with levers, where the step was host-bound without; else half of that. A choice."""
_ROOM = 1.2
"""What freed memory may gain where activations are recomputed or a larger batch did not fit. A choice."""
_GRAPHS, _FEWER_LAYERS = "cuda_graphs", "checkpointed_layers"
_EXPANDABLE = "expandable_segments"
_EXPANDABLE_SPEED = 0.99
"""Speed in such segments over that without, at best: 0.90 to 0.99 (H200)."""
_COMPILED_KEEPS = 0.7
"""Share of its activations that a compiled model keeps at least: 0.7 to 1.0 (Qwen2.5-0.5B and Llama-3.1-8B with LoRA,
H200, 23 November 2026)."""
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
    def limit_seconds(self) -> float:
        """How long its trial may take: a compiler that hangs is ended."""
        return _LEAST_LIMIT_SECONDS + _LIMIT_TIMES * self.seconds

    @property
    def name(self) -> str:
        """What the lever is called, and what else changes with it."""
        name, one = _name(self.lever), self.candidate
        if self.lever != _GRAPHS and one.arm.cuda_graphs and not self.root.arm.cuda_graphs:
            name = f"{name} in {_name(_GRAPHS)}"
        if self.root.arm.gradient_checkpointing and not one.arm.gradient_checkpointing:
            return f"{name} without checkpointing"
        is_other_batch = one.per_device_train_batch_size != self.root.per_device_train_batch_size
        if is_other_batch and self.lever != _BATCH:
            return f"{name} at {one.per_device_train_batch_size} × {one.gradient_accumulation_steps}"
        return name

    def describe(self) -> str:
        """Return ``CUDA graphs may give up to 1.60 ×, about 4 s``."""
        return f"{self.name} may give up to {self.gain:.2f} ×, about {format_seconds(self.seconds)}"


_BATCH = "batch"
"""What an idea has for a lever where only the batch is another."""


def _name(lever: str) -> str:
    return PRIORS[lever].called if lever in PRIORS else "another batch with it"


class Anytime:
    """Proposes levers for the best candidates of a search that has its first answer."""

    def __init__(self, space: Space, layers: int | None, *, compiled_recomputes: bool = True) -> None:
        self._space = space
        self._layers = layers
        self._late = space.late - {"cpu_affinity"}
        self._saving = frozenset(space.saving.arms) if space.saving is not None else frozenset()
        self._given: dict[str, list[float]] = {}
        """By lever, what it gave over what was expected of it."""
        self._compiled_recomputes = compiled_recomputes
        self._added: dict[str, float] = {}
        """By lever with which a trial ran out of memory, how many bytes it took at least beyond what was expected.
        Ways to compile are one lever here."""

    def leave_out(self, levers: Collection[str]) -> None:
        """Propose some levers no more."""
        self._late -= set(levers)

    @property
    def has_levers(self) -> bool:
        """Whether there is any lever to try."""
        return bool(self._late)

    def uses_levers(self, candidate: Candidate) -> bool:
        """Return whether a candidate has a late setting."""
        return bool(levers_of(candidate.arm, self._late))

    def is_late(self, candidate: Candidate) -> bool:
        """Return whether a candidate is tried after the first answer only: not so with what saves memory alone."""
        arm = without(candidate.arm, self._late & {_EXPANDABLE})
        return bool(levers_of(arm, self._late)) and arm not in self._saving

    def has_time(self, seconds: float, spent_seconds: float) -> bool:
        """Return whether a trial of so many seconds may begin after what trials with levers have taken."""
        return spent_seconds + seconds <= _MOST_SECONDS

    def arms_that_save(self, history: History, among: Collection[Candidate]) -> list[Arm]:
        """Return the best candidate's arm with each lever that saves memory, where memory limits that candidate."""
        best = history.winner(among)
        if best is None or not self._space.resorts:
            return []
        arm, larger = best.candidate.arm, self._beside(best.candidate, larger=True)
        if not arm.gradient_checkpointing and not any(history.is_ruled_out(each) for each in larger[:1]):
            return []
        return [changed(arm, **{name: True}) for name in sorted(self._space.resorts)]

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
            # It has to promise more than its trial costs.
            if idea.gain - 1 > max(idea.seconds * _GAIN_A_SECOND, history.tolerance)
            and self.has_time(idea.seconds, spent_seconds)
            and judge.is_open(idea.candidate)
        ]
        return max(ideas, key=lambda idea: math.log(idea.gain) / idea.seconds, default=None)

    def ideas(
        self, history: History, among: Collection[Candidate], best: Tried, usual_seconds: float
    ) -> Iterator[Idea]:
        """Yield every lever on every measured candidate, with what is expected of it.

        Of what ran and left too little memory, the same in segments that expand is one, too, and with levers the next
        smaller batch.
        """
        roots = [(root, self._changes(history, root)) for root in history.believed(set(among))]
        over = [tried for tried in history.tried if tried.measurement is not None and history.is_over(tried)]
        roots += [(each, self._expanding(history, each)) for each in over]
        roots += [(each, self._smaller(history, each)) for each in over if self.uses_levers(each.candidate)]
        for root, changes in roots:
            for way, candidate, gain in changes:
                if candidate == root.candidate or excluding(candidate.arm) or not self._space.contains(candidate):
                    continue
                if self._compiles_without_end(history, candidate.arm):
                    continue
                if not self._may_fit(history, root, candidate, way):
                    continue
                expected = gain * self._learned(way) * speed_of(root) / speed_of(best)
                seconds = usual_seconds + extra_seconds(history, candidate.arm)
                yield Idea(candidate, way, root.candidate, expected, gain, seconds)

    def _expanding(self, history: History, over: Tried) -> Iterator[tuple[str, Candidate, float]]:
        candidate = Judge(self._space, history).in_expandable_segments(over)
        if candidate is not None and _EXPANDABLE not in self.failures(history):
            yield _EXPANDABLE, candidate, _EXPANDABLE_SPEED

    def _smaller(self, history: History, over: Tried) -> Iterator[tuple[str, Candidate, float]]:
        smaller = self._beside(over.candidate, larger=False) or self._beside(
            over.candidate, larger=False, any_level=True
        )
        for candidate in smaller[:1]:
            yield _BATCH, candidate, self._gain_of_batch(history, over.candidate, candidate)

    def _changes(self, history: History, root: Tried) -> Iterator[tuple[str, Candidate, float]]:
        """Yield ways to change a measured candidate, what becomes of it, and the most that this may gain."""
        candidate, measured = root.candidate, root.measurement
        assert measured is not None
        rows = self._rows(history, candidate)
        captures = BY_NAME[_GRAPHS] in rows and _ways_of("torch_compile").isdisjoint(self.failures(history))
        for row in rows:
            prior = PRIORS[row.name]
            if row.name == _FEWER_LAYERS:
                yield from self._fewer_layers(history, root)
                continue
            arm = candidate.arm
            if prior.is_unmasked:
                # A compiler has processes of its own, and what is replayed needs no fast host.
                is_unpadded = "unpadded" in self._late and arm.length_multiple is None and not arm.padding_free
                arm = changed(arm, cpu_affinity=False, unpadded=arm.unpadded or is_unpadded)
            with_it = replace(candidate, arm=with_lever(arm, row.name, self._late, self._space.multiples))
            ways = [(with_it, gain_of(prior, measured, graphed=arm.cuda_graphs))]
            if captures and _owner(row.name) == "torch_compile":
                # What is compiled and captured was the fastest of all. Each alone may be no faster than a best that has
                # a lever already, so that they are tried at once as well.
                both = replace(prior, host=min(prior.host, PRIORS[_GRAPHS].host))
                ways.append((replace(with_it, arm=changed(with_it.arm, cuda_graphs=True)), gain_of(both, measured)))
            for each, gain in ways:
                yield row.name, each, gain
                if _ran_out(history, each):
                    yield from ((way, other, gain) for way, other in self._in_less_memory(history, each))
            if row.memory == "peak" and row.saving is not None and row.saving(with_it.arm) > row.saving(arm):
                roomy, alone = self._with_more_room(history, with_it), gain_of(prior, measured, graphed=arm.cuda_graphs)
                yield from ((row.name, each, _ROOM * alone) for each in roomy if levers_of(each.arm, [row.name]))
        if self.uses_levers(candidate):
            for is_larger in (True, False):
                for other in self._beside(candidate, larger=is_larger)[:1]:
                    yield _BATCH, other, self._gain_of_batch(history, candidate, other)

    def _in_less_memory(self, history: History, over: Candidate) -> Iterator[tuple[str, Candidate]]:
        """Yield what has a better chance to fit: the same with each lever that saves memory, and a smaller batch."""
        for name in sorted((self._space.resorts & self._late) - self.failures(history).keys()):
            yield name, replace(over, arm=changed(over.arm, **{name: True}))
        yield from ((_BATCH, each) for each in self._beside(over, larger=False, any_level=True)[:1])

    def _rows(self, history: History, candidate: Candidate) -> list[Lever]:
        """Return the levers that a candidate may be given besides its own."""
        failed = self.failures(history)
        return [
            row
            for row in LEVERS
            if row.prior is not None
            and row.name not in failed
            and (row.name in self._late or row.part_of in self._late)
            and (
                row.name == _FEWER_LAYERS
                or not levers_of(candidate.arm, [row.name, *([row.part_of] if row.part_of in self._late else [])])
            )
            and (row.prior.accumulates or not candidate.accumulates)
            and (row.part_of != "gradient_checkpointing" or candidate.arm.gradient_checkpointing)
            and not (row.stands_in_for and self._can_have(row.stands_in_for, candidate, failed))
        ]

    def _compiles_without_end(self, history: History, arm: Arm) -> bool:
        """Return whether an arm compiles for lengths without end, although few can be had: each new length may compile
        anew."""
        can_be_few = "length_multiple" in self._late and "length_multiple" not in self.failures(history)
        return self._space.shapes_vary and can_be_few and arm.torch_compile and arm.length_multiple is None

    def _can_have(self, name: str, candidate: Candidate, failed: Collection[str]) -> bool:
        row = BY_NAME[name]
        with_it = changed(candidate.arm, **{name: row.values[1]})
        return not self._late.isdisjoint({name, row.part_of}) and name not in failed and not excluding(with_it)

    def _with_more_room(self, history: History, candidate: Candidate) -> Iterator[Candidate]:
        """Yield what a lever that saves memory may allow: to keep all activations, or a larger batch.

        Of larger batches it is the largest that is predicted to fit, the next one where nothing is predicted.
        """
        if candidate.arm.gradient_checkpointing:
            yield replace(candidate, arm=changed(candidate.arm, gradient_checkpointing=False))
        memory, larger = history.memory, self._beside(candidate, larger=True)
        fitting = [each for each in larger if memory is not None and memory.likely_fits(each)]
        for each in fitting[-1:] or larger[:1]:
            if history.is_ruled_out(replace(each, arm=self._space.plain(each.arm))):
                yield each

    def _fewer_layers(self, history: History, root: Tried) -> Iterator[tuple[str, Candidate, float]]:
        """Yield the candidate with as few layers that recompute as memory is predicted to allow, and the gain."""
        memory, layers, candidate = history.memory, self._layers, root.candidate
        if memory is None or not layers or not candidate.arm.gradient_checkpointing or root.measurement is None:
            return
        now = candidate.arm.checkpointed_layers or layers
        a_layer, ran_out = self._bytes_a_layer(history, root), self._added.get(_FEWER_LAYERS, 0.0)
        if now < layers and a_layer is None:
            return
        for count in range(1, now):
            fewer = replace(candidate, arm=changed(candidate.arm, checkpointed_layers=count))
            if a_layer is not None:
                fits: bool | None = self._leaves_room(history, root, a_layer * (now - count) + ran_out)
            elif (fits := memory.likely_fits(fewer)) is None:
                # Compiled layers keep no more of their activations than others do.
                more = self._more_bytes(memory, candidate, fewer)
                fits = more is not None and self._leaves_room(history, root, more + ran_out)
            if fits and not history.is_ruled_out(fewer):
                yield _FEWER_LAYERS, fewer, gain_of_fewer_layers(root.measurement, count, layers, before=now)
                return

    def _bytes_a_layer(self, history: History, root: Tried) -> float | None:
        """Return what a layer that recomputes nothing takes more, from two trials that differ in how many do so.

        ``None`` where there are none. Compiled layers keep less than is predicted of others.
        """
        arm, layers, found = root.candidate.arm, self._layers or 0, list[float]()
        assert root.measurement is not None
        for other in history.tried:
            like = changed(other.candidate.arm, checkpointed_layers=arm.checkpointed_layers)
            fewer = (other.candidate.arm.checkpointed_layers or layers) - (arm.checkpointed_layers or layers)
            if other.measurement is None or not fewer or replace(other.candidate, arm=like) != root.candidate:
                continue
            more = root.measurement.judged_bytes(arm) - other.measurement.judged_bytes(other.candidate.arm)
            found += [more / fewer] if more / fewer > 0 else []
        return max(found, default=None)

    def _beside(self, candidate: Candidate, *, larger: bool, any_level: bool = False) -> list[Candidate]:
        """Return the candidates at larger or smaller batches of no lower multiple, or of any; the nearest first."""
        batches, batch = self._space.batches, candidate.per_device_train_batch_size
        levels = [level for level in batches.levels() if any_level or level >= batches.level(batch)]
        ladder = sorted(each for level in levels for each in batches.at_level(level))
        beside = [each for each in ladder if each > batch] if larger else [e for e in reversed(ladder) if e < batch]
        return [self._space.candidate(candidate.arm, each) for each in beside]

    def _may_fit(self, history: History, root: Tried, other: Candidate, way: str) -> bool:
        """Return whether a candidate is expected to fit, from its prediction or from what a similar one was measured.

        Where nothing is predicted, another batch is expected to need its peak in proportion, and a lever nothing more.
        """
        assert root.measurement is not None
        memory, before = history.memory, root.candidate
        if way in (_EXPANDABLE, _FEWER_LAYERS):
            # Looked at where they are proposed.
            return True
        if memory is not None and memory.trusted(other.arm) and (fits := memory.likely_fits(other)) is not None:
            return fits
        if way in self._space.resorts and _keeps_as_much(other, before):
            less = replace(other, arm=without(other.arm, [way]))
            # How much less it takes than what ran out is not known: its trial tells.
            if _ran_out(history, less):
                return True
        is_compiled_anew, after = other.arm.torch_compile and not before.arm.torch_compile, other
        if is_compiled_anew and root.measurement.allocation_retries:
            # Its allocator met the cap. Of Qwen3-32B with QLoRA, what the compiler needs besides did not fit then.
            return False
        if is_compiled_anew and not self._compiled_recomputes:
            after = replace(other, arm=changed(other.arm, gradient_checkpointing=False))
        more = self._more_bytes(memory, before, after) if memory is not None else None
        if more is None:
            times = other.per_device_train_batch_size / before.per_device_train_batch_size
            more = root.measurement.judged_bytes(before.arm) * (times - 1) if other.arm == before.arm else 0.0
        elif is_compiled_anew:
            more *= _COMPILED_KEEPS
        more += self._added.get(_owner(way), 0.0)
        return more <= 0 or self._leaves_room(history, root, more)

    def _more_bytes(self, memory: MemoryModel, candidate: Candidate, other: Candidate) -> float | None:
        """Return how much more one candidate is predicted to allocate than another, both as they are not compiled.

        Where other levers are not predicted either, both are compared without them.
        """
        for names in ({"torch_compile"}, self._late - {"checkpointed_layers"}):
            before, after = (memory.prediction(replace(c, arm=without(c.arm, names))) for c in (candidate, other))
            if before and after:
                return after.peak_allocated_bytes - before.peak_allocated_bytes
        return None

    def _leaves_room(self, history: History, root: Tried, more_bytes: float) -> bool:
        assert root.measurement is not None
        peak_bytes = root.measurement.judged_bytes(root.candidate.arm) + more_bytes
        return history.ceiling.bounds.fits(math.ceil(peak_bytes))

    def _gain_of_batch(self, history: History, candidate: Candidate, other: Candidate) -> float:
        """Return what another batch may gain: as much as it did without levers, where both were measured."""
        plain = [history.speed(replace(c, arm=self._space.plain(c.arm))) for c in (candidate, other)]
        if plain[0] is not None and plain[1] is not None:
            return plain[1].samples_per_second / plain[0].samples_per_second
        if other.per_device_train_batch_size < candidate.per_device_train_batch_size:
            return 1.0
        is_host_bound = history.is_host_bound(candidate)
        return _LARGER_BATCH if is_host_bound else 1 + (_LARGER_BATCH - 1) / 2

    def failures(self, history: History) -> dict[str, str]:
        """Return the levers that failed, each with its message.

        A failure is blamed on a lever that completed in no other trial. Where two ways of one lever failed, or the
        lever alone did, no way of it is tried any more.
        """
        found: dict[str, str] = {}
        proven = {name for t in history.tried if t.measurement for name in levers_of(t.candidate.arm, PRIORS)}
        failed_with = []
        for tried in history.tried:
            if isinstance(tried.outcome, Failed) and self.uses_levers(tried.candidate):
                has = levers_of(tried.candidate.arm, PRIORS)
                failed_with.append((has - proven, has, tried.outcome.message))
        for unproven, has, message in sorted(failed_with, key=lambda each: len(each[0] or each[1])):
            suspected = unproven or has
            if suspected.isdisjoint(found):
                # Of compiling and graphs at once, graphs: compiling alone is tried then, and tells.
                is_compiler = not _ways_of("torch_compile").isdisjoint(found)
                blamed = _GRAPHS if _GRAPHS in unproven and not is_compiler else _most_telling(suspected)
                found[blamed] = " ".join(message.split())
        for owner in {row.part_of for row in LEVERS if row.name in found and row.part_of in PRIORS} | {*found}:
            ways = [row.name for row in LEVERS if row.part_of == owner and row.name in PRIORS]
            failed = [way for way in ways if way in found]
            if owner is not None and (owner in found or len(failed) >= _MOST_FAILURES):
                why = found.get(owner) or found[failed[0]]
                found |= {way: why for way in (owner, *ways) if way not in found}
        return found

    def left_out(self, history: History) -> tuple[LeftOut, ...]:
        """Return the levers that failed, with the reason of each."""
        return tuple(LeftOut((_name(way),), why) for way, why in self.failures(history).items())

    def learn(self, idea: Idea, history: History, among: Collection[Candidate]) -> float | None:
        """Take in the end of an idea's trial; return what it gave, as a factor, ``None`` if it has no speed.

        That is its speed over that of its root, or over the best of ``among`` where the root left too little memory.
        """
        one, root = (next(reversed(history.outcomes_of(c)), None) for c in (idea.candidate, idea.root))
        if root is None or root.measurement is None:
            return None
        if one is None or one.measurement is None:
            if one is not None and history.is_over(one) and _keeps_as_much(idea.candidate, idea.root):
                room = history.ceiling.cap_bytes - root.measurement.judged_bytes(idea.root.arm)
                self._added[_owner(idea.lever)] = max(room, self._added.get(_owner(idea.lever), 0.0))
            return None
        speed = _samples_per_second(history, one)
        gain = speed / _samples_per_second(history, root)
        self._given.setdefault(idea.lever, []).append(gain / idea.root_gain)
        best = history.winner({*among} - {idea.candidate}) if history.is_over(root) else None
        return speed / speed_of(best) if best is not None else gain

    def _learned(self, way: str) -> float:
        """Return how much of what was expected of a lever it gave where it was tried; 1.0 where it was not yet."""
        given = self._given.get(way)
        return statistics.median(given) if given else 1.0


def _keeps_as_much(candidate: Candidate, other: Candidate) -> bool:
    """Return whether two differ in levers alone: they have the same batch, and both recompute or neither does."""
    is_same = replace(candidate, arm=other.arm) == other
    return is_same and candidate.arm.gradient_checkpointing == other.arm.gradient_checkpointing


def _ran_out(history: History, candidate: Candidate) -> bool:
    return any(map(history.is_over, history.outcomes_of(candidate)))


def _owner(way: str) -> str:
    """Return the lever that a way is part of, where that is one."""
    owner = BY_NAME[way].part_of if way in BY_NAME else None
    return owner if owner in PRIORS else way


def _ways_of(owner: str) -> frozenset[str]:
    """Return a lever and its parts."""
    return frozenset((owner, *(row.name for row in LEVERS if row.part_of == owner)))


def _most_telling(names: Collection[str]) -> str:
    """Return of several levers the one that costs the most; a part stands for its whole."""
    wholes = {BY_NAME[name].part_of for name in names}
    return max((name for name in names if name not in wholes), key=lambda name: PRIORS[name].seconds)


def _samples_per_second(history: History, tried: Tried) -> float:
    """Return the pooled speed of a candidate, or that of one trial that left too little memory."""
    pooled = history.speed(tried.candidate)
    return pooled.samples_per_second if pooled is not None else speed_of(tried)

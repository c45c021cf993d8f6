"""Choose what to try next: the expected improvement, times the probability that it runs and fits, for its seconds.

Candidates are the arms of the space at their batches. Nothing is left where none is worth its seconds. Levers come once
that is so: ``autotune.tuning.anytime``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.core.candidate import Arm, Candidate
from autotune.core.stop import NOTHING_LEFT, LeftOut
from autotune.estimate.arm_names import names_of_arms
from autotune.estimate.chance import Chances
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History, Tried, batch_of, speed_of
from autotune.estimate.speed_model import Floats, SpeedModel
from autotune.space.levers import (
    BY_NAME,
    LEVERS,
    compiles,
    levers_of,
    never_slower,
)
from autotune.space.space import Space

_LEAST_GAIN = 0.0015
"""Expected improvement, as a logarithm, for which a usual trial is worth it. A choice: of 2,000 random worlds it keeps
96.4 % within 1 % of the best (``studies/worlds.py --first 400 --worlds 2000``)."""
_GAIN_A_SECOND = 0.0005
"""What each second beyond a usual trial has to promise in addition: a minute 3 %. A choice."""
_TRIAL_SECONDS, _TRIAL_STEPS = 3.0, 6
"""A trial without its steps, and how many it has: small models on an H200."""
_LEAST_CHANCE = 0.03
"""Where nothing fits so far, candidates that are less likely to fit wait until nothing else is left. A choice."""
_LIKELY = 0.5
"""A batch that is less likely to fit than this is approached from below. A choice."""
_PRIORS = {row.name: row.prior for row in LEVERS if row.prior is not None}


class Acquisition:
    """Chooses candidates of one space."""

    ending = NOTHING_LEFT

    def __init__(self, space: Space, layers: int | None = None) -> None:
        """``layers`` is how many layers of the model can recompute their activations."""
        self._space, self._layers = space, layers
        self._faster: dict[Arm, frozenset[Arm]] = {}

    def next(self, history: History) -> Candidate | None:
        """See ``Policy.next``. Smaller multiples are searched where nothing above fits."""
        for space in self._spaces(history):
            judge = Judge(space, history)
            for multiple in space.batches.levels():
                if (best := self._best_plain(history, space, judge, multiple)) is not None:
                    return best
                if history.pending or judge.fits_at(multiple):
                    return None
        return Judge(self._space, history).last_resort()

    def _spaces(self, history: History) -> list[Space]:
        """Return the space and that with what saves memory, which comes first where it alone is predicted to fit."""
        plain, saving = self._space, self._space.saving
        if saving is None:
            return [plain]
        if any(tried.candidate.arm in plain.arms for tried in history.believed()) or history.memory is None:
            return [plain, saving]

        def fits(space: Space) -> bool:
            batches = [batch for level in space.batches.levels() for batch in space.batches.at_level(level)]
            candidates = (space.candidate(arm, batch) for arm in space.arms for batch in batches)
            return any(history.memory and (told := history.memory.prediction(c)) and told.fits for c in candidates)

        return [saving, plain] if fits(saving) and not fits(plain) else [plain, saving]

    def _best_plain(self, history: History, space: Space, judge: Judge, multiple: int) -> Candidate | None:
        believed = [t for t in history.believed() if space.contains(t.candidate)]
        best = max(believed, key=speed_of, default=None)
        among = self._grid(history, space, multiple)
        if best is not None and (on_one_core := pinned(self._space, history, best)) is not None:
            among.append(on_one_core)
        if not judge.fits_at(multiple):
            # Half the batch, which comes next, took 1.5 times as long for Qwen3-32B with QLoRA (H200).
            smallest = [t for t in history.tried if batch_of(t) == min(space.batches.at_level(multiple), default=0)]
            if expanded := next(filter(None, map(judge.in_expandable_segments, smallest)), None):
                return expanded
        among = [each for each in among if judge.is_open(each) and not self._is_beaten(history, each)]
        if not among:
            return None
        is_first = all(t.candidate == space.baseline(t.candidate.arm.attn_implementation) for t in history.tried)
        if is_first and (measured := [each for each in among if each in history.elsewhere]):
            # What other machines of the kind measured decides what is tried first, and nothing else.
            return max(measured, key=lambda each: history.elsewhere[each])
        values = self._values(history, among, best)
        at = int(np.argmax(values))
        return among[at] if values[at] > 0 else None

    def _values(self, history: History, among: list[Candidate], best: Tried | None) -> Floats:
        """Return what each candidate promises for a second of its trial; 0 where that is not worth it."""
        model, chances = SpeedModel(history, self._layers), Chances(history)
        chance = np.array([chances.chance(candidate) for candidate in among])
        # What more likely fits than not is tried before what surely does and is slower.
        likely = np.minimum(1.0, 2 * chance)
        wanted = speed_of(best) if best is not None else 1.0
        if best is not None and history.pending:
            # A trial under way counts as what is expected of it.
            likeliest = [each for each in history.pending if chances.chance(each) > _LIKELY]
            if likeliest:
                wanted = max(wanted, float(np.exp(-model.expected(likeliest, wanted)[1].min())))
        gains, expected = model.expected(among, wanted)
        expected = np.minimum(expected, 20.0)
        steps = _TRIAL_STEPS * np.exp(expected) * [candidate.samples_per_step for candidate in among]
        extra = np.array([self._extra_seconds(history, candidate.arm) for candidate in among])
        seconds = _TRIAL_SECONDS + steps + extra
        if best is None:
            return np.asarray((chance > _LEAST_CHANCE) * likely * (expected.max() + 0.3 - expected) / seconds)
        return np.asarray((gains * chance > _LEAST_GAIN + _GAIN_A_SECOND * extra) * gains * likely / seconds)

    def _grid(self, history: History, space: Space, multiple: int) -> list[Candidate]:
        """Return the candidates of a multiple; of a free batch also some between powers of two.

        That is where the larger power was tried, or is unlikely to fit.
        """
        batches = set(space.batches.at_level(multiple))
        is_free = space.batches.effective_batch is None and multiple == space.batches.levels()[0]
        found, chances, judge = [], Chances(history), Judge(space, history)
        for arm in space.arms:
            among = batches
            if is_free and space.batches.only is None:
                doubled = [space.candidate(arm, 2 * batch) for batch in sorted(batches)]
                below = [c for c in doubled if not judge.is_open(c) or chances.fits(c) < _LIKELY]
                among = batches | {c.per_device_train_batch_size * 3 // 4 // multiple * multiple for c in below}
                fitting = max((t.candidate.per_device_train_batch_size for t in history.feasible(arm)), default=0)
                over = history.smallest_over(arm, accumulates=False)
                if over is not None and fitting:
                    among = among | {(fitting + over) // 2 // multiple * multiple}
            found += [space.candidate(arm, batch) for batch in sorted(among) if space.batches.valid(batch)]
        return found

    def _is_beaten(self, history: History, candidate: Candidate) -> bool:
        """Return whether an arm that is never slower was measured at this batch or a larger one, or is under way there.

        Such as the same arm without checkpointing, or in the faster of two precisions. A trial that retried allocations
        shows nothing: at its cap, the allocator freed and allocated segments in each step, which an arm with less
        memory is spared.
        """
        if candidate.arm not in self._faster:
            self._faster[candidate.arm] = never_slower(candidate.arm, allows=lambda other: other in self._space.arms)
        faster, batch = self._faster[candidate.arm], candidate.per_device_train_batch_size
        if any(each.arm in faster and each.per_device_train_batch_size >= batch for each in history.pending):
            return True
        return any(
            t.candidate.arm in faster
            and t.candidate.per_device_train_batch_size >= batch
            and not (t.measurement and t.measurement.allocation_retries)
            for t in history.believed()
        )

    def _extra_seconds(self, history: History, arm: Arm) -> float:
        """Return what a trial takes beyond a usual one: what the last one like it took to compile, else the prior."""
        has = levers_of(arm, _PRIORS)
        if not has:
            return 0.0
        wholes = {BY_NAME[name].part_of for name in has}
        compiler = {name for name in has if "torch_compile" in (name, BY_NAME[name].part_of)}
        if compiles(arm):
            for tried in reversed(history.tried):
                like = levers_of(tried.candidate.arm, _PRIORS)
                took = tried.measurement.compile_seconds if tried.measurement else None
                if took is not None and compiler == {n for n in like if "torch_compile" in (n, BY_NAME[n].part_of)}:
                    return took
        return max((_PRIORS[name].seconds for name in has - wholes), default=0.0)


def pinned(space: Space, history: History, best: Tried) -> Candidate | None:
    """Return the best candidate pinned to one core, if it is host-bound.

    Not what is compiled, which would be compiled again: in CUDA graphs it was 0.97 to 1.03 times as fast (bert-base,
    distilbert, Qwen2.5-0.5B; H200). An optimizer on the CPU needs all cores.
    """
    arm = best.candidate.arm
    if "cpu_affinity" not in space.late or arm.cpu_affinity or arm.offloads_optimizer or arm.torch_compile:
        return None
    if not history.is_host_bound(best.candidate):
        return None
    return replace(best.candidate, arm=replace(arm, cpu_affinity=True))


def left_out_arms(space: Space, history: History) -> tuple[LeftOut, ...]:
    """Return the arms without a trial, by the reason: none of its batches fits, or too little is expected of it."""
    judge, tried = Judge(space, history), {t.candidate.arm for t in history.tried}
    reach = judge.batches_in_reach()
    best = history.fastest(t.candidate for t in history.tried if space.contains(t.candidate))
    untried = [
        arm
        for arm in space.arms
        if arm not in tried and not judge.offloads_needlessly(space.candidate(arm, max(reach, default=1)))
    ]
    if not untried or not reach or best is None:
        return ()
    chances, model = Chances(history), SpeedModel(history)
    too_large, slower, most = [], [], 0.0
    for arm in untried:
        candidates = [space.candidate(arm, batch) for batch in reach]
        fitting = [c for c in candidates if judge.is_open(c) and chances.fits(c) > _LEAST_CHANCE]
        if fitting:
            slower.append(arm)
            most = max(most, float(np.exp(-model.expected(fitting, speed_of(best))[1].min())) / speed_of(best))
        else:
            too_large.append(arm)
    others, named = list(space.arms), []
    whys = (
        ("no batch of it fits", too_large),
        (f"expected to be {most:.2f} × as fast as the best, or less: not worth a trial", slower),
    )
    for why, arms in whys:
        if arms:
            named.append(LeftOut(names_of_arms(arms, others, space.arms), why))
            others = [arm for arm in others if arm not in arms]
    return tuple(named)

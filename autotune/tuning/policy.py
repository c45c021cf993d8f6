"""Choose the next candidate from what is known, without Optuna or processes.

Batches are multiples of 8, or of ``--batch-multiple``; smaller multiples are searched where none of these fits. With
several trials running, those that have not ended count as tried. A decision that needs all results (that nothing at a
multiple fits, that nothing else is left) waits for them.

``Acquisition`` is the search for speed. The value of a candidate is the expected improvement, times the probability
that it runs and fits, divided by the seconds of its trial. Candidates are the arms of the space at their batches. Once
none is worth its seconds, ``autotune.tuning.anytime`` proposes levers on measured candidates, valued in the same way.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from autotune.core.candidate import Arm, Candidate
from autotune.core.options import OPTUNA_SAMPLERS, Objective, SamplerName
from autotune.estimate.chance import LEAST_CHANCE, Chances
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History, Tried, batch_of, failed_without_verdict, speed_of
from autotune.estimate.speed_model import Floats, SpeedModel, extra_seconds
from autotune.space.arms import memory_class, never_slower
from autotune.space.space import Space


class Policy:
    """Proposes candidates, arms at batches; here all in order, those of a smaller multiple where no larger one fits."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def next(self, history: History) -> Candidate | None:
        """Return the next candidate to run; ``None`` where none is worth it, or a running trial has to end first."""
        for space in self._spaces(history):
            judge = Judge(space, history)
            for multiple in space.batches.levels():
                if (candidate := self._next_at(multiple, space, history, judge)) is not None:
                    return candidate
                if history.pending or judge.fits_at(multiple):
                    return None
        return Judge(self._space, history).last_resort()

    def _spaces(self, history: History) -> list[Space]:
        """Return the spaces to search, one after the other; subclasses may add to them."""
        return [self._space]

    def _next_at(self, multiple: int, space: Space, history: History, judge: Judge) -> Candidate | None:
        """Return the next candidate whose batch is such a multiple: the first that is untried and may fit, if any."""
        return next(filter(judge.is_open, judge.candidates_at(multiple)), None)


class MaxBatchPolicy(Policy):
    """Finds the largest batch that stays under the line (the memory less headroom), and shows that the next does not.

    Arms with checkpointing come first, since they need the least memory; later arms are only tried above the largest
    batch so far. The next trial takes the largest batch that more likely fits than not, else a batch beside it.
    """

    def _next_at(self, multiple: int, space: Space, history: History, judge: Judge) -> Candidate | None:
        """Return the next batch of the first arm that may have a larger one; see ``Policy``."""
        # Arms of one class need the same memory, so that one of them is enough.
        seen_classes = set()
        for arm in sorted(space.arms, key=lambda arm: not arm.gradient_checkpointing):
            tried = [t for t in history.tried if t.candidate.arm == arm and space.contains(t.candidate)]
            if memory_class(arm) in seen_classes:
                continue
            if not any(map(failed_without_verdict, tried)):
                # This arm may fail for reasons other than memory, where another of its class does not.
                seen_classes.add(memory_class(arm))
            if (candidate := self._next_of(arm, multiple, history, judge)) is not None:
                return candidate
            if any(c.arm == arm and space.contains(c) for c in history.pending):
                # Other arms are tried above the largest batch of this one, which is not known yet.
                return None
        return None

    def _next_of(self, arm: Arm, multiple: int, history: History, judge: Judge) -> Candidate | None:
        """Return the batch of an arm to try next, as a candidate; ``None`` where none above the largest is left."""
        largest = history.largest(t.candidate for t in history.tried if self._space.contains(t.candidate))
        batches, chances = _ladder(self._space, multiple), Chances(history)
        above = batches[bisect_right(batches, batch_of(largest) if largest else 0) :]
        count = _how_many(self._space, arm, above, chances.chance, _LIKELY)
        # A batch that failed or is under way says nothing about memory, so that a neighbour is tried in its place.
        for offset in (0, 1, -1, 2, -2):
            index = max(0, count - 1) + offset
            if not 0 <= index < len(above):
                continue
            candidate = self._space.candidate(arm, above[index])
            if judge.is_open(candidate) and chances.runs(candidate) > LEAST_CHANCE:
                return candidate
        return None


def _ladder(space: Space, multiple: int) -> Sequence[int]:
    """Return the batches at a multiple, ascending; of a free batch all that there are, not only the first to try."""
    batches = space.batches
    if batches.effective_batch is None and batches.only is None:
        return range(multiple, batches.most + 1, multiple)
    return batches.at_level(multiple)


def _how_many(
    space: Space, arm: Arm, batches: Sequence[int], chance_of: Callable[[Candidate], float], least: float
) -> int:
    """Return how many of ascending batches have at least this probability for an arm, which falls with the batch."""
    # ``bisect`` wants keys that ascend, as negated probabilities do.
    return bisect_right(batches, -least, key=lambda batch: -chance_of(space.candidate(arm, batch)))


_LEAST_GAIN = 0.0015
"""Expected improvement, as a logarithm, for which a usual trial is worth it. A choice: of 2,000 random worlds it keeps
96.4 % within 1 % of the best (``studies/worlds.py --first 400 --worlds 2000``)."""
_GAIN_A_SECOND = 0.0005
"""What each second beyond a usual trial has to promise in addition: a minute 3 %. A choice."""
_TRIAL_SECONDS, _TRIAL_STEPS = 3.0, 6
"""Seconds of a trial without its steps, and the number of its steps: small models on an H200."""
_LIKELY = 0.5
"""A batch that is less likely to fit than this is approached from below. A choice."""
_SURELY = 0.9
"""A free batch of this probability to fit is proposed beside the largest one that likely fits. A choice."""


class Acquisition(Policy):
    """Proposes the candidate of a space that promises the largest gain in speed for the time of its trial."""

    def _spaces(self, history: History) -> list[Space]:
        """Return the space and its memory-saving variant, which comes first where only that is predicted to fit."""
        plain, saving = self._space, self._space.saving
        if saving is None:
            return [plain]
        if any(tried.candidate.arm in plain.arms for tried in history.believed()) or history.memory is None:
            return [plain, saving]

        def fits(space: Space) -> bool:
            """Return whether any candidate of a space is predicted to fit."""
            candidates = (space.candidate(arm, batch) for arm in space.arms for batch in space.batches.every)
            return any(history.memory and (told := history.memory.prediction(c)) and told.fits for c in candidates)

        return [saving, plain] if fits(saving) and not fits(plain) else [plain, saving]

    def _next_at(self, multiple: int, space: Space, history: History, judge: Judge) -> Candidate | None:
        """Return the most promising candidate of a space at a multiple; ``None`` where none is worth a trial."""
        believed = [t for t in history.believed() if space.contains(t.candidate)]
        best = max(believed, key=speed_of, default=None)
        among = self._grid(history, space, multiple)
        if not judge.fits_at(multiple):
            # The smallest batch left too little memory: torch's expandable segments waste less. They come before half
            # the batch, which took 1.5 times as long for Qwen3-32B with QLoRA (H200).
            smallest = [t for t in history.tried if batch_of(t) == min(space.batches.at_level(multiple), default=0)]
            if expanded := next(filter(None, map(judge.in_expandable_segments, smallest)), None):
                return expanded
        among = [each for each in among if judge.is_open(each) and not is_beaten(history, each)]
        if not among:
            return None
        is_first = all(t.candidate == space.baseline for t in history.tried)
        if is_first and (measured := [each for each in among if each in history.elsewhere]):
            # What other machines of the kind measured decides what is tried first, and nothing else.
            return max(measured, key=lambda each: history.elsewhere[each])
        values = worth(history, SpeedModel(history), among, speed_of(best) if best is not None else None)
        index = int(np.argmax(values))
        return among[index] if values[index] > 0 else None

    def _grid(self, history: History, space: Space, multiple: int) -> list[Candidate]:
        """Return each arm at each batch of a multiple; without an effective batch, also at the largest that fit."""
        batches, chances, found = _ladder(space, multiple), Chances(history), list[Candidate]()
        for arm in space.arms:
            among = set(space.batches.at_level(multiple))
            if multiple == space.batches.levels()[0]:
                counts = [_how_many(space, arm, batches, chances.fits, least) for least in (_LIKELY, _SURELY)]
                among |= {batches[count - 1] for count in counts if 0 < count < len(batches)}
            found += [space.candidate(arm, batch) for batch in sorted(among)]
        return found


def worth(
    history: History, model: SpeedModel, among: list[Candidate], best: float | None, usual_seconds: float | None = None
) -> Floats:
    """Return the expected gain of each candidate per second of its trial; 0 where it is not worth a trial.

    ``best`` is the speed to beat, in samples a second; without one, the fastest are worth most. A trial takes
    ``usual_seconds`` (``None``: the expected seconds of its steps) and the seconds to compile.
    """
    chances = Chances(history)
    fits, runs = (np.array([chance_of(each) for each in among]) for chance_of in (chances.fits, chances.runs))
    chance = fits * runs
    by_arm = {(c.arm, c.per_device_train_batch_size): value for c, value in zip(among, chance, strict=True)}
    # A candidate waits for one that is never slower and no less likely to run and fit.
    chance = chance * [
        all(by_arm.get((arm, c.per_device_train_batch_size), -1.0) < value for arm in never_slower(c.arm))
        for c, value in zip(among, chance, strict=True)
    ]
    # A probability to fit from one half on counts as 1: what is fast is tried before what is slower and surely fits.
    likely = np.minimum(1.0, 2 * fits) * runs
    to_beat = best if best is not None else 1.0
    if best is not None and history.pending:
        # A trial under way counts as what is expected of it.
        likeliest = [each for each in history.pending if chances.chance(each) > _LIKELY]
        if likeliest:
            to_beat = max(to_beat, float(np.exp(-model.expected(likeliest, to_beat)[1].min())))
    # Logarithms of the seconds a sample are limited, so that their exponentials stay finite.
    gains, log_seconds = model.expected(among, to_beat)
    log_seconds = np.minimum(log_seconds, 20.0)
    extra = np.array([extra_seconds(history, candidate) for candidate in among])
    steps = _TRIAL_STEPS * np.exp(log_seconds) * [candidate.samples_per_step for candidate in among]
    seconds = extra + (_TRIAL_SECONDS + steps if usual_seconds is None else usual_seconds)
    if best is None:
        # The gain over the slowest candidate; 0.3 more, so that this one is worth something, too.
        return np.asarray((chance > LEAST_CHANCE) * likely * (log_seconds.max() + 0.3 - log_seconds) / seconds)
    # A lever has to be worth its whole trial; before the first answer only compilation counts, not slow steps.
    paid = extra if usual_seconds is None else np.maximum(0.0, seconds - _TRIAL_SECONDS)
    return np.asarray((gains * chance > _LEAST_GAIN + _GAIN_A_SECOND * paid) * gains * likely / seconds)


def is_beaten(history: History, candidate: Candidate) -> bool:
    """Return whether a candidate cannot win, since an arm that is never slower runs at its batch or a larger one.

    Such an arm is the same one without checkpointing, or in the faster of two precisions; its trial may be under way. A
    trial that retried allocations shows nothing: at its cap, the allocator freed and allocated segments in each step,
    which it need not do for an arm with less memory.
    """
    faster, batch = never_slower(candidate.arm), candidate.per_device_train_batch_size
    ran = [t.candidate for t in history.believed() if not (t.measurement and t.measurement.allocation_retries)]
    return any(each.arm in faster and each.per_device_train_batch_size >= batch for each in (*history.pending, *ran))


def pinned(space: Space, history: History, best: Tried) -> Candidate | None:
    """Return the best candidate with its process pinned to one core; ``None`` where it cannot gain by that.

    Only a host-bound step gains, one in which the GPU waits for the host to launch kernels.

    A compiled one would be compiled again: in CUDA graphs it was 0.97 to 1.03 times as fast (bert-base, distilbert,
    Qwen2.5-0.5B; H200). An optimizer on the CPU needs all cores.
    """
    arm = best.candidate.arm
    if "cpu_affinity" not in space.late or arm.cpu_affinity or arm.offloads_optimizer or arm.torch_compile:
        return None
    if not history.pool.is_host_bound(best.candidate):
        return None
    return replace(best.candidate, arm=replace(arm, cpu_affinity=True))


# At most so many rivals of the winner are measured again, and winner and rivals in so many processes each. The error of
# a mean falls with the square root of their number. Choices.
_MOST_RIVALS, _MOST_PROCESSES = 2, 3
# A step of another process may be faster by this factor. Processes of bert-base at 128 tokens differed by 1.25 (H200).
_FAR_BEHIND = 1.3
# Relative half-width of a winner's own mean above which it is measured once more.
_UNCERTAIN = 0.05
# From so many deviations between processes on, a promise rests on this machine rather than on those where the prior was
# measured. Until then the winner is run again where a process takes no more than this share of the search. Choices.
_FEW_DEVIATIONS, _FEW_SHARE = 2, 0.1
# From so many on, the prior hardly counts: intervals hold in 93 to 97 % of simulated cases.
_ENOUGH_DEVIATIONS, _CHEAP_SHARE = 12, 0.05


def to_measure_again(
    history: History, among: Iterable[Candidate], *, tells_apart: bool = True, share: float = math.inf
) -> list[Candidate]:
    """Return the candidates that are to be measured in one more process before a search ends, the next one first.

    Where choosing a rival is expected to gain more than the tolerance, these are the winner and its rivals in
    alternation, so that a drift of the machine affects them alike. Otherwise, and without ``tells_apart``, the winner
    alone is due, until enough processes measured it. A trial of it takes a ``share`` of the search's time so far.
    """
    among = set(among)
    winner = history.winner(among)
    if winner is None:
        return []
    rivals = _rivals(history, winner, among) if tells_apart else []
    due = dict.fromkeys([winner.candidate, *rivals], _MOST_PROCESSES)
    if not rivals:
        due[winner.candidate] = _processes(history, winner, share)
    # Failed trials count as well, so that a failing candidate is not repeated forever.
    owed = [candidate for candidate, processes in due.items() if history.attempts(candidate) < processes]
    return sorted(owed, key=history.attempts)


def _rivals(history: History, winner: Tried, among: set[Candidate]) -> list[Candidate]:
    """Return the candidates that may be better than the winner, without those that would compile again.

    Where the mean of a few steps is wide, because one was slow, a candidate whose fastest step is far behind the winner
    is no rival.
    """
    gains = {
        tried.candidate: history.pool.expected_gain(tried.candidate, winner.candidate)
        for tried in history.believed(among)
        if tried.candidate != winner.candidate
        and not tried.candidate.arm.torch_compile
        and (one := tried.measurement) is not None
        and min(one.step_seconds_each, default=0.0) * speed_of(winner) < _FAR_BEHIND * tried.candidate.samples_per_step
    }
    possible = [candidate for candidate, gain in gains.items() if gain > history.tolerance]
    return sorted(possible, key=lambda candidate: -gains[candidate])[:_MOST_RIVALS]


def _processes(history: History, winner: Tried, share: float) -> int:
    """Return in how many processes the winner is to be measured, each of which takes a ``share`` of the search's time.

    Steps differ between processes, host-bound ones most, which a single process does not show. Where another one is
    cheap, it shows that for all later searches on the machine, too.
    """
    candidate = winner.candidate
    if candidate.arm.torch_compile:
        return 1
    degrees = history.pool.degrees(candidate)
    seen = history.pool.processes(candidate) + history.pending.count(candidate)
    if (history.pool.is_host_bound(candidate) and seen < 2) or (degrees < _FEW_DEVIATIONS and share <= _FEW_SHARE):
        return _MOST_PROCESSES
    is_cheap = degrees < _ENOUGH_DEVIATIONS and share <= _CHEAP_SHARE
    is_wide = winner.measurement is not None and winner.measurement.relative_spread > _UNCERTAIN
    return 2 if is_cheap or is_wide or not winner.in_full else 1


def make_policy(sampler: SamplerName, objective: Objective, space: Space) -> Policy | None:
    """Return the policy that proposes candidates as a ``sampler``; ``None`` for Optuna's, which draw by themselves."""
    if sampler in OPTUNA_SAMPLERS:
        return None
    if sampler == "grid":
        return Policy(space)
    return MaxBatchPolicy(space) if objective == "max-batch" else Acquisition(space)

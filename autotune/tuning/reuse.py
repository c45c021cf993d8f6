"""Answer candidates from trials of earlier studies with the same environment and workload.

A trial is reused only where it is what a new trial would show: under this search's ceiling, with as many steps as this
search asks for. The rules:

- The allocator behaves the same under any cap that it never meets. So a trial that completed without retried
  allocations counts under every cap at or above its peak. Under a lower cap it only shows that its candidate does not
  fit, if its *allocated* bytes alone exceed the line: reserved memory may include segments that could be freed.
- Running out of memory under a cap shows that more than that cap is needed. So it counts while this search's line is
  not above that cap, for every candidate that needs as much or more (``History.ruled_out_by``).
- With accumulation, a step takes accumulation × micro-step + optimizer, and peak memory grows by the inputs of each
  micro-step, which the trial counted. So a trial at one accumulation gives the result at every other of 2 or more. Such
  a result is derived, and counts as measured in part: a winner is run in full. Records that did not count those inputs
  are only used for candidates whose every micro-step they ran.

Faults and disturbed trials are not reused. A second measurement must not reuse the same earlier trial again, so the
caller names the trials to leave out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.outcome import Completed, Effort, Measurement, Outcome, OutOfMemory, Source
from autotune.core.schema import decode
from autotune.estimate.history import History, Tried, cap_of, ran_in_full
from autotune.estimate.memory import MemoryModel
from autotune.store.records import PastTrial

# Where a trial ran a part of each step's micro-steps, the seconds that it really took are recomputed, not exactly. A
# trial of this share of the required seconds was long enough.
_SECONDS_KNOWN_TO = 0.95


class Library:
    """Finds outcomes for candidates in trials of earlier studies, under one memory ceiling.

    ``memory``, the model that predicts memory, learns from all trials, whether or not they are reused.
    """

    def __init__(self, trials: Iterable[PastTrial], ceiling: Ceiling, memory: MemoryModel | None = None) -> None:
        self._ceiling = ceiling
        self._completed: dict[tuple[Arm, int], list[PastTrial]] = {}
        self._sources: dict[str, PastTrial] = {}
        self._over = History(ceiling)
        """Trials that ran out of memory under a cap that is no lower than this ceiling's line."""
        for past in trials:
            if memory is not None and past.trial.outcome is not None:
                cap_bytes = cap_of(past.trial.candidate.arm, decode(past.ceiling, Ceiling))
                memory.learn(past.trial.candidate, past.trial.outcome, cap_bytes)
            self._file(past, ceiling)

    def _file(self, past: PastTrial, ceiling: Ceiling) -> None:
        """Add a trial of an earlier study, where its outcome is valid under this ceiling and was not disturbed."""
        trial = past.trial
        if trial.outcome is None or bool(getattr(trial.outcome, "disturbed", False)):
            return
        past_ceiling, arm = decode(past.ceiling, Ceiling), trial.candidate.arm
        if arm.expandable_segments and past_ceiling.line_bytes != ceiling.line_bytes:
            # Its allocator was limited to the line of its own ceiling, so that it tells nothing about another line.
            return
        cap_bytes = cap_of(arm, past_ceiling)
        self._sources[trial.id] = past
        if isinstance(trial.outcome, OutOfMemory):
            if trial.outcome.where == "device" and ceiling.line_bytes <= cap_bytes:
                self._over.add(Tried(trial.id, trial.candidate, trial.outcome))
        elif isinstance(trial.outcome, Completed) and _has_valid_peaks(
            trial.candidate, trial.outcome, cap_bytes, ceiling
        ):
            key = trial.candidate.arm, trial.candidate.per_device_train_batch_size
            self._completed.setdefault(key, []).append(past)

    def answer(
        self, candidate: Candidate, effort: Effort, *, in_full: bool = False, not_from: Collection[str] = ()
    ) -> Outcome | None:
        """Return the outcome of a candidate at this effort from earlier trials; ``None`` where it must be run.

        ``in_full`` requires every micro-step to be measured. ``not_from`` are the ids of trials that may not answer:
        for a second measurement, those of the candidate's outcomes so far (see ``Tried.process``). A second
        measurement is never derived from a trial of another candidate.
        """
        is_second = bool(not_from)
        # Outcomes of the candidate itself, the oldest first; the latest of those that are good enough is returned.
        exact = [
            dataclasses.replace(outcome, source=_source_of(past, derived=False), phase_seconds={})
            for past, outcome in self._at_any_accumulation(candidate)
            if past.trial.candidate == candidate and past.trial.id not in not_from
        ]
        # A second measurement counts as it did in its own search, however few steps it has.
        measured = [
            found
            for found in exact
            if _measured_long_enough(found, candidate, effort) or (is_second and ran_in_full(candidate, found))
        ]
        over_line = [found for found in exact if not found.measurement.fits(candidate.arm, self._ceiling)]
        if over_line:
            return over_line[-1]
        in_whole_steps = [found for found in measured if ran_in_full(candidate, found)]
        if in_whole_steps:
            return in_whole_steps[-1]
        if measured and not in_full:
            return measured[-1]
        ran_out = self._ran_out(candidate, not_from)
        if ran_out is not None or in_full or is_second:
            return ran_out
        return self._derived(candidate, effort)

    def _derived(self, candidate: Candidate, effort: Effort) -> Completed | None:
        """Return the latest measurement at another accumulation, converted to the candidate's; ``None`` without one."""
        converted: Completed | None = None
        for past, outcome in self._at_any_accumulation(candidate):
            other = past.trial.candidate
            if other == candidate or not (other.accumulates and candidate.accumulates):
                continue
            measured = derive(outcome.measurement, other, candidate)
            if measured is not None:
                derived = Completed(measured, source=_source_of(past, derived=True))
                if _measured_long_enough(derived, candidate, effort):
                    converted = derived
        return converted

    def _at_any_accumulation(self, candidate: Candidate) -> Iterator[tuple[PastTrial, Completed]]:
        """Yield the completed trials of a candidate's arm and per-device batch, with their outcomes."""
        for past in self._completed.get((candidate.arm, candidate.per_device_train_batch_size), ()):
            assert isinstance(past.trial.outcome, Completed)
            yield past, past.trial.outcome

    def _ran_out(self, candidate: Candidate, not_from: Collection[str]) -> OutOfMemory | None:
        """Return an out-of-memory outcome for a candidate: its own or, without ``not_from``, of one that needs no more.

        ``None`` where there is none; ``not_from`` are ids of trials that do not count.
        """
        same = [tried for tried in self._over.outcomes_of(candidate) if tried.trial_id not in not_from]
        if same:
            outcome, past = same[-1].outcome, self._sources[same[-1].trial_id]
            assert isinstance(outcome, OutOfMemory)
            return dataclasses.replace(outcome, source=_source_of(past, derived=False), phase_seconds={})
        over = self._over.ruled_out_by(candidate) if not not_from else None
        if over is None:
            return None
        message = f"needs no less than {over.candidate.describe()}, which ran out of memory"
        return OutOfMemory(message, source=_source_of(self._sources[over.trial_id], derived=True))


def holds_under(measurement: Measurement, cap_bytes: int, ceiling: Ceiling) -> bool:
    """Return whether a trial that ran under a cap fits, or does not, under this ceiling as it did there.

    The cap limits torch's allocator; a trial fits whose peak is not above the ceiling's line.
    """
    reserved_bytes, line_bytes = measurement.peak_reserved_bytes, ceiling.line_bytes
    if measurement.allocation_retries:
        # The allocator met its cap and freed segments, which takes time and lowers the peak.
        is_over = reserved_bytes > line_bytes and ceiling.cap_bytes >= cap_bytes
        return is_over or ceiling.cap_bytes == cap_bytes or measurement.peak_allocated_bytes > line_bytes
    if reserved_bytes <= ceiling.cap_bytes:
        return True
    return measurement.peak_allocated_bytes > line_bytes


def derive(measurement: Measurement, measured: Candidate, wanted: Candidate) -> Measurement | None:
    """Convert the measurement of a candidate to that of another accumulation, the ``wanted`` candidate.

    ``None`` for several ranks or DeepSpeed, or where the optimizer was not timed or micro-step inputs not counted.
    """
    if measurement.ranks > 1 or measured.arm.zero_stage is not None:
        # DeepSpeed updates weights within the last micro-step. Of a step's micro-steps only the last exchanges
        # gradients, so that times do not scale with their number.
        return None
    optimizer, micro_batch_bytes = measurement.optimizer_seconds, measurement.micro_batch_bytes
    if optimizer is None or not 0 <= optimizer < min(measurement.step_seconds_each, default=0.0):
        return None
    if micro_batch_bytes is None:
        return None
    more_bytes = (wanted.gradient_accumulation_steps - measured.gradient_accumulation_steps) * micro_batch_bytes
    ratio = wanted.gradient_accumulation_steps / measured.gradient_accumulation_steps

    def scaled(seconds: float) -> float:
        """Return a step's time with the micro-steps of the wanted accumulation."""
        return (seconds - optimizer) * ratio + optimizer

    step_seconds = scaled(measurement.step_seconds)
    waiting, steady = measurement.data_seconds, measurement.steady_step_seconds
    return dataclasses.replace(
        measurement,
        step_seconds=step_seconds,
        steady_step_seconds=None if steady is None else scaled(steady),
        run_steps=None if measurement.run_steps is None else max(1, round(measurement.run_steps / ratio)),
        step_seconds_each=tuple(map(scaled, measurement.step_seconds_each)),
        samples_per_second=wanted.samples_per_step / step_seconds,
        peak_allocated_bytes=measurement.peak_allocated_bytes + more_bytes,
        peak_reserved_bytes=measurement.peak_reserved_bytes + more_bytes,
        worst_batch_peak_allocated_bytes=_sum_if_known(measurement.worst_batch_peak_allocated_bytes, more_bytes),
        worst_batch_peak_reserved_bytes=_sum_if_known(measurement.worst_batch_peak_reserved_bytes, more_bytes),
        micro_steps_run=min(measurement.micro_steps_run, wanted.gradient_accumulation_steps),
        data_seconds=None if waiting is None else waiting * ratio,
        train_loss=None,
        gpu_seconds_by_kind=None,
    )


def _sum_if_known(size_bytes: int | None, more_bytes: int) -> int | None:
    return None if size_bytes is None else size_bytes + more_bytes


def _has_valid_peaks(candidate: Candidate, outcome: Completed, cap_bytes: int, ceiling: Ceiling) -> bool:
    """Return whether a trial measured the peaks of whole steps, with the same verdict under this ceiling."""
    measurement = outcome.measurement
    is_partial = measurement.micro_steps_run < candidate.gradient_accumulation_steps
    if is_partial and measurement.micro_batch_bytes is None:
        return False
    return candidate.arm.expandable_segments or holds_under(measurement, cap_bytes, ceiling)


def _measured_long_enough(outcome: Completed, candidate: Candidate, effort: Effort) -> bool:
    """Return whether an earlier trial measured long enough for this effort."""
    measurement = outcome.measurement
    # The same rules end a running trial, see ``Effort``.
    each = measurement.step_seconds_each
    behind = effort.behind_step_seconds
    if behind and len(each) > 1 and min(each) > behind:
        return True
    if len(each) < min(2, effort.max_steps):
        return False
    if len(each) >= effort.max_steps or _seconds_run(measurement, candidate) >= effort.max_seconds * _SECONDS_KNOWN_TO:
        return True
    return len(each) >= effort.min_steps and measurement.relative_spread <= effort.target_spread


def _seconds_run(measurement: Measurement, candidate: Candidate) -> float:
    """Return the seconds that the measured steps really took: their times include micro-steps that were not run."""
    optimizer = measurement.optimizer_seconds or 0.0
    share = measurement.micro_steps_run / candidate.gradient_accumulation_steps
    return sum((seconds - optimizer) * share + optimizer for seconds in measurement.step_seconds_each)


def _source_of(past: PastTrial, *, derived: bool) -> Source:
    """Return the reference to an earlier trial, for the outcome that is taken from it."""
    return Source(past.trial.id, past.study, past.trial.number, derived)

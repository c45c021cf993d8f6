"""Time the optimizer steps of a training, whatever runs them, and decide when they are enough.

A step whose shapes are new to the GPU is run twice: the first run, called a rehearsal, loads and compiles kernels and
is not counted; the second is timed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from time import perf_counter
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.measured_steps import StepEstimate, is_enough, mean_step
from autotune.core.outcome import Effort, Measurement
from autotune.space.dataloader import batches_ahead
from autotune.space.levers import compiles
from autotune.worker.dataset.schedule import Schedule
from autotune.worker.rendezvous import Ranks
from autotune.worker.trial.gpu_busy import BusyStep
from autotune.worker.trial.listener import StepListener
from autotune.worker.trial.losses import ScalerWatch, scaler_watch
from autotune.worker.trial.meter import Meter, PeakBytes
from autotune.worker.trial.rehearsal import Rehearsing
from autotune.worker.trial.step_checks import NotTrained, StepChecks
from autotune.worker.trial.training_watch import Seen

# Once three steps are measured, stop when rehearsals took this many times ``max_seconds``. A choice, not measured.
_REHEARSAL_PATIENCE = 3.0
# NVML's energy counter is updated every 20 to 100 ms, depending on the GPU. Over shorter times its steps would show,
# and more so where rehearsals come between measured steps, so that it is read more often.
_LEAST_ENERGY_SECONDS = 0.5
_LEAST_REHEARSED_SECONDS = 1.0


MOST_SKIPPED_STEPS = 20
"""Most steps that are run again because fp16's gradient scaler skipped their update.

Each halves the scale of 65,536, so it is below 1 after 17 of them."""


def most_steps(candidate: Candidate, effort: Effort) -> int:
    """Return the most steps that a trial may run, without rehearsals."""
    skipped = MOST_SKIPPED_STEPS if candidate.arm.precision == "fp16" else 0
    return effort.warmup_steps + effort.max_steps + effort.busy_steps + skipped


def micro_steps_to_run(candidate: Candidate, effort: Effort) -> int:
    """Return the micro-steps to run in each step of the trial: all of them, or a few that stand for the rest."""
    return min(candidate.gradient_accumulation_steps, max(3, effort.max_micro_steps))


def prefetched_steps(candidate: Candidate, effort: Effort) -> int:
    """Return how many steps' batches the data loader workers may have prefetched.

    Steps on prefetched batches say nothing about how fast data is loaded.
    """
    return math.ceil(batches_ahead(candidate.arm) / micro_steps_to_run(candidate, effort))


@dataclass
class _Step:
    """One optimizer step as it was run."""

    seconds: float
    data_seconds: float
    optimizer_seconds: float
    micro_seconds: float
    """Time of a micro-step that adds to existing gradients, and does not exchange them between ranks; 0 where none was
    run."""
    last_micro_seconds: float
    """Time of the last micro-step, which exchanges the gradients between ranks, with gradient clipping."""


class _Rehearsals:
    """Compares steps with new shapes, which are rehearsals, with the same batches run again right after."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._shapes = 0
        self._extra_seconds = 0.0
        self._last: tuple[_Step, int] | None = None

    def begin(self, step: _Step, new_shapes: int) -> None:
        """Record a rehearsal."""
        self.steps += 1
        self.seconds += step.seconds
        self._last = step, new_shapes

    def end(self, step: _Step) -> None:
        """Record a measured step, and compare it with its rehearsal if it had one, without waits for data."""
        if self._last is not None:
            rehearsal, new_shapes = self._last
            self._extra_seconds += rehearsal.seconds - rehearsal.data_seconds - step.seconds + step.data_seconds
            self._shapes += new_shapes
        self.forget()

    def forget(self) -> None:
        """Forget the last rehearsal: the next step does not repeat it."""
        self._last = None

    def seconds_a_shape(self) -> float | None:
        """Return the extra time of a shape's first run; ``None`` where no shape was new."""
        return max(0.0, self._extra_seconds / self._shapes) if self._shapes else None


class _Energy:
    """Adds up the joules of measured steps, from a counter that is read before and after each."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._before: float | None = None
        self.joules: float | None = 0.0

    def read(self) -> None:
        """Read the counter before a measured step."""
        self._before = self._meter.energy_joules()

    def add(self) -> None:
        """Add the joules of a measured step."""
        before, after = self._before, self._meter.energy_joules()
        if self.joules is None or before is None or after is None:
            self.joules = None
        else:
            self.joules += after - before


class StepTimer(StepListener):
    """Times the steps of a training, synchronizing with the device once an optimizer step.

    Whatever runs the training tells it of its steps (``StepListener``). ``on_enough`` is called with the measurement
    inside the last step, ``on_step`` with the step's number after each. ``checks`` judges whether each of them trained,
    outside the timed part. ``busy`` profiles steps after the timed ones, where ``effort`` asks for some. How long to
    measure follows from ``effort`` alone.

    Of several ranks each has such a timer. They meet after every step, outside the timed part, and go on with the
    step of the slowest, so that all of them stop after the same step.
    """

    def __init__(
        self,
        meter: Meter,
        candidate: Candidate,
        effort: Effort,
        on_enough: Callable[[Measurement], None],
        on_step: Callable[[int], None],
        checks: StepChecks,
        schedule: Schedule | None = None,
        rehearsing: Rehearsing | None = None,
        busy: BusyStep | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._meter = meter
        self.checks = checks
        self._ranks = ranks or Ranks()
        self._rank_seconds = [0.0] * self._ranks.count
        """Seconds of the measured steps of each rank, added up."""
        self._candidate = candidate
        self._effort = effort
        self._on_enough = on_enough
        self._on_step = on_step
        self._schedule = schedule
        self._rehearsing = rehearsing
        self._rehearsals = _Rehearsals()
        self._worst_peaks: PeakBytes | None = None
        self._warmup: list[_Step] = []
        self._measured: list[_Step] = []
        self._tokens: list[int | None] = []
        """Tokens of each measured step, over all ranks; ``None`` where they were not seen."""
        self._marks: list[Any] = []
        self._wait_seconds: float | None = None
        """How long the step that ends waited for batches after its first; ``None`` where all were there at once."""
        self._saving_seconds = 0.0
        self._saving_seconds_each: list[float] = []
        self._previous_end = 0.0
        self._begin = 0.0
        self._first_reserved: int | None = None
        self._scaler = ScalerWatch()
        self._steps_seen = 0
        self._steps_run_again = 0
        self._warmup_steps = effort.warmup_steps
        self._costs: list[float] = []
        """Padded tokens of each measured step's batches, where a schedule knows them."""
        self._busy = busy
        self._busy_steps = 0
        self._is_profiled = False
        self.is_finished = False
        """Whether enough was measured, so that the training may stop."""
        self.pending: Measurement | None = None
        """The measurement, once enough steps are timed. Profiling may add to it, and a failure of it must not lose
        it."""
        self._energy = _Energy(meter)

    def begin(self, optimizer: Any = None) -> None:
        """Start the clock of the first step; an optimizer may have a gradient scaler, as the Trainer's has."""
        self._scaler = scaler_watch(optimizer)
        self._meter.synchronize()
        self._ranks.gather(None)
        self.checks.begin()
        if self._is_warm:
            self.checks.begin_timed()
        self.start_clock()

    def mark(self) -> Any:
        """Mark this point on the device's timeline."""
        return self._meter.mark()

    def step_begins(self) -> None:
        """Note when the batches are there: the time since the last step was spent waiting for data."""
        self._begin = perf_counter()
        self._marks = [self._meter.mark()]
        self._is_profiled = self.pending is not None and not self._new_shapes()
        if self._is_profiled and self._busy is not None:
            self._busy.step_begins()

    def micro_step_ends(self) -> None:
        """Note the end of a micro-step that is not the last."""
        self._marks.append(self._meter.mark())
        if self._is_profiled and self._busy is not None:
            self._busy.micro_step_ends(len(self._marks) - 1)

    def step_ends(self, marks: tuple[Any, Any], wait_seconds: float | None = None) -> None:
        """Record the step, and stop the training once enough was measured."""
        self._marks += marks
        self._wait_seconds = wait_seconds
        self._saving_seconds_each.append(self._saving_seconds)
        self._saving_seconds = 0.0
        self._meter.synchronize()
        end = perf_counter()
        if self.pending is not None:
            self._end_profiled(self.pending)
            return
        step = self._timed_step(end)
        self._previous_end = end
        # Skipped updates cost less time, and before the first update the optimizer has no state.
        seen = self.checks.step_ends(len(self._marks) - 2)
        told = self._ranks.gather((astuple(step), self._was_skipped(seen), seen.tokens))
        each, tokens = [_Step(*figures) for figures, _, _ in told], [count for _, _, count in told]
        step, again = max(each, key=lambda one: one.seconds), any(skipped for _, skipped, _ in told)
        is_warm, new_shapes = self._is_warm, self._new_shapes()
        is_measured = is_warm and not new_shapes and not again
        if is_measured:
            self._energy.add()
            self._rehearsals.end(step)
            self._measured.append(step)
            self._rank_seconds = [sum_ + one.seconds for sum_, one in zip(self._rank_seconds, each, strict=True)]
            known = [count for count in tokens if count is not None]
            self._tokens.append(sum(known) if len(known) == len(tokens) else None)
            self._costs += self._cost_of_step()
        elif not is_warm:
            self._warmup.append(step)
            self._warmup_steps += again
            if self._schedule is not None and len(self._warmup) == self._schedule.worst_steps:
                self._worst_peaks = self._meter.peaks()
        elif new_shapes:
            self._rehearsals.begin(step, new_shapes)
        else:
            self._rehearsals.forget()
        self._steps_run_again += again
        self._step_is_over()
        if is_measured and self._enough():
            self.pending = self.measurement()
            if self._busy is not None and self._effort.busy_steps:
                self._busy.begin()
            else:
                self._finish(self.pending)
        elif self._is_warm:
            self.checks.begin_timed()
            self.start_clock()

    def _was_skipped(self, seen: Seen) -> bool:
        """Return whether a gradient scaler left the update of the step that ends out."""
        is_skipped = self._scaler.step_was_skipped() or seen.skipped_steps > 0
        if is_skipped and self._steps_run_again == MOST_SKIPPED_STEPS:
            self.checks.refuse(
                NotTrained(
                    f"fp16's gradient scaler skipped the updates of {MOST_SKIPPED_STEPS + 1} steps",
                    "train in bf16 or fp32",
                    reason="non_finite",
                )
            )
        return is_skipped

    @property
    def _is_warm(self) -> bool:
        """Whether all warm-up steps were run, not counting those whose update was skipped."""
        return len(self._warmup) >= self._warmup_steps

    def _step_is_over(self) -> None:
        self._steps_seen += 1
        if self._first_reserved is None:
            self._first_reserved = self._meter.peaks().reserved
        self._on_step(self._steps_seen)

    def _end_profiled(self, measured: Measurement) -> None:
        """Record a step after the timed ones: a profiled step, or a rehearsal of one."""
        assert self._busy is not None
        if self._is_profiled:
            # Over that of the epoch's mean step.
            costs = self._cost_of_step()
            cost = costs[0] / self._schedule.epoch_cost if costs and self._schedule else 1.0
            self._busy.step_ends(measured.step_seconds, cost)
            self._busy_steps += 1
        self._step_is_over()
        self.checks.step_is_dropped()
        if self._busy_steps >= self._effort.busy_steps or any(self._ranks.gather(self._busy.is_broken)):
            self._finish(measured)

    def end(self) -> None:
        """Keep what was timed where the data ends before a step is profiled."""
        if self.pending is not None and not self.is_finished:
            self._finish(self.pending)

    def _finish(self, measured: Measurement) -> None:
        """Hand the measurement on: the training may stop."""
        self.is_finished = True
        if self._busy is not None:
            share, cost = self._busy.share, self._busy.cost_seconds
            kinds = self._busy.seconds_by_kind
            measured = replace(measured, gpu_busy_share=share, gpu_busy_cost_seconds=cost, gpu_seconds_by_kind=kinds)
        self._on_enough(measured)

    def _cost_of_step(self) -> list[float]:
        """Return the padded tokens of the step that ends, as a list of one; empty where no schedule knows them."""
        if self._schedule is None:
            return []
        timed = [not new for new in self._schedule.new_lengths[: self._position]]
        index = sum(timed) if self._schedule.new_lengths else self._position
        return list(self._schedule.costs[index : index + 1])

    @property
    def _position(self) -> int:
        """Index of the current step among those of the schedule that follow the warm-up."""
        return self._steps_seen - self._effort.warmup_steps

    def _new_shapes(self) -> int:
        """Return how many shapes of the current step are new, if the step is run again; 0 during warm-up."""
        if self._rehearsing is not None:
            return self._rehearsing.new_shapes
        new = self._schedule.new_lengths if self._schedule else ()
        return new[self._position] if 0 <= self._position < len(new) else 0

    def start_clock(self) -> None:
        """Start the clock of a step, after reading the energy counter, which takes time itself."""
        self._energy.read()
        self._previous_end = perf_counter()

    @property
    def micro_steps_begun(self) -> int:
        """Micro-steps of the step under way, with the one under way."""
        return len(self._marks)

    @property
    def has_measured(self) -> bool:
        """Whether a step was measured, so that a training that ends is none too soon."""
        return bool(self._measured)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Leave what is done within out of the step's time."""
        self._meter.synchronize()
        began = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - began
            self._saving_seconds += seconds
            self._previous_end += seconds
            self._begin += seconds
            if len(self._marks) == 1:
                self._marks = [self._meter.mark()]

    def step_is_dropped(self) -> None:
        """Discard the step that ends, and start the clock of the next one."""
        self._saving_seconds = 0.0
        if self._is_profiled and self._busy is not None:
            self._busy.stop()
        self._meter.synchronize()
        self._rehearsals.forget()
        self.checks.step_is_dropped()
        self.start_clock()

    def _timed_step(self, end: float) -> _Step:
        marks, between = self._marks, self._meter.seconds_between
        # The second micro-step is the first that adds to existing gradients, as all later ones do. Where batches differ
        # in length, the mean over more of them matters more than that difference.
        first = 1 if self._schedule is None else 0
        data_seconds = self._begin - self._previous_end
        micro_seconds = between(marks[first], marks[2]) / (2 - first) if len(marks) > 4 else 0.0
        if self._wait_seconds is not None:
            data_seconds += self._wait_seconds
            # The time between two marks has the micro-step and its wait, which may be shorter than the mean of all.
            micro_seconds = max(0.0, micro_seconds - data_seconds / max(1, len(marks) - 2))
        return _Step(
            seconds=end - self._previous_end,
            data_seconds=data_seconds,
            optimizer_seconds=between(marks[-2], marks[-1]),
            micro_seconds=micro_seconds,
            last_micro_seconds=between(marks[-3], marks[-2]),
        )

    def _enough(self) -> bool:
        measured = [step.seconds for step in self._measured]
        if self._is_behind():
            return True
        if len(measured) >= 3 and self._rehearsals.seconds >= _REHEARSAL_PATIENCE * self._effort.max_seconds:
            return True
        return is_enough(measured, self._effort, self._estimate().relative_half_width)

    def _is_behind(self) -> bool:
        """Return whether the first steps show that the candidate cannot win. One slow step may have another cause."""
        behind = self._effort.behind_step_seconds
        whole = self._whole_steps()
        if behind is None or len(whole) < 2:
            return False
        # The first three steps of a schedule are a fast, a slow and a medium one.
        return min(whole) > behind if self._schedule is None else len(whole) == 3 and statistics.fmean(whole) > behind

    def _estimate(self) -> StepEstimate:
        """Return the estimated step time; its half-width is infinite with fewer than two steps."""
        whole = self._whole_steps()
        if self._schedule is not None:
            return replace(self._schedule, costs=tuple(self._costs)).estimate(whole)
        estimate = mean_step(whole)
        return StepEstimate(estimate.mean, estimate.relative_half_width() if len(whole) > 1 else math.inf)

    def _whole_steps(self) -> list[float]:
        """Return the times of the candidate's whole steps, with the missing micro-steps added."""
        run = micro_steps_to_run(self._candidate, self._effort)
        missing = self._candidate.gradient_accumulation_steps - run
        return [step.seconds + missing * (step.micro_seconds + step.data_seconds / run) for step in self._measured]

    def measurement(self) -> Measurement:
        """Return the measurement so far; needs at least one measured step."""
        whole = self._whole_steps()
        seconds, spread = self._estimate()
        peaks = self._largest(self._meter.peaks())
        joules_per_sample = self._joules_per_sample(seconds)
        ranks = self._ranks.count
        run = micro_steps_to_run(self._candidate, self._effort)
        average = statistics.median if self._schedule is None else statistics.fmean
        data = average([step.data_seconds for step in self._measured])
        worst = self._largest(self._worst_peaks) if self._worst_peaks else None
        return Measurement(
            step_seconds=seconds,
            step_seconds_each=tuple(whole),
            relative_spread=spread if len(whole) > 1 else 0.0,
            samples_per_second=self._candidate.samples_per_step / seconds,
            peak_allocated_bytes=peaks.allocated,
            peak_reserved_bytes=peaks.reserved,
            warmup_step_seconds=tuple(step.seconds for step in self._warmup),
            micro_steps_run=run,
            optimizer_seconds=self._optimizer_seconds(),
            data_seconds=data * self._candidate.gradient_accumulation_steps / run,
            device_used_bytes=self._most(self._meter.device_used_bytes()),
            context_bytes=self._most(self._meter.context_bytes()),
            peak_reserved_first_step_bytes=self._most(self._first_reserved),
            allocation_retries=self._most(self._meter.allocation_retries()),
            skipped_steps=self._scaler.skipped,
            tokens_per_sample=self._tokens_per_sample(),
            joules_per_sample=joules_per_sample,
            compile_seconds=self._compile_seconds() if compiles(self._candidate.arm) else None,
            new_length_seconds=self._rehearsals.seconds_a_shape(),
            epoch_lengths=self._schedule.epoch_lengths if self._schedule else None,
            worst_batch_tokens=self._schedule.worst_tokens if self._schedule else None,
            worst_batch_step_seconds=self._worst_step_seconds(),
            worst_batch_peak_allocated_bytes=worst.allocated if worst else None,
            worst_batch_peak_reserved_bytes=worst.reserved if worst else None,
            saving_seconds=statistics.median_low(self._saving_seconds_each) or None,
            **(self._of_ranks() if ranks > 1 else {}),
        )

    def _optimizer_seconds(self) -> float | None:
        """Return the time of an update; ``None`` under DeepSpeed, which updates within the last micro-step."""
        if self._candidate.arm.zero_stage is not None:
            return None
        return statistics.median(step.optimizer_seconds for step in self._measured)

    def _of_ranks(self) -> dict[str, Any]:
        """Return the figures that only several ranks have."""
        micro = [step.micro_seconds for step in self._measured if step.micro_seconds > 0]
        return {
            "ranks": self._ranks.count,
            "rank_step_seconds": tuple(seconds / len(self._measured) for seconds in self._rank_seconds),
            "micro_step_seconds": statistics.median(micro) if micro else None,
            "last_micro_step_seconds": statistics.median(step.last_micro_seconds for step in self._measured),
        }

    def _tokens_per_sample(self) -> float | None:
        """Return the mean tokens of the samples that the measured steps ran; ``None`` where some were not seen."""
        known = [count for count in self._tokens if count is not None]
        if not known or len(known) < len(self._tokens):
            return None
        run, whole = micro_steps_to_run(self._candidate, self._effort), self._candidate.gradient_accumulation_steps
        return statistics.fmean(known) / (self._candidate.samples_per_step * run / whole)

    def _most(self, figure: int | None) -> int | None:
        """Return the largest of a figure over the ranks; ``None`` where a rank does not know it."""
        figures = self._ranks.gather(figure)
        known = [figure for figure in figures if figure is not None]
        return max(known) if len(known) == len(figures) else None

    def _largest(self, peaks: PeakBytes) -> PeakBytes:
        """Return the largest peaks of any rank."""
        each = self._ranks.gather(peaks)
        return PeakBytes(max(peak[0] for peak in each), max(peak[1] for peak in each))

    def _joules_per_sample(self, step_seconds: float) -> float | None:
        """Return mean power over the measured steps times the seconds of a sample; ``None`` where it is not known."""
        run_seconds = sum(step.seconds for step in self._measured)
        each = [joules for joules in self._ranks.gather(self._energy.joules) if joules is not None]
        joules = sum(each) if len(each) == self._ranks.count else None
        least = _LEAST_REHEARSED_SECONDS if self._rehearsals.steps else _LEAST_ENERGY_SECONDS
        if joules is None or run_seconds < least:
            return None
        return joules / run_seconds * step_seconds / self._candidate.samples_per_step

    def _compile_seconds(self) -> float:
        """Return the extra time of the warm-up steps, compared with as many measured ones."""
        usual = statistics.median(step.seconds for step in self._measured)
        return max(0.0, sum(step.seconds - usual for step in self._warmup))

    def _worst_step_seconds(self) -> float | None:
        """Return the fastest warm-up step on the largest batches that had optimizer state.

        ``None`` without a dataset.
        """
        if self._schedule is None or self._schedule.worst_tokens is None:
            return None
        return min((step.seconds for step in self._warmup[1 : self._schedule.worst_steps]), default=None)

"""Time the optimizer steps of a training, whatever runs them, and decide when they are enough.

Steps whose shapes are new to the GPU are told apart: their extra time is the cost of a new shape.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

from autotune.core.candidate import Candidate
from autotune.core.lengths import PlannedRun
from autotune.core.measured_steps import LEAST_CORE_WAIT, is_enough, most_measured_steps
from autotune.core.outcome import Effort, Measurement
from autotune.core.real_training import PeakBytes
from autotune.space.arms import compiles
from autotune.space.space import batches_ahead
from autotune.worker.dataset.prepared import Schedule
from autotune.worker.rendezvous import Ranks
from autotune.worker.trial.batch_shapes import BatchShapes, RunEstimate, Timed, estimate_run, without_new
from autotune.worker.trial.cores import CoreWait
from autotune.worker.trial.free_steps import FreeSteps, most_free_steps
from autotune.worker.trial.meter import BusyStep, Meter, Profiler, growth_of
from autotune.worker.trial.step_checks import NotTrainedError, ScalerWatch, StepChecks
from autotune.worker.trial.training_watch import StepCounts, StepListener

# Where the number of calls without gradients varies from step to step, more than so many times the most so far are an
# evaluation. A choice.
_FAR_MORE = 2
# Once three steps are timed, stop when those with new shapes or evaluations took this many times ``max_seconds``, or
# those with new shapes are as many times ``max_steps``. Choices.
_PATIENCE = 1.5
_MOST_NEW = 2
# NVML's energy counter is updated every 20 to 100 ms, depending on the GPU. Over shorter times its steps would show.
_LEAST_ENERGY_SECONDS = 0.5
# Number of tensors without a gradient whose names are kept. A choice.
_NAMED = 3


Number = TypeVar("Number", int, float)

MOST_SKIPPED_STEPS = 20
"""Most steps that are run again because fp16's gradient scaler skipped their update.

Each halves the scale of 65,536, so it is below 1 after 17 of them."""


def most_steps(candidate: Candidate, effort: Effort, *, are_alike: bool = True) -> int:
    """Return the upper limit of the number of steps in a trial, without the repeats of a ``Schedule``.

    Where batches differ, steps are not ``are_alike``: no steps are added to wait until a slow one recurs.
    """
    measured = most_measured_steps(effort) if are_alike else effort.max_steps
    skipped = MOST_SKIPPED_STEPS if candidate.arm.precision == "fp16" else 0
    return effort.warmup_steps + measured + most_free_steps(candidate) + effort.busy_steps + skipped


def micro_steps_to_run(candidate: Candidate, effort: Effort) -> int:
    """Return the number of micro-steps to run in each step: all of the candidate's, or a few that stand for them."""
    return min(candidate.gradient_accumulation_steps, max(3, effort.max_micro_steps))


def prefetched_steps(candidate: Candidate, effort: Effort) -> int:
    """Return the number of steps whose batches the data loader workers may have prefetched.

    Steps on prefetched batches say nothing about how fast data is loaded.
    """
    return math.ceil(batches_ahead(candidate.arm) / micro_steps_to_run(candidate, effort))


class Evaluations:
    """Finds steps with an evaluation: they call models without gradients more often than usual.

    Other steps may make such calls, too, as of a teacher.
    """

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._found: list[tuple[int, float]] = []

    def is_one(self, calls: int) -> bool:
        """Record a step's number of calls without gradients; return whether the step has an evaluation in it.

        The usual count is that of at least half of the steps so far, and more calls are an evaluation. Where no count
        is usual, only more than ``_FAR_MORE`` times the most calls so far are one.
        """
        counts = self._counts
        usual = min(statistics.multimode(counts), default=calls)
        most = usual if 2 * counts.count(usual) >= len(counts) else _FAR_MORE * max(counts)
        is_one = calls > most
        counts.append(calls)
        return is_one

    def add(self, step: int, seconds: float) -> None:
        """Record the time of a step with an evaluation; ``step`` is its index."""
        self._found.append((step, seconds))

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps with an evaluation."""
        return sum(seconds for _, seconds in self._found)

    def seconds(self, step_seconds: float) -> float | None:
        """Return the mean seconds of an evaluation, without its step's own; ``None`` where none was seen."""
        return max(0.0, self.total_seconds / len(self._found) - step_seconds) if self._found else None

    @property
    def every(self) -> int | None:
        """Number of steps from one evaluation to the next; ``None`` where it varied, or fewer than two were seen."""
        at = [step for step, _ in self._found]
        between = {later - earlier for earlier, later in itertools.pairwise(at)}
        return between.pop() if len(between) == 1 else None


class StepTimer(StepListener):
    """Times the steps of a training, synchronizing with the device once in each, except in ``FreeSteps``.

    Whatever runs the training reports its steps to the timer (``StepListener``). ``on_enough`` is called with the
    measurement inside the last step, ``on_step`` with the step's number after each. ``checks`` judges whether each step
    trained, outside the timed part. ``profiler`` records steps after the timed ones, where ``effort`` asks for some.
    ``run`` is the training that the speed is promised for; ``shapes`` tells which shapes are new, by default none.

    With several ranks, each has such a timer. After every warm-up and timed step, outside the timed part, the ranks
    exchange their times, and all record that of the slowest, so that all of them stop after the same step.
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
        run: PlannedRun | None = None,
        shapes: BatchShapes | None = None,
        profiler: Profiler | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._meter = meter
        self.checks = checks
        self._run = run or PlannedRun()
        self._shapes = shapes or BatchShapes(settles=0)
        self._ranks = ranks or Ranks()
        self._candidate = candidate
        self._effort = effort
        self._on_enough = on_enough
        self._on_step = on_step
        self._schedule = schedule
        self._evaluations = Evaluations()
        self._held: list[int | None] = []
        """Bytes that were held after each step."""
        self._worst_peaks: PeakBytes | None = None
        self._worst_tokens: int | None = None
        self._warmup: list[Timed] = []
        self._timed: list[Timed] = []
        self._marks: list[Any] = []
        self._saving_seconds = 0.0
        self._previous_end = 0.0
        self._begin = 0.0
        self._scaler = ScalerWatch()
        self._steps_seen = 0
        self._skipped_steps = 0
        self._warmup_steps = effort.warmup_steps
        run_each, accumulation = micro_steps_to_run(candidate, effort), candidate.gradient_accumulation_steps
        self._busy = BusyStep(profiler, meter, run_each, accumulation)
        self._busy_steps = 0
        self._free = FreeSteps(candidate)
        self._is_profiled = False
        self.is_finished = False
        """Whether enough was measured, so that the training may stop."""
        self.pending: Measurement | None = None
        """The measurement, once enough steps are timed; ``None`` before. Profiling may add to the measurement, and is
        allowed to fail without losing it."""
        self._joules: float | None = 0.0
        self._joules_before: float | None = None
        self._core_wait = CoreWait()

    def begin(self, optimizer: Any = None) -> None:
        """Start the clock of the first step; ``optimizer`` may hold a gradient scaler, as the Trainer's does."""
        self._scaler = ScalerWatch(optimizer)
        self._meter.synchronize()
        self._ranks.gather(None)
        self.checks.watch.begin()
        if self._is_warm:
            self.checks.begin_timed()
        self.start_clock()

    def mark(self) -> Any:
        """Mark this point on the device's timeline."""
        return self._meter.mark()

    def step_begins(self) -> None:
        """Record the arrival of the step's first batch: the time since the last step was spent waiting for data."""
        self._begin = perf_counter()
        self._marks = [self._meter.mark()]
        is_measured = self.pending is not None and not self._free.is_under_way
        self._is_profiled = is_measured and not self._shapes.new
        if self._is_profiled:
            self._busy.step_begins()

    def micro_step_ends(self) -> None:
        """Record the end of a micro-step that is not the last."""
        self._marks.append(self._meter.mark())
        if self._is_profiled:
            self._busy.micro_step_ends(len(self._marks) - 1)

    def step_ends(self, marks: tuple[Any, Any], wait_seconds: float | None = None) -> None:
        """Record the step, and stop the training once enough was measured."""
        self._marks += marks
        if self._free.is_under_way:
            self._end_free(marks[1])
            return
        self._meter.synchronize()
        end = perf_counter()
        if self.pending is not None:
            self._end_profiled(self.pending)
            return
        seen = self.checks.step_ends(len(self._marks) - 2)
        step = self._timed_step(end, wait_seconds, seen.tokens)
        self._previous_end = end
        evaluates = self._evaluations.is_one(seen.calls_without_gradients)
        # Skipped updates cost less time, and before the first update the optimizer has no state.
        step, is_skipped, evaluates = self._of_all_ranks(step, self._was_skipped(seen), evaluates)
        is_warm = self._is_warm
        is_timed = is_warm and not is_skipped and not evaluates
        if is_timed:
            self._add_energy()
            self._core_wait.add()
            self._timed.append(step)
        elif evaluates:
            # Of this step only the memory peaks are used.
            self._evaluations.add(self._steps_seen, step.seconds)
        elif not is_warm:
            self._warmup.append(step)
            self._warmup_steps += is_skipped
            if self._schedule is not None and len(self._warmup) == self._schedule.worst_steps:
                self._worst_peaks = self._meter.peaks()
                self._worst_tokens = self._shapes.longest_row or None
        self._skipped_steps += is_skipped
        self._step_is_over()
        if is_timed and self._enough():
            self.pending = self.measurement()
            self._free.begin(self.pending)
            self._finish_free()
        elif self._is_warm:
            self.checks.begin_timed()
            self.start_clock()

    def _of_all_ranks(self, step: Timed, is_skipped: bool, evaluates: bool) -> tuple[Timed, bool, bool]:
        """Return the step of the slowest rank, and whether any rank skipped the update, and evaluated."""
        told = self._ranks.gather((step, is_skipped, evaluates))
        each = [Timed(*figures) for figures, *_ in told]
        known = [step.real_tokens for step in each if step.real_tokens is not None]
        slowest = max(each, key=lambda step: step.seconds)._replace(
            new_shapes=max(step.new_shapes for step in each),
            tokens=max(step.tokens for step in each),
            real_tokens=sum(known) if len(known) == len(each) else None,
        )
        return slowest, any(skipped for _, skipped, _ in told), any(found for *_, found in told)

    def _add_energy(self) -> None:
        """Add the energy of the timed step that ends; one unknown reading makes the sum unknown."""
        before, after = self._joules_before, self._meter.energy_joules()
        if self._joules is None or before is None or after is None:
            self._joules = None
        else:
            self._joules += after - before

    def _was_skipped(self, seen: StepCounts) -> bool:
        """Return whether a gradient scaler skipped the update of the step that ends.

        Refuses the training if ``MOST_SKIPPED_STEPS`` steps before it were skipped, too.
        """
        # A loop of the user's own gives ``begin`` no optimizer; there only ``seen`` tells of skipped updates.
        is_skipped = self._scaler.step_was_skipped() or seen.skipped_steps > 0
        if is_skipped and self._skipped_steps == MOST_SKIPPED_STEPS:
            self.checks.refuse(
                NotTrainedError(
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
        self._held.append(self._meter.allocated_bytes())
        self._on_step(self._steps_seen)

    def _end_free(self, mark: Any) -> None:
        """Record a free step that ends at ``mark``."""
        new, tokens = self._end_batches()
        self._step_is_over()
        self.checks.step_is_dropped()
        self._free.ends(mark, tokens, is_known=not new and not self._saving_seconds)
        self._saving_seconds = 0.0
        if not self._free.is_under_way:
            self._meter.synchronize()
        self._finish_free()

    def _finish_free(self) -> None:
        """After the last free step, scale the measured times to theirs; end the measuring unless steps are profiled."""
        if self._free.is_under_way or self.pending is None:
            return
        self.pending = self._free.measured(self.pending, self._timed, self._meter.seconds_between)
        if self._busy.is_broken or not self._effort.busy_steps:
            self._finish(self.pending)

    def _end_profiled(self, measured: Measurement) -> None:
        """Record a step after the timed ones, which is profiled unless its shapes are new."""
        tokens = self._end_batches()[1]
        if self._is_profiled:
            # The step's tokens over those of the run's mean step.
            cost = tokens / self._run.step_tokens if tokens and self._run.step_tokens else 1.0
            self._busy.step_ends(measured.steady_step_seconds or measured.step_seconds, cost)
            self._busy_steps += 1
        self._step_is_over()
        self.checks.step_is_dropped()
        if self._busy_steps >= self._effort.busy_steps or any(self._ranks.gather(self._busy.is_broken)):
            self._finish(measured)

    def end(self) -> None:
        """Hand on the measurement if the training ends after the timed steps, but before those planned after them."""
        if self.pending is not None and not self.is_finished:
            self._finish(self.pending)

    def _finish(self, measured: Measurement) -> None:
        """Call ``on_enough`` with the measurement and the busy share: the training may stop."""
        self.is_finished = True
        self.pending = replace(
            measured, gpu_busy_share=self._busy.share, gpu_seconds_by_kind=self._busy.seconds_by_kind
        )
        self._on_enough(self.pending)

    def takes(self, batch: Any) -> None:
        """Record the shapes of a batch before the step trains on it."""
        self._shapes.take(batch)

    def _end_batches(self) -> tuple[float, float]:
        """Return the new shapes of the step that ends, and the tokens of the candidate's whole step; 0 if unknown."""
        new, tokens = self._shapes.end_step()
        return new, tokens * self._candidate.gradient_accumulation_steps

    def start_clock(self) -> None:
        """Start the clock of a step, after reading the counters, which takes time itself."""
        self._joules_before = self._meter.energy_joules()
        self._core_wait.read()
        self._previous_end = perf_counter()

    @property
    def micro_steps_begun(self) -> int:
        """Number of micro-steps that have begun in the current step."""
        return len(self._marks)

    @property
    def has_measured(self) -> bool:
        """Whether at least one step was timed, so that the training may end with a measurement."""
        return bool(self._timed)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Exclude the time of the block, in which a checkpoint is saved, from the step's time."""
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
        if self._is_profiled:
            self._busy.stop()
        self._meter.synchronize()
        self._end_batches()
        self.checks.step_is_dropped()
        self.start_clock()
        if self._free.is_under_way:
            self._free.ends(None, 0.0, is_known=False)
            self._finish_free()

    def _timed_step(self, end: float, wait_seconds: float | None, real_tokens: int | None) -> Timed:
        """Return the times of the step that ended at ``end``, and clear what was recorded of it."""
        marks, between = self._marks, self._meter.seconds_between
        # The second micro-step is the first that adds to existing gradients, as all later ones do. Where batches differ
        # in length, the mean is over all micro-steps, since tokens are. With several ranks it is over the first two,
        # since ranks exchange gradients in the last.
        differ = self._schedule is not None or self._varies
        first, last = 1, 2
        if differ:
            first, last = 0, len(marks) - 2 if self._ranks.count == 1 else 2
        data_seconds, saving_seconds = self._begin - self._previous_end, self._saving_seconds
        self._saving_seconds = 0.0
        new_shapes, tokens = self._end_batches()
        micro_seconds = between(marks[first], marks[last]) / (last - first) if len(marks) > 4 else 0.0
        if wait_seconds is not None:
            data_seconds += wait_seconds
            # The time between two marks includes the wait for a batch, which may be shorter than the mean wait.
            micro_seconds = max(0.0, micro_seconds - data_seconds / max(1, len(marks) - 2))
        return Timed(
            seconds=end - self._previous_end,
            data_seconds=data_seconds,
            optimizer_seconds=between(marks[-2], marks[-1]),
            micro_seconds=micro_seconds,
            new_shapes=new_shapes,
            tokens=tokens,
            saving_seconds=saving_seconds,
            real_tokens=real_tokens,
        )

    def _enough(self) -> bool:
        """Return whether to stop timing: enough is measured, the candidate is behind, or new shapes take too long."""
        if self._is_behind():
            return True
        new = [step.seconds for step in self._timed if step.new_shapes]
        effort = self._effort
        takes_long = sum(new) + self._evaluations.total_seconds >= _PATIENCE * effort.max_seconds
        if len(self._timed) >= 3 and (takes_long or len(new) >= _MOST_NEW * effort.max_steps):
            return True
        known = [step.seconds for step in self._timed if not step.new_shapes]
        width = self._estimate().step.relative_half_width
        if not is_enough(known, effort, width, are_alike=False):
            return False
        if self._varies or is_enough(known, effort, width):
            return True
        # Only a slow step is left to recur. Steps are slow because of other processes where threads wait for a core.
        return any(self._ranks.gather((self._core_wait.share() or 0.0) >= LEAST_CORE_WAIT))

    @property
    def _varies(self) -> bool:
        return self._run.varies or len({step.tokens for step in self._timed}) > 1

    def _is_behind(self) -> bool:
        """Return whether at least two steps show that the candidate cannot win: a single one may be slow by chance."""
        behind = self._effort.behind_step_seconds
        known = [step.seconds for step in self._whole_steps() if not step.new_shapes]
        if behind is None or len(known) < 2:
            return False
        # The first three steps of a schedule are a fast, a slow and a medium one.
        return min(known) > behind if self._schedule is None else len(known) == 3 and statistics.fmean(known) > behind

    def _estimate(self) -> RunEstimate:
        """Return the estimated step time of the run."""
        return estimate_run(self._whole_steps(), self._run)

    def _whole_steps(self) -> list[Timed]:
        """Return the timed steps with the time of the candidate's micro-steps that were not run added."""
        run = micro_steps_to_run(self._candidate, self._effort)
        missing = self._candidate.gradient_accumulation_steps - run

        known = [step for step in self._timed if not step.new_shapes]

        def whole(step: Timed) -> Timed:
            micro_seconds = step.micro_seconds
            if step.new_shapes and known:
                # Shapes are new once, not in each of the missing micro-steps.
                like = min(known, key=lambda one: abs(one.tokens - step.tokens))
                micro_seconds = like.micro_seconds * (step.tokens / like.tokens if like.tokens else 1.0)
            added = missing * (micro_seconds + step.data_seconds / run)
            return step._replace(seconds=step.seconds + added)

        return [whole(step) for step in self._timed]

    def measurement(self) -> Measurement:
        """Return the measurement so far; needs at least one measured step."""
        estimate = self._estimate()
        seconds, spread = estimate.step
        whole = tuple(step.seconds for step in without_new(self._whole_steps()))
        peaks = self._largest_peaks(self._meter.peaks())
        run = micro_steps_to_run(self._candidate, self._effort)
        average = statistics.median if self._schedule is None else statistics.fmean
        data = average([step.data_seconds for step in self._timed])
        worst = self._largest_peaks(self._worst_peaks) if self._worst_peaks else None
        trained, untrained = self.checks.watch.trained, self.checks.watch.untrained
        arm, timed, middle = self._candidate.arm, self._timed, statistics.median
        usual = middle(step.seconds for step in timed)
        micro = [step.micro_seconds for step in timed if step.micro_seconds > 0]
        return Measurement(
            trained_tensors=len(trained) if trained is not None else None,
            untrained=tuple(untrained[:_NAMED]),
            untrained_tensors=len(untrained),
            step_seconds=seconds,
            step_seconds_each=whole,
            relative_spread=spread if len(whole) > 1 else 0.0,
            steady_error=estimate.steady_error if len(whole) > 1 else 0.0,
            samples_per_second=self._candidate.samples_per_step / seconds,
            peak_allocated_bytes=peaks.allocated,
            peak_reserved_bytes=peaks.reserved,
            warmup_step_seconds=tuple(step.seconds for step in self._warmup),
            micro_steps_run=run,
            # DeepSpeed updates within the last micro-step.
            optimizer_seconds=None if arm.zero_stage is not None else middle(step.optimizer_seconds for step in timed),
            data_seconds=data * self._candidate.gradient_accumulation_steps / run,
            device_used_bytes=self._largest_known(self._meter.device_used_bytes()),
            context_bytes=self._largest_known(self._meter.context_bytes()),
            allocation_retries=self._largest_known(self._meter.allocation_retries()),
            skipped_steps=self._skipped_steps,
            tokens_per_sample=self._tokens_per_sample(),
            joules_per_sample=self._joules_per_sample(seconds),
            # The extra time of the warm-up steps over as many median timed steps.
            compile_seconds=max(0.0, sum(step.seconds - usual for step in self._warmup)) if compiles(arm) else None,
            steady_step_seconds=estimate.steady_seconds,
            new_shape_seconds=estimate.shape_seconds,
            shapes_seen=self._shapes.count or None,
            run_shapes=self._run.new_shapes,
            epoch_shapes=self._run.epoch_shapes,
            new_shapes_in_steps=self._run.new_in_steps,
            run_steps=self._run.steps,
            run_epochs=self._run.epochs,
            batches_vary=self._varies,
            worst_batch_tokens=self._worst_tokens,
            worst_batch_step_seconds=self._worst_step_seconds(),
            worst_batch_peak_allocated_bytes=worst.allocated if worst else None,
            worst_batch_peak_reserved_bytes=worst.reserved if worst else None,
            core_wait_share=self._largest_known(self._core_wait.share()),
            evaluation_seconds=self._evaluations.seconds(statistics.fmean(step.seconds for step in self._timed)),
            evaluates_every=self._evaluations.every,
            growth_bytes=self._largest_known(growth_of(self._held, self._meter.fewest_growing_steps)),
            saving_seconds=statistics.median_low(one.saving_seconds for one in [*self._warmup, *self._timed]) or None,
            ranks=self._ranks.count,
            micro_step_seconds=statistics.median(micro) if micro and self._ranks.count > 1 else None,
        )

    def _tokens_per_sample(self) -> float | None:
        """Return the mean tokens of a sample in the timed steps, without padding; ``None`` where some were not seen."""
        known = [step.real_tokens for step in self._timed if step.real_tokens is not None]
        if len(known) < len(self._timed):
            return None
        run, whole = micro_steps_to_run(self._candidate, self._effort), self._candidate.gradient_accumulation_steps
        return statistics.fmean(known) / (self._candidate.samples_per_step * run / whole)

    def _largest_known(self, figure: Number | None) -> Number | None:
        """Return the largest figure of the ranks that know theirs; ``None`` where no rank does."""
        return max((each for each in self._ranks.gather(figure) if each is not None), default=None)

    def _largest_peaks(self, peaks: PeakBytes) -> PeakBytes:
        """Return the largest peaks of any rank."""
        each = self._ranks.gather((peaks.allocated, peaks.reserved))
        return PeakBytes(max(allocated for allocated, _ in each), max(reserved for _, reserved in each))

    def _joules_per_sample(self, step_seconds: float) -> float | None:
        """Return the mean power of all ranks' devices in the timed steps, times the seconds of a sample.

        ``None`` where a device's energy is not known, or the steps took less than ``_LEAST_ENERGY_SECONDS``.
        """
        run_seconds = sum(step.seconds for step in self._timed)
        each = [joules for joules in self._ranks.gather(self._joules) if joules is not None]
        joules = sum(each) if len(each) == self._ranks.count else None
        if joules is None or run_seconds < _LEAST_ENERGY_SECONDS:
            return None
        return joules / run_seconds * step_seconds / self._candidate.samples_per_step

    def _worst_step_seconds(self) -> float | None:
        """Return the seconds of the fastest warm-up step on the largest batches, without the first.

        The first step has no optimizer state yet. ``None`` where there is no other, without a dataset, and for images.
        """
        if self._schedule is None or self._worst_tokens is None:
            return None
        return min((step.seconds for step in self._warmup[1 : self._schedule.worst_steps]), default=None)

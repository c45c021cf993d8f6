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
from autotune.worker.trial.batch_shapes import BatchShapes, Timed, estimate_run, without_new
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
# Most tensors without a gradient whose names are kept. A choice.
_MOST_NAMED_TENSORS = 3

Number = TypeVar("Number", int, float)

MOST_SKIPPED_STEPS = 20
"""Most steps whose update fp16's gradient scaler may skip. Each halves its scale, 65,536: below 1 after 17 steps."""


def most_steps(candidate: Candidate, effort: Effort, *, are_alike: bool = True) -> int:
    """Return the most steps that a trial runs: warm-up, timed, free, profiled and skipped ones.

    The repeated steps of a ``Schedule`` come on top. Where steps ``are_alike``, since batches have one size, more are
    timed until a slow step recurs.
    """
    measured = most_measured_steps(effort) if are_alike else effort.max_steps
    skipped = MOST_SKIPPED_STEPS if candidate.arm.precision == "fp16" else 0
    return effort.warmup_steps + measured + most_free_steps(candidate) + effort.busy_steps + skipped


def micro_steps_to_run(candidate: Candidate, effort: Effort) -> int:
    """Return the number of micro-steps to run in each step: all of the candidate's, or a few that stand for them."""
    # Three stand for all: the first, one that adds to existing gradients as later ones do, and the last.
    return min(candidate.gradient_accumulation_steps, max(3, effort.max_micro_steps))


def prefetched_steps(candidate: Candidate, effort: Effort) -> int:
    """Return the number of steps whose batches the data loader workers may have prefetched.

    Steps on prefetched batches say nothing about how fast data is loaded.
    """
    return math.ceil(batches_ahead(candidate.arm) / micro_steps_to_run(candidate, effort))


class Evaluations:
    """Finds steps with an evaluation: they call models without gradients more often than others (say, of a teacher)."""

    def __init__(self) -> None:
        self._call_counts: list[int] = []
        self._steps: list[tuple[int, float]] = []
        """Index and seconds of each step with an evaluation."""

    def has_evaluation(self, calls: int) -> bool:
        """Record a step's number of calls without gradients; return whether the step contains an evaluation.

        A count that at least half of the steps so far have is usual, and a step with more calls has an evaluation.
        Where no count is usual, a step needs more than ``_FAR_MORE`` times the most calls so far.
        """
        counts = self._call_counts
        usual = min(statistics.multimode(counts), default=calls)
        most = usual if 2 * counts.count(usual) >= len(counts) else _FAR_MORE * max(counts)
        counts.append(calls)
        return calls > most

    def add(self, step: int, seconds: float) -> None:
        """Record the time of a step with an evaluation; ``step`` is its index."""
        self._steps.append((step, seconds))

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps with an evaluation."""
        return sum(seconds for _, seconds in self._steps)

    def seconds(self, step_seconds: float) -> float | None:
        """Return the mean seconds of an evaluation, less ``step_seconds`` of its step; ``None`` where none was seen."""
        return max(0.0, self.total_seconds / len(self._steps) - step_seconds) if self._steps else None

    @property
    def every(self) -> int | None:
        """Number of steps from one evaluation to the next; ``None`` where it varied, or fewer than two were seen."""
        gaps = {later - earlier for (earlier, _), (later, _) in itertools.pairwise(self._steps)}
        return gaps.pop() if len(gaps) == 1 else None


class StepTimer(StepListener):
    """Times the steps of a training: first warm-up steps, then timed ones, then perhaps free and profiled ones.

    Whatever runs the training reports its steps to the timer (``StepListener``). The timer waits for the device at the
    end of each step, except of free ones (``FreeSteps``). ``on_enough`` is called with the measurement inside the last
    step, ``on_step`` with the step's number after each. ``checks`` judges whether each step trained, outside the timed
    part. ``profiler`` records ``effort.busy_steps`` steps after the timed ones. ``run`` is the training that the speed
    is promised for; ``shapes`` tells which shapes are new, by default none.

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
        self._held_bytes: list[int | None] = []
        """Bytes that were allocated after each step."""
        self._worst_peaks: PeakBytes | None = None
        """Peak memory of the steps on the largest batches, with which a ``Schedule`` begins."""
        self._worst_tokens: int | None = None
        """Tokens of the longest row in these batches."""
        self._warmup: list[Timed] = []
        self._timed: list[Timed] = []
        self._marks: list[Any] = []
        """Points on the device's timeline in this step: its begin, the ends of its micro-steps, the update's end."""
        self._saving_seconds = 0.0
        self._previous_ended_at = 0.0
        self._began_at = 0.0
        self._scaler = ScalerWatch()
        self._steps_seen = 0
        self._skipped_steps = 0
        self._warmup_steps = effort.warmup_steps
        run_each, accumulation = micro_steps_to_run(candidate, effort), candidate.gradient_accumulation_steps
        self._busy = BusyStep(profiler, meter, run_each, accumulation)
        self._profiled_steps = 0
        self._free = FreeSteps(candidate)
        self._is_profiled = False
        self.is_finished = False
        """Whether enough was measured, so that the training may stop."""
        self.timed_measurement: Measurement | None = None
        """The measurement, once enough steps are timed; ``None`` before. Free and profiled steps may still change it,
        and may fail without losing it."""
        self._joules: float | None = 0.0
        self._joules_before: float | None = None
        self._core_wait = CoreWait()

    def begin(self, optimizer: Any = None) -> None:
        """Start the clock of the first step; ``optimizer`` may hold a gradient scaler, as the Trainer's does."""
        self._scaler = ScalerWatch(optimizer)
        self._meter.synchronize()
        # No rank starts its clock before all are ready.
        self._ranks.gather(None)
        self.checks.watch.begin()
        if self._is_warm:  # Without warm-up steps, the first step is timed already.
            self.checks.begin_timed()
        self.start_clock()

    def mark(self) -> Any:
        """Mark this point on the device's timeline."""
        return self._meter.mark()

    def step_begins(self) -> None:
        """Record the arrival of the step's first batch: the time since the last step was spent waiting for data."""
        self._began_at = perf_counter()
        self._marks = [self._meter.mark()]
        is_after_timed = self.timed_measurement is not None and not self._free.is_under_way
        # Steps with new shapes are untypical: kernels are loaded in them.
        self._is_profiled = is_after_timed and not self._shapes.new
        if self._is_profiled:
            self._busy.step_begins()

    def micro_step_ends(self) -> None:
        """Record the end of a micro-step that is not the last."""
        self._marks.append(self._meter.mark())
        if self._is_profiled:
            self._busy.micro_step_ends(len(self._marks) - 1)

    def step_ends(self, marks: tuple[Any, Any], wait_seconds: float | None = None) -> None:
        """Record the step that ends, by what it is for: free, profiled, timed, evaluating or warm-up.

        ``marks`` are from before and after its update. ``wait_seconds`` were spent waiting for batches after the first;
        ``None`` where all batches came before the step began. After enough timed steps, make the measurement.
        """
        self._marks += marks
        if self._free.is_under_way:
            self._end_free(marks[1])
            return
        self._meter.synchronize()
        ended_at = perf_counter()
        if self.timed_measurement is not None:
            self._end_profiled(self.timed_measurement)
            return
        # Two marks end no micro-step: those of the step's begin and of the update's end.
        counts = self.checks.step_ends(micro_steps=len(self._marks) - 2)
        step = self._timed_step(ended_at, wait_seconds, counts.tokens)
        self._previous_ended_at = ended_at
        evaluates = self._evaluations.has_evaluation(counts.calls_without_gradients)
        step, is_skipped, evaluates = self._of_all_ranks(step, self._was_skipped(counts), evaluates)
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
            # A skipped update costs less time, and leaves the optimizer without its state: one more warm-up step.
            self._warmup_steps += is_skipped
            # The first steps of a schedule are on the largest batches.
            if self._schedule is not None and len(self._warmup) == self._schedule.worst_steps:
                self._worst_peaks = self._meter.peaks()
                self._worst_tokens = self._shapes.longest_row or None
        self._skipped_steps += is_skipped
        self._step_is_over()
        if is_timed and self._enough():
            self.timed_measurement = self.measurement()
            self._free.begin(self.timed_measurement)
            self._finish_free()
        elif self._is_warm:  # The next step is timed.
            self.checks.begin_timed()
            self.start_clock()

    def _of_all_ranks(self, step: Timed, is_skipped: bool, evaluates: bool) -> tuple[Timed, bool, bool]:
        """Exchange a step among the ranks; return the slowest rank's, and whether any skipped its update or evaluated.

        So all ranks treat the step alike. Its shapes and tokens are those of the rank with most, its real tokens those
        of all ranks together.
        """
        of_ranks = self._ranks.gather((step, is_skipped, evaluates))
        steps = [Timed(*figures) for figures, *_ in of_ranks]
        known = [step.real_tokens for step in steps if step.real_tokens is not None]
        slowest = max(steps, key=lambda step: step.seconds)._replace(
            new_shapes=max(step.new_shapes for step in steps),
            tokens=max(step.tokens for step in steps),
            real_tokens=sum(known) if len(known) == len(steps) else None,
        )
        return slowest, any(skipped for _, skipped, _ in of_ranks), any(found for *_, found in of_ranks)

    def _add_energy(self) -> None:
        """Add the energy of the timed step that ends; one unknown reading makes the sum unknown."""
        before, after = self._joules_before, self._meter.energy_joules()
        if self._joules is None or before is None or after is None:
            self._joules = None
        else:
            self._joules += after - before

    def _was_skipped(self, counts: StepCounts) -> bool:
        """Return whether a gradient scaler skipped the update of the step that ends.

        Refuses the training if ``MOST_SKIPPED_STEPS`` steps before it were skipped, too.
        """
        # A loop of the user's own gives ``begin`` no optimizer; there only the counts tell of skipped updates.
        is_skipped = self._scaler.step_was_skipped() or counts.skipped_steps > 0
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
        """Count a step of any kind, record the memory after it, and report it."""
        self._steps_seen += 1
        self._held_bytes.append(self._meter.allocated_bytes())
        self._on_step(self._steps_seen)

    def _end_free(self, mark: Any) -> None:
        """Record a free step (without waiting for the device) that ends at ``mark``. Its training is not judged."""
        new_shapes, tokens = self._end_batches()
        self._step_is_over()
        self.checks.step_is_dropped()
        self._free.ends(mark, tokens, counts=not new_shapes and not self._saving_seconds)
        self._saving_seconds = 0.0
        if not self._free.is_under_way:
            self._meter.synchronize()
        self._finish_free()

    def _finish_free(self) -> None:
        """After the last free step, or without any, scale the measurement to them; finish unless steps are profiled."""
        if self._free.is_under_way or self.timed_measurement is None:
            return
        self.timed_measurement = self._free.scaled(self.timed_measurement, self._timed, self._meter.seconds_between)
        if self._busy.is_broken or not self._effort.busy_steps:
            self._finish(self.timed_measurement)

    def _end_profiled(self, measured: Measurement) -> None:
        """Record a step after the timed ones, profiled unless its shapes are new; finish after enough of them."""
        _, tokens = self._end_batches()
        if self._is_profiled:
            relative_size = tokens / self._run.step_tokens if tokens and self._run.step_tokens else 1.0
            # The profiler slows down the host, so the busy seconds are compared with those of the timed steps.
            self._busy.step_ends(measured.steady_step_seconds or measured.step_seconds, relative_size)
            self._profiled_steps += 1
        self._step_is_over()
        self.checks.step_is_dropped()
        if self._profiled_steps >= self._effort.busy_steps or any(self._ranks.gather(self._busy.is_broken)):
            self._finish(measured)

    def end(self) -> None:
        """Hand on the measurement if the training ends after the timed steps, but before all free and profiled ones."""
        if self.timed_measurement is not None and not self.is_finished:
            self._finish(self.timed_measurement)

    def _finish(self, measured: Measurement) -> None:
        """Add the GPU's busy share to the measurement, and hand it to ``on_enough``: the training may stop."""
        self.is_finished = True
        self.timed_measurement = replace(
            measured, gpu_busy_share=self._busy.share, gpu_seconds_by_kind=self._busy.seconds_by_kind
        )
        self._on_enough(self.timed_measurement)

    def takes(self, batch: Any) -> None:
        """Record the shapes of a batch before the step trains on it."""
        self._shapes.take(batch)

    def _end_batches(self) -> tuple[float, float]:
        """End the step's batches; return its new shapes, and the tokens of the candidate's whole step (0: unknown)."""
        new_shapes, mean_tokens = self._shapes.end_step()
        return new_shapes, mean_tokens * self._candidate.gradient_accumulation_steps

    def start_clock(self) -> None:
        """Start the clock of a step, after reading the counters of energy and of waits for a core, which takes time."""
        self._joules_before = self._meter.energy_joules()
        self._core_wait.read()
        self._previous_ended_at = perf_counter()

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
            self._previous_ended_at += seconds
            self._began_at += seconds
            if len(self._marks) == 1:  # Before the first micro-step ends: it begins after the save.
                self._marks = [self._meter.mark()]

    def step_is_dropped(self) -> None:
        """Discard the step that ends, such as one cut short by the end of the data, and start the next one's clock."""
        self._saving_seconds = 0.0
        if self._is_profiled:
            self._busy.stop()
        self._meter.synchronize()
        self._end_batches()
        self.checks.step_is_dropped()
        self.start_clock()
        if self._free.is_under_way:
            self._free.ends(None, 0.0, counts=False)  # Without a mark, the next step does not count either.
            self._finish_free()

    def _timed_step(self, ended_at: float, wait_seconds: float | None, real_tokens: int | None) -> Timed:
        """Return the record of the step that ended at ``ended_at``, from its marks and batches, which are then cleared.

        ``wait_seconds`` were spent waiting for batches after the first; ``real_tokens`` are without padding.
        """
        marks, between = self._marks, self._meter.seconds_between
        # The second micro-step is the first that adds to existing gradients, as all later ones do. Where batches differ
        # in length, the mean is over all micro-steps, since tokens are. With several ranks it is over the first two,
        # since ranks exchange gradients in the last.
        first, last = 1, 2
        if self._schedule is not None or self._varies:
            first, last = 0, len(marks) - 2 if self._ranks.count == 1 else 2
        data_seconds, saving_seconds = self._began_at - self._previous_ended_at, self._saving_seconds
        self._saving_seconds = 0.0
        new_shapes, tokens = self._end_batches()
        # Only steps of three or more micro-steps have one between the first and the last.
        micro_seconds = between(marks[first], marks[last]) / (last - first) if len(marks) > 4 else 0.0
        if wait_seconds is not None:
            data_seconds += wait_seconds
            # The time between two marks includes the wait for a batch, which may be shorter than the mean wait.
            micro_seconds = max(0.0, micro_seconds - data_seconds / max(1, len(marks) - 2))
        return Timed(
            seconds=ended_at - self._previous_ended_at,
            data_seconds=data_seconds,
            optimizer_seconds=between(marks[-2], marks[-1]),
            micro_seconds=micro_seconds,
            new_shapes=new_shapes,
            tokens=tokens,
            saving_seconds=saving_seconds,
            real_tokens=real_tokens,
        )

    def _enough(self) -> bool:
        """Return whether to stop timing: enough is measured, the candidate cannot win, or new shapes take too long."""
        if self._is_behind():
            return True
        of_new_shapes = [step.seconds for step in self._timed if step.new_shapes]
        effort = self._effort
        takes_long = sum(of_new_shapes) + self._evaluations.total_seconds >= _PATIENCE * effort.max_seconds
        if len(self._timed) >= 3 and (takes_long or len(of_new_shapes) >= _MOST_NEW * effort.max_steps):
            return True
        of_known_shapes = [step.seconds for step in self._timed if not step.new_shapes]
        width = estimate_run(self._whole_steps(), self._run).step.relative_half_width
        if not is_enough(of_known_shapes, effort, width, are_alike=False):
            return False
        if self._varies or is_enough(of_known_shapes, effort, width):
            return True
        # Only a slow step would have to recur. That is not waited for where other processes made it slow, as threads
        # that waited for a core show.
        return any(self._ranks.gather((self._core_wait.share() or 0.0) >= LEAST_CORE_WAIT))

    @property
    def _varies(self) -> bool:
        """Whether batches differ in their number of tokens, in the run or in the timed steps."""
        return self._run.varies or len({step.tokens for step in self._timed}) > 1

    def _is_behind(self) -> bool:
        """Return whether two or more steps, since one may be slow by chance, show that the candidate cannot win."""
        limit_seconds = self._effort.behind_step_seconds
        known = [step.seconds for step in self._whole_steps() if not step.new_shapes]
        if limit_seconds is None or len(known) < 2:
            return False
        if self._schedule is None:
            return min(known) > limit_seconds
        # The first three steps of a schedule are a fast, a slow and a medium one.
        return len(known) == 3 and statistics.fmean(known) > limit_seconds

    def _whole_steps(self) -> list[Timed]:
        """Return the timed steps, with time added for those of the candidate's micro-steps that were not run."""
        micro_steps_run = micro_steps_to_run(self._candidate, self._effort)
        missing = self._candidate.gradient_accumulation_steps - micro_steps_run
        known = [step for step in self._timed if not step.new_shapes]

        def whole(step: Timed) -> Timed:
            """Add the time of the missing micro-steps to a step."""
            micro_seconds = step.micro_seconds
            if step.new_shapes and known:
                # Shapes are new once, not in each missing micro-step: take the time of a step with similar tokens.
                similar = min(known, key=lambda other: abs(other.tokens - step.tokens))
                micro_seconds = similar.micro_seconds * (step.tokens / similar.tokens if similar.tokens else 1.0)
            added = missing * (micro_seconds + step.data_seconds / micro_steps_run)
            return step._replace(seconds=step.seconds + added)

        return [whole(step) for step in self._timed]

    def measurement(self) -> Measurement:
        """Return the measurement so far; needs at least one timed step. All ranks have to call it at once."""
        whole_steps = self._whole_steps()
        estimate = estimate_run(whole_steps, self._run)
        seconds, spread = estimate.step
        each_seconds = tuple(step.seconds for step in without_new(whole_steps))
        peaks = self._largest_peaks(self._meter.peaks())
        micro_steps_run = micro_steps_to_run(self._candidate, self._effort)
        # Steps of a schedule differ as the run's do, so that their mean is the run's.
        average = statistics.median if self._schedule is None else statistics.fmean
        data_seconds = average([step.data_seconds for step in self._timed])
        worst = self._largest_peaks(self._worst_peaks) if self._worst_peaks else None
        trained, untrained = self.checks.watch.trained, self.checks.watch.untrained
        arm, timed, median = self._candidate.arm, self._timed, statistics.median
        usual = median(step.seconds for step in timed)
        micro = [step.micro_seconds for step in timed if step.micro_seconds > 0]
        return Measurement(
            trained_tensors=len(trained) if trained is not None else None,
            untrained=tuple(untrained[:_MOST_NAMED_TENSORS]),
            untrained_tensors=len(untrained),
            step_seconds=seconds,
            step_seconds_each=each_seconds,
            relative_spread=spread if len(each_seconds) > 1 else 0.0,
            steady_error=estimate.steady_error if len(each_seconds) > 1 else 0.0,
            samples_per_second=self._candidate.samples_per_step / seconds,
            peak_allocated_bytes=peaks.allocated,
            peak_reserved_bytes=peaks.reserved,
            warmup_step_seconds=tuple(step.seconds for step in self._warmup),
            micro_steps_run=micro_steps_run,
            # DeepSpeed updates within the last micro-step.
            optimizer_seconds=None if arm.zero_stage is not None else median(step.optimizer_seconds for step in timed),
            data_seconds=data_seconds * self._candidate.gradient_accumulation_steps / micro_steps_run,
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
            evaluation_seconds=self._evaluations.seconds(statistics.fmean(step.seconds for step in timed)),
            evaluates_every=self._evaluations.every,
            growth_bytes=self._largest_known(growth_of(self._held_bytes, self._meter.fewest_growing_steps)),
            saving_seconds=statistics.median_low(one.saving_seconds for one in [*self._warmup, *self._timed]) or None,
            ranks=self._ranks.count,
            micro_step_seconds=median(micro) if micro and self._ranks.count > 1 else None,
        )

    def _tokens_per_sample(self) -> float | None:
        """Return the mean tokens of a sample in the timed steps, without padding; ``None`` where some were not seen."""
        known = [step.real_tokens for step in self._timed if step.real_tokens is not None]
        if len(known) < len(self._timed):
            return None
        micro_steps_run = micro_steps_to_run(self._candidate, self._effort)
        samples_run = self._candidate.samples_per_step * micro_steps_run / self._candidate.gradient_accumulation_steps
        return statistics.fmean(known) / samples_run

    def _largest_known(self, figure: Number | None) -> Number | None:
        """Return the largest figure of the ranks that know theirs; ``None`` where no rank does. All ranks call this."""
        return max((each for each in self._ranks.gather(figure) if each is not None), default=None)

    def _largest_peaks(self, peaks: PeakBytes) -> PeakBytes:
        """Return the largest allocated and the largest reserved peak of any rank."""
        each = self._ranks.gather((peaks.allocated, peaks.reserved))
        return PeakBytes(max(allocated for allocated, _ in each), max(reserved for _, reserved in each))

    def _joules_per_sample(self, step_seconds: float) -> float | None:
        """Return the energy of a sample: mean power of all ranks' devices in the timed steps, times its seconds.

        ``None`` where a device's energy is not known, or the steps took less than ``_LEAST_ENERGY_SECONDS``.
        """
        timed_seconds = sum(step.seconds for step in self._timed)
        each = [joules for joules in self._ranks.gather(self._joules) if joules is not None]
        joules = sum(each) if len(each) == self._ranks.count else None
        if joules is None or timed_seconds < _LEAST_ENERGY_SECONDS:
            return None
        return joules / timed_seconds * step_seconds / self._candidate.samples_per_step

    def _worst_step_seconds(self) -> float | None:
        """Return the seconds of the fastest warm-up step on the largest batches, but not of the first step.

        The first has no optimizer state yet. ``None`` where it is the only one, without a dataset, and for images.
        """
        if self._schedule is None or self._worst_tokens is None:
            return None
        return min((step.seconds for step in self._warmup[1 : self._schedule.worst_steps]), default=None)

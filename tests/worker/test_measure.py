"""Test the step timer's arithmetic and stopping rules, with a clock that the test controls."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from fake_meter import FakeClock, FakeMeter, unwatched

from autotune.core.candidate import Arm, Candidate
from autotune.core.lengths import PlannedRun
from autotune.core.outcome import Effort, Measurement
from autotune.core.units import MIB
from autotune.worker.dataset.prepared import Schedule
from autotune.worker.trial.batch_shapes import BatchShapes
from autotune.worker.trial.cores import CoreWait
from autotune.worker.trial.measure import StepTimer, micro_steps_to_run

STEADY = Effort(warmup_steps=0, min_steps=2, target_spread=0.1, max_steps=4, max_seconds=1000.0)


class Uninterrupted(CoreWait):
    def share(self) -> float | None:
        return 0.0


@dataclass
class Drive:
    """Tells a timer of steps as a training does, each part of a step taking as long as it is told."""

    candidate: Candidate
    effort: Effort
    clock: FakeClock
    measurements: list[Measurement] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    schedule: Schedule | None = None
    run_of: PlannedRun | None = None
    shapes: BatchShapes | None = None
    lengths: Sequence[int] = ()
    """Of the batch of each step."""

    def __post_init__(self) -> None:
        self.meter = FakeMeter(self.clock)
        self.timer = StepTimer(
            self.meter,
            self.candidate,
            self.effort,
            self.measurements.append,
            self.steps.append,
            unwatched(),
            self.schedule,
            self.run_of,
            self.shapes,
        )

    def run(
        self, *, data: float = 0.0, micro: tuple[float, ...] = (1.0,), optimizer: float = 0.0, extra: Any = ()
    ) -> None:
        """Steps until the timer has enough; ``extra[i]`` seconds are added to step ``i``."""
        self.timer.begin()
        while not self.timer.is_finished:
            done = len(self.steps)
            assert done < 50, "the timer never has enough"
            more = extra[done] if done < len(extra) else 0.0
            self.step(data=data, micro=micro, optimizer=optimizer, extra=more)

    def step(
        self, *, data: float = 0.0, micro: tuple[float, ...] = (1.0,), optimizer: float = 0.0, extra: float = 0.0
    ) -> None:
        run = micro_steps_to_run(self.candidate, self.effort)
        self.clock.sleep(data)
        if self.lengths:
            batch = {
                "input_ids": torch.zeros(self.candidate.per_device_train_batch_size, self.lengths[len(self.steps)])
            }
            for _ in range(run):
                self.timer.takes(batch)
        self.timer.step_begins()
        for index in range(run):
            self.clock.sleep(micro[min(index, len(micro) - 1)])
            if index < run - 1:
                self.timer.micro_step_ends()
        self.clock.sleep(extra)
        before = self.timer.mark()
        self.clock.sleep(optimizer)
        self.timer.step_ends((before, self.timer.mark()))

    @property
    def measured(self) -> Measurement:
        assert len(self.measurements) == 1
        return self.measurements[0]


def candidate(batch: int, accumulation: int = 1) -> Candidate:
    return Candidate(Arm(), batch, accumulation)


def test_a_step_is_everything_between_two_ends(clock: FakeClock) -> None:
    drive = Drive(candidate(8), STEADY, clock)
    drive.run(data=0.25, micro=(1.5,), optimizer=0.25)
    assert drive.measured.step_seconds == pytest.approx(2.0)
    assert drive.measured.data_seconds == pytest.approx(0.25)
    assert drive.measured.optimizer_seconds == pytest.approx(0.25)
    assert drive.measured.samples_per_second == pytest.approx(4.0)
    assert drive.measured.micro_steps_run == 1
    assert drive.measured.relative_spread < 0.03
    assert drive.steps == [1, 2]
    assert drive.meter.synchronized == 3, "once at the start and once a step"


def test_a_host_that_goes_on_is_measured_without_waiting_for_the_device(clock: FakeClock) -> None:
    """The timed steps, which wait, take 2 s each; those after them 1.25 s, since the host does its part meanwhile."""
    drive = Drive(Candidate(Arm(non_blocking=True), 8), STEADY, clock)
    drive.timer.begin()
    for _ in range(2):
        drive.step(data=0.5, micro=(1.25,), optimizer=0.25)
    waited = drive.meter.synchronized
    assert not drive.timer.is_finished
    for _ in range(5):
        drive.step(micro=(1.25,))
    assert drive.meter.synchronized == waited + 1
    measured = drive.measured
    assert measured.step_seconds == measured.steady_step_seconds == pytest.approx(1.25)
    assert measured.step_seconds_each == pytest.approx([1.25, 1.25])
    assert measured.samples_per_second == pytest.approx(8 / 1.25)
    assert measured.data_seconds == 0.0, "it is hidden by the GPU's time"


def test_free_steps_of_other_lengths_are_compared_with_timed_ones_of_those_lengths(clock: FakeClock) -> None:
    drive = Drive(
        Candidate(Arm(non_blocking=True), 8), replace(STEADY, min_steps=4), clock, run_of=PlannedRun(varies=True),
        shapes=BatchShapes(settles=0), lengths=[100, 200, 100, 200, 200, 200, 200, 200, 200],
    )  # fmt: skip
    drive.timer.begin()
    for tokens in drive.lengths:
        free = 0.8 if len(drive.steps) >= 4 else 1.0
        drive.step(micro=(free * tokens / 100,))
    assert drive.measured.step_seconds == pytest.approx(0.8 * 1.5)


def test_a_free_step_with_a_new_shape_or_a_save_is_left_out(clock: FakeClock) -> None:
    drive = Drive(
        Candidate(Arm(non_blocking=True), 8), STEADY, clock, run_of=PlannedRun(varies=True),
        shapes=BatchShapes(settles=1), lengths=[100, 100, 100, 100, 200, *[100] * 5],
    )  # fmt: skip
    drive.timer.begin()
    for tokens in drive.lengths:
        if len(drive.steps) == 7:
            with drive.timer.saving():
                clock.sleep(5.0)
        drive.step(micro=(0.5 if len(drive.steps) > 2 else 1.0,), extra=9.0 if tokens == 200 else 0.0)
    assert drive.measured.step_seconds == pytest.approx(0.5)


def test_what_was_timed_has_to_do_where_every_step_has_a_new_shape(clock: FakeClock) -> None:
    drive = Drive(
        Candidate(Arm(non_blocking=True), 8), STEADY, clock, run_of=PlannedRun(varies=True),
        shapes=BatchShapes(settles=1), lengths=[100, 100, 100, *range(200, 230)],
    )  # fmt: skip
    drive.run(micro=(1.0,))
    assert drive.measured.step_seconds == pytest.approx(1.0)
    assert len(drive.steps) == 3 + 3 * 4


def test_the_free_step_after_one_that_is_dropped_is_left_out(clock: FakeClock) -> None:
    drive = Drive(Candidate(Arm(non_blocking=True), 8), STEADY, clock)
    drive.timer.begin()
    for _ in range(4):
        drive.step(micro=(1.0,))
    clock.sleep(7.0)
    drive.timer.step_is_dropped()
    clock.sleep(3.0)
    for _ in range(4):
        drive.step(micro=(1.0,))
    assert drive.measured.step_seconds == pytest.approx(1.0)


def test_an_update_within_the_last_micro_step_is_not_timed_apart(clock: FakeClock) -> None:
    """So does DeepSpeed."""
    drive = Drive(Candidate(Arm(strategy="zero2", ranks=2), 8), STEADY, clock)
    drive.run(data=0.25, micro=(1.75,), optimizer=0.0)
    assert drive.measured.optimizer_seconds is None


def test_micro_steps_that_were_left_out_are_added(clock: FakeClock) -> None:
    drive = Drive(candidate(8, 8), STEADY, clock)
    drive.run(data=0.3, micro=(1.0, 0.8), optimizer=0.2)
    # Three were run: 0.3 + 1.0 + 0.8 + 0.8 + 0.2; five more take 0.8 and a third of the data time each.
    assert drive.measured.step_seconds == pytest.approx(3.1 + 5 * (0.8 + 0.1))
    assert drive.measured.step_seconds_each == pytest.approx([7.6, 7.6])
    assert drive.measured.samples_per_second == pytest.approx(64 / 7.6)
    assert drive.measured.joules_per_sample == pytest.approx(300.0 * 7.6 / 64)
    assert drive.measured.data_seconds == pytest.approx(0.8)
    assert drive.measured.optimizer_seconds == pytest.approx(0.2)
    assert drive.measured.micro_steps_run == 3


def test_where_batches_differ_all_micro_steps_that_were_run_stand_for_those_left_out(clock: FakeClock) -> None:
    drive = Drive(candidate(8, 9), STEADY, clock, run_of=PlannedRun(varies=True))
    drive.run(micro=(0.5, 0.5, 2.0), optimizer=0.2)
    assert drive.measured.step_seconds == pytest.approx(9 * 1.0 + 0.2)


def test_a_whole_accumulation_is_not_scaled(clock: FakeClock) -> None:
    in_full = Effort(warmup_steps=0, min_steps=2, target_spread=0.1, max_steps=4, max_seconds=1000.0, max_micro_steps=8)
    drive = Drive(candidate(8, 8), in_full, clock)
    drive.run(data=0.8, micro=(1.0, 0.8), optimizer=0.2)
    assert drive.measured.step_seconds == pytest.approx(0.8 + 1.0 + 7 * 0.8 + 0.2)
    assert drive.measured.data_seconds == pytest.approx(0.8)
    assert drive.measured.micro_steps_run == 8


@pytest.mark.parametrize(
    ("accumulation", "most", "run"), [(1, 3, 1), (2, 3, 2), (3, 3, 3), (64, 3, 3), (64, 5, 5), (64, 1, 3), (2, 0, 2)]
)
def test_micro_steps_to_run(accumulation: int, most: int, run: int) -> None:
    assert micro_steps_to_run(candidate(1, accumulation), Effort(max_micro_steps=most)) == run


def test_warm_up_steps_are_kept_apart(clock: FakeClock) -> None:
    drive = Drive(candidate(8), Effort(warmup_steps=2, min_steps=2, target_spread=0.1, max_seconds=1000.0), clock)
    drive.run(extra=(10.0, 5.0))
    assert drive.measured.warmup_step_seconds == pytest.approx([11.0, 6.0])
    assert drive.measured.step_seconds_each == pytest.approx([1.0, 1.0])
    assert drive.measured.joules_per_sample == pytest.approx(300.0 * 1.0 / 8)


def test_a_slow_step_counts_and_is_waited_for(clock: FakeClock) -> None:
    """It does not come again within three times the most steps: the mean has it, and says how little that is known."""
    drive = Drive(candidate(8), Effort(warmup_steps=0, max_steps=5, max_seconds=1000.0), clock)
    # Another process that made steps slow would be a reason to stop.
    drive.timer._core_wait = Uninterrupted()
    drive.run(extra=(0.0, 0.2, 30.0, 0.0, 0.1))
    assert len(drive.steps) == 15
    assert drive.measured.step_seconds == pytest.approx(1 + 30.3 / 15)
    assert drive.measured.relative_spread > 0.5


@pytest.mark.parametrize(
    ("effort", "extra", "steps"),
    [
        pytest.param(Effort(0, 3, 12, 0.02, 1000.0), (), 3, id="steady steps end at the least"),
        pytest.param(Effort(0, 3, 6, 0.01, 1000.0), (0.0, 1.0) * 6, 6, id="noisy ones at the most"),
        pytest.param(Effort(0, 3, 12, 10.0, 1000.0), (0.0, 1.0) * 6, 3, id="unless that much noise is welcome"),
        pytest.param(Effort(0, 8, 12, 0.01, 2.5), (), 3, id="time goes before the least"),
        pytest.param(Effort(0, 3, 12, 0.01, 0.1), (), 2, id="but two are measured in any case"),
        pytest.param(Effort(2, 3, 12, 0.02, 1000.0), (), 5, id="warm-up comes on top"),
        pytest.param(Effort(2, 1, 1, 0.01, 1000.0), (), 3, id="a single step where no more is asked"),
    ],
)
def test_when_it_stops(clock: FakeClock, effort: Effort, extra: tuple[float, ...], steps: int) -> None:
    drive = Drive(candidate(8), effort, clock)
    drive.run(extra=extra)
    assert drive.steps == list(range(1, steps + 1))
    assert len(drive.measured.step_seconds_each) == steps - effort.warmup_steps
    # A single step has no spread to tell.
    assert (drive.measured.relative_spread == 0.0) is (effort.max_steps == 1)


def test_memory_is_what_the_meter_says(clock: FakeClock) -> None:
    drive = Drive(candidate(8), STEADY, clock)
    held = [drive.meter.allocate(100 * MIB)]
    first = drive.timer._on_step
    drive.timer._on_step = lambda step: (first(step), held.append(drive.meter.allocate(50 * MIB)))[0]
    drive.run()
    assert drive.measured.peak_allocated_bytes == 200 * MIB
    assert drive.measured.peak_reserved_bytes == 220 * MIB
    assert drive.measured.device_used_bytes == 400 * MIB
    assert drive.measured.allocation_retries == 3


def test_too_short_a_time_tells_no_energy(clock: FakeClock) -> None:
    drive = Drive(candidate(8), STEADY, clock)
    drive.run(micro=(0.01,))
    assert drive.measured.joules_per_sample is None


def test_a_reading_of_the_energy_is_in_no_step(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(candidate(8), Effort(warmup_steps=1, min_steps=2, target_spread=0.1, max_seconds=1000.0), clock)
    monkeypatch.setattr(drive.meter, "energy_joules", lambda: clock.sleep(0.5))
    drive.run()
    assert drive.measured.step_seconds_each == pytest.approx([1.0, 1.0])
    assert drive.measured.data_seconds == pytest.approx(0.0)


def by_length(clock: FakeClock, effort: Effort, lengths: Sequence[int], run: PlannedRun, new_seconds: float) -> Drive:
    """Drive steps of a second and another for 100 tokens, and so many seconds for each length that is new."""
    drive = Drive(candidate(8), effort, clock, run_of=run, shapes=BatchShapes(settles=1), lengths=lengths)
    first = [at for at, length in enumerate(lengths) if length not in lengths[:at]]
    extra = [length * 8 / 100 + new_seconds * (at in first) for at, length in enumerate(lengths)]
    drive.run(extra=extra)
    return drive


def test_what_new_shapes_take_is_part_of_the_run_and_told_apart(clock: FakeClock) -> None:
    run = PlannedRun(steps=100, epochs=2.0, new_shapes=40, epoch_shapes=30, step_tokens=160.0, varies=True)
    lengths = (40, 10, 30, 20, 10, 30, 20, 12, 28, 12, 28)
    measured = by_length(clock, Effort(1, 5, 5, 0.0, 1000.0), lengths, run, 5.0).measured
    assert measured.steady_step_seconds == pytest.approx(1.0 + 1.6), "the mean batch of the run has 160 tokens"
    assert measured.step_seconds_each == pytest.approx([1.8, 3.4, 2.6, 1.96, 3.24]), "the second visits"
    assert measured.new_shape_seconds == pytest.approx(5.0)
    assert (measured.shapes_seen, measured.run_shapes) == (6, 40)
    assert measured.step_seconds == pytest.approx(2.6 + 5.0 * 40 / 100)
    assert measured.samples_per_second == pytest.approx(8 / measured.step_seconds)
    assert measured.steady_samples_per_second == pytest.approx(8 / 2.6)
    assert measured.first_epoch_samples_per_second == pytest.approx(8 / (2.6 + 5.0 * 30 / 50))
    assert measured.relative_spread == pytest.approx(0.0, abs=1e-6)


def test_what_is_compiled_for_the_second_length_comes_once_in_a_run(clock: FakeClock) -> None:
    run = PlannedRun(steps=100, new_shapes=40, epoch_shapes=40, step_tokens=160.0, varies=True)
    lengths = (20, 10, 30, 40, 20, 10, 30, 40)
    drive = Drive(candidate(8), Effort(1, 4, 4, 0.0, 1000.0), clock, run_of=run, shapes=BatchShapes(settles=1),
                  lengths=lengths)  # fmt: skip
    drive.run(extra=[length * 8 / 100 + new for length, new in zip(lengths, (90, 30, 1, 1, 0, 0, 0, 0), strict=True)])
    assert drive.measured.step_seconds == pytest.approx(2.6 + (30 + 39 * 1) / 100)
    assert drive.measured.new_shape_seconds == pytest.approx(69 / 40)


def test_a_graph_that_is_captured_late_is_a_new_shape_until_then(clock: FakeClock) -> None:
    """Three visits of a length take four, one and one seconds more."""
    drive = Drive(candidate(8), Effort(0, 2, 2, 0.0, 1000.0), clock, shapes=BatchShapes(settles=3), lengths=[5] * 9)
    drive.run(extra=(4.0, 1.0, 1.0))
    assert drive.measured.step_seconds_each == pytest.approx([1.0, 1.0])
    assert drive.measured.new_shape_seconds == pytest.approx(6.0)


def test_a_step_in_which_a_graph_is_captured_again_is_one_with_a_new_shape() -> None:
    shapes = BatchShapes(settles=4)
    batch = {"input_ids": torch.zeros(2, 8)}
    for _ in range(4):
        shapes.take(batch)
        assert shapes.end_step()[0] == pytest.approx(1 / 4)
    shapes.take(batch)
    shapes.take_capture()
    assert shapes.end_step()[0] == pytest.approx(1 / 4)
    shapes.take(batch)
    assert shapes.end_step()[0] == 0


def test_new_shapes_alone_are_what_is_measured_where_none_comes_again(clock: FakeClock) -> None:
    drive = by_length(clock, Effort(0, 3, 4, 0.0, 1000.0), range(10, 40), PlannedRun(), 5.0)
    assert len(drive.steps) == 8, "twice the most steps"
    assert drive.measured.new_shape_seconds is None
    assert drive.measured.step_seconds > 6.0


def test_new_shapes_are_not_waited_for_for_ever(clock: FakeClock) -> None:
    lengths = [10, 20, 30, 10, *range(40, 80)]
    drive = by_length(clock, Effort(0, 5, 9, 0.0, 4.0), lengths, PlannedRun(), 9.0)
    assert len(drive.steps) == 3, "30 s of new shapes are more than three times 4 s"


def test_waiting_for_data_is_no_cost_of_a_new_shape(clock: FakeClock) -> None:
    shapes = BatchShapes(settles=1)
    drive = Drive(candidate(8), Effort(0, 2, 2, 0.0, 1000.0), clock, shapes=shapes, lengths=[5] * 9)
    begin = drive.timer.step_begins

    def fetch() -> None:
        clock.sleep(0.4 if drive.steps else 0.9)
        begin()

    drive.timer.step_begins = fetch  # type: ignore[method-assign]
    drive.run(extra=(3.0,))
    assert drive.measured.step_seconds_each == pytest.approx([1.4, 1.4])
    assert drive.measured.new_shape_seconds == pytest.approx(3.0)


def test_a_new_shape_is_new_in_one_of_the_micro_steps_that_were_left_out(clock: FakeClock) -> None:
    """Three micro-steps are run of six; the shape is new in the first step."""
    shapes = BatchShapes(settles=1)
    drive = Drive(candidate(8, 6), Effort(0, 2, 2, 0.0, 1000.0), clock, shapes=shapes, lengths=[5] * 9)
    drive.timer.begin()
    drive.step(micro=(1.0, 4.0, 1.0))
    drive.run()
    assert drive.measured.new_shape_seconds == pytest.approx(3.0)

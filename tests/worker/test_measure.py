"""Test the step timer's arithmetic and stopping rules, with a clock that the test controls."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_meter import FakeClock, FakeMeter, unwatched

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Effort, Measurement
from autotune.core.units import MIB
from autotune.worker.dataset.schedule import Schedule
from autotune.worker.trial.measure import StepTimer, micro_steps_to_run
from autotune.worker.trial.rehearsal import Rehearsing

STEADY = Effort(warmup_steps=0, min_steps=2, target_spread=0.1, max_steps=4, max_seconds=1000.0)


@dataclass
class Drive:
    """Tells a timer of steps as a training does, each part of a step taking as long as it is told."""

    candidate: Candidate
    effort: Effort
    clock: FakeClock
    measurements: list[Measurement] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    schedule: Schedule | None = None
    rehearsing: Rehearsing | None = None

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
            self.rehearsing,
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
        self,
        *,
        data: float = 0.0,
        micro: tuple[float, ...] = (1.0,),
        optimizer: float = 0.0,
        extra: float = 0.0,
    ) -> None:
        run = micro_steps_to_run(self.candidate, self.effort)
        self.clock.sleep(data)
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


def test_the_mean_stands_for_the_steps_less_one_that_was_delayed(clock: FakeClock) -> None:
    drive = Drive(candidate(8), Effort(warmup_steps=0, max_steps=5, max_seconds=1000.0), clock)
    drive.run(extra=(0.0, 0.2, 30.0, 0.0, 0.1))
    assert drive.measured.step_seconds == pytest.approx(1.075)
    # Student's t with three degrees of freedom, to which the prior adds two.
    assert 0.08 < drive.measured.relative_spread < 0.2


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
    assert drive.measured.peak_reserved_first_step_bytes == 110 * MIB
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


def test_what_new_lengths_cost_is_told_apart(clock: FakeClock) -> None:
    # After the warm-up: a rehearsal with two new lengths, its step, a step of old ones, a rehearsal with one, its step.
    schedule = Schedule((), 1, (1.0,) * 3, 1.0, 128, new_lengths=(2, 0, 0, 1, 0), epoch_lengths=40)
    drive = Drive(candidate(8), Effort(1, 3, 3, 0.01, 1000.0), clock, schedule=schedule)
    drive.run(extra=(7.0, 5.0, 0.0, 0.0, 1.0, 0.0))
    assert drive.steps == [1, 2, 3, 4, 5, 6]
    assert drive.measured.step_seconds_each == pytest.approx([1.0, 1.0, 1.0])
    assert drive.measured.new_length_seconds == pytest.approx((5.0 + 1.0) / 3)
    assert drive.measured.epoch_lengths == 40
    assert drive.measured.joules_per_sample == pytest.approx(300.0 / 8)


def test_a_step_that_is_dropped_takes_no_energy_and_ends_a_rehearsal(clock: FakeClock) -> None:
    schedule = Schedule((), 0, (1.0,) * 3, 1.0, 128, new_lengths=(1, 0, 0, 0))
    drive = Drive(candidate(8), Effort(0, 3, 3, 0.0, 1000.0), clock, schedule=schedule)
    end, dropped = drive.timer.step_ends, []

    def end_step(marks: tuple[Any, Any]) -> None:
        if len(drive.steps) == 1 and not dropped:
            clock.sleep(10.0)
            dropped.append(True)
            drive.timer.step_is_dropped()
        else:
            end(marks)

    drive.timer.step_ends = end_step  # type: ignore[method-assign,assignment]
    drive.run(extra=(5.0,))
    assert drive.measured.step_seconds_each == pytest.approx([1.0, 1.0, 1.0])
    assert drive.measured.new_length_seconds is None, "what would have been compared was dropped"
    assert drive.measured.joules_per_sample == pytest.approx(300.0 / 8)


def test_rehearsals_are_not_gone_on_with_for_ever(clock: FakeClock) -> None:
    schedule = Schedule((), 0, (1.0,) * 9, 1.0, 128, new_lengths=(1, 0) * 9)
    drive = Drive(candidate(8), Effort(0, 5, 9, 0.0, 4.0), clock, schedule=schedule)
    drive.run(micro=(0.5,), extra=(4.0, 0.1) * 9)
    assert len(drive.measured.step_seconds_each) == 3, "12 s of rehearsals are three times 4 s"


def test_waiting_for_data_is_no_cost_of_a_new_shape(clock: FakeClock) -> None:
    rehearsing = Rehearsing(1)
    drive = Drive(candidate(8), Effort(0, 2, 2, 0.0, 1000.0), clock, rehearsing=rehearsing)
    batches = rehearsing.batches([torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 5)])
    begin = drive.timer.step_begins

    def fetch() -> None:
        next(batches)
        clock.sleep(0.1 if rehearsing.new_shapes else 0.4)
        begin()

    drive.timer.step_begins = fetch  # type: ignore[method-assign]
    drive.run(extra=(3.0,))
    assert drive.steps == [1, 2, 3]
    assert drive.measured.step_seconds_each == pytest.approx([1.4, 1.4])
    assert drive.measured.data_seconds == pytest.approx(0.4)
    assert drive.measured.new_length_seconds == pytest.approx(3.0)

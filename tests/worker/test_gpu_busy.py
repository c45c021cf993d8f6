"""Test the share of a step in which the GPU computes, and that measuring it loses no trial."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_meter import FakeClock
from test_measure import Drive

from autotune.core.candidate import Arm, Candidate
from autotune.core.lengths import PlannedRun
from autotune.core.outcome import Effort, Measurement
from autotune.worker.trial.batch_shapes import BatchShapes
from autotune.worker.trial.measure import micro_steps_to_run
from autotune.worker.trial.meter import BusyStep, busy_seconds, work_on_gpu

ONE = Effort(warmup_steps=1, min_steps=2, max_steps=2, max_seconds=1000.0, busy_steps=1)


@pytest.mark.parametrize(
    ("intervals", "seconds"),
    [
        ([(0, 10)], 10e-9),
        ([(20, 30), (0, 10)], 20e-9),
        ([(0, 10), (5, 12), (6, 7)], 12e-9),
        ([(5, 5)], 0.0),
        ([], None),
    ],
)
def test_what_overlaps_counts_once(intervals: Any, seconds: float | None) -> None:
    found = busy_seconds(intervals)
    assert found == (None if seconds is None else pytest.approx(seconds))


class TestKineto:
    """The raw events of torch.profiler, on the CPU: the names that are used are there, and none is the GPU's."""

    @pytest.fixture
    def profile(self) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3).add(1)
        return profile

    def test_the_hosts_events_are_left_out(self, profile: Any) -> None:
        assert work_on_gpu(profile) == (None, {})

    def test_kernels_are_counted_by_kind(self) -> None:
        def event(name: str, ns: int, device: str = "CUDA") -> Any:
            return SimpleNamespace(
                name=lambda: name,
                start_ns=lambda: 100,
                duration_ns=lambda: ns,
                device_type=lambda: SimpleNamespace(name=device),
                is_user_annotation=lambda: False,
            )

        events = [event("nvjet_a", 5), event("nvjet_b", 7), event("Memset (Device)", 2), event("aten::mm", 9, "CPU")]
        results = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
        busy, found = work_on_gpu(SimpleNamespace(profiler=results))
        assert busy == pytest.approx(7e-9)
        assert found == pytest.approx({"matrix_product": 12e-9, "fill": 2e-9})


class FakeProfiler:
    """The GPU is busy for a share of the time that passes on the test's clock, and slow to start."""

    def __init__(self, clock: FakeClock, share: float) -> None:
        self._clock, self._share = clock, share
        self._began: float | None = None
        self.windows: list[float] = []

    def start(self) -> None:
        assert self._began is None, "started twice"
        self._clock.sleep(0.125)
        self._began = self._clock.now

    def stop(self) -> tuple[float | None, dict[str, float]]:
        """Two thirds of what it computes are matrix products."""
        self.windows.append(self._clock.now - self._began)
        self._began = None
        busy = self._share * self.windows[-1]
        return busy, {"softmax": busy / 3, "matrix_product": 2 * busy / 3}


class BrokenProfiler:
    """CUPTI that another profiler holds, say."""

    def start(self) -> None:
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    def stop(self) -> tuple[float | None, dict[str, float]]:
        raise AssertionError("never started")


class StrangeProfiler(FakeProfiler):
    """Of another torch, whose events have other names."""

    def stop(self) -> tuple[float | None, dict[str, float]]:
        return work_on_gpu(SimpleNamespace())


class SilentProfiler(FakeProfiler):
    """It sees no kernel."""

    def stop(self) -> tuple[float | None, dict[str, float]]:
        super().stop()
        return None, {}


def profiled(clock: FakeClock, accumulation: int, profiler: Any, effort: Effort = ONE, **drive: Any) -> Measurement:
    candidate = Candidate(Arm(), 8, accumulation)
    of_batches = {name: drive.pop(name) for name in ("run_of", "shapes", "lengths") if name in drive}
    driven = Drive(candidate, effort, clock, **of_batches)
    run = micro_steps_to_run(candidate, effort)
    driven.timer._busy = BusyStep(profiler, driven.meter, run, accumulation)
    driven.run(data=1.0, micro=drive.pop("micro", (2.0,)), optimizer=1.0, **drive)
    return driven.measured


@pytest.mark.parametrize("accumulation", [1, 2, 3, 4, 64])
def test_share_and_kinds_of_work_are_of_the_candidates_whole_step(clock: FakeClock, accumulation: int) -> None:
    measured = profiled(clock, accumulation, FakeProfiler(clock, 0.5))
    # Half of every micro-step and of the optimizer, none of the waiting for data, which is a third of a micro-step's
    # seconds where they are added up.
    data = measured.data_seconds
    assert measured.gpu_busy_share == pytest.approx(0.5 * (1 - data / measured.step_seconds))
    kinds = dict(measured.gpu_seconds_by_kind or ())
    assert list(kinds) == ["matrix_product", "softmax"]
    assert kinds["matrix_product"] == pytest.approx(2 * kinds["softmax"])
    assert sum(kinds.values()) == pytest.approx(measured.gpu_busy_share * measured.step_seconds)


def test_a_long_accumulation_is_profiled_in_part(clock: FakeClock) -> None:
    profiler = FakeProfiler(clock, 0.5)
    profiled(clock, 64, profiler, Effort(1, 2, 2, max_seconds=1000.0, max_micro_steps=64, busy_steps=1))
    assert profiler.windows == pytest.approx([2.0, 3.0]), "one micro-step; the last one and the optimizer"


def test_the_timed_steps_are_as_without(clock: FakeClock) -> None:
    without = profiled(clock, 8, FakeProfiler(clock, 0.5), Effort(1, 2, 2, max_seconds=1000.0))
    measured = profiled(clock, 8, FakeProfiler(clock, 0.5))
    assert measured.step_seconds_each == pytest.approx(without.step_seconds_each)
    assert without.gpu_busy_share is None


def test_it_is_at_most_one(clock: FakeClock) -> None:
    assert profiled(clock, 1, FakeProfiler(clock, 7.0)).gpu_busy_share == 1.0


def test_several_steps_give_their_mean(clock: FakeClock) -> None:
    measured = profiled(clock, 1, FakeProfiler(clock, 0.5), Effort(1, 2, 2, max_seconds=1000.0, busy_steps=3))
    assert measured.gpu_busy_share == pytest.approx(0.5 * 3 / 4)


@pytest.mark.parametrize("profiler", [BrokenProfiler, StrangeProfiler, SilentProfiler])
def test_a_profiler_that_fails_costs_the_share_alone(clock: FakeClock, profiler: Any) -> None:
    made = profiler() if profiler is BrokenProfiler else profiler(clock, 0.5)
    measured = profiled(clock, 4, made)
    assert measured.gpu_busy_share is None
    assert measured.samples_per_second > 0


def test_batches_of_other_lengths_are_set_right(clock: FakeClock) -> None:
    # The two timed steps are of the epoch's mean, the profiled one is half as long.
    of_batches = {"run_of": PlannedRun(step_tokens=800.0), "lengths": (100, 100, 100, 50)}
    shapes = BatchShapes(settles=0)
    # Of each step: extra seconds that its batch takes.
    profiler = FakeProfiler(clock, 0.5)
    measured = profiled(clock, 1, profiler, micro=(0.0,), extra=(3, 3, 3, 1), shapes=shapes, **of_batches)
    assert measured.step_seconds == pytest.approx(5.0)
    # Half of 1 + 1 seconds, in a step that is half as long as the mean.
    assert measured.gpu_busy_share == pytest.approx(0.5 * 2.0 * 2 / 5.0)


def test_a_step_with_a_new_shape_is_not_profiled(clock: FakeClock) -> None:
    profiler = FakeProfiler(clock, 0.5)
    shapes = BatchShapes(settles=1)
    profiled(clock, 1, profiler, shapes=shapes, lengths=(5, 5, 5, 9, 5), extra=(0, 0, 0, 99.0))
    assert profiler.windows == pytest.approx([3.0])


def test_what_was_timed_counts_where_the_data_ends(clock: FakeClock) -> None:
    candidate = Candidate(Arm(), 8)
    drive = Drive(candidate, ONE, clock)
    drive.timer._busy = BusyStep(FakeProfiler(clock, 0.5), drive.meter, 1, 1)
    drive.timer.begin()
    for _ in range(3):
        drive.step()
    assert drive.measurements == []
    assert drive.timer.timed_measurement is not None, "a failure from here on costs nothing"
    drive.timer.end()
    assert drive.measured.gpu_busy_share is None


def test_without_a_profiler_no_step_is_added_to_the_timed_ones(clock: FakeClock) -> None:
    drive = Drive(Candidate(Arm(), 8), ONE, clock)
    drive.run()
    assert (len(drive.steps), drive.measured.gpu_busy_share) == (3, None)

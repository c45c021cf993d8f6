"""Test what a trial tells of a second copy of DDP's buckets: how large it may be, and peaks without it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_meter import FakeClock, FakeMeter, unwatched
from test_measure import Drive
from torch.nn.parallel import DistributedDataParallel

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Effort, Measurement
from autotune.core.units import MIB
from autotune.worker.private.torch import join_fake_ranks
from autotune.worker.rendezvous import Ranks
from autotune.worker.trial import bucket_copy, measure
from autotune.worker.trial.rehearsal import Rehearsing

COPY = 400 * MIB
EFFORT = Effort(warmup_steps=2, min_steps=3, max_steps=3)


class Twins(Ranks):
    """Two ranks that do the same."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.fixture
def clock(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The time that the timer sees, in which it pauses."""
    monkeypatch.setattr(bucket_copy, "time", clock)
    return clock


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of two ranks that exchanges nothing, taken for one of NCCL."""
    join_fake_ranks(2)
    monkeypatch.setattr(bucket_copy, "_is_nccl", lambda _: True)
    yield
    dist.destroy_process_group()


def measurement_of(
    clock: FakeClock, extra: tuple[int, ...], size_bytes: int | None = COPY, **changes: Any
) -> Measurement:
    """A trial of steps that allocate 1,000 MiB, and in each so much more."""
    candidate = Candidate(Arm(strategy="ddp", ranks=2), 8)
    drive = Drive(candidate, EFFORT, clock)
    drive.timer = measure.StepTimer(
        drive.meter,
        candidate,
        EFFORT,
        drive.measurements.append,
        drive.steps.append,
        unwatched(),
        ranks=Twins(),
        **changes,
    )
    monkey = pytest.MonkeyPatch()
    monkey.setattr(bucket_copy, "bucket_copy_bytes", lambda _: size_bytes)
    step = drive.step

    def allocating(*args: Any, **kwargs: Any) -> None:
        number = len(drive.steps)
        more_bytes = extra[number] if number < len(extra) else 0
        drive.meter.allocate(1000 * MIB + more_bytes)
        step(*args, **kwargs)

    monkey.setattr(drive, "step", allocating)
    drive.run()
    monkey.undo()
    return drive.measured


def test_a_copy_that_was_met_is_kept_out_of_the_peaks(clock: FakeClock) -> None:
    met, not_met = measurement_of(clock, (0, COPY)), measurement_of(clock, ())
    assert met.peak_allocated_bytes == not_met.peak_allocated_bytes == 1000 * MIB
    # What the fake meter reserves beyond what is allocated grows with the copy.
    assert met.peak_reserved_bytes == (1400 * 11 // 10 - 400) * MIB
    assert (met.bucket_copy_bytes, not_met.bucket_copy_bytes) == (COPY, COPY)
    assert met.once_allocated_bytes == not_met.once_allocated_bytes == 1400 * MIB
    assert met.peak_allocated_with_bucket_copy_bytes == 1400 * MIB
    assert met.peak_reserved_with_bucket_copy_bytes == 1540 * MIB
    assert not_met.peak_allocated_with_bucket_copy_bytes is not_met.peak_reserved_with_bucket_copy_bytes is None


def test_where_steps_are_short_the_third_may_meet_it_too(clock: FakeClock) -> None:
    found = measurement_of(clock, (0, COPY, COPY))
    assert (found.peak_allocated_bytes, found.once_allocated_bytes) == (1000 * MIB, 1400 * MIB)


@pytest.mark.parametrize(("second_mib", "met_bytes"), [(1000, 0), (1400, COPY)])
def test_after_the_longest_batches_shorter_ones_say_nothing(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, second_mib: int, met_bytes: int
) -> None:
    """Three warm-up steps train on the longest, so that the second is compared with the third."""
    monkeypatch.setattr(bucket_copy, "bucket_copy_bytes", lambda _: COPY)
    meter = FakeMeter(clock)
    watched = bucket_copy.BucketCopy(meter, lambda: None, 3)
    for steps, mib in enumerate((900, second_mib, 1000, 300, 500), start=1):
        meter.allocate(mib * MIB)
        watched.end_step(steps)
    assert watched.met_bytes() == met_bytes


def test_the_pause_after_the_first_step_is_in_no_step(clock: FakeClock) -> None:
    before = clock.now
    found = measurement_of(clock, ())
    assert found.warmup_step_seconds == pytest.approx((1.0, 1.0))
    assert clock.now - before == pytest.approx(4.25)


@pytest.mark.parametrize(
    ("extra", "size_bytes", "changes"),
    [
        ((0, COPY // 4), COPY, {}),
        ((0, 0, 0, COPY), COPY, {}),
        ((0, COPY), None, {}),
        # Steps of the user's own code differ, so that a higher peak of the second may be that of a longer batch.
        ((0, COPY), COPY, {"rehearsing": Rehearsing(1)}),
    ],
)
def test_other_differences_between_steps_stay_in_the_peaks(
    clock: FakeClock, extra: tuple[int, ...], size_bytes: int | None, changes: dict[str, Any]
) -> None:
    found = measurement_of(clock, extra, size_bytes, **changes)
    assert found.peak_allocated_bytes == 1000 * MIB + max(extra)
    assert found.peak_allocated_with_bucket_copy_bytes is None
    assert found.bucket_copy_bytes == size_bytes


def test_one_rank_tells_of_no_copy(clock: FakeClock) -> None:
    drive = Drive(Candidate(Arm(), 8), EFFORT, clock)
    drive.run()
    assert drive.measured.bucket_copy_bytes is None


@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true")
def test_the_copy_is_of_all_gradients_where_buckets_are_rebuilt(two_ranks: None) -> None:
    model = torch.nn.Linear(10, 10)
    model.bias.requires_grad = False
    assert bucket_copy.bucket_copy_bytes(DistributedDataParallel(model)) == 400
    assert bucket_copy.bucket_copy_bytes(model) is None
    looking = DistributedDataParallel(model, find_unused_parameters=True)
    assert bucket_copy.bucket_copy_bytes(looking) is None
    fixed = DistributedDataParallel(model, find_unused_parameters=True, static_graph=True)
    assert bucket_copy.bucket_copy_bytes(fixed) == 400


def test_gloo_keeps_no_bucket(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backend than NCCL: here the one that exchanges nothing."""
    monkeypatch.undo()
    assert bucket_copy.bucket_copy_bytes(DistributedDataParallel(torch.nn.Linear(2, 2))) is None

"""Test the one rule that says whether a trial is feasible, and that a step that comes once needs no headroom."""

import dataclasses

import pytest

from autotune.core.candidate import Arm
from autotune.core.ceiling import Ceiling, Headroom
from autotune.core.outcome import Completed, Measurement, outcome_document, outcome_from_document
from autotune.core.units import GIB, MIB

CEILING = Ceiling(24 * GIB, 140 * GIB, GIB, Headroom(size_bytes=GIB))
"""A cap of 23 GiB, a line of 22."""
DDP = Arm(strategy="ddp", ranks=2)


def measurement(allocated_mib: int, reserved_mib: int, copy_mib: int | None = None) -> Measurement:
    copy_bytes = None if copy_mib is None else copy_mib * MIB
    return Measurement(
        1.0, (1.0,), 0.0, 64.0, allocated_mib * MIB, reserved_mib * MIB, ranks=2, bucket_copy_bytes=copy_bytes
    )


@pytest.mark.parametrize(
    ("allocated_mib", "reserved_mib", "copy_mib", "excess_mib"),
    [
        (21 * 1024, 22 * 1024, None, 0),
        # The copy uses up the headroom, up to the cap.
        (21 * 1024, 22 * 1024, 2 * 1024, 0),
        (21 * 1024, 22 * 1024, 2 * 1024 + 5, 5),
        # It is allocated bytes that count with it, since cached segments can be freed.
        (18 * 1024, 22 * 1024, 2 * 1024, 0),
        # The line holds without it.
        (18 * 1024, 22 * 1024 + 3, 1024, 3),
    ],
)
def test_the_steps_that_repeat_keep_the_headroom_and_one_step_may_use_it(
    allocated_mib: int, reserved_mib: int, copy_mib: int | None, excess_mib: int
) -> None:
    measured = measurement(allocated_mib, reserved_mib, copy_mib)
    assert measured.excess_bytes(DDP, CEILING) == excess_mib * MIB
    assert measured.fits(DDP, CEILING) == (excess_mib == 0)


def test_it_makes_no_difference_whether_the_trial_met_the_copy() -> None:
    missed = measurement(21 * 1024, 22 * 1024, 1024)
    met = dataclasses.replace(
        missed,
        peak_allocated_with_bucket_copy_bytes=22 * GIB,
        peak_reserved_with_bucket_copy_bytes=23 * GIB,
    )
    assert met.excess_bytes(DDP, CEILING) == missed.excess_bytes(DDP, CEILING)


def test_a_larger_context_takes_room_from_the_copy_too() -> None:
    measured = dataclasses.replace(measurement(20 * 1024, 20 * 1024, 3 * 1024), context_bytes=GIB)
    assert measured.fits(DDP, CEILING)
    assert dataclasses.replace(measured, context_bytes=GIB + MIB).excess_bytes(DDP, CEILING) == MIB


def test_where_segments_expand_the_copy_counts_on_top_of_what_is_allocated() -> None:
    expanding = dataclasses.replace(DDP, expandable_segments=True)
    assert measurement(22 * 1024, 23 * 1024, 1024).fits(expanding, CEILING)
    assert not measurement(22 * 1024, 23 * 1024, 1025).fits(expanding, CEILING)


def test_a_record_without_the_copy_is_read_and_judged_by_its_peaks() -> None:
    document = outcome_document(Completed(measurement(21 * 1024, 22 * 1024, 2 * 1024 + 5)))
    assert outcome_from_document(document) == Completed(measurement(21 * 1024, 22 * 1024, 2 * 1024 + 5))
    for name in list(document["measurement"]):
        if "bucket_copy" in name:
            del document["measurement"][name]
    old = outcome_from_document(document)
    assert old.measurement.once_allocated_bytes is None
    assert old.measurement.fits(DDP, CEILING)


@pytest.mark.parametrize(
    ("changes", "rebuilds"),
    [
        ({}, False),
        ({"gradient_checkpointing": True}, True),
        ({"ddp_find_unused_parameters": False}, True),
        ({"ddp_find_unused_parameters": True, "gradient_checkpointing": True}, False),
        ({"ddp_find_unused_parameters": False, "strategy": "fsdp"}, False),
        ({"ddp_find_unused_parameters": False, "ranks": 1}, False),
    ],
)
def test_buckets_are_rebuilt_where_ddp_looks_for_no_unused_parameters(
    changes: dict[str, object], rebuilds: bool
) -> None:
    assert dataclasses.replace(DDP, **changes).rebuilds_buckets == rebuilds  # type: ignore[arg-type]

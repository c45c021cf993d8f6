"""Test the one rule that says whether a trial is feasible."""

import dataclasses

import pytest

from autotune.core.candidate import Arm
from autotune.core.ceiling import Ceiling, Headroom
from autotune.core.outcome import Completed, Measurement, outcome_document, outcome_from_document
from autotune.core.units import GIB, MIB

CEILING = Ceiling(24 * GIB, 140 * GIB, GIB, Headroom(size_bytes=GIB))
"""A cap of 23 GiB, a line of 22."""
DDP = Arm(strategy="ddp", ranks=2)
AT_LINE = Measurement(1.0, (1.0,), 0.0, 64.0, 21 * GIB, 22 * GIB, ranks=2)


@pytest.mark.parametrize(("more_mib", "fits"), [(0, True), (3, False)])
def test_a_peak_is_feasible_up_to_the_line(more_mib: int, fits: bool) -> None:
    measured = dataclasses.replace(AT_LINE, peak_reserved_bytes=22 * GIB + more_mib * MIB)
    assert measured.excess_bytes(DDP, CEILING) == more_mib * MIB
    assert measured.fits(DDP, CEILING) == fits


def test_a_larger_context_takes_room() -> None:
    assert dataclasses.replace(AT_LINE, context_bytes=2 * GIB).fits(DDP, CEILING)
    assert dataclasses.replace(AT_LINE, context_bytes=2 * GIB + MIB).excess_bytes(DDP, CEILING) == MIB


def test_where_segments_expand_what_is_allocated_counts() -> None:
    expanding = dataclasses.replace(DDP, expandable_segments=True)
    over = dataclasses.replace(AT_LINE, peak_allocated_bytes=22 * GIB, peak_reserved_bytes=23 * GIB)
    assert over.fits(expanding, CEILING)
    assert not over.fits(DDP, CEILING)


def test_a_record_with_fields_of_an_earlier_version_is_read() -> None:
    document = outcome_document(Completed(AT_LINE))
    document["measurement"] |= {"bucket_copy_bytes": GIB, "peak_reserved_with_bucket_copy_bytes": 23 * GIB}
    assert outcome_from_document(document) == Completed(AT_LINE)

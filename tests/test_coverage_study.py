"""Test the coverage of promises on a sample; ``make bench`` simulates many more and prints the table."""

from __future__ import annotations

import pytest
from promised_coverage import KNOWN, cell, table


@pytest.mark.parametrize(("spread", "equal"), [(0.012, 1), (0.012, 6), (0.05, 3)])
def test_on_a_machine_that_was_searched_on_before_promises_hold(spread: float, equal: int) -> None:
    """Of 300 searches the share is known to 2.5 %. Not corrected for the choice, 88 % of six equals would hold."""
    found = cell(spread, equal, KNOWN, runs=300)
    assert 0.91 <= found.inside <= 0.985
    assert found.below <= 0.08


def test_what_the_machine_has_shown_decides() -> None:
    """The prior alone knows nothing of processes that deviate by 5 %."""
    known, new = (cell(0.05, 1, known, runs=100) for known in (KNOWN, 0))
    assert known.half_width > 3 * new.half_width
    assert known.inside > new.inside + 0.2
    shown = table([known, new]).splitlines()
    assert shown[1].split()[3:5] == ["5.0%", f"{known.inside:.1%}"]

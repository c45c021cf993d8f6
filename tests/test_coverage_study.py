"""Test the coverage of promises on a sample; ``make bench`` simulates many more and prints the table."""

import pytest
from promised_coverage import KNOWN, cell, table


@pytest.mark.parametrize(
    ("spread", "equal", "known"), [(0.012, 1, KNOWN), (0.05, 3, KNOWN), (0.025, 1, 0), (0.05, 6, 0)]
)
def test_promises_hold_where_the_machine_was_measured(spread: float, equal: int, known: int) -> None:
    """Of 300 searches the share is known to 2.5 %. On a new machine the winner is measured in three processes."""
    found = cell(spread, equal, known, cheap=True, runs=300)
    assert 0.91 <= found.inside <= 0.985
    assert found.below <= 0.08


def test_what_the_machine_has_shown_decides() -> None:
    """The prior alone knows nothing of processes that deviate by 5 %."""
    measured, dear = (cell(0.05, 1, 0, cheap, runs=100) for cheap in (True, False))
    assert (measured.processes, dear.processes) == (3, 1)
    assert measured.half_width > 2.5 * dear.half_width
    assert measured.inside > dear.inside + 0.2
    shown = table([measured, dear]).splitlines()
    assert shown[1].split()[3:5] == ["5.0%", f"{measured.inside:.1%}"]
    assert shown[2].startswith("a machine that is new, trials dear")

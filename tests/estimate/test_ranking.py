"""The candidate that is predicted to be the fastest, on every recorded landscape."""

from __future__ import annotations

from ranking import NEAR, landscapes


def test_the_predicted_winner_is_near_the_measured_one_on_recorded_landscapes() -> None:
    every = landscapes()
    assert len(every) >= 10
    assert sum(known.loss <= NEAR for known in every) >= 0.9 * len(every)

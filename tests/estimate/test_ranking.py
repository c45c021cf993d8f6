"""The candidate that is predicted to be the fastest, on every recorded landscape."""

import statistics

from ranking import NEAR, OPTIONS, landscapes, pairs


def test_the_predicted_winner_is_near_the_measured_one_on_recorded_landscapes() -> None:
    every = landscapes()
    assert len(every) >= 10
    assert sum(known.loss <= NEAR for known in every) >= 0.9 * len(every)


def test_what_a_choice_gains_is_predicted_where_the_gpu_limits() -> None:
    for option in OPTIONS:
        limited = [pair for pair in pairs(option) if not pair.waits]
        assert len(limited) >= 5, option
        assert not any(pair.is_reversed for pair in limited), option
        assert statistics.median(pair.error for pair in limited) < 0.06, option

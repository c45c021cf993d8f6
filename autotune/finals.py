"""Which candidates are measured once more before a search ends, so that its winner is not noise."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.history import History, Tried
from autotune.trial import Candidate

_MOST_RIVALS = 2
_ROUNDS = 2


def finals(history: History, among: Iterable[Candidate]) -> list[Candidate]:
    """What is still to be measured, in turn: a winner that was measured in part, and rivals that may be faster.

    A rival is faster than the winner by more than the tolerance, but by no more than the noise between trials that
    were minutes apart. Winner and rivals are measured in full, one after the other, so that whatever drifts hits
    them alike; between candidates with two measurements the tolerance decides, no longer the noise.
    """
    among = set(among)
    winner = history.winner(among)
    if winner is None or winner.measurement is None:
        return []
    enough = winner.measurement.samples_per_second * (1 + history.tolerance)
    faster = [t for t in history.believed(among) if t.measurement and t.measurement.samples_per_second > enough]
    rivals = sorted(faster, key=_speed, reverse=True)[:_MOST_RIVALS]
    wanted = [winner, *rivals] if rivals else [] if winner.in_full else [winner]
    return [tried.candidate for tried in wanted if len(history.outcomes_of(tried.candidate)) < _ROUNDS]


def _speed(tried: Tried) -> float:
    return tried.measurement.samples_per_second if tried.measurement else 0.0

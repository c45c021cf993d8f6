"""Which candidates are measured once more before a search ends, so that its winner is not noise."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.history import History, Tried, promised_within
from autotune.trial import Candidate

_MOST_RIVALS = 2
_ROUNDS = 2


def finals(history: History, among: Iterable[Candidate]) -> list[Candidate]:
    """What is still to be measured, in turn: a winner measured in part or amid noise, and rivals that may be faster.

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
    # Where a second measurement was no more certain than the first, the machine is as it is.
    in_vain = any(_is_in_doubt(t) and history.times_measured(t.candidate) > 1 for t in history.believed(among))
    is_owed = needs_another(winner) and not (winner.in_full and in_vain)
    wanted = [winner, *rivals] if rivals else [winner] if is_owed else []
    return [tried.candidate for tried in wanted if len(history.outcomes_of(tried.candidate)) < _ROUNDS]


def needs_another(winner: Tried) -> bool:
    """Whether it was measured in part or amid noise. What compiles was measured at length, and would compile again."""
    return (not winner.in_full or _is_in_doubt(winner)) and not winner.candidate.arm.torch_compile


def _is_in_doubt(tried: Tried) -> bool:
    """Whether a stock run may be slower by more than is promised, so wide is the ±."""
    measured = tried.measurement
    return measured is not None and measured.relative_spread > promised_within(tried.candidate, measured)


def _speed(tried: Tried) -> float:
    return tried.measurement.samples_per_second if tried.measurement else 0.0

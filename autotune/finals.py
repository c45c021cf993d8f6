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
    wanted = [winner, *rivals] if rivals else [winner] if needs_another(winner) else []
    return [tried.candidate for tried in wanted if len(history.outcomes_of(tried.candidate)) < _ROUNDS]


def needs_another(winner: Tried) -> bool:
    """Whether it was measured in part, or a stock run may be slower by more than is promised, so wide is its ±.

    What compiles is measured at length at once: another trial would compile again.
    """
    measured = winner.measurement
    if measured is None or winner.candidate.arm.torch_compile:
        return False
    return not winner.in_full or measured.relative_spread > promised_within(winner.candidate, measured)


def _speed(tried: Tried) -> float:
    return tried.measurement.samples_per_second if tried.measurement else 0.0

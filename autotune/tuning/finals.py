"""Choose which candidates are measured again before a search ends, so that its winner and its promise hold.

Each measurement is a process of its own. The winner and what may be faster are measured in alternation, so that what
drifts hits them alike, until measuring on is worth less than the tolerance or each has had its share of processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.candidate import Candidate
from autotune.estimate.history import History
from autotune.estimate.pooling import Tried

_MOST_RIVALS = 2
# Processes for each of winner and rivals. The error of a mean falls with the square root of their number.
_MOST_PROCESSES = 3
# A winner that waits for the host is measured in two processes at least: one says nothing of how much they differ.
_HOST_BOUND_PROCESSES = 2
# Half the interval of a winner's own mean, relative, above which it is measured once more.
_UNCERTAIN = 0.05


def finals(history: History, among: Iterable[Candidate]) -> list[Candidate]:
    """Return what is still to be measured once more, next first."""
    among = set(among)
    winner = history.winner(among)
    if winner is None:
        return []
    rivals = _rivals(history, winner, among)
    contenders = [winner.candidate, *rivals] if rivals else []
    owed = [candidate for candidate in contenders if _attempts(history, candidate) < _MOST_PROCESSES]
    if owed:
        return sorted(owed, key=lambda candidate: _attempts(history, candidate))
    return [winner.candidate] if needs_another(history, winner) else []


def _attempts(history: History, candidate: Candidate) -> int:
    """Trials of a candidate, those that did not end well included: a failing one is not tried for ever."""
    return len(history.outcomes_of(candidate))


def _rivals(history: History, winner: Tried, among: set[Candidate]) -> list[Candidate]:
    """Candidates that are worth measuring again, since choosing them may gain more than the tolerance on average.

    What compiles would compile again.
    """
    gains = {
        tried.candidate: history.expected_gain(tried.candidate, winner.candidate)
        for tried in history.believed(among)
        if tried.candidate != winner.candidate and not tried.candidate.arm.torch_compile
    }
    possible = [candidate for candidate, gain in gains.items() if gain > history.tolerance]
    return sorted(possible, key=lambda candidate: -gains[candidate])[:_MOST_RIVALS]


def needs_another(history: History, winner: Tried) -> bool:
    """Return whether the winner is owed one more process on its own account."""
    candidate = winner.candidate
    done = _attempts(history, candidate)
    if candidate.arm.torch_compile or done >= _MOST_PROCESSES:
        return False
    if not winner.in_full and done < 2:
        return True
    if history.is_host_bound(candidate) and history.processes(candidate) < _HOST_BOUND_PROCESSES:
        return True
    measured = winner.measurement
    return measured is not None and done < 2 and measured.relative_spread > _UNCERTAIN

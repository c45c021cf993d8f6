"""Tell steps within which the code evaluates, samples or validates from those that only train."""

from __future__ import annotations

import itertools
import statistics

# Of steps that call models without gradients now more often, now less, more than so many times the most. A choice.
_FAR_MORE = 2


class Evaluations:
    """Learns how often a step calls models without gradients, as it may call a teacher, and finds steps with more."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._found: list[tuple[int, float]] = []

    def is_one(self, calls: int) -> bool:
        """Return whether a step with so many calls without gradients has an evaluation in it.

        The usual count is that of most steps so far; where they have none in common, only far more calls are.
        """
        counts = self._counts
        usual = min(statistics.multimode(counts), default=calls)
        most = usual if 2 * counts.count(usual) >= len(counts) else _FAR_MORE * max(counts)
        is_one = calls > most
        counts.append(calls)
        return is_one

    def add(self, step: int, seconds: float) -> None:
        """Record the time of a step with an evaluation, the how manyth it was."""
        self._found.append((step, seconds))

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps with an evaluation."""
        return sum(seconds for _, seconds in self._found)

    def seconds(self, step_seconds: float) -> float | None:
        """Return what an evaluation takes besides a step; ``None`` where none was seen."""
        return max(0.0, self.total_seconds / len(self._found) - step_seconds) if self._found else None

    @property
    def every(self) -> int | None:
        """After how many steps each evaluation comes; ``None`` where that was not seen."""
        at = [step for step, _ in self._found]
        between = {later - earlier for earlier, later in itertools.pairwise(at)}
        return between.pop() if len(between) == 1 else None

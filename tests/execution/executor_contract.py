"""Test the contract of every executor, on one with two slots."""

from collections.abc import Callable

import pytest

from autotune.core.messages import Progress
from autotune.core.outcome import Completed, Outcome
from autotune.execution import Executor, TrialJob


class ExecutorContract:
    """A subclass has the fixtures ``executor``, with two free slots, and ``job``, which makes a trial by its id.

    Trials complete, but for one whose id begins with ``hang``, which says what it is doing and does not end by itself.
    """

    def outcomes(self, executor: Executor, count: int) -> dict[str, Outcome]:
        """Wait for so many trials to end; each must have said something before that."""
        found: dict[str, Outcome] = {}
        heard: set[str] = set()
        while len(found) < count:
            trial_id, report = executor.wait()
            assert trial_id not in found, "nothing comes after the outcome"
            if isinstance(report, Progress):
                heard.add(trial_id)
            else:
                assert trial_id in heard
                found[trial_id] = report
        return found

    def test_two_trials_run_at_the_same_time(self, executor: Executor, job: Callable[[str], TrialJob]) -> None:
        assert len(executor.slots) == 2
        assert executor.submit(job("complete")) == "complete"
        assert executor.submit(job("progress 1, complete")) == "progress 1, complete"
        found = self.outcomes(executor, 2)
        assert found.keys() == {"complete", "progress 1, complete"}
        assert all(isinstance(outcome, Completed) for outcome in found.values())

    def test_a_slot_is_free_again_once_its_trial_ended(
        self, executor: Executor, job: Callable[[str], TrialJob]
    ) -> None:
        for _ in range(2):
            executor.submit(job("complete"))
            assert self.outcomes(executor, 1).keys() == {"complete"}

    def test_more_than_there_are_slots_is_refused(self, executor: Executor, job: Callable[[str], TrialJob]) -> None:
        for name in ("complete", "progress 1, complete"):
            executor.submit(job(name))
        with pytest.raises(RuntimeError):
            executor.submit(job("progress 2, complete"))
        assert len(self.outcomes(executor, 2)) == 2

    def test_waiting_for_nothing_is_a_mistake(self, executor: Executor) -> None:
        with pytest.raises(RuntimeError):
            executor.wait()

    def test_after_closing_nothing_is_heard_and_trials_can_be_run_anew(
        self, executor: Executor, job: Callable[[str], TrialJob]
    ) -> None:
        for name in ("hang", "progress 1, hang"):
            executor.submit(job(name))
        executor.wait()
        executor.close()
        with pytest.raises(RuntimeError):
            executor.wait()
        executor.submit(job("complete"))
        assert self.outcomes(executor, 1).keys() == {"complete"}
        executor.close()

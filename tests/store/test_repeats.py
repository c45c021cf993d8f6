"""Test which trials are repeated, how often, and which one counts in the end."""

import pytest
from postgres import sqlite_alone
from recorded import EFFECTIVE_64, RecordedRunner, fault, measurement, out_of_memory
from searching import search

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, Failed, Outcome, OutOfMemory
from autotune.estimate.history import History, Tried
from autotune.store.records import Repeats, TrialRecord
from autotune.store.repository import Store

BEST = Candidate(Arm("bf16"), 32, 2)
OTHER = Candidate(Arm("bf16"), 16, 4)
INTERRUPTED = Failed("interrupted", "the search was killed during this trial")
KILLED = Failed("killed", "killed by SIGKILL")
HOT = ("thermal slowdown by the hardware at 95 °C",)


def completed(seconds: float = 0.1, *, disturbed: tuple[str, ...] = ()) -> Completed:
    return Completed(measurement(BEST, seconds, 1000, 1000), disturbed=disturbed)


def record(outcome: Outcome, candidate: Candidate = BEST) -> TrialRecord:
    return TrialRecord("study", 0, candidate, "workload", "environment", outcome=outcome)


@pytest.mark.parametrize(
    "outcome", [completed(), out_of_memory(), fault(), Failed("timeout", "stopped"), Failed("error", "ValueError")]
)
def test_what_speaks_for_its_candidate_at_once(outcome: Outcome) -> None:
    repeats, trial = Repeats(), record(outcome)
    assert repeats.take(trial) is trial
    assert (repeats.owed, repeats.excused) == ([], 0)


@pytest.mark.parametrize("reason", ["killed", "lost", "device_lost", "malformed"])
def test_a_transient_failure_has_one_more_trial(reason: str) -> None:
    repeats = Repeats()
    failed = Failed(reason, "gone")  # type: ignore[arg-type]
    assert repeats.take(record(failed)) is None
    assert repeats.owed[0] == ("search", BEST)
    assert repeats.take(record(failed, OTHER)) is None
    again = record(failed)
    assert repeats.take(again) is again
    assert repeats.owed[0] == ("search", OTHER)
    assert repeats.excused == 2


def test_a_search_that_is_killed_again_and_again_holds_nothing_against_a_candidate() -> None:
    repeats = Repeats()
    for _ in range(10):
        assert repeats.take(record(INTERRUPTED)) is None
    last = record(INTERRUPTED)
    assert repeats.take(last) is last
    assert repeats.owed == []


def test_a_measurement_that_stays_disturbed_counts_as_the_fastest() -> None:
    repeats = Repeats()
    slow, fast, last = (record(completed(seconds, disturbed=HOT)) for seconds in (0.3, 0.1, 0.2))
    assert repeats.take(slow) is None
    assert repeats.take(fast) is None
    assert repeats.take(last) is fast
    assert repeats.owed == []


def test_a_neighbour_that_stays_is_not_fought_for_ever() -> None:
    repeats = Repeats()
    candidates = [Candidate(Arm("bf16"), batch) for batch in range(8, 80, 8)]
    runs = 0
    for candidate in candidates:
        while repeats.take(record(completed(disturbed=HOT), candidate)) is None:
            runs += 1
    assert runs == repeats.excused == 10


def test_an_out_of_memory_beside_a_neighbour_is_never_held_against_a_candidate() -> None:
    history = History(ceiling=None)  # type: ignore[arg-type]
    history.add(Tried("1", BEST, OutOfMemory("no memory", disturbed=("others",))))
    assert history.ruled_out_by(BEST) is None
    history.add(Tried("2", BEST, OutOfMemory("no memory")))
    assert history.ruled_out_by(BEST) is not None


@sqlite_alone
class TestInASearch:
    def test_a_killed_trial_is_run_again_next_and_takes_nothing_from_the_budget(self, store: Store) -> None:
        whole = search(store, RecordedRunner(EFFECTIVE_64), trials=3, study="whole")
        runner = RecordedRunner(EFFECTIVE_64)
        runner.faults[BEST] = [KILLED]
        run = search(store, runner, trials=3, fresh=True)
        at = runner.candidates.index(BEST)
        assert runner.candidates[at + 1] == BEST
        assert len(run.trials) == len(whole.trials) + 1
        assert run.best.candidate == whole.best.candidate

    def test_a_disturbed_measurement_is_taken_again_and_the_second_counts(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        runner.faults[BEST] = [completed(99.0, disturbed=HOT)]
        run = search(store, runner)
        assert run.best.candidate == BEST
        assert not run.best.outcome.disturbed  # type: ignore[union-attr]
        assert runner.candidates.count(BEST) == 2

    def test_an_out_of_memory_that_others_caused_rules_nothing_out(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        runner.faults[BEST] = [OutOfMemory("CUDA out of memory", disturbed=("other processes held 9.0 GiB",))]
        run = search(store, runner)
        assert run.best.candidate == BEST

    def test_a_retry_that_was_owed_when_the_search_ended_comes_first(self, store: Store) -> None:
        runner = RecordedRunner(EFFECTIVE_64)
        runner.faults[BEST] = [KILLED, KeyboardInterrupt()]
        with pytest.raises(KeyboardInterrupt):
            search(store, runner)
        rest = RecordedRunner(EFFECTIVE_64)
        run = search(store, rest)
        assert rest.candidates[0] == BEST
        assert run.best.candidate == BEST

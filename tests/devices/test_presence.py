"""Test how searches on one CPU notice each other, and what happens to their measurements."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import warm
from recorded import job_of, measurement

from autotune.core.candidate import Arm, Candidate
from autotune.core.messages import Progress
from autotune.core.outcome import Completed, Outcome, OutOfMemory
from autotune.core.placement import Placement
from autotune.devices.host import cpu_device
from autotune.devices.lock import FOLDER_VARIABLE, Presence, had_company
from autotune.execution import TrialJob
from autotune.execution.executor import run_to_end
from autotune.execution.gpu_monitor import WatchedExecutor
from autotune.store.records import Repeats, TrialRecord

CANDIDATE = Candidate(Arm("bf16"), 8)
COMPLETED = Completed(measurement(CANDIDATE, 1.0, 1000, 1000))

pytestmark = pytest.mark.usefixtures("locks")

STAY = """
import sys
from autotune.devices.lock import Presence
with Presence("cpu"):
    print("here", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_search() -> Iterator[subprocess.Popen[str]]:
    """Another process with a search on the CPU, which is gone at the end of the block."""
    process = warm.Popen([sys.executable, "-c", STAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "here\n"
        yield process
    finally:
        process.kill()
        process.communicate()


class TestPresence:
    def test_alone(self) -> None:
        with Presence("cpu") as ours:
            before = ours.mark()
            assert not had_company(before, ours.mark())

    def test_one_that_was_there_before(self) -> None:
        with another_search(), Presence("cpu") as ours:
            before = ours.mark()
            assert had_company(before, ours.mark())

    def test_one_that_comes_and_one_that_has_gone_again(self) -> None:
        with Presence("cpu") as ours:
            before = ours.mark()
            with another_search():
                assert had_company(before, ours.mark())
            assert had_company(before, ours.mark())

    def test_one_that_was_killed_before_is_not_there(self) -> None:
        with another_search() as process, Presence("cpu") as ours:
            assert not ours.mark().is_alone
            process.kill()
            process.wait()
            before = ours.mark()
            assert not had_company(before, ours.mark())

    def test_two_that_look_at_once_never_both_see_themselves_alone(self) -> None:
        look = (
            "import sys\nfrom autotune.devices.lock import Presence\n"
            "with Presence('cpu') as ours:\n"
            "    print('here', flush=True); sys.stdin.readline()\n"
            "    print(sum(ours.mark().is_alone for _ in range(20_000)), flush=True); sys.stdin.readline()"
        )
        command = [sys.executable, "-c", look]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        searches = [warm.Popen(command, **pipes) for _ in range(2)]
        try:
            assert [search.stdout.readline() for search in searches] == ["here\n"] * 2
            for search in searches:
                search.stdin.write("look\n")
                search.stdin.flush()
            assert [search.stdout.readline() for search in searches] == ["0\n"] * 2
        finally:
            for search in searches:
                search.communicate("leave\n")

    def test_one_on_another_device(self) -> None:
        with Presence("cpu") as ours, Presence("GPU-1"):
            assert ours.mark().is_alone

    def test_without_a_folder_for_locks_nobody_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(FOLDER_VARIABLE, "/proc/no/such")
        with Presence("cpu") as ours, Presence("cpu"):
            before = ours.mark()
            assert not had_company(before, ours.mark())


class Trials:
    """An executor whose trials end with one outcome, in the middle of which another search may come and go."""

    slots = (Placement.of(cpu_device()),)

    def __init__(self, outcome: Outcome, *, disturbing: bool) -> None:
        self._outcome = outcome
        self._disturbing = disturbing
        self._trial_id = ""

    def submit(self, job: TrialJob) -> str:
        self._trial_id = job.trial_id
        return job.trial_id

    def wait(self) -> tuple[str, Progress | Outcome]:
        if self._disturbing:
            with Presence("cpu"):
                pass
        return self._trial_id, self._outcome

    def close(self) -> None:
        pass


def run(outcome: Outcome, *, disturbing: bool) -> Outcome:
    with Presence("cpu") as presence:
        watched = WatchedExecutor(Trials(outcome, disturbing=disturbing), 0, print, presence=presence)
        return run_to_end(watched, job_of(CANDIDATE, 1000))


class TestPresenceOfAnotherSearch:
    def test_a_trial_alone_is_as_it_was(self) -> None:
        assert run(COMPLETED, disturbing=False) == COMPLETED

    def test_a_measurement_beside_another_search_is_marked(self) -> None:
        outcome = run(COMPLETED, disturbing=True)
        assert outcome.disturbed == ("another search used this CPU",)
        assert outcome.measurement == COMPLETED.measurement

    def test_running_out_of_memory_does_not_depend_on_others(self) -> None:
        ran_out = OutOfMemory("DefaultCPUAllocator: can't allocate memory")
        assert run(ran_out, disturbing=True) == ran_out

    def test_what_was_marked_counts_at_once(self) -> None:
        # The other search may last longer than this one, so nothing is won by running the trial again.
        record = TrialRecord("s", 0, CANDIDATE, "w", "e", outcome=run(COMPLETED, disturbing=True))
        repeats = Repeats()
        assert repeats.take(record) == record
        assert repeats.owed == []

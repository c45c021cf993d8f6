"""Thousands of jobs, many threads at once, and a PostgreSQL server that is killed at random moments.

``make test-service`` runs these; ``-s`` shows what was measured.
"""

import contextlib
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from postgres import NoPostgresError, PostgresServer
from recorded import EFFECTIVE_64, RecordedRunner
from searching import search
from sqlalchemy import insert

from autotune.core.errors import StorageError
from autotune.store.opening import open_store
from autotune.store.queue import AttemptOverError, JobRecord, Offer, Queue
from autotune.store.records import now
from autotune.store.repository import Store
from autotune.store.tables import JobRow

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]

CPU = Offer("cpu", "EPYC", 64 * 2**30)
THREADS = 50
JOBS = 5000
KILLS = 30


@pytest.fixture
def durable_server() -> Iterator[PostgresServer]:
    """A server of its own that keeps what it committed, whatever ends it."""
    try:
        server = PostgresServer.make(durable=True)
    except NoPostgresError as error:
        pytest.skip(str(error))
    try:
        server.start()
        yield server
    finally:
        server.close()


def fill(store: Store, jobs: int) -> None:
    """Queue jobs, faster than one after the other."""
    row = {
        "request": {"model": "bert-tiny"},
        "needs_count": 1,
        "priority": 0,
        "state": "queued",
        "is_cancel_asked": False,
        "attempts": 0,
        "losses": 0,
        "heard": 0,
        "events": 0,
        "submitted_by": "",
        "submitted_at": now(),
    }
    with store.engine.begin() as connection:
        rows = [{**row, "id": f"{number:032d}", "study": f"load-{number}"} for number in range(jobs)]
        connection.execute(insert(JobRow), rows)


def work(queue: Queue, job: JobRecord) -> None:
    """Record what a job of no length comes to."""
    with queue.writing(job.id, job.attempts, [("trial", {"number": 0}), ("trial", {"number": 1})]):
        pass
    queue.end(job.id, job.attempts, "finished")


def start_next(queue: Queue) -> JobRecord | None:
    """Start the next job; ``None`` where none waits."""
    while (waiting := queue.next_for(CPU)) is not None:
        started = queue.start(waiting.id, {"host": "here"})
        if started is not None:
            return started
    return None


def run_until_empty(queue: Queue, seconds: list[float], taken: list[int]) -> None:
    while True:
        started = time.monotonic()
        job = start_next(queue)
        if job is None:
            return
        seconds.append(time.monotonic() - started)
        taken.append(job.number)
        work(queue, job)


def test_fifty_threads_run_five_thousand_jobs(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """As the threads of one service do. Nothing is lost and nothing is given out twice."""
    fill(store, JOBS)
    seconds: list[float] = []
    taken: list[int] = []
    started = time.monotonic()
    threads = [threading.Thread(target=run_until_empty, args=(store.queue, seconds, taken)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = time.monotonic() - started
    assert sorted(taken) == list(range(1, JOBS + 1))
    assert store.queue.counts() == {"finished": JOBS}
    median, last = statistics.median(seconds), sorted(seconds)[int(0.95 * JOBS)]
    with capsys.disabled():
        kind = store.engine.dialect.name
        print(f"\n{kind}: start {1000 * median:.1f} ms median, {1000 * last:.1f} ms p95, {JOBS / whole:.0f} jobs/s")


def test_a_server_killed_at_random_moments_loses_and_doubles_no_job(durable_server: PostgresServer) -> None:
    """As the service does: what failed is tried again, and a job that was started without an answer waits again.

    A job whose end was told is ended, and none is told to have ended twice.
    """
    chance = random.Random(1)
    jobs = 400
    url = durable_server.url("postgres")
    with open_store(url) as store:
        fill(store, jobs)
        queue = store.queue
        ended: Counter[int] = Counter()
        turn = threading.Semaphore(8)
        guard = threading.Lock()
        is_over = threading.Event()

        def run_one() -> None:
            job = start_next(queue)
            if job is None:
                time.sleep(0.05)
                return
            time.sleep(chance.random() * 0.05)
            while True:
                try:
                    queue.end(job.id, job.attempts, "finished")
                except StorageError:
                    time.sleep(0.05)
                    continue
                except AttemptOverError:
                    # It was ended although no answer came.
                    pass
                break
            with guard:
                ended[job.number] += 1

        def go_on() -> None:
            while not is_over.is_set():
                with turn, contextlib.suppress(StorageError):
                    run_one()

        threads = [threading.Thread(target=go_on) for _ in range(8)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 600
        for _ in range(KILLS):
            time.sleep(chance.random() * 0.6)
            durable_server.kill(signal.SIGKILL)
            time.sleep(chance.random() * 0.2)
            durable_server.start()
        while queue.counts() != {"finished": jobs}:
            assert time.monotonic() < deadline, queue.counts()
            time.sleep(0.2)
            # With nobody at work, a job that runs is one whose start had no answer.
            for _ in threads:
                turn.acquire()
            for job in queue.jobs(states=["running"], most=jobs):
                queue.put_back(job.id, job.attempts, "no answer came", is_lost=False)
            turn.release(len(threads))
        is_over.set()
        for thread in threads:
            thread.join(60)
        assert not [number for number, times in ended.items() if times > 1]
        for job in queue.jobs(most=2 * jobs):
            assert [event.number for event in queue.events(job.id)] == list(range(1, job.events + 1))


def test_a_search_over_a_server_that_is_killed_is_resumed_to_the_same_answer(
    durable_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often it stops: no trial that ended is run again, and the winner is that of an undisturbed search."""
    url = durable_server.url("postgres")
    with open_store(url) as store:
        undisturbed = search(store, RecordedRunner(EFFECTIVE_64), study="undisturbed")
        expected = {trial.candidate for trial in undisturbed.trials}
    chance = random.Random(2)
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.wait(chance.random() * 1.5):
            durable_server.kill(signal.SIGKILL)
            durable_server.start()

    killer = threading.Thread(target=disturb)
    killer.start()
    stops = 0
    try:
        deadline = time.monotonic() + 300
        while True:
            assert time.monotonic() < deadline
            try:
                with open_store(url) as store:
                    run = search(store, RecordedRunner(EFFECTIVE_64), study="disturbed")
                break
            except StorageError:
                stops += 1
    finally:
        is_over.set()
        killer.join(120)
    with capsys.disabled():
        print(f"\nthe search stopped {stops} times")
    with open_store(url) as store:
        trials = store.trials(run.study.id)
        measured = Counter(trial.candidate for trial in trials if trial.state in ("completed", "out_of_memory"))
        assert max(measured.values()) == 1
        assert set(measured) == expected
        assert run.best.candidate == undisturbed.best.candidate
        assert len({trial.number for trial in trials}) == len(trials)

"""The queue of a service: order, needs, and attempts that end, are put back or are lost."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from autotune.store.queue import AttemptOverError, JobRecord, Needs, Offer, Queue
from autotune.store.repository import Store
from autotune.store.tables import PLACES_PER_PRIORITY

CPU = Offer("cpu", "EPYC", 64 * 2**30)
H200 = Offer("cuda", "NVIDIA H200", 141 * 2**30)
HERE = {"host": "here", "name": "EPYC"}


@pytest.fixture
def queue(store: Store) -> Queue:
    return store.queue


def submit(queue: Queue, study: str = "bert", needs: Needs | None = None, **options: object) -> JobRecord:
    job, _ = queue.submit(study, {"model": "bert-tiny"}, needs or Needs(), **options)  # type: ignore[arg-type]
    return job


def start_next(queue: Queue, offer: Offer = CPU) -> JobRecord:
    return queue.start(queue.next_for(offer).id, HERE)


def events_of(queue: Queue, job: JobRecord) -> list[tuple[int, str, str | None]]:
    return [(event.number, event.kind, event.document.get("state")) for event in queue.events(job.id)]


def test_jobs_of_one_priority_run_in_the_order_of_their_submission(queue: Queue) -> None:
    studies = [submit(queue, f"study-{number}").study for number in range(3)]
    assert [start_next(queue).study for _ in studies] == studies
    assert queue.next_for(CPU) is None


def test_an_urgent_job_goes_first_but_overtakes_only_so_many(queue: Queue) -> None:
    oldest = submit(queue, "oldest")
    urgent = [submit(queue, f"urgent-{number}", priority=1) for number in range(PLACES_PER_PRIORITY + 1)]
    ran = [start_next(queue).study for _ in range(PLACES_PER_PRIORITY + 2)]
    assert ran[0] == urgent[0].study
    assert ran.index(oldest.study) == PLACES_PER_PRIORITY - 1


def test_a_job_with_a_higher_priority_is_counted_ahead(queue: Queue) -> None:
    waiting = submit(queue, "waiting")
    assert queue.ahead_of([waiting]) == {waiting.id: 0}
    urgent, last = submit(queue, "urgent", priority=1), submit(queue, "last")
    assert queue.ahead_of([waiting, urgent, last]) == {urgent.id: 0, waiting.id: 1, last.id: 2}
    assert [job.study for job in queue.next_jobs(2)] == ["urgent", "waiting"]
    assert queue.count_queued() == 3


@pytest.mark.parametrize(
    ("needs", "offer", "fits"),
    [
        (Needs(), CPU, True),
        (Needs("cuda"), CPU, False),
        (Needs("cuda", "h200"), H200, True),
        (Needs(None, "a100"), H200, False),
        (Needs(memory_bytes=200 * 2**30), H200, False),
        (Needs(memory_bytes=80 * 2**30), H200, True),
        (Needs(count=2), H200, False),
    ],
)
def test_devices_are_offered_what_fits_alone(queue: Queue, needs: Needs, offer: Offer, fits: bool) -> None:
    submit(queue, needs=needs)
    assert (queue.next_for(offer) is not None) is fits
    assert offer.meets(needs) is fits


def test_what_happens_to_a_job_is_numbered(queue: Queue) -> None:
    job = submit(queue)
    attempt = start_next(queue).attempts
    with queue.writing(job.id, attempt, [("line", {"text": "a"}), ("line", {"text": "b"})], heard=7):
        pass
    found = queue.job(job.id)
    assert (found.heard, found.device, found.attempts) == (7, HERE, 1)
    queue.end(job.id, attempt, "finished")
    assert events_of(queue, job) == [
        (1, "state", "queued"),
        (2, "state", "running"),
        (3, "line", None),
        (4, "line", None),
        (5, "state", "finished"),
    ]
    assert [event.number for event in queue.events(job.id, after=3)] == [4, 5]


def test_what_a_former_attempt_writes_changes_nothing(queue: Queue) -> None:
    job = submit(queue)
    first = start_next(queue)
    assert queue.start(job.id, HERE) is None
    assert queue.put_back(job.id, first.attempts, "its process was ended", is_lost=True) == "queued"
    second = start_next(queue)
    assert (second.id, second.attempts, second.losses, second.heard) == (job.id, 2, 1, 0)
    with pytest.raises(AttemptOverError):
        queue.end(job.id, first.attempts, "finished")
    with pytest.raises(AttemptOverError):
        queue.put_back(job.id, first.attempts, "again", is_lost=True)
    with pytest.raises(AttemptOverError), queue.writing(job.id, first.attempts, [("line", {})]):
        pass
    queue.end(job.id, second.attempts, "finished")
    assert [state for _, _, state in events_of(queue, job)] == ["queued", "running", "queued", "running", "finished"]


def test_cancelling(queue: Queue) -> None:
    queued, running, lost = submit(queue, "a"), submit(queue, "b"), submit(queue, "c")
    assert queue.cancel(queued.id).state == "cancelled"  # type: ignore[union-attr]
    started = start_next(queue)
    assert started.id == running.id
    assert queue.cancel(running.id).is_cancel_asked  # type: ignore[union-attr]
    queue.end(running.id, started.attempts, "cancelled")
    attempt = start_next(queue).attempts
    queue.cancel(lost.id)
    # One that is to be cancelled is not started again.
    assert queue.put_back(lost.id, attempt, "the service ends", is_lost=False) == "cancelled"
    assert queue.counts() == {"cancelled": 3}
    assert queue.cancel("nobody") is None


def test_a_job_is_found_by_its_study_the_latest_first(queue: Queue) -> None:
    submit(queue)
    second = submit(queue)
    assert queue.job("bert") == second
    assert [job.number for job in queue.jobs(study="bert")] == [2, 1]
    assert [job.number for job in queue.jobs(before=2)] == [1]
    assert queue.jobs(states=["running"]) == []


def test_several_that_start_jobs_at_once_never_start_one_twice(store: Store) -> None:
    numbers = [submit(store.queue, f"s{number}").number for number in range(60)]
    taken: list[int] = []

    def take(_: int) -> None:
        while (job := store.queue.next_for(CPU)) is not None:
            if (started := store.queue.start(job.id, HERE)) is not None:
                store.queue.end(started.id, started.attempts, "finished")
                taken.append(started.number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(take, range(6)))
    assert sorted(taken) == numbers
    assert store.queue.counts() == {"finished": 60}

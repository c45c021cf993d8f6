"""The queue of a service: order, needs, leases that are renewed, lost and put back, and claims that never collide."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest

from autotune.store.queue import (
    LEASE_SECONDS,
    MOST_ATTEMPTS,
    AgentRecord,
    JobRecord,
    LeaseLostError,
    Needs,
    Offer,
    Queue,
)
from autotune.store.repository import Store
from autotune.store.tables import PLACES_PER_PRIORITY

CPU = Offer("cpu", "EPYC", 64 * 2**30)
H200 = Offer("cuda", "NVIDIA H200", 141 * 2**30)


class Clock:
    """A time that only moves when it is told to."""

    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time

    def move(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(store: Store, clock: Clock) -> Queue:
    store.queue.clock = clock
    return store.queue


def submit(queue: Queue, study: str = "bert", needs: Needs | None = None, **options: object) -> JobRecord:
    job, _ = queue.submit(study, {"model": "bert-tiny"}, needs or Needs(), **options)  # type: ignore[arg-type]
    return job


def claim(queue: Queue, offer: Offer = CPU) -> JobRecord:
    job = queue.claim("agent", offer)
    assert job is not None
    return job


def token_of(job: JobRecord) -> str:
    assert job.lease_token is not None
    return job.lease_token


def kinds(queue: Queue, job: JobRecord) -> list[tuple[int, str, str | None]]:
    return [(event.number, event.kind, event.document.get("state")) for event in queue.events(job.id)]


def test_jobs_of_one_priority_run_in_the_order_of_their_submission(queue: Queue) -> None:
    studies = [submit(queue, f"study-{number}").study for number in range(3)]
    assert [claim(queue).study for _ in studies] == studies
    assert queue.claim("agent", CPU) is None


def test_an_urgent_job_goes_first_but_overtakes_only_so_many(queue: Queue) -> None:
    oldest = submit(queue, "oldest")
    urgent = [submit(queue, f"urgent-{number}", priority=1) for number in range(PLACES_PER_PRIORITY + 1)]
    ran = [claim(queue).study for _ in range(PLACES_PER_PRIORITY + 2)]
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
def test_an_agent_takes_what_fits_alone(queue: Queue, needs: Needs, offer: Offer, fits: bool) -> None:
    submit(queue, needs=needs)
    assert (queue.claim("agent", offer) is not None) is fits
    assert offer.meets(needs) is fits


def test_a_job_that_no_agent_can_run_does_not_hold_up_the_others(queue: Queue) -> None:
    submit(queue, "large", Needs("cuda", "h200"))
    assert submit(queue, "small").id == claim(queue).id


def test_a_request_that_is_repeated_with_its_key_is_one_job(queue: Queue) -> None:
    first, is_new = queue.submit("a", {}, Needs(), idempotency_key="key")
    again, is_new_again = queue.submit("b", {}, Needs(), idempotency_key="key")
    assert (first.id, is_new, is_new_again) == (again.id, True, False)
    assert len(queue.jobs()) == 1


def test_what_happens_to_a_job_is_numbered(queue: Queue) -> None:
    job = submit(queue)
    token = token_of(claim(queue))
    with queue.writing(job.id, token, [("line", {"text": "a"}), ("line", {"text": "b"})]):
        pass
    queue.end(job.id, token, "finished")
    assert kinds(queue, job) == [
        (1, "state", "queued"),
        (2, "state", "running"),
        (3, "line", None),
        (4, "line", None),
        (5, "state", "finished"),
    ]
    assert [event.number for event in queue.events(job.id, after=3)] == [4, 5]


def test_a_silent_agent_loses_its_job_and_what_it_says_later_changes_nothing(queue: Queue, clock: Clock) -> None:
    job = submit(queue)
    lost = token_of(claim(queue))
    clock.move(LEASE_SECONDS - 1)
    assert queue.sweep() == []
    assert queue.renew(job.id, lost) is False
    clock.move(LEASE_SECONDS + 1)
    assert queue.sweep() == [(job.id, "queued")]
    second = claim(queue)
    assert (second.id, second.attempts) == (job.id, 2)
    with pytest.raises(LeaseLostError):
        queue.renew(job.id, lost)
    with pytest.raises(LeaseLostError):
        queue.end(job.id, lost, "finished")
    with pytest.raises(LeaseLostError), queue.writing(job.id, lost, [("line", {})]):
        pass
    queue.end(job.id, token_of(second), "finished")
    assert [state for _, _, state in kinds(queue, job)] == ["queued", "running", "queued", "running", "finished"]


def test_a_late_heartbeat_keeps_a_job_that_nobody_has_taken(queue: Queue, clock: Clock) -> None:
    job = submit(queue)
    token = token_of(claim(queue))
    clock.move(LEASE_SECONDS + 1)
    queue.renew(job.id, token)
    assert queue.sweep() == []


def test_a_job_that_loses_its_agents_again_and_again_has_failed(queue: Queue, clock: Clock) -> None:
    job = submit(queue)
    for _ in range(MOST_ATTEMPTS):
        claim(queue)
        clock.move(LEASE_SECONDS + 1)
        queue.sweep()
    ended = queue.job(job.id)
    assert ended is not None
    assert ended.state == "failed"
    assert ended.problem is not None
    assert "3 agents were lost" in ended.problem["message"]


def test_a_job_put_back_by_its_agent_may_be_tried_as_often_as_before(queue: Queue) -> None:
    job = submit(queue)
    for _ in range(MOST_ATTEMPTS + 1):
        queue.put_back(job.id, token_of(claim(queue)), "the agent ends")
    assert claim(queue).attempts == 1


def test_cancelling(queue: Queue, clock: Clock) -> None:
    queued, running, silent = submit(queue, "a"), submit(queue, "b"), submit(queue, "c")
    assert queue.cancel(queued.id).state == "cancelled"  # type: ignore[union-attr]
    claimed = claim(queue)
    assert claimed.id == running.id
    assert queue.cancel(running.id).state == "running"  # type: ignore[union-attr]
    assert queue.renew(running.id, token_of(claimed)) is True
    queue.end(running.id, token_of(claimed), "cancelled")
    claim(queue)
    queue.cancel(silent.id)
    clock.move(LEASE_SECONDS + 1)
    assert queue.sweep() == [(silent.id, "cancelled")]
    assert queue.counts() == {"cancelled": 3}
    assert queue.cancel("nobody") is None


def test_leases_survive_a_service_that_was_down(queue: Queue, clock: Clock) -> None:
    job = submit(queue)
    token = token_of(claim(queue))
    clock.move(3600)
    queue.grant_grace()
    assert queue.sweep() == []
    queue.end(job.id, token, "finished")


def test_a_job_is_found_by_its_study_the_latest_first(queue: Queue) -> None:
    submit(queue)
    second = submit(queue)
    assert queue.job("bert") == second
    assert [job.number for job in queue.jobs(study="bert")] == [2, 1]
    assert [job.number for job in queue.jobs(before=2)] == [1]
    assert queue.jobs(states=["running"]) == []


def test_agents_and_tokens(queue: Queue, clock: Clock) -> None:
    agent = AgentRecord("a", "host cpu", "host", "0.1", {"name": "EPYC"}, clock(), clock(), None)
    queue.register(agent)
    clock.move(60)
    assert queue.agents(clock() - timedelta(seconds=30)) == []
    assert queue.saw_agent("a")
    assert [found.name for found in queue.agents(clock())] == ["host cpu"]
    queue.saw_agent("a", leaves=True)
    assert queue.agents() == []
    assert queue.saw_agent("b") is False
    queue.add_token("ann", "digest", "read")
    found = queue.token("digest")
    assert found is not None
    assert (found.name, found.role) == ("ann", "read")
    assert queue.token("other") is None
    assert queue.remove_token("ann")
    assert queue.tokens() == []


def test_many_claim_at_once_and_none_gets_what_another_has(store: Store) -> None:
    numbers = [submit(store.queue, f"s{number}").number for number in range(60)]
    taken: list[int] = []

    def take() -> None:
        while (job := store.queue.claim("agent", CPU)) is not None:
            store.queue.end(job.id, token_of(job), "finished")
            taken.append(job.number)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == numbers
    assert store.queue.counts() == {"finished": 60}

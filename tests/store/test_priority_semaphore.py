"""Test that a semaphore admits few threads at a time, in the order of asking, urgent ones first."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import wait_until

from autotune.store.queue import PrioritySemaphore


def waiting(semaphore: PrioritySemaphore) -> int:
    return len(semaphore._waiting)


def test_the_urgent_go_first_and_the_others_in_the_order_of_asking() -> None:
    semaphore = PrioritySemaphore(1)
    order: list[str] = []

    def work(name: str) -> None:
        with semaphore.take(is_urgent=name.startswith("urgent")):
            order.append(name)

    names = ["first", "second", "urgent 1", "third", "urgent 2"]
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    with semaphore.take():
        for place, thread in enumerate(threads):
            thread.start()
            assert wait_until(lambda place=place: waiting(semaphore) == place + 1)
    for thread in threads:
        thread.join(120)
    assert order == ["urgent 1", "urgent 2", "first", "second", "third"]
    with semaphore.take():
        assert waiting(semaphore) == 0


def test_as_many_at_a_time_as_there_are_places() -> None:
    semaphore = PrioritySemaphore(2)
    inside = most = 0
    guard, pair = threading.Lock(), threading.Barrier(2)

    def work(_: int) -> None:
        nonlocal inside, most
        with semaphore.take():
            with guard:
                inside += 1
                most = max(most, inside)
            # As many as there are places meet here, and it would be seen if there were more.
            pair.wait(120)
            with guard:
                inside -= 1

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(12)))
    assert (inside, most) == (0, 2)


def test_what_fails_within_a_turn_passes_it_on() -> None:
    semaphore = PrioritySemaphore(1)
    for _ in range(2):
        with pytest.raises(KeyError), semaphore.take():
            raise KeyError("a")
    with semaphore.take():
        assert waiting(semaphore) == 0

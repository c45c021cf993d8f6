"""Leases: one owner at a time, expired ones can be taken over, and writes without the lease are refused."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from autotune.core.errors import StorageError
from autotune.core.outcome import OutOfMemory
from autotune.core.placement import Owner, this_owner
from autotune.store.leases import LEASE_SECONDS, Leases, name_of_study
from autotune.store.records import StudyRecord, TrialRecord, now
from autotune.store.repository import Store

OTHERS = Owner("ada", "gpu-2", "gpu-2 boot pid:[1]", 71, "12345")
LATER = timedelta(seconds=LEASE_SECONDS + 1)


def leases_later(store: Store) -> Leases:
    """The leases as they are once those of now have expired."""
    return Leases(store.engine, store.label, lambda: now() + LATER)


def test_one_at_a_time(store: Store) -> None:
    assert store.leases.take("study a", OTHERS, "one") is None
    held = store.leases.take("study a", this_owner(), "two")
    assert (held.token, held.owner) == ("one", OTHERS)
    assert held.describe().startswith("process 71 of ada on gpu-2 (since 20")
    assert store.leases.take("study b", this_owner(), "two") is None
    store.leases.release("study a", "two")
    assert store.leases.holder("study a") == held, "only the token gives it back"
    store.leases.release("study a", "one")
    assert store.leases.holder("study a") is None
    assert store.leases.take("study a", this_owner(), "two") is None


def test_what_has_expired_is_taken_over_and_its_token_is_worth_nothing(store: Store) -> None:
    assert store.leases.take("study a", OTHERS, "one") is None
    assert leases_later(store).take("study a", this_owner(), "two") is None
    assert not store.leases.renew("study a", "one")
    store.leases.release("study a", "one")
    held = store.leases.holder("study a")
    assert held.token == "two"


def test_renewing_moves_the_expiry_on(store: Store) -> None:
    assert store.leases.take("study a", OTHERS, "one") is None
    assert leases_later(store).holder("study a") is None
    assert leases_later(store).renew("study a", "one")
    assert leases_later(store).take("study a", this_owner(), "two") is not None


def test_a_process_of_this_machine_that_ended_is_not_waited_for(store: Store) -> None:
    gone = dataclasses.replace(this_owner(), started="1")
    assert store.leases.take("study a", gone, "one") is None
    assert store.leases.holder("study a") is None
    assert store.leases.take("study a", this_owner(), "two") is None


@pytest.mark.parametrize("is_expired", [True, False])
def test_of_many_that_take_a_free_lease_one_gets_it(store: Store, is_expired: bool) -> None:
    if is_expired:
        assert store.leases.take("study a", OTHERS, "old") is None
    taken: list[str] = []
    together = threading.Barrier(8)

    def take(token: str) -> None:
        together.wait(120)
        if leases_later(store).take("study a", OTHERS, token) is None:
            taken.append(token)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, (f"new-{number}" for number in range(8))))
    held = leases_later(store).holder("study a")
    assert taken == [held.token]


class TestGuard:
    """A store that holds a lease."""

    @pytest.fixture
    def study(self, store: Store, new_study: Callable[[str], StudyRecord]) -> StudyRecord:
        study = new_study("a")
        assert store.leases.take(name_of_study("a"), OTHERS, "one") is None
        store.hold("a", "one")
        return study

    def test_writes_while_it_is_held(
        self, store: Store, study: StudyRecord, new_trial: Callable[[StudyRecord, int], TrialRecord]
    ) -> None:
        trial = new_trial(study, 0)
        store.finish_trial(trial.id, OutOfMemory("full"), 1.0)
        store.update_study(study)
        assert store.lose_running_trials(study.id) == 0

    def test_refuses_every_write_once_it_is_lost(
        self, store: Store, study: StudyRecord, new_trial: Callable[[StudyRecord, int], TrialRecord]
    ) -> None:
        trial = new_trial(study, 0)
        assert leases_later(store).take(name_of_study("a"), dataclasses.replace(OTHERS, host="gpu-3"), "two") is None
        before = store.study("a"), store.trials(study.id)
        writes: list[Callable[[], object]] = [
            lambda: new_trial(study, 1),
            lambda: store.finish_trial(trial.id, OutOfMemory("full"), 1.0),
            lambda: store.update_study(dataclasses.replace(study, seconds=5.0)),
            lambda: store.lose_running_trials(study.id),
        ]
        for write in writes:
            with pytest.raises(StorageError, match="'a' is no longer this search's: process 71 of ada on gpu-3"):
                write()
        assert (store.study("a"), store.trials(study.id)) == before

    def test_trials_of_who_holds_the_lease_are_not_lost(
        self, store: Store, study: StudyRecord, new_trial: Callable[[StudyRecord, int], TrialRecord]
    ) -> None:
        new_trial(study, 0)
        store.let_go()
        with pytest.raises(StorageError, match="'a' is searched by process 71 of ada on gpu-2"):
            store.lose_running_trials(study.id)
        store.leases.release(name_of_study("a"), "one")
        assert store.lose_running_trials(study.id) == 1

"""Studies carried to another database: whole, trial by trial, over what is there, and refused where they are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import EFFECTIVE_64, RecordedRunner
from searching import interrupt_after, search
from sqlalchemy import event

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError, StorageError
from autotune.store.engine import transaction
from autotune.store.opening import open_store
from autotune.store.repository import Store
from autotune.store.transfer import make_way, read_study, related_studies, take_in, take_in_all, take_in_study


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """A database elsewhere."""
    with open_store(str(tmp_path / "other.db")) as opened:
        yield opened


def sent(store: Store, name: str = "bert") -> Document:
    """A study as it comes over the network."""
    found: Document = json.loads(json.dumps(read_study(store.engine, name)))
    return found


def test_a_search_that_was_interrupted_is_gone_on_with_in_another_database(store: Store, other: Store) -> None:
    observer, interruption = interrupt_after(3)
    begun = search(store, RecordedRunner(EFFECTIVE_64), observer, interruption)
    take_in_study(other.engine, sent(store))
    assert other.study("bert") == begun.study
    assert other.trials(begun.study.id) == begun.trials
    runner = RecordedRunner(EFFECTIVE_64)
    ended = search(other, runner)
    assert ended.study.state == "finished"
    assert ended.trials[:3] == begun.trials
    assert [trial.number for trial in ended.trials] == list(range(len(ended.trials)))
    take_in_study(store.engine, sent(other))
    assert store.trials(begun.study.id) == ended.trials
    assert store.study("bert") == ended.study


def test_a_study_of_an_agent_must_be_the_one_it_was_given(store: Store, other: Store) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))
    search(other, RecordedRunner(EFFECTIVE_64))
    with pytest.raises(InvalidRequestError, match="there is another study named 'bert'"):
        take_in_study(other.engine, sent(store))
    with (
        pytest.raises(InvalidRequestError, match="not 'roberta'"),
        transaction(store.engine, writes=True) as connection,
    ):
        take_in(connection, sent(store), "roberta")
    take_in_all(other.engine, [sent(store)])
    make_way(other.engine, "bert", sent(store))
    take_in_study(other.engine, sent(store))
    assert len(other.studies()) == 2


def test_a_name_that_made_way_is_free_for_a_new_search(store: Store) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))
    make_way(store.engine, "bert", None)
    assert search(store, RecordedRunner(EFFECTIVE_64)).study.state == "finished"
    assert len(store.studies()) == 2


def test_trials_of_a_time_when_the_search_was_anothers_do_not_count_twice(store: Store, other: Store) -> None:
    observer, interruption = interrupt_after(3)
    search(store, RecordedRunner(EFFECTIVE_64), observer, interruption)
    early = sent(store)
    # This one went on although its lease was lost; the other one went on from what was known then.
    search(store, RecordedRunner(EFFECTIVE_64))
    take_in_study(other.engine, early)
    observer, interruption = interrupt_after(2)
    search(other, RecordedRunner(EFFECTIVE_64), observer, interruption)
    late = sent(other)
    make_way(store.engine, "bert", late)
    take_in_study(store.engine, late)
    ended = search(store, RecordedRunner(EFFECTIVE_64))
    assert ended.study.state == "finished"
    measured = [(trial.candidate, trial.stage) for trial in ended.trials if trial.state == "completed"]
    assert len(measured) == len(set(measured))
    assert [trial.number for trial in ended.trials] == list(range(len(ended.trials)))


def test_what_is_no_study_is_refused_and_leaves_nothing(store: Store, other: Store) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))
    whole = sent(store)
    broken: list[Document] = [
        {},
        {**whole, "study": {**whole["study"], "color": "red"}},
        {**whole, "study": {**whole["study"], "started_at": "yesterday"}},
        {**whole, "trials": [{**whole["trials"][0], "outcome": {"state": "won"}}]},
        {**whole, "trials": [{**whole["trials"][0], "candidate": {}}]},
        {**whole, "trials": 3},
    ]
    for document in broken:
        with pytest.raises(InvalidRequestError, match="this study cannot be taken in"):
            take_in_study(other.engine, document)
    assert other.studies() == []


def test_a_database_that_fails_is_no_fault_of_the_study(store: Store, other: Store) -> None:
    """The agent sends it again, where a study that is refused would be lost."""
    search(store, RecordedRunner(EFFECTIVE_64))

    def refuse_writes(*arguments: Any) -> None:
        if str(arguments[2]).startswith("INSERT INTO autotune_trials"):
            arguments[0].connection.dbapi_connection.execute("PRAGMA query_only=ON")

    event.listen(other.engine, "before_cursor_execute", refuse_writes)
    with pytest.raises(StorageError, match="cannot be written"):
        take_in_study(other.engine, sent(store))
    event.remove(other.engine, "before_cursor_execute", refuse_writes)
    other.engine.dispose()
    take_in_study(other.engine, sent(store))
    assert len(other.trials(other.existing_study("bert").id)) == len(sent(store)["trials"])


def test_finished_studies_of_the_model_are_offered_for_reuse(store: Store) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))
    assert [found["study"]["name"] for found in related_studies(store.engine, "bert-large-uncased")] == ["bert"]
    assert related_studies(store.engine, "gpt2") == []

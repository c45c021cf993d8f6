"""Studies carried to another database: whole, trial by trial, over what is there, and refused where they are none."""

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
from autotune.store.transfer import read_study, related_studies, take_in, take_in_study


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """A database elsewhere."""
    with open_store(str(tmp_path / "other.db")) as opened:
        yield opened


def study_as_sent(store: Store, name: str = "bert") -> Document:
    """A study as it comes over the network."""
    return json.loads(json.dumps(read_study(store, name)))


def test_a_search_that_was_interrupted_is_gone_on_with_in_another_database(store: Store, other: Store) -> None:
    observer, interruption = interrupt_after(3)
    begun = search(store, RecordedRunner(EFFECTIVE_64), observer, interruption)
    take_in_study(other, study_as_sent(store))
    assert other.study("bert") == begun.study
    assert other.trials(begun.study.id) == begun.trials
    runner = RecordedRunner(EFFECTIVE_64)
    ended = search(other, runner)
    assert ended.study.state == "finished"
    assert ended.trials[:3] == begun.trials
    assert [trial.number for trial in ended.trials] == list(range(len(ended.trials)))
    take_in_study(store, study_as_sent(other))
    assert store.trials(begun.study.id) == ended.trials
    assert store.study("bert") == ended.study


def test_ids_that_arrive_are_not_believed(store: Store, other: Store) -> None:
    """A document neither renames another study nor takes its trials."""
    search(store, RecordedRunner(EFFECTIVE_64))
    search(other, RecordedRunner(EFFECTIVE_64))
    mine, before = study_as_sent(store), other.trials(other.existing_study("bert").id)
    with pytest.raises(InvalidRequestError, match="there is another study named 'bert'"):
        take_in_study(other, mine)
    with (
        pytest.raises(InvalidRequestError, match="not 'roberta'"),
        transaction(store.engine, writes=True) as connection,
    ):
        take_in(connection, mine, "roberta")
    theirs = study_as_sent(other)
    forged = {**mine, "study": {**mine["study"], "name": "forged"}}
    with pytest.raises(InvalidRequestError, match="there is another study named 'bert'"):
        take_in_study(other, {**forged, "study": {**forged["study"], "id": theirs["study"]["id"]}}, "forged")
    with pytest.raises(InvalidRequestError, match="one of its trials belongs to another study"):
        take_in_study(other, {**forged, "trials": theirs["trials"]}, "forged")
    assert [summary.study.name for summary in other.studies()] == ["bert"]
    assert other.trials(other.existing_study("bert").id) == before


def test_a_study_that_went_on_is_taken_in_over_what_is_there(store: Store, other: Store) -> None:
    observer, interruption = interrupt_after(2)
    search(store, RecordedRunner(EFFECTIVE_64), observer, interruption)
    take_in_study(other, study_as_sent(store))
    ended = search(store, RecordedRunner(EFFECTIVE_64))
    take_in_study(other, study_as_sent(store))
    assert other.trials(ended.study.id) == ended.trials
    assert len(ended.trials) > 2


def test_what_is_no_study_is_refused_and_leaves_nothing(store: Store, other: Store) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))
    whole = study_as_sent(store)
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
            take_in_study(other, document)
    assert other.studies() == []


def test_a_database_that_fails_is_no_fault_of_the_study(store: Store, other: Store) -> None:
    """The agent sends it again, where a study that is refused would be lost."""
    search(store, RecordedRunner(EFFECTIVE_64))

    def refuse_writes(*arguments: Any) -> None:
        if str(arguments[2]).startswith("INSERT INTO autotune_trials"):
            arguments[0].connection.dbapi_connection.execute("PRAGMA query_only=ON")

    event.listen(other.engine, "before_cursor_execute", refuse_writes)
    with pytest.raises(StorageError, match="cannot be written"):
        take_in_study(other, study_as_sent(store))
    event.remove(other.engine, "before_cursor_execute", refuse_writes)
    other.engine.dispose()
    take_in_study(other, study_as_sent(store))
    assert len(other.trials(other.existing_study("bert").id)) == len(study_as_sent(store)["trials"])


def test_finished_studies_of_the_model_are_offered_for_reuse(store: Store) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))
    assert [found["study"]["name"] for found in related_studies(store, "bert-large-uncased")] == ["bert"]
    assert related_studies(store, "gpt2") == []

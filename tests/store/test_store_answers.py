"""Test stored answers of trial processes in real files."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from frozen_databases import REVISIONS, run_sql, write_frozen
from postgres import sqlite_alone

from autotune.core.errors import StorageError
from autotune.core.prediction import PredictionAnswer
from autotune.store.answers import AnswerFile, open_answers
from autotune.store.location import plain_path, resolve_location
from autotune.store.repository import Store

PREDICTED = PredictionAnswer((), 64)


def test_an_answer_is_kept_once_and_is_no_environment(store: Store) -> None:
    assert store.answers.find("0123", PredictionAnswer) is None
    store.answers.keep("0123", PREDICTED)
    store.answers.keep("0123", PredictionAnswer((), 8))
    assert store.answers.find("0123", PredictionAnswer) == PREDICTED
    assert store.environment(store.intern_environment({"driver": "1"}, "0123")) == {"driver": "1"}


def test_answers_are_looked_up_while_the_database_is_open_elsewhere(store: Store) -> None:
    store.answers.keep("0123", PREDICTED)
    answers = open_answers(store.engine.url.render_as_string(hide_password=False), 1.0)
    with closing(answers):
        assert answers.find("0123", PredictionAnswer) == PREDICTED
        assert answers.find("4567", PredictionAnswer) is None


@sqlite_alone
@pytest.mark.parametrize(
    "damaged", ["{}", "[]", '"text"', "null", '{"largest_batch": 64}', '{"batches": [1], "largest_batch": 64}']
)
def test_an_answer_that_is_damaged_is_asked_for_again(store: Store, damaged: str) -> None:
    store.answers.keep("0123", PREDICTED)
    run_sql(store.path, "UPDATE autotune_answers SET document = ?", (damaged,))
    assert store.answers.find("0123", PredictionAnswer) is None


@sqlite_alone
@pytest.mark.parametrize("damaged", ["{", "\x80"])
def test_a_file_of_answers_that_is_damaged_is_said_to_be(store: Store, damaged: str) -> None:
    store.answers.keep("0123", PREDICTED)
    run_sql(store.path, "UPDATE autotune_answers SET document = CAST(? AS TEXT)", (damaged.encode("latin-1"),))
    answers = open_answers(str(store.path), 1.0)
    assert isinstance(answers, AnswerFile)
    with closing(answers), pytest.raises(StorageError):
        answers.find("0123", PredictionAnswer)


@pytest.mark.parametrize(
    "name", ["a?b.db", "a%41.db", "sqlite:///a.db?mode=ro", "sqlite:a.db", ":memory:", "", "x://y"]
)
def test_only_plain_names_of_files_are_paths_at_once(name: str) -> None:
    assert plain_path(name) is None


@pytest.mark.parametrize("name", ["a.db", " b c/ü.db ", "sqlite:///a.db", "sqlite:////x/a.db", "~/a.db", "a@b:c.db"])
def test_plain_names_of_files_are_the_paths_that_sqlalchemy_gives(name: str) -> None:
    assert plain_path(name) == resolve_location(name).path


def test_a_file_that_cannot_be_looked_for_is_said_to_be() -> None:
    with pytest.raises(StorageError, match="File name too long"):
        open_answers("a" * 300 + ".db", 1.0)


def test_looking_up_makes_no_database(tmp_path: Path) -> None:
    assert open_answers(str(tmp_path / "studies" / "none.db"), 1.0) is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="does not name a SQLite file"):
        open_answers(":memory:", 1.0)


@pytest.mark.parametrize("name", ["studies.db", "a b ü.db"])
def test_a_database_that_vanishes_is_not_made_again(tmp_path: Path, name: str) -> None:
    path = write_frozen(tmp_path, REVISIONS[-1]).rename(tmp_path / name)
    answers = open_answers(str(path), 1.0)
    with closing(answers):
        assert answers.find("0123", PredictionAnswer) is None
    path.unlink()
    with closing(answers), pytest.raises(StorageError, match="cannot be opened"):
        answers.find("0123", PredictionAnswer)
    assert list(tmp_path.iterdir()) == []


def test_looking_up_does_not_upgrade_an_older_database(tmp_path: Path) -> None:
    path = write_frozen(tmp_path, "0001")
    before = path.read_bytes()
    answers = open_answers(str(path), 1.0)
    with closing(answers), pytest.raises(StorageError, match="no such table"):
        answers.find("0123", PredictionAnswer)
    assert path.read_bytes() == before


@sqlite_alone
def test_looking_up_in_a_file_imports_no_library_of_databases(store: Store) -> None:
    store.answers.keep("0123", PREDICTED)
    program = (
        "import sys; from autotune.core.prediction import PredictionAnswer; "
        "from autotune.store.answers import open_answers; "
        f"print(open_answers({str(store.path)!r}, 1.0).find('0123', PredictionAnswer), "
        "*{'optuna', 'alembic', 'sqlalchemy'} & sys.modules.keys())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert ended.stdout.strip() == str(PREDICTED)

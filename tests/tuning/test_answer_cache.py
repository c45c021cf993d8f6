"""Test the keys of stored answers, and a cache that cannot be used."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from searching import BERT_LARGE, H200, ceiling_of, new_store

from autotune.core.candidate import Arm
from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths
from autotune.core.prediction import PredictionAnswer, PredictionWork
from autotune.core.training_source import find_trainer
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.devices.gpus import CHIPS
from autotune.estimate.memory import Question
from autotune.store.opening import open_store
from autotune.tuning.answer_cache import AnswerCache, KeptPredictions, inspection_key, prediction_key

QUESTION = Question(Arm("bf16"), ((8, 2), (64, 1)), 8)
IDENTITY = QUESTION.identity(CHIPS["rtx-3090"], ceiling_of(20 * GIB))
PREDICTED = PredictionAnswer((), 64)


def with_data(longest: int, samples: int = 1000, content: str = "a") -> Workload:
    """The workload with data of its own, after it was read."""
    lengths = Lengths(100, 200, 300, longest, 200.0, 0.0, 0.1, (1, 2))
    spec = DataSpec("/data/train.jsonl", "json", content, facts=DataFacts(samples, 2, lengths))
    return replace(BERT_LARGE, data=spec)


SAME: list[tuple[Workload, Workload]] = [
    (BERT_LARGE, replace(BERT_LARGE, model="another-name")),
    (BERT_LARGE, replace(BERT_LARGE, weights="google-bert/bert-large-uncased")),
    (with_data(400), with_data(400, samples=9, content="b")),
]
DIFFERENT: list[tuple[Workload, Workload]] = [
    (BERT_LARGE, replace(BERT_LARGE, seq_len=128)),
    (BERT_LARGE, replace(BERT_LARGE, dtype="bfloat16")),
    (BERT_LARGE, replace(BERT_LARGE, padding=0.2)),
    (BERT_LARGE, replace(BERT_LARGE, peft="lora", lora_rank=16)),
    (BERT_LARGE, replace(BERT_LARGE, config={**BERT_LARGE.config, "num_hidden_layers": 12})),
    (with_data(400), with_data(401)),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_does_not_matter_to_a_step_is_not_in_the_key(one: Workload, other: Workload) -> None:
    assert prediction_key(IDENTITY, one) == prediction_key(IDENTITY, other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_matters_to_a_step_is_in_the_key(one: Workload, other: Workload) -> None:
    assert prediction_key(IDENTITY, one) != prediction_key(IDENTITY, other)


def test_arms_and_gpus_with_the_same_answer_have_one_key() -> None:
    ceiling = ceiling_of(20 * GIB)
    twin = replace(QUESTION, arm=Arm("fp16"))
    assert twin.identity(CHIPS["rtx-3090"], ceiling) == IDENTITY
    assert QUESTION.identity(CHIPS["v100-16gb"], ceiling) == QUESTION.identity(CHIPS["v100-32gb"], ceiling)


@pytest.mark.parametrize(
    "other",
    [
        replace(QUESTION, arm=Arm("tf32")).identity(CHIPS["rtx-3090"], ceiling_of(20 * GIB)),
        replace(QUESTION, batches=((8, 2),)).identity(CHIPS["rtx-3090"], ceiling_of(20 * GIB)),
        replace(QUESTION, multiple=None).identity(CHIPS["rtx-3090"], ceiling_of(20 * GIB)),
        QUESTION.identity(CHIPS["rtx-4090"], ceiling_of(20 * GIB)),
        QUESTION.identity(CHIPS["rtx-3090"], ceiling_of(20 * GIB, headroom=0.05)),
        QUESTION.identity(CHIPS["rtx-3090"], ceiling_of(21 * GIB)),
    ],
)
def test_another_question_has_another_key(other: PredictionWork) -> None:
    assert prediction_key(other, BERT_LARGE) != prediction_key(IDENTITY, BERT_LARGE)


def test_the_users_own_code_is_not_remembered() -> None:
    source = find_trainer(f"{Path(__file__).parents[1]}/own_code/build_trainer.py:build")
    assert inspection_key(H200, Workload.of_source(source)) is None
    assert inspection_key(H200, BERT_LARGE) != inspection_key(replace(H200, driver="1"), BERT_LARGE)


def test_predictions_are_kept_in_a_file(tmp_path: Path) -> None:
    with new_store(tmp_path) as store:
        kept = KeptPredictions(AnswerCache(store.answers), BERT_LARGE)
        assert kept.find(IDENTITY) is None
        kept.keep(IDENTITY, PREDICTED)
    with open_store(str(tmp_path / "autotune.db")) as store:
        assert KeptPredictions(AnswerCache(store.answers), BERT_LARGE).find(IDENTITY) == PREDICTED
        assert KeptPredictions(AnswerCache(store.answers), replace(BERT_LARGE, seq_len=64)).find(IDENTITY) is None


def test_a_locked_database_is_given_up_and_is_no_error(tmp_path: Path) -> None:
    new_store(tmp_path).close()
    path = tmp_path / "autotune.db"
    with open_store(str(path), lock_timeout_seconds=0.1) as store, closing(sqlite3.connect(path)) as other:
        kept = KeptPredictions(AnswerCache(store.answers), BERT_LARGE)
        other.execute("BEGIN IMMEDIATE")
        kept.keep(IDENTITY, PREDICTED)
        assert kept.cache.problem is not None
        other.rollback()
        kept.keep(IDENTITY, PREDICTED)
        assert kept.find(IDENTITY) is None
        assert KeptPredictions(AnswerCache(store.answers), BERT_LARGE).find(IDENTITY) is None


def test_a_database_is_made_with_the_first_answer_only(tmp_path: Path) -> None:
    path = tmp_path / "studies" / "autotune.db"
    with AnswerCache(str(path)) as answers:
        assert answers.find("0123", PredictionAnswer) is None
    assert list(tmp_path.iterdir()) == []
    with AnswerCache(str(path)) as answers:
        answers.keep("0123", PREDICTED)
        assert answers.find("0123", PredictionAnswer) == PREDICTED
        assert answers.problem is None
    with AnswerCache(str(path)) as answers:
        assert answers.find("0123", PredictionAnswer) == PREDICTED
    with open_store(str(path)) as store:
        assert store.studies() == []


def _no_database(folder: Path) -> Path:
    (folder / "text.db").write_text("no database at all, but long enough to look like one" * 100)
    return folder / "text.db"


def _below_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "autotune.db"


def _read_only(folder: Path) -> Path:
    """Not even the superuser can write below here."""
    return Path("/proc/autotune/autotune.db")


def _another_programs(folder: Path) -> Path:
    with closing(sqlite3.connect(folder / "other.db")) as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
    return folder / "other.db"


@pytest.mark.parametrize("make", [_no_database, _below_a_file, _read_only, _another_programs])
def test_what_is_no_database_of_ours_is_left_alone_and_no_error(make: Callable[[Path], Any], tmp_path: Path) -> None:
    path = make(tmp_path)
    before = path.read_bytes() if path.is_file() else None
    with AnswerCache(str(path)) as answers:
        answers.keep("0123", PREDICTED)
        answers.keep("4567", PREDICTED)
        assert answers.find("0123", PredictionAnswer) is None
        assert answers.problem is not None
    assert (path.read_bytes() if path.is_file() else None) == before

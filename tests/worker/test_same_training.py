"""Test what a look finds in a collection of trainings, one step of each in this process."""

from pathlib import Path

import pytest
from trainings import DIFFERING, SAME, Training, table_lines

from autotune.core.look import Difference


def _named(training: Training) -> object:
    marks = () if training.is_quick else (pytest.mark.whole,)
    return pytest.param(training, marks=marks, id=f"{training.name}; {training.change}")


def test_the_collection_is_large_enough_and_documented() -> None:
    """``python tests/trainings.py`` prints the table."""
    assert len(DIFFERING) >= 30
    assert len(SAME) >= 30
    page = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "same-training.md"
    assert "\n".join(table_lines()) in page.read_text()


@pytest.mark.parametrize("training", map(_named, (*DIFFERING, *SAME)))
def test_a_look_finds_what_changes_a_training(training: Training, tmp_path: Path) -> None:
    found = training.found(tmp_path)
    kind = found.kind if isinstance(found, Difference) else found or "same"
    assert kind == training.finds, found

"""Test folders of prepared datasets: published whole, and never removed while in use."""

import dataclasses
import json
from pathlib import Path

import pytest
from tiny import tiny_workload

from autotune.core.dataset_spec import FACTS_FILE, DataFacts, DataSpec, facts_in, hold_data, publish_data
from autotune.core.device import Device
from autotune.execution import TrialServer

DATA = DataSpec("/no/such.jsonl", "json", "content")


def read_into(folder: Path, samples: int) -> Path:
    """A folder as if so many samples had been read into it."""
    folder.mkdir(parents=True)
    (folder / FACTS_FILE).write_text(json.dumps(dataclasses.asdict(DataFacts(samples))))
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the data belongs."""
    return tmp_path / ".data" / "key"


def test_what_was_read_is_moved_to_its_place(place: Path) -> None:
    partial = read_into(place.with_name("partial"), 5)
    assert publish_data(partial, place) is None
    assert facts_in(place) == DataFacts(5)
    assert not partial.exists()


def test_a_quicker_search_keeps_its_folder(place: Path) -> None:
    winner = read_into(place, 5).stat()
    partial = read_into(place.with_name("partial"), 6)
    assert publish_data(partial, place) == DataFacts(5)
    assert place.stat().st_ino == winner.st_ino


def test_what_is_incomplete_is_replaced(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "half").write_text("")
    assert hold_data(place) is None
    publish_data(read_into(place.with_name("partial"), 6), place)
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert [path.name for path in place.iterdir()] == [FACTS_FILE]


def test_nobody_removes_what_another_search_holds(place: Path) -> None:
    read_into(place, 5)
    one, other = hold_data(place), hold_data(place)
    one.discard()
    one.release()
    assert facts_in(place) == DataFacts(5)
    other.discard()
    other.release()
    assert not place.parent.exists()


def test_a_runner_holds_the_data_that_it_has_read(cpu: Device, place: Path, tmp_path: Path) -> None:
    read_into(place, 5)
    workload = dataclasses.replace(tiny_workload("bert-tiny"), data=DATA)
    with TrialServer(cpu, workload, tmp_path / "logs", on_start=lambda: None) as runner:
        runner.read_data(place)
        other = hold_data(place)
        other.discard()
        assert place.exists()
        other.release()
        runner.discard_data()
        assert not place.exists()

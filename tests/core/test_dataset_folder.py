"""Test folders of prepared datasets: published whole, kept for the next search, and not left after an error."""

import dataclasses
import json
from pathlib import Path

import pytest
from own_data import write_tokenizer
from tiny import tiny_workload

from autotune.core.dataset_spec import FACTS_FILE, DataFacts, DataSpec, facts_in, publish_data
from autotune.core.device import Device
from autotune.core.errors import InvalidRequestError, StorageError
from autotune.core.workload import Workload
from autotune.execution import TrialServer
from autotune.models.dataset_files import locate, tokenizer_content


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
    publish_data(partial, place)
    assert facts_in(place) == DataFacts(5)
    assert not partial.exists()


def test_a_quicker_search_keeps_its_folder(place: Path) -> None:
    winner = read_into(place, 5).stat()
    publish_data(read_into(place.with_name("partial"), 6), place)
    assert facts_in(place) == DataFacts(5)
    assert place.stat().st_ino == winner.st_ino


def test_what_is_incomplete_is_replaced(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "half").write_text("")
    assert facts_in(place) is None
    publish_data(read_into(place.with_name("partial"), 6), place)
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert [path.name for path in place.iterdir()] == [FACTS_FILE]


def test_a_place_that_another_kind_of_file_has_is_refused(place: Path) -> None:
    partial = read_into(place.with_name("partial"), 6)
    place.write_text("")
    with pytest.raises(StorageError, match="the data cannot be kept in"):
        publish_data(partial, place)


class TestReading:
    """A server that reads a dataset of two samples."""

    @pytest.fixture
    def workload(self, tmp_path: Path) -> Workload:
        file = tmp_path / "two.jsonl"
        file.write_text('{"text": "one", "label": 0}\n{"text": "two", "label": 1}\n')
        source, kind, content = locate(str(file), None)
        tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
        its_content = tokenizer_content(tokenizer, of_processor=False)
        return dataclasses.replace(
            tiny_workload("bert-tiny"), data=DataSpec(source, kind, content, its_content, tokenizer=tokenizer)
        )

    def test_keeps_what_it_has_read(self, cpu: Device, workload: Workload, place: Path, tmp_path: Path) -> None:
        seen: list[Workload] = []
        for _ in range(2):
            with TrialServer(cpu, workload, tmp_path / "logs", on_start=lambda: None) as runner:
                read = runner.read_data(place, seen.append)
            assert read.data.facts.samples == 2
            assert [path.name for path in place.parent.iterdir()] == [place.name]
            (tmp_path / "two.jsonl").unlink(missing_ok=True)
        assert seen == [read, read]

    def test_leaves_nothing_of_data_that_is_refused(
        self, cpu: Device, workload: Workload, place: Path, tmp_path: Path
    ) -> None:
        def refuse(read: Workload) -> None:
            raise InvalidRequestError(f"{read.data.facts.samples} samples are too few")

        with TrialServer(cpu, workload, tmp_path / "logs", on_start=lambda: None) as runner:
            with pytest.raises(InvalidRequestError, match="2 samples are too few"):
                runner.read_data(place, refuse)
            assert not place.parent.exists()
            assert runner.data_folder is None
            runner.read_data(place)
            with pytest.raises(InvalidRequestError, match="2 samples are too few"):
                runner.read_data(place, refuse)
        assert facts_in(place).samples == 2

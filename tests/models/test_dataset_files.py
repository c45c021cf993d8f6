"""Test how datasets are found and identified, without reading samples; a local server is the hub."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from machine import write_files
from messages import check_refusals
from own_data import samples, write_jsonl, write_saved
from searching import BERT_LARGE, prepared
from tiny import tiny_workload

from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths, describe_lengths
from autotune.core.errors import InvalidRequestError
from autotune.core.workload import Workload
from autotune.models import dataset_files as data_module
from autotune.models.dataset_files import check_unchanged, commit_of, data_files, locate, tokenizer_content
from autotune.tuning.studies import changes_since

LENGTHS = Lengths(5, 40, 90, 101, 43.5, 0.02, 0.4, (10, 40, 20, 5))
SPEC = DataSpec("/data/train.jsonl", "json", "abc", text_columns=("a", "b"), tokenizer="/tok", pad_to_multiple_of=8)


def workload(spec: DataSpec, lengths: Lengths | None = LENGTHS) -> Workload:
    facts = DataFacts(75, 3, lengths)
    return dataclasses.replace(tiny_workload("bert-tiny", seq_len=128), data=spec).with_facts(facts)


def test_a_workload_with_data_survives_json() -> None:
    made = workload(SPEC)
    assert Workload.from_document(json.loads(json.dumps(made.document()))) == made
    assert made.config["num_labels"] == 3


def test_workloads_without_data_are_what_they_were() -> None:
    """Those that were recorded before there was data are found again."""
    plain = tiny_workload("bert-tiny", config={"vocab_size": 30522})
    document = plain.document()
    del document["data"]
    assert Workload.from_document(document) == plain
    assert plain.fingerprint() == "95816cbdbbbb72bc"


def test_the_content_counts_and_the_place_does_not() -> None:
    made = workload(SPEC)
    assert workload(dataclasses.replace(SPEC, source="/elsewhere", tokenizer="/other")).fingerprint() == (
        made.fingerprint()
    )
    for change in ({"content": "abd"}, {"padding": "max_length"}, {"pad_to_multiple_of": None}, {"split": "test"},
                   {"group_by_length": True}, {"tokenizer_content": "x"}):  # fmt: skip
        assert workload(dataclasses.replace(SPEC, **change)).fingerprint() != made.fingerprint(), change


@pytest.mark.parametrize(
    ("changes", "length", "has_mask"),
    [
        ({}, 104, True),
        ({"pad_to_multiple_of": None}, 101, True),
        ({"padding": "max_length"}, 128, True),
        ({"padding": "max_length", "pad_to_multiple_of": 96}, 192, True),
    ],
)
def test_the_worst_batch_is_predicted(changes: dict[str, object], length: int, has_mask: bool) -> None:
    worst = workload(dataclasses.replace(SPEC, **changes)).at_its_worst()  # type: ignore[arg-type]
    assert (worst.seq_len, worst.padding > 0) == (length, has_mask)


def test_samples_of_one_length_have_no_mask() -> None:
    even = dataclasses.replace(LENGTHS, shortest=101)
    worst = workload(dataclasses.replace(SPEC, pad_to_multiple_of=None), even).at_its_worst()
    assert (worst.seq_len, worst.padding) == (101, 0.0)


def test_the_line_says_all_of_the_lengths() -> None:
    line = describe_lengths(LENGTHS)
    for part in ("min 5", "median 40", "95 % below 90", "max 101", "2.0% truncated", "40% of a batch of 8"):
        assert part in line
    assert "▂█▄▁" in line


def test_kinds_are_told_by_name_and_by_what_a_folder_holds(tmp_path: Path) -> None:
    rows = samples([3] * 8)
    for name, kind in (("a.jsonl", "json"), ("a.json", "json"), ("b.csv", "csv"), ("c.parquet", "parquet")):
        write_jsonl(tmp_path / name, rows)
        assert locate(str(tmp_path / name), "train")[:2] == (str(tmp_path / name), kind)
    assert locate(str(write_saved(tmp_path / "saved", rows)), "train")[1] == "saved"
    folder = tmp_path / "images" / "cat"
    folder.mkdir(parents=True)
    (folder / "1.png").write_bytes(b"not looked at")
    assert locate(str(tmp_path / "images"), "train")[1] == "imagefolder"
    assert locate("imdb", "train") == ("imdb", "hub", "imdb")
    assert locate("nyu-mll/glue:mrpc", "train")[1] == "hub"


FILES = ("train-00000-of-2.parquet", "train.parquet", "my_train.parquet", "constrain.parquet", "dev.parquet",
         "latest.parquet", "test1.parquet", "extra/part.parquet", "Train/part.parquet")  # fmt: skip


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (None, {"train-00000-of-2.parquet", "train.parquet", "my_train.parquet", "Train/part.parquet"}),
        ("train", {"train-00000-of-2.parquet", "train.parquet", "my_train.parquet", "Train/part.parquet"}),
        ("validation", {"dev.parquet"}),
        ("dev", {"dev.parquet"}),
        ("test", {"test1.parquet"}),
        ("extra", {"extra/part.parquet"}),
    ],
)
def test_a_split_is_a_word_of_a_name(tmp_path: Path, split: str | None, expected: set[str]) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = {str(Path(file).relative_to(tmp_path)) for file in data_files(str(tmp_path), "parquet", split or "train")}
    assert found == expected
    # What is looked at to tell whether the data has changed is what is read.
    content = locate(str(tmp_path), split)[2]
    for name in FILES:
        (tmp_path / name).write_text("changed")
        assert (locate(str(tmp_path), split)[2] != content) == (name in expected), name
        (tmp_path / name).write_text(name)


def test_train_is_all_only_where_nobody_asked_for_it(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(name)
    source, kind, content = locate(str(tmp_path), None)
    assert [Path(file).name for file in data_files(source, kind, "train")] == ["a.csv", "b.csv"]
    with pytest.raises(InvalidRequestError, match="--split train"):
        locate(str(tmp_path), "train")
    found = DataSpec(source, kind, content)
    check_unchanged(found)
    (tmp_path / "a.csv").write_text("c")
    with pytest.raises(InvalidRequestError, match="has changed"):
        check_unchanged(found)


def test_a_folder_of_saved_splits_and_one_of_them_are_found(tmp_path: Path) -> None:
    both = write_saved(tmp_path / "saved", samples([3] * 8))
    assert locate(str(both), "test")[1] == "saved"
    assert locate(str(both / "train"), None)[1] == "saved"


def test_content_is_what_is_inside(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", samples([3, 4]))
    same = write_jsonl(tmp_path / "b.jsonl", samples([3, 4]))
    other = write_jsonl(tmp_path / "c.jsonl", samples([3, 5]))
    contents = [locate(str(path), "train")[2] for path in (first, same, other)]
    assert contents[0] == contents[1] != contents[2]
    (tmp_path / "tokenizer.json").write_text("{}")
    before = tokenizer_content(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("[]")
    assert tokenizer_content(str(tmp_path)) != before


def test_messages_of_data_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_saved(tmp_path / "saved", samples([3] * 8))
    write_jsonl(tmp_path / "train.jsonl", samples([3]))
    files = ["empty.jsonl", "what.bin", "mixed/a.csv", "mixed/b.jsonl", "nothing/.keep"]
    files += [f"splits/{name}" for name in FILES[5:]] + [f"many/{number:02}.csv" for number in range(50)]
    write_files(tmp_path, {name: "" if "empty" in name else "x" for name in files})
    cases: dict[str, tuple[str, str]] = {
        **{
            name: (name, "train")
            for name in ("missing.jsonl", "./missing", "empty.jsonl", "what.bin", "nothing", "mixed")
        },
        **{f"{split} of a folder": ("splits", split) for split in ("validation", "tes", "parquet", "x[:10%]")},
        "many files": ("many", "test"),
        "a split of a saved split": ("saved/train", "test"),
        "a split of a file": ("train.jsonl", "test"),
    }
    check_refusals("datasets", {name: partial(locate, *given) for name, given in cases.items()}, tmp_path)


@pytest.mark.parametrize("name", ["train.jsnl", "tran.jsonl", "data/train.jsnl"])
def test_a_misspelt_file_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where a file of a data format with nearly the same name lies in the folder, that file is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for folder in (tmp_path, tmp_path / "data"):
        (folder / "train.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.setattr("autotune.models.dataset_files.hub_content", lambda name: pytest.fail(f"asked for {name}"))
    with pytest.raises(InvalidRequestError, match="there is no such file or folder") as caught:
        locate(name, None)
    assert caught.value.hint == "did you mean train.jsonl?"


@pytest.mark.parametrize("name", ["wikitext-103-raw-v1.5", "org/wikitext-103-raw-v1.5", "wikitext-103-raw-v1.v2"])
def test_a_hub_name_with_a_version_is_no_misspelt_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    for folder in (tmp_path, tmp_path / "org"):
        (folder / "wikitext-103-raw-v1.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.setattr("autotune.models.dataset_files.hub_content", lambda name: name)
    assert locate(name, None) == (name, "hub", name)


def test_a_missing_file_in_a_folder_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, who can list every folder."""

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InvalidRequestError, match="there is no such file or folder"):
        locate(str(tmp_path / "train.jsonl"), None)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = "import sys; from autotune.models.dataset_files import locate; print(locate(sys.argv[1], None)[2])"


class Hub(BaseHTTPRequestHandler):
    """Knows one dataset."""

    def do_GET(self) -> None:
        is_known = self.path.partition("?")[0].startswith("/api/datasets/acme/texts")
        body = json.dumps({"id": "acme/texts", "sha": COMMIT, "siblings": []} if is_known else {}).encode()
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of the hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def content(name: str, folder: Path, **variables: str) -> str:
    """What is known of a dataset's content, in a process with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ran = subprocess.run(
        [sys.executable, "-c", ASK, name],
        env={**environment, "HF_HOME": str(folder), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


def test_the_hub_says_which_commit_a_dataset_is_at(hub: str, tmp_path: Path) -> None:
    assert content("acme/texts", tmp_path, HF_ENDPOINT=hub) == f"acme/texts@{COMMIT}"
    assert content("acme/texts:german", tmp_path, HF_ENDPOINT=hub) == f"acme/texts:german@{COMMIT}"
    assert content("acme/nothing", tmp_path, HF_ENDPOINT=hub) == "acme/nothing"


def test_offline_it_is_the_commit_that_was_downloaded_last(tmp_path: Path) -> None:
    assert content("acme/texts", tmp_path, HF_HUB_OFFLINE="1") == "acme/texts"
    known = tmp_path / "hub" / "datasets--acme--texts" / "refs"
    known.mkdir(parents=True)
    (known / "main").write_text(COMMIT)
    assert content("acme/texts", tmp_path, HF_HUB_OFFLINE="1") == f"acme/texts@{COMMIT}"


def spec(found: str) -> DataSpec:
    return DataSpec("acme/texts", "hub", found)


OTHER = "f" * 40


@pytest.mark.parametrize(
    ("recorded", "today", "has_changed"),
    [
        (f"acme/texts@{COMMIT}", f"acme/texts@{COMMIT}", False),
        (f"acme/texts@{COMMIT}", f"acme/texts@{OTHER}", True),
        # Recorded when no commit was looked up, or asked now without a network.
        ("acme/texts", f"acme/texts@{OTHER}", False),
        (f"acme/texts@{COMMIT}", "acme/texts", False),
    ],
)
def test_a_study_goes_on_unless_the_dataset_has_changed(
    monkeypatch: pytest.MonkeyPatch, recorded: str, today: str, has_changed: bool
) -> None:
    monkeypatch.setattr(data_module, "hub_content", lambda name: today)
    if has_changed:
        with pytest.raises(InvalidRequestError, match="has changed since"):
            check_unchanged(spec(recorded))
    else:
        check_unchanged(spec(recorded))
    given = prepared()
    workload = dataclasses.replace(BERT_LARGE, data=spec(today))
    given = dataclasses.replace(given, request=dataclasses.replace(given.request, workload=workload))
    then = dataclasses.replace(BERT_LARGE, data=spec(recorded)).recorded_document()
    found = changes_since(given, given.request.document(), then, given.environment)
    assert found == (["acme/texts has changed since"] if has_changed else [])


def test_data_of_two_commits_are_two_workloads() -> None:
    keys = {dataclasses.replace(BERT_LARGE, data=spec(f"acme/texts@{commit}")).fingerprint() for commit in "ab"}
    assert len(keys) == 2
    assert commit_of("acme/texts:german@abc") == "abc"
    assert commit_of("acme/texts") is None

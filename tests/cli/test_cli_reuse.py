"""Test a repeated search, which starts no process, with odd names and no home folder."""

import json
import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from command_line import TINY_SEARCH, Ran, Run, command, environment, run_process

from autotune.devices.lock import Presence

AGAIN = (
    *TINY_SEARCH, "--effective-batch", "16", "--precision", "fp32", "--gradient-checkpointing", "off", "--trials", "2",
)  # fmt: skip


def search_again(path: Path, *options: str, **variables: str) -> Ran:
    """Repeat the search under another name, with no more trials than were measured."""
    return run_process(*AGAIN, "--json", "--storage", str(path), *options, folder=path.parent, **variables)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database in which a small search is recorded whole."""
    path = tmp_path_factory.mktemp("known") / "studies.db"
    ran = search_again(path, "--study", "first")
    assert ran.code == 0, ran.stderr
    assert "starting a process" in ran.stderr
    with closing(sqlite3.connect(path)) as connection, connection:
        for trial_id, text in connection.execute("SELECT id, outcome FROM autotune_trials").fetchall():
            # Steady, whatever else this machine was doing.
            outcome = json.loads(text)
            outcome["measurement"]["relative_spread"] = 0.001
            outcome["measurement"]["step_seconds_each"] = [outcome["measurement"]["step_seconds"]] * 3
            connection.execute("UPDATE autotune_trials SET outcome = ? WHERE id = ?", (json.dumps(outcome), trial_id))
    return path


@pytest.fixture
def copy(known: Path, tmp_path: Path) -> Path:
    """The same in a file of its own."""
    return Path(shutil.copy(known, tmp_path / "studies.db"))


def test_repeated_under_another_name_no_process_is_started(copy: Path) -> None:
    ran = search_again(copy, "--study", "second")
    document = ran.document
    assert "starting a process" not in ran.stderr
    assert {trial["stage"] for trial in document["trials"]} == {"reused"}
    assert {trial["reused_from"]["study"] for trial in document["trials"]} == {"first"}
    assert document["best"]["samples_per_second"] > 0
    assert not (copy.parent / "logs").exists() or not list((copy.parent / "logs").rglob("*.log"))
    shown = run_process("show", "second", "--storage", str(copy), folder=copy.parent)
    assert re.search(r"\(trial \d of first\)", shown.stdout)
    assert "--fresh measures again" in shown.stdout


def test_what_is_too_noisy_to_tell_is_exported_only_anyway(copy: Path) -> None:
    with closing(sqlite3.connect(copy)) as connection, connection:
        for trial_id, text in connection.execute("SELECT id, outcome FROM autotune_trials").fetchall():
            outcome = {**json.loads(text), "disturbed": ["others"], "others_share": 0.9, "run_again": False}
            connection.execute("UPDATE autotune_trials SET outcome = ? WHERE id = ?", (json.dumps(outcome), trial_id))
    where, variables = ("first", "--storage", str(copy)), {"AUTOTUNE_ACCEPT_NOISE": "0"}
    for command_ in ("export", "run"):
        refused = run_process(command_, *where, folder=copy.parent, **variables)
        assert refused.code == 14, refused.stderr
        assert not refused.stdout
        assert "too noisy to tell which candidate is the fastest" in refused.stderr
    assert run_process("export", *where, "--anyway", folder=copy.parent, **variables).code == 0
    again = search_again(copy, "--study", "first", **variables)
    assert again.code == 14, again.stderr
    assert json.loads(again.stdout)["too_noisy"]


def test_repeated_under_its_own_name_no_process_is_started(copy: Path) -> None:
    before = search_again(copy, "--study", "second")
    again = search_again(copy, "--study", "second")
    assert "starting a process" not in again.stderr
    assert again.document["trials"] == before.document["trials"]


def test_what_was_measured_beside_another_search_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "studies.db"
    with Presence("cpu"):
        ran = search_again(path, "--study", "first", "--trials", "1", "--no-baseline")
    assert [trial["disturbed"] for trial in ran.document["trials"]] == [["another search used this CPU"]]
    again = search_again(path, "--study", "second", "--trials", "1", "--no-baseline")
    assert [(trial["stage"], trial["disturbed"]) for trial in again.document["trials"]] == [("search", [])]


@pytest.mark.whole
def test_another_variable_that_changes_speed_is_another_environment(copy: Path) -> None:
    ran = search_again(copy, "--study", "second", "--trials", "1", OMP_NUM_THREADS="2")
    assert "starting a process" in ran.stderr
    assert ran.document["trials"][0]["reused_from"] is None


ODD_NAMES = ["a b.db", "q'uo\"te.db", "per%20cent.db", "ha#sh?.db", "br{a}ce.db", "new\nline.db"]


@pytest.mark.parametrize(
    "name", ["a q'uo\"te%20ha#sh?br{a}ce\n.db", *(pytest.param(name, marks=pytest.mark.whole) for name in ODD_NAMES)]
)
def test_any_name_will_do_for_the_file(copy: Path, name: str) -> None:
    """All odd characters at once; one by one in ``make test-whole``."""
    path = copy.rename(copy.with_name(name))
    ran = search_again(path, "--study", "second")
    assert ran.code == 0, ran.stderr
    assert [file.name for file in path.parent.iterdir() if file.is_file()] == [name]


def test_no_home_no_terminal_no_width(copy: Path) -> None:
    kept = {name: value for name, value in environment().items() if name not in ("HOME", "TERM", "XDG_CACHE_HOME")}
    ended = subprocess.run(
        command(*AGAIN, "--storage", str(copy), "--study", "x"),
        cwd=copy.parent,
        env={**kept, "COLUMNS": "20"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Best: " in ended.stdout


def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    """Its config names classes of its own for a model type that transformers has: the latter's is built."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    own = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 50, "auto_map": own, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    words = ("--device", "cpu", "--seq-len", "8", "--effective-batch", "8", "--precision", "fp32", "--trials", "1")
    ran = run_process("search", "--model", str(folder), *words, "--no-baseline", folder=tmp_path)
    assert ran.code == 0, ran.stderr
    assert "(BertForSequenceClassification)" in ran.stderr
    assert not (tmp_path / "ran").exists()


def test_damaged_documents_are_a_damaged_database(copy: Path, run: Run) -> None:
    """Bytes within the documents, which SQLite does not look at."""
    for table, column in (
        ("autotune_trials", "outcome"),
        ("autotune_trials", "candidate"),
        ("autotune_studies", "request"),
        ("autotune_workloads", "document"),
        ("autotune_environments", "document"),
    ):
        path = Path(shutil.copy(copy, copy.with_name("damaged.db")))
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE {table} SET {column} = substr({column}, 1, 20)")
        ran = run("show", "first", "--storage", str(path))
        assert ran.code == 5, (table, column)
        assert "is damaged" in ran.stderr
        assert len(ran.stderr.splitlines()) == 2


def test_no_length_of_time_depends_on_a_clock_that_jumps() -> None:
    """The clock on the wall only says when something was."""
    package = Path(__file__).parents[2] / "autotune"
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    # NVML asks for a moment on that clock.
    assert [path.name for path, text in sources.items() if "time.time()" in text] == ["gpu_monitor.py"]
    asked = {path.name for path, text in sources.items() if "datetime.now" in text}
    assert asked == {"lock.py", "records.py", "run_watch.py"}

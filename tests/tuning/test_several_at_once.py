"""Test several searches that write to one file while others read it, each in its own process."""

import multiprocessing
import time
import urllib.error
import urllib.request
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from socket import create_server
from typing import Any

import pytest
from processes import receive
from recorded import EFFECTIVE_64, RecordedRunner
from searching import new_store, search

from autotune.core.errors import AutotuneError
from autotune.results.dashboard import serve
from autotune.results.report import load_report
from autotune.store.opening import open_store

forks = multiprocessing.get_context("fork")
Answers = Any


def _search(path: str, name: str, repeats: int, start: Barrier, answers: Answers) -> None:
    try:
        with open_store(path) as store:
            start.wait(200)
            for repeat in range(repeats):
                run = search(store, RecordedRunner(EFFECTIVE_64), study=f"{name}-{repeat}", fresh=repeat % 2 == 0)
                assert run.best.candidate.describe() == "32 × 2  bf16"
        answers.put("")
    except (AutotuneError, AssertionError) as error:
        answers.put(f"{type(error).__name__}: {error}")


def _read(path: str, end: Any, answers: Answers) -> None:
    read = 0
    try:
        # Once more after the end, where it has come late.
        while not (end.is_set() and read):
            with open_store(path, create=False) as store:
                for summary in store.studies():
                    load_report(store, summary.study.name)
                    read += 1
        answers.put("")
    except AutotuneError as error:
        answers.put(f"{type(error).__name__}: {error}")


def _free_port() -> int:
    with closing(create_server(("127.0.0.1", 0))) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("repeats", [1, pytest.param(4, marks=pytest.mark.whole)])
def test_searches_a_reader_and_the_dashboard_do_not_lock_each_other_out(tmp_path: Path, repeats: int) -> None:
    new_store(tmp_path).close()
    path, port = str(tmp_path / "autotune.db"), _free_port()
    answers, end = forks.SimpleQueue(), forks.Event()
    names = ("one", "two", "three")
    # All begin once the dashboard has shown its first page.
    start = forks.Barrier(len(names) + 1)
    searches = [
        forks.Process(target=_search, args=(path, name, repeats, start, answers), daemon=True) for name in names
    ]
    reader = forks.Process(target=_read, args=(path, end, answers), daemon=True)
    shown = forks.Process(target=serve, args=(path, port, print), daemon=True)
    for process in (shown, *searches, reader):
        process.start()
    pages = 0
    try:
        while any(process.is_alive() for process in searches):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/studies", timeout=120) as page:
                    pages += page.status == 200
                if pages == 1:
                    start.wait(60)
            except urllib.error.HTTPError:
                raise
            except OSError:
                # Not listening yet.
                time.sleep(0.05)
        end.set()
        assert [receive(answers) for _ in (*searches, reader)] == ["", "", "", ""]
        reader.join(120)
    finally:
        end.set()
        shown.terminate()
        shown.join(120)
    assert pages
    with open_store(path) as store:
        studies = store.studies()
        assert len(studies) == len(names) * repeats
        for summary in studies:
            trials = store.trials(summary.study.id)
            assert summary.study.state == "finished"
            assert [trial.number for trial in trials] == list(range(len(trials)))
            assert all(trial.outcome is not None for trial in trials)

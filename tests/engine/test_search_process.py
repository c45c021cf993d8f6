"""Test the process of a device: one search after the other, and none for a process that was killed."""

import ctypes
import functools
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

from autotune.core.errors import DeviceError
from autotune.engine.child import _Child
from autotune.engine.local import LocalRun, SearchProcess
from autotune.engine.work import Work
from autotune.execution import child_process

# Ends a search once it is cancelled and a file is there.
ENDS_LATE = """
import json, os, sys, time
fd, gate = int(sys.argv[1]), sys.argv[2]

def say(work, kind, document):
    os.write(fd, json.dumps({"work": work, "kind": kind, "document": document}).encode() + b"\\n")

for line in sys.stdin:
    message = json.loads(line)
    if "work" in message:
        say(message["work"]["id"], "line", {})
    else:
        while not os.path.exists(gate):
            time.sleep(0.01)
        say(message["cancel"], "end", {"state": "interrupted"})
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that lets a search end."""
    program, path = tmp_path / "ends_late.py", tmp_path / "gate"
    program.write_text(ENDS_LATE)

    class EndsLate(subprocess.Popen[bytes]):
        def __init__(self, words: list[str], **options: Any) -> None:
            super().__init__([sys.executable, str(program), words[4], str(path)], **options)

    monkeypatch.setattr(child_process, "Popen", EndsLate)
    return path


@pytest.fixture
def process(gate: Path) -> Iterator[SearchProcess]:
    """A device's process."""
    process = SearchProcess(None, lambda *_: None)
    yield process
    process.tell_to_end()
    process.wait(60.0)


def work(name: str) -> Work:
    return Work(name, name, {})


def kinds(run: LocalRun) -> list[str]:
    return [message.kind for message in run.messages(0, 60.0)]


def test_a_search_waits_for_one_that_still_ends(process: SearchProcess, gate: Path) -> None:
    first = process.begin(work("first"))
    assert kinds(first) == ["line"]
    first.close()
    second: list[LocalRun] = []
    waiting = threading.Thread(target=lambda: second.append(process.begin(work("second"))))
    waiting.start()
    assert not second
    gate.touch()
    waiting.join(60)
    assert first.is_over
    assert kinds(second[0]) == ["line"]


def end_of(work: Work) -> dict[str, Any]:
    """How a process says that a search ended."""
    said = io.StringIO()
    _Child(0, said, None)._do(work)
    return dict(json.loads(said.getvalue().splitlines()[-1])["document"])


def test_a_database_that_fails_ends_an_attempt_and_a_wrong_request_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a folder would have to be")
    options = {"model": "bert-tiny", "effective_batch": 16}
    nobody = "postgresql+psycopg://autotune@127.0.0.1:1/autotune"
    lost = end_of(Work("1", "study", options, storage=nobody))
    assert (lost["state"], "127.0.0.1" in lost["why"]) == ("lost", True), lost
    # What no later attempt could do, either.
    never = end_of(Work("1", "study", options, storage=str(tmp_path / "file" / "a.db")))
    assert (never["state"], never["problem"]["exit_code"]) == ("failed", 5)
    wrong = end_of(Work("1", "study", {**options, "seq_len": 10**6}, storage=str(tmp_path / "a.db")))
    assert (wrong["state"], wrong["problem"]["exit_code"]) == ("failed", 2)


def test_a_cancel_as_its_work_ends_leaves_a_process_to_the_next() -> None:
    child = _Child(0, io.StringIO(), None)
    child._cancelled.add("1")
    # In C alone: where the guard is taken the signal has come, and nothing has handled it.
    raises = staticmethod(functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGTERM))
    child._guard = type("Guard", (), {"__enter__": raises, "__exit__": lambda *_: None})()
    before = signal.signal(signal.SIGTERM, child._on_signal)
    child._do(Work("1", "study", {}))
    signal.signal(signal.SIGTERM, before)
    assert not child._is_stopping


def test_a_process_that_was_killed_takes_no_search(process: SearchProcess) -> None:
    run = process.begin(work("first"))
    assert kinds(run) == ["line"]
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: run.is_over)
    assert run.messages(1, 60.0)[-1].document["state"] == "lost"
    with pytest.raises(DeviceError, match="has ended"):
        process.begin(work("second"))
    assert not process.is_alive

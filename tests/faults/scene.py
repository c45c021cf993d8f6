"""One study in a folder of its own: real processes search it, are disturbed, resumed, and looked at afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import time
import traceback
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from formula_trials import MARK, STAND_IN, begun, server_of, write_model
from processes import is_alive, processes_with, wait_until

# Imported here once, so that a controller is forked in milliseconds.
from autotune.cli.main import main

ORDERLY = {0, 5, 7, 8, 130}
OPTIONS = (
    "--seq-len", "8", "--device", "cpu", "--effective-batch", "64", "--memory-limit", "2GiB", "--precision", "fp32",
    "--optim", "adamw_torch_fused,adafactor", "--trial-timeout", "20s", "--study", "study",
)  # fmt: skip
# Long enough for a busy machine; what is waited for takes milliseconds.
PATIENCE_SECONDS = 60.0


Victim = Literal["trial", "server"]


@dataclass
class Tally:
    """What was injected and what came of it, by kind of fault."""

    faults: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    doubled: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def rows(self) -> list[tuple[str, int, int, int, int, int]]:
        """Kind, faults, trials lost, trials doubled, processes left, wrong answers; their sum last."""
        columns = (self.faults, self.lost, self.doubled, self.left, self.wrong)
        rows: list[Any] = [(kind, *(column[kind] for column in columns)) for kind in sorted(self.faults)]
        return [*rows, ("all", *(column.total() for column in columns))]


TALLY = Tally()


@dataclass(frozen=True)
class Row:
    """A recorded trial, read from the file without any of autotune."""

    id: str
    number: int
    candidate: str
    stage: str
    state: str
    outcome: dict[str, Any] | None

    @property
    def result(self) -> tuple[str, str, str, str]:
        """What a trial was and what it gave, without what differs from run to run."""
        outcome = {k: v for k, v in (self.outcome or {}).items() if k not in ("phase_seconds",)}
        return self.candidate, self.stage, self.state, json.dumps(outcome, sort_keys=True)


class Scene:
    """A folder, the controller that runs in it, and what it has done so far."""

    def __init__(self, folder: Path, kind: str, seed: int = 0, *, real: bool = False, options: tuple[str, ...] = ()):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.kind, self.options = folder, kind, options
        self.random = random.Random(f"{kind} {seed}")
        self.environment = {MARK: str(folder), "FAULTS_SECONDS": "0" if real else "0.1"}
        if real:
            self.environment["FAULTS_REAL"] = "1"
        self.pid: int | None = None
        self.hit: set[str] = set()
        self.outputs: list[str] = []
        self.seconds = 0.0
        """How long an undisturbed search took here, where this is one."""
        write_model(folder)
        interpreter = folder / "python"
        interpreter.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
        interpreter.chmod(0o755)

    # The controller

    @property
    def database(self) -> Path:
        return self.folder / "studies.db"

    def start(self, file_limit_bytes: int | None = None) -> None:
        """Fork a controller: ``autotune resume`` where the study is recorded, else ``autotune search``."""
        if self.is_recorded():
            self.start_resume(file_limit_bytes)
        else:
            self.start_search(str(self.database), file_limit_bytes)

    def start_resume(self, file_limit_bytes: int | None = None) -> None:
        """Fork ``autotune resume``."""
        self._fork(["resume", "study", "--storage", str(self.database)], file_limit_bytes)

    def start_search(self, storage: str, file_limit_bytes: int | None = None) -> None:
        """Fork ``autotune search``."""
        model = str(self.folder / "model")
        words = ["search", "--model", model, *OPTIONS, *self.options, "--storage", storage]
        self._fork(words, file_limit_bytes)

    def _fork(self, words: list[str], file_limit_bytes: int | None) -> None:
        self._output = self.folder / f"output-{uuid.uuid4().hex[:8]}"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become_controller(words, file_limit_bytes)

    def _become_controller(self, words: list[str], file_limit_bytes: int | None) -> None:
        code = 99
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for fd in (1, 2):
                os.dup2(output, fd)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.chdir(self.folder)
            os.environ.update(self.environment)
            sys.executable = str(self.folder / "python")
            if file_limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))
            main(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self) -> int:
        """Wait for the controller's end; its exit code, negative where a signal ended it."""
        pid, self.pid = self.pid, None
        ended: list[int] = []

        def has_ended() -> bool:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended.append(os.waitstatus_to_exitcode(status))
            return bool(ended)

        if not wait_until(has_ended, 4 * PATIENCE_SECONDS):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the controller hangs: {self._output.read_text()}")
        output = self._output.read_text(errors="replace") if self._output.exists() else ""
        self.outputs.append(output)
        assert "Traceback" not in output, output
        return ended[0]

    def finish(self) -> None:
        """Search on until the study is finished; every end on the way is an orderly one."""
        for _ in range(5):
            self.start()
            code = self.wait()
            assert code in ORDERLY, (code, self.outputs[-1])
            if code == 0:
                return
        raise AssertionError(f"no end: {self.outputs[-1]}")

    # Who runs

    def running(self) -> tuple[int, str] | None:
        """Process id and candidate of the trial that was begun last."""
        return next(reversed(begun(self.folder)), None)

    def descendants(self) -> list[int]:
        """Every living process that was started for this scene, wherever it has gone."""
        return processes_with(MARK, str(self.folder))

    # Faults

    def fault(self, times: int = 1) -> None:
        TALLY.faults[self.kind] += times

    def pause(self, most_seconds: float) -> None:
        """Wait for a random while, or until the controller has ended."""
        deadline = time.monotonic() + self.random.uniform(0, most_seconds)
        while time.monotonic() < deadline and self.pid and is_alive(self.pid):
            time.sleep(0.002)

    def strike(self, victim: Victim, number: int, within_seconds: float = 20.0) -> bool:
        """Send a signal to the running trial or its server, as soon as there is one; whether there was.

        None meets a candidate twice: a trial that is killed a second time is a failed one, so that the answer
        might rightly be another.
        """
        deadline = time.monotonic() + within_seconds
        while time.monotonic() < deadline and self.pid and is_alive(self.pid):
            running = self.running()
            server = server_of(running[0]) if running and running[1] not in self.hit else None
            if running is None or server is None:
                time.sleep(0.001)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(running[0] if victim == "trial" else server, number)
                self.fault()
                self.hit.add(running[1])
                return True
        return False

    # What is recorded

    def is_recorded(self) -> bool:
        return self.database.exists() and bool(self._query("SELECT 1 FROM autotune_studies WHERE name = 'study'"))

    def _query(self, words: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self.database, timeout=PATIENCE_SECONDS)) as connection:
            return connection.execute(words).fetchall()

    def trials(self) -> list[Row]:
        rows = self._query("SELECT id, number, candidate, stage, state, outcome FROM autotune_trials ORDER BY number")
        return [
            Row(i, n, json.dumps(json.loads(c), sort_keys=True), s, state, json.loads(o) if o else None)
            for i, n, c, s, state, o in rows
        ]

    def ended(self) -> list[Row]:
        """Those that ended in a way that says something of their candidate."""
        return [row for row in self.trials() if row.state in ("completed", "out_of_memory")]

    def searched(self) -> list[tuple[str, str, str, str]]:
        """What the trials gave that looked for the winner.

        Whether the winner is measured again is decided by the time that the search has taken.
        """
        return sorted(row.result for row in self.ended() if row.stage != "final")

    def winner(self) -> str | None:
        best = self._query("SELECT best_trial_id FROM autotune_studies WHERE name = 'study'")
        return next((row.candidate for row in self.trials() if best and row.id == best[0][0]), None)

    # Checks

    def check_nothing_runs(self) -> None:
        """No process is left a little after the controller's end."""
        wait_until(lambda: not self.descendants(), 20)
        left = self.descendants()
        TALLY.left[self.kind] += len(left)
        assert not left

    def check_kept(self, before: list[Row]) -> None:
        """What was recorded before is recorded now, unchanged."""
        now = {row.id: row for row in self.trials()} if self.database.exists() else {}
        lost = [row for row in before if now.get(row.id) != row]
        TALLY.lost[self.kind] += len(lost)
        assert not lost

    def check_answer(self, reference: Scene) -> None:
        """Nothing is doubled, and trials and winner are those of the undisturbed search."""
        counts = Counter((row.candidate, row.stage) for row in self.ended())
        # A winner is measured in up to three processes, two of them at the end.
        doubled = sum(max(0, count - (2 if stage == "final" else 1)) for (_, stage), count in counts.items())
        TALLY.doubled[self.kind] += doubled
        mine, theirs = self.searched(), reference.searched()
        wrong = self.winner() != reference.winner() or mine != theirs
        TALLY.wrong[self.kind] += wrong
        assert not doubled
        assert self.winner() == reference.winner()
        assert mine == theirs
        assert not [row for row in self.trials() if row.state == "running"]
        numbers = [row.number for row in self.trials()]
        assert len(numbers) == len(set(numbers))

"""Run ``autotune serve`` with stand-ins for devices, for the processes that search, or for their trials.

``python tests/service/standing_in.py KIND FOLDER serve …``, where KIND is

- ``devices``: devices that do not exist, whose searches last as long as ``FOLDER/plan.json`` says (see
  ``with_devices``). At the end the file holds what was started, and how long devices were idle.
- ``processes``: ten made-up GPUs, each with a process that says two trials and an end of each search.
- ``trials``: processes as they are, whose trials answer from a formula (``tests/faults/stand_in.py``), with leases of 3
  seconds. The time of day is off by the seconds that are written in ``FOLDER/clock``.
"""

import contextlib
import dataclasses
import json
import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STATUS = {"running": "trial 2: 16 × 2 bf16 (step 7); best so far 121.4 samples/s (8 × 4 bf16)"}
LEASE_SECONDS = 3.0
PROCESSES = 10


def program(kind: str, folder: Path) -> tuple[str, ...]:
    """Return the program of this kind, for ``Service``."""
    return (str(Path(__file__)), kind, str(folder))


def with_devices(folder: Path, hosts: Mapping[str, int], seconds: float | None = None) -> tuple[str, ...]:
    """Return the program with so many GPUs on each host; a search lasts so long on average, or for ever."""
    (folder / "plan.json").write_text(json.dumps({"hosts": hosts, "seconds": seconds}))
    return program("devices", folder)


def serve_with_devices(folder: Path) -> None:
    """Have an engine that ends each search after a while."""
    from searching import H200
    from serving import StandInEngine, StandInRun

    from autotune.core.errors import DeviceError
    from autotune.engine.work import Host, Run, Work
    from autotune.service import server

    class Engine(StandInEngine):
        def __init__(self) -> None:
            super().__init__()
            plan = json.loads((folder / "plan.json").read_text())
            self.seconds: float | None = plan["seconds"]
            for name, count in plan["hosts"].items():
                gpus = [dataclasses.replace(H200, uuid=f"{name}-{number}", index=number) for number in range(count)]
                self.add(*gpus, name=name)
            self.started: list[str] = []
            self.idle: list[float] = []
            self._ended_at: dict[str, float] = {}

        def start(self, work: Work, host: Host) -> Run:
            if not work.devices:
                raise DeviceError("no device was named")
            ended = self._ended_at.pop(work.devices[0], None)
            if ended is not None:
                self.idle.append(time.monotonic() - ended)
            self.started.append(work.id)
            run = StandInRun(work)
            run.add("status", STATUS)
            if self.seconds is not None:
                timer = threading.Timer(self.seconds * random.uniform(0.5, 1.5), self._end, [run])
                timer.daemon = True
                timer.start()
            return run

        def _end(self, run: StandInRun) -> None:
            for _ in range(2):
                run.add("trial", {"number": 0, "state": "completed"})
            self._ended_at[run.work.devices[0]] = time.monotonic()
            run.end("finished")

        def close(self) -> None:
            (folder / "plan.json").write_text(json.dumps({"started": self.started, "idle": self.idle}))

    server._engine = lambda settings: Engine()


def serve_with_processes(folder: Path) -> None:
    """Have the process of each made-up GPU be this program."""
    from searching import H200

    from autotune.engine import local

    gpus = [dataclasses.replace(H200, uuid=f"GPU-{number}", index=number) for number in range(PROCESSES)]
    local.list_devices = lambda: gpus  # type: ignore[attr-defined]
    sys.executable = _interpreter(folder, f'exec "{sys.executable}" "{__file__}" processes "{folder}" child "$4"')


def search_without_trials(fd: int) -> None:
    """Stand in for ``autotune.engine.child``: say two trials and an end of each search that is handed over."""
    sink = os.fdopen(fd, "w")

    def say(work: str, kind: str, document: dict[str, Any]) -> None:
        print(json.dumps({"work": work, "kind": kind, "document": document}), file=sink, flush=True)

    say("", "ready", {})
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            work = json.loads(line).get("work")
            if work is None:
                continue
            for number in range(2):
                time.sleep(random.uniform(0.02, 0.2))
                say(work["id"], "trial", {"number": number, "state": "completed"})
            say(work["id"], "end", {"state": "finished", "problem": None})


def disturb(folder: Path) -> None:
    """Replace the trials of this process and its children, the length of leases, and the clock."""
    import autotune.store.records as records

    true_now = records.now

    def shifted_now() -> datetime:
        with contextlib.suppress(OSError, ValueError):
            return true_now() + timedelta(seconds=float((folder / "clock").read_text()))
        return true_now()

    # Before anything else imports it by name.
    records.now = shifted_now
    import autotune.store.leases as leases
    import autotune.store.queue as queue

    leases.LEASE_SECONDS = LEASE_SECONDS
    # Jobs lose more processes here than any does by chance.
    queue.MOST_LOSSES = 1000
    for function in (leases.Leases.take, leases.Leases.renew):
        if function.__defaults__:
            function.__defaults__ = (LEASE_SECONDS,)
    import autotune.engine.local as local

    local._LONGEST_PAUSE_SECONDS = local._FIRST_PAUSE_SECONDS
    child = f'exec "{sys.executable}" "{__file__}" trials "{folder}" child "$4" "$5"'
    trial = f'shift 3\nexec "{sys.executable}" "{ROOT / "tests" / "faults" / "stand_in.py"}" "$@"'
    sys.executable = _interpreter(folder, f'if [ "$3" = autotune.engine.child ]; then {child}; fi\n{trial}')


def _interpreter(folder: Path, script: str) -> str:
    """Return what is run in place of Python; the first service makes it, for those after it and their processes."""
    interpreter = folder / "python"
    if not interpreter.exists():
        interpreter.write_text(f"#!/bin/sh\n{script}\n")
        interpreter.chmod(0o755)
    return str(interpreter)


def main() -> None:
    """Run the command, or the process that searches."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "studies")]
    kind, folder, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if kind == "processes" and words[0] == "child":
        search_without_trials(int(words[1]))
        return
    {"devices": serve_with_devices, "processes": serve_with_processes, "trials": disturb}[kind](folder)
    if words[0] == "child":
        from autotune.engine.child import main as search

        search(int(words[1]), words[2])
        return
    from autotune.cli.main import main as run

    run(words)


if __name__ == "__main__":
    main()

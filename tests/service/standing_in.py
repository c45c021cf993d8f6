"""Run ``autotune serve`` over devices that do not exist, whose searches last as long as they are told.

``python tests/service/standing_in.py FILE serve …``: FILE is JSON with ``devices``, names of hosts with their GPUs
counted, and ``seconds``, how long a search lasts on average; ``null`` is for ever. At the end the file holds what was
started, and how long devices were idle.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "studies")]

from searching import H200  # noqa: E402
from serving import StandInEngine, StandInRun  # noqa: E402

from autotune.core.errors import DeviceError  # noqa: E402
from autotune.engine.work import Host, Run, Work  # noqa: E402

STATUS = {"running": "trial 2: 16 × 2 bf16 (step 7); best so far 121.4 samples/s (8 × 4 bf16)"}


class Standing(StandInEngine):
    """Ends each search after a while."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        told = json.loads(path.read_text())
        self.seconds: float | None = told["seconds"]
        for host in told["devices"]:
            gpus = [dataclasses.replace(H200, uuid=f"{host['name']}-{n}", index=n) for n in range(host["gpus"])]
            self.add(*gpus, name=host["name"])
        self.started: list[str] = []
        self.idle: list[float] = []
        self._ended_at: dict[str, float] = {}

    def start(self, work: Work, host: Host) -> Run:
        """See ``Engine.start``."""
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
        """See ``Engine.close``."""
        self.path.write_text(json.dumps({"started": self.started, "idle": self.idle}))


def main() -> None:
    """Run the command."""
    from autotune.cli.main import main as run
    from autotune.service import server

    server._engine = lambda settings: Standing(Path(sys.argv[1]))
    run(sys.argv[2:])


if __name__ == "__main__":
    main()

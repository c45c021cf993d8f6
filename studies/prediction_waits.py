"""How long a search's predictions take on this machine: from asking for them to the end of the last one.

    python studies/prediction_waits.py                                  # the models of `make bench`, on the GPU
    python studies/prediction_waits.py --model bert-base-uncased --seq-len 128

Runs `autotune search` with three trials into an empty database, in a process for each model, and prints when
predictions were asked for, when each ended, what was waited for and when trials began, in seconds since the start. The
last line with "all that were asked for" is what `PREDICTION_SECONDS` of `studies/bench.py` holds. Whatever is given is
handed to `autotune search` instead.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_BENCH = (
    "Qwen2.5-0.5B --seq-len 512",
    "bert-large-uncased",
    "gpt2-medium --seq-len 1024",
    "roberta-base",
    "vit-large-patch16-224",
)
_OPTIONS = ("--effective-batch", "64", "--memory-limit", "24GiB", "--trials", "3", "--fresh")


def probe(arguments: list[str]) -> None:
    """Run one search in this process, and print when its predictions and trials begin and end."""
    began = time.monotonic()
    from autotune.cli.main import main
    from autotune.core.messages import Ended, ServerLine
    from autotune.core.outcome import Effort
    from autotune.core.placement import Placement
    from autotune.estimate.memory_jobs import Forecast
    from autotune.execution import TrialJob
    from autotune.execution.trial_server import TrialServer
    from autotune.store.records import TrialRecord
    from autotune.tuning.loop import Search

    asked: dict[str, float] = {}
    waits: list[float] = []

    def say(text: str) -> None:
        print(f"  probe {time.monotonic() - began:7.2f} {text}", flush=True)

    submit, take, wait, begin = TrialServer.submit, TrialServer._take, Forecast._wait, Search._job

    def submitting(self: TrialServer, job_id: str, work: Any, timeout_seconds: float) -> None:
        asked[job_id] = time.monotonic()
        say(f"asked {job_id} [{work.arm.describe()}]")
        submit(self, job_id, work, timeout_seconds)

    def taking(self: TrialServer, line: ServerLine) -> None:
        if isinstance(line, Ended) and line.ended in asked:
            say(f"ended {line.ended} {time.monotonic() - asked[line.ended]:.2f} s after it was asked for")
            say(f"all that were asked for: {time.monotonic() - min(asked.values()):.2f} s")
        take(self, line)

    def waiting(self: Forecast) -> None:
        since = time.monotonic()
        wait(self)
        waits.append(time.monotonic() - since)
        say(f"waited {sum(waits):.2f} s in all")

    def beginning(self: Search, record: TrialRecord, effort: Effort, placement: Placement) -> TrialJob:
        say(f"trial begins {record.candidate.describe()}")
        return begin(self, record, effort, placement)

    TrialServer.submit, TrialServer._take = submitting, taking  # type: ignore[method-assign]
    Forecast._wait, Search._job = waiting, beginning  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SystemExit):
        main(["search", "--model", *arguments, *_OPTIONS, "--storage", str(Path(folder) / "waits.db")])


def run() -> None:
    """Probe what was asked for, or each model of the bench in a process of its own."""
    given = sys.argv[1:]
    if given[:1] == ["--model"]:
        probe(given[1:])
        return
    for model in _BENCH:
        print(f"== {model}", flush=True)
        subprocess.run([sys.executable, __file__, "--model", *model.split()], check=False, timeout=600)


if __name__ == "__main__":
    run()

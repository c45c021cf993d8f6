"""Record what a search of a recorded landscape is told about memory, so that a replay can be told the same.

    python studies/predictions.py [LANDSCAPE.jsonl …]

Without a name, every grid. Asks the questions of the search itself, for the GPU of the landscape, in the processes
that a search asks; needs no GPU. Writes ``studies/landscapes/NAME.predictions.json``.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from replay import ROOT, RecordedRunner, landscapes, predictions_path, prepared_for

from autotune.core.candidate import Document
from autotune.core.messages import Answer
from autotune.core.prediction import PredictionWork
from autotune.core.schema import encode
from autotune.devices.listing import find_device
from autotune.execution import TrialServer
from autotune.tuning.forecast import forecast_of


class _Listener:
    """A ``Submitter`` that passes questions on to real processes and keeps what was asked and answered."""

    def __init__(self, runner: TrialServer) -> None:
        self._runner = runner
        self._asked: dict[str, Document] = {}
        self.answers: list[Document] = []

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        self._asked[job_id] = {name: value for name, value in encode(work).items() if name != "chip"}
        self._runner.submit(job_id, work, timeout_seconds)

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        ended = self._runner.ended(wait_seconds)
        for job_id, answer in ended.items():
            if answer.result is not None:
                self.answers.append({"question": self._asked[job_id], "result": answer.result})
        return ended


def record(path: Path) -> Document:
    """Return the questions about memory that a search of this landscape asks, with their answers."""
    prepared = prepared_for(RecordedRunner(path), "predictions")
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as logs,
        TrialServer(find_device("cpu"), prepared.request.workload, Path(logs)) as runner,
    ):
        listener = _Listener(runner)
        forecast = forecast_of(prepared, listener, patience_seconds=math.inf)
        assert forecast is not None
        forecast.complete()
    if forecast.unanswered:
        print(f"{path.name}: {len(forecast.unanswered)} questions without an answer", file=sys.stderr)
    packages = {name: version(name) for name in ("torch", "transformers")}
    answers = sorted(listener.answers, key=lambda answer: json.dumps(answer, sort_keys=True))
    command = ["python", "studies/predictions.py", path.relative_to(ROOT).as_posix()]
    print(f"{path.name}: {len(answers)} answers in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return {"command": command, "packages": packages, "answers": answers}


def _rows(document: Document) -> str:
    """Return a document as JSON with one answer a line."""
    answers: list[Any] = document["answers"]
    head = json.dumps({name: value for name, value in document.items() if name != "answers"})
    return head[:-1] + ', "answers": [\n' + ",\n".join(json.dumps(answer) for answer in answers) + "\n]}\n"


def main() -> None:
    """Record the landscapes that are named, or all."""
    for path in [Path(name).resolve() for name in sys.argv[1:]] or landscapes():
        predictions_path(path).write_text(_rows(record(path)), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Run a trial or an inspection of the user's own code, by the kind of training that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from autotune.core.candidate import Document
from autotune.core.workload import Workload
from autotune.worker.process import leave
from autotune.worker.user import accelerate_trial, lightning_trial, loop_trial, trainer_trial
from autotune.worker.user.own_trial import OwnTrial

_TRIALS: dict[str, type[OwnTrial]] = {
    "trainer": trainer_trial.TrainerTrial,
    "loop": loop_trial.LoopTrial,
    "accelerate": accelerate_trial.AccelerateTrial,
    "lightning": lightning_trial.LightningTrial,
}

SendMessage = Callable[[str, Document], None]


def run_own(job: Document, send: SendMessage) -> None:
    """Run the job, send its result with ``send``, end the process."""
    output_dir: str = job["output_dir"]
    source = Workload.from_document(job["workload"]).source
    assert source is not None

    def finish(result: Document) -> NoReturn:
        send("result", result)
        leave(0)

    def progress(record: Document) -> None:
        send("progress", record)

    if job["kind"] == "inspect":
        inspect = loop_trial.inspect if source.kind == "loop" else trainer_trial.inspect
        inspect(job, output_dir, finish)
    kind = _TRIALS["loop" if source.kind == "loop" else source.interface.get("kind", "trainer")]
    kind(job, progress, finish).run_in(output_dir)

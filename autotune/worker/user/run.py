"""Run a trial or an inspection of the user's own code, by the kind of training that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from autotune.core.inspection import InspectionAnswer
from autotune.core.jobs import InspectionWork, TrialWork
from autotune.core.look import LookAnswer, LookWork
from autotune.core.outcome import Outcome, outcome_document
from autotune.core.rehearsal import Rehearsal, RehearsalWork
from autotune.core.scratch import Scratch
from autotune.core.workload import Workload
from autotune.worker.process import leave
from autotune.worker.rendezvous import Ranks
from autotune.worker.user import (
    loop_inspection,
    placeholder_inspection,
    trainer_inspection,
    trainer_trial,
)
from autotune.worker.user.inspection import Code
from autotune.worker.user.own_look import look_at_own
from autotune.worker.user.own_trial import OwnTrial
from autotune.worker.user.rehearsal import TrainerRehearsal

SendMessage = Callable[[str, Any], None]
"""Sends a line to the trial server: what it is, and a value."""


def run_own(
    workload: Workload,
    work: TrialWork | LookWork | RehearsalWork | InspectionWork,
    scratch: Scratch,
    send: SendMessage,
    ranks: Ranks,
) -> NoReturn:
    """Run a trial, a look or an inspection, send its result with ``send``, end the process."""
    source = workload.source
    assert source is not None

    def finish(answer: InspectionAnswer) -> NoReturn:
        if answer.inspection is not None:
            # So that no rank loses another one while it still waits for it.
            ranks.gather(True)
        send("result", answer)
        leave(0)

    def finish_trial(outcome: Outcome) -> NoReturn:
        send("result", outcome_document(outcome))
        leave(0)

    def finish_look(answer: LookAnswer) -> NoReturn:
        send("result", answer)
        leave(0)

    def finish_rehearsal(answer: Rehearsal) -> NoReturn:
        send("result", answer)
        leave(0)

    if isinstance(work, RehearsalWork):
        TrainerRehearsal(workload, work, scratch, finish_rehearsal, ranks).run_and_end()
    if isinstance(work, LookWork):
        look_at_own(workload, work, scratch, finish_look, ranks)
    if isinstance(work, TrialWork):
        kind = trainer_trial.TrainerTrial if source.framework == "trainer" else OwnTrial
        trial = kind(workload, work, scratch, lambda progress: send("progress", progress), finish_trial, ranks)
        trial.run_and_end()
    elif source.kind == "loop":
        loop_inspection.inspect(Code(source, work, scratch), finish)
    elif source.template.names:
        placeholder_inspection.inspect(Code(source, work, scratch), finish)
    else:
        trainer_inspection.inspect(Code(source, work, scratch), finish, ranks)

"""Run a trial or an inspection of the user's own code, by the kind of training that it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from autotune.core.inspection import InspectionAnswer
from autotune.core.look import LookAnswer, LookWork
from autotune.core.messages import InspectionWork, TrialWork
from autotune.core.outcome import Effort, Failed, Outcome, OutOfMemory, outcome_document
from autotune.core.rehearsal import Rehearsal, RehearsalWork
from autotune.core.scratch import Scratch
from autotune.core.workload import Workload
from autotune.worker.process import leave
from autotune.worker.rendezvous import Ranks
from autotune.worker.user import placeholder_inspection, trainer_inspection
from autotune.worker.user.inspection import Code, inspect_loop
from autotune.worker.user.loop_rehearsal import LoopRehearsal
from autotune.worker.user.own_look import LoopLook, TrainerLook
from autotune.worker.user.own_trial import OwnTrial
from autotune.worker.user.rehearsal import TrainerRehearsal
from autotune.worker.user.trainer_trial import TrainerTrial

SendMessage = Callable[[str, Any], None]
"""Sends a line to the trial server: what it is, and a value."""


def run_own(
    workload: Workload,
    work: TrialWork | LookWork | RehearsalWork | InspectionWork,
    scratch: Scratch,
    send: SendMessage,
    ranks: Ranks,
) -> NoReturn:
    """Run a job of the user's own code, send its result, and end the process."""
    source = workload.source
    assert source is not None

    def finish(answer: Any) -> NoReturn:
        send("result", answer)
        leave(0)

    def finish_inspection(answer: InspectionAnswer) -> NoReturn:
        if answer.inspection is not None:
            # So that no rank loses another one while it still waits for it.
            ranks.gather(True)
        finish(answer)

    def finish_trial(outcome: Outcome) -> NoReturn:
        finish(outcome_document(outcome))

    def end_look(outcome: Outcome) -> NoReturn:
        why = outcome.message if isinstance(outcome, Failed | OutOfMemory) else "it made no update"
        finish(LookAnswer(problem=why))

    def end_rehearsal(outcome: Outcome) -> NoReturn:
        why = outcome.message if isinstance(outcome, Failed | OutOfMemory) else "it ended as a trial does"
        if rehearsal.parts is not None:
            rehearsal.parts.end_after(why, is_out_of_memory=isinstance(outcome, OutOfMemory))
        finish(Rehearsal(problem=why))

    is_trainer = source.framework == "trainer"
    match work:
        case RehearsalWork():
            trial = TrialWork(work.candidate, work.devices, work.cap_bytes, Effort(), work.seed, work.unmodified)
            rehearses: type[TrainerRehearsal | LoopRehearsal] = TrainerRehearsal if is_trainer else LoopRehearsal
            rehearsal = rehearses(work, finish, workload, trial, scratch, lambda _: None, end_rehearsal, ranks)
            rehearsal.run_and_end()
        case LookWork():
            (candidate,) = work.candidates
            effort = Effort(max_micro_steps=candidate.gradient_accumulation_steps)
            trial = TrialWork(candidate, work.devices, work.cap_bytes, effort, work.seed, work.unmodified)
            look = TrainerLook if is_trainer else LoopLook
            look(work, finish, workload, trial, scratch, lambda _: None, end_look, ranks).run_and_end()
        case TrialWork():
            kind = TrainerTrial if is_trainer else OwnTrial
            kind(workload, work, scratch, lambda told: send("progress", told), finish_trial, ranks).run_and_end()
    code = Code(source, work, scratch)
    if source.kind == "loop":
        inspect_loop(code, finish_inspection)
    elif source.template.names:
        placeholder_inspection.inspect(code, finish_inspection)
    else:
        trainer_inspection.inspect(code, finish_inspection, ranks)

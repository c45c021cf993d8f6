"""Run a trial of the user's own training code: start it, stop it once it is measured, judge it."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from autotune.core.candidate import Candidate
from autotune.core.jobs import TrialWork
from autotune.core.lengths import PlannedRun, SampleLengths, shapes_of
from autotune.core.outcome import Completed, Failed, FailureReason, Outcome, OutOfMemory
from autotune.core.scratch import Scratch
from autotune.core.workload import Workload
from autotune.training.errors import SettingUnavailableError
from autotune.worker.rendezvous import Ranks
from autotune.worker.trial.measure import StepTimer, prefetched_steps
from autotune.worker.trial.run import Send, Trial
from autotune.worker.trial.step_checks import NotTrained, NotTrainedError, StepChecks
from autotune.worker.trial.training_watch import TrainingWatch
from autotune.worker.user.code import UserCodeError, enter, foreseen, trim
from autotune.worker.user.guard import Guard
from autotune.worker.user.loader_overlay import MOST_PREFETCHED, cap_prefetching
from autotune.worker.wrapping import around


class OwnTrial(Trial):
    """A trial whose process ends inside the user's code, once enough is measured.

    Whatever their code would do with an exception, it gets none: the result is sent and the process ends.
    """

    begins_anywhere = False
    """Whether the code may train in this process wherever it begins to, since it is measured there."""

    def __init__(
        self,
        workload: Workload,
        work: TrialWork,
        scratch: Scratch,
        send: Send,
        finish: Callable[[Outcome], NoReturn],
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(workload, work, scratch, send, ranks)
        assert self._workload.source is not None
        self._source = self._workload.source
        self._finish = finish
        self._is_unmodified = work.unmodified
        self._guard = Guard(self._source, self._refuse, is_known=lambda: self.begins_anywhere)
        self._timer: StepTimer | None = None

    @property
    def watch(self) -> TrainingWatch:
        """Return what counts what the code trains."""
        return self._checks.watch

    def run_code(self, output_dir: str) -> None:
        """Run the user's code with the candidate's settings, to where it ends the process."""
        raise NotImplementedError

    def run_and_end(self) -> NoReturn:
        """Run the user's code; never returns, and never raises."""
        # Their code may compile.
        try:
            self._open_device()
            self._phases.enter(self._source.kind)
            enter(self._source)
            cap_prefetching()
            self._guard.install(self._scratch.stop_file)
            note_cache_files(self._scratch.cache_list)
            self.run_code(self._scratch.output_dir)
            raise UserCodeError(
                f"{self._source.name} ended before enough steps were measured",
                "have it train for more steps, or on more data",
            )
        except BaseException as error:
            self._end_after(error)

    def _end_after(self, error: BaseException) -> NoReturn:
        """End the process after an error, which counts for nothing once enough was measured."""
        if self._timer is not None and self._timer.pending is not None:
            # Only the profiled step failed, after all that is needed was measured.
            self._end(self._completed(self._timer.pending, None))
        if self._is_open:
            self._meter.lift_limit()
        self._end(self._judged(error))

    def samples_of_micro_step(self) -> int | None:
        """Return how many samples are to be seen going into the model; ``None`` where they are counted otherwise."""
        return self._candidate.per_device_train_batch_size

    def _make_timer(self, *words: Any, **options: Any) -> StepTimer:
        """Return what times the steps, without what is spent in ``torch.save``."""
        timer = super()._make_timer(*words, **options)

        def saved(save: Callable[..., Any], *given: Any, **named: Any) -> Any:
            with timer.saving():
                return save(*given, **named)

        around(torch, "save", saved)
        return timer

    def _warm_up_loading(self, workers: int, prefetch: int | None) -> None:
        """Have as many more steps of warm-up as the loading processes, the user's own too, have ready."""
        ahead = None if prefetch is None else min(prefetch, MOST_PREFETCHED)
        arm = dataclasses.replace(self._candidate.arm, dataloader_num_workers=workers, dataloader_prefetch_factor=ahead)
        ready = prefetched_steps(dataclasses.replace(self._candidate, arm=arm), self._effort)
        self._effort = dataclasses.replace(self._effort, warmup_steps=self._effort.warmup_steps + ready)

    def _make_checks(self) -> StepChecks:
        def refuse(found: NotTrained) -> NoReturn:
            # Their code might catch an exception.
            self._end(self._failure(NotTrainedError(found)))

        return StepChecks(
            self._source.name,
            self.samples_of_micro_step(),
            refuse,
            out_of_memory_count=self._meter.failed_allocations,
        )

    def _refuse(self, message: str, hint: str) -> NoReturn:
        """End the trial of code that trains in a way that is not measured."""
        self._end(self._judged(UserCodeError(message, hint)))

    def _judged(self, error: BaseException) -> OutOfMemory | Failed:
        trim(error, self._source)
        error = foreseen(error, self._source)
        if isinstance(error, UserCodeError | SystemExit) and self._checks.has_run_out():
            message = f"{self._source.name} ran out of memory, and caught the error"
            return self._failure(NotTrainedError(NotTrained(message, is_out_of_memory=True)))
        if isinstance(error, UserCodeError | SettingUnavailableError):
            print("; ".join(filter(None, (f"autotune: {error}", getattr(error, "hint", "")))), file=sys.stderr)
            reason: FailureReason = "unavailable" if isinstance(error, SettingUnavailableError) else "error"
            return Failed(reason, str(error), during=self._phases.current)
        outcome = self._failure(error)
        if isinstance(outcome, OutOfMemory) and (line := _line_of(error, self._source.file)) is not None:
            return dataclasses.replace(outcome, message=f"{outcome.message} ({line})")
        if isinstance(outcome, Failed):
            return dataclasses.replace(outcome, message=f"{self._source.name} raised {outcome.message}")
        return outcome

    def _end(self, outcome: Completed | OutOfMemory | Failed) -> NoReturn:
        self._phases.end()
        self._finish(dataclasses.replace(outcome, phase_seconds=self._phases.seconds))


def planned_run(
    lengths: SampleLengths | None, candidate: Candidate, steps: int | None, epochs: float | None
) -> PlannedRun:
    """Return a run of so many optimizer steps, with what its batches are where the lengths of the samples are known."""
    if lengths is None or not lengths.counts:
        return PlannedRun(steps, epochs)
    arm, ranks = candidate.arm, candidate.arm.data_parallel
    batching = lengths.batching(candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps, ranks)
    if arm.padding_free:
        batching = dataclasses.replace(batching, padding="rows", multiple=1)
    if arm.length_multiple is not None:
        batching = dataclasses.replace(batching, multiple=math.lcm(batching.multiple, arm.length_multiple))
    shapes, of_epoch = shapes_of(lengths, batching, steps), shapes_of(lengths, batching)
    tokens = shapes.mean_tokens * candidate.gradient_accumulation_steps
    varies = lengths.vary and batching.padding != "max_length"
    return PlannedRun(
        shapes.steps, epochs, shapes.new, min(shapes.new, of_epoch.new), shapes.new_in_steps, tokens, varies
    )


def _line_of(error: BaseException, file: str) -> str | None:
    """Return ``train.py:12``: the innermost line of a file that an error went through."""
    lines = [trace.lineno for trace in traceback.extract_tb(error.__traceback__) if trace.filename == file]
    return f"{os.path.basename(file)}:{lines[-1]}" if lines else None


def note_cache_files(list_file: str) -> None:
    """Have the cache files of ``datasets`` that this process makes written down, to be removed with the trial.

    Preprocessing with a function that depends on a script's arguments makes others for each candidate, which are never
    read again.
    """

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        # datasets writes to a temporary file and moves it.
        if event == "os.rename":
            path = os.path.abspath(os.fsdecode(arguments[1]))
            name = os.path.basename(path)
            # One that was there before is the user's.
            if name.startswith("cache-") and name.endswith(".arrow") and not os.path.exists(path):
                with open(list_file, "a", encoding="utf-8") as file:
                    file.write(f"{path}\n")

    sys.addaudithook(on_event)

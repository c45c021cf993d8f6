"""Look at the first optimizer step of the user's own ``Trainer`` or script, with some settings, and end the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from autotune.core.candidate import Document
from autotune.core.jobs import TrialWork
from autotune.core.look import FirstStep, LookAnswer, LookWork
from autotune.core.outcome import Effort, Failed, Outcome, OutOfMemory
from autotune.core.scratch import Scratch
from autotune.core.workload import Workload
from autotune.space.levers import applied_settings
from autotune.worker.rendezvous import Ranks
from autotune.worker.trial.look import in_full_float32, prepare_look
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.trainer_fields import generates
from autotune.worker.user.trainer_trial import TrainerTrial

# What is set beside batch and accumulation where the user's own settings stay: what rounds, and what compiles.
_IN_FLOAT32: Document = {
    "bf16": False,
    "fp16": False,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
}


class TrainerLook(TrainerTrial):
    """A trial that ends with what its first step is given to do, and measures nothing."""

    def __init__(
        self,
        workload: Workload,
        work: LookWork,
        scratch: Scratch,
        finish: Callable[[LookAnswer], NoReturn],
        ranks: Ranks | None = None,
    ) -> None:
        (candidate,) = work.candidates
        effort = Effort(max_micro_steps=candidate.gradient_accumulation_steps)
        trial = TrialWork(candidate, work.devices, work.cap_bytes, effort, work.seed, work.unmodified)

        def end(outcome: Outcome) -> NoReturn:
            why = outcome.message if isinstance(outcome, Failed | OutOfMemory) else "it did not end as a look does"
            finish(LookAnswer(problem=why))

        super().__init__(workload, trial, scratch, lambda _: None, end, ranks)
        self._look, self._answer = work, finish

    @property
    def _wanted(self) -> Document:
        """The fields to set."""
        if not self._is_unmodified:
            return super()._wanted
        candidate = self._candidate
        return {
            "per_device_train_batch_size": candidate.per_device_train_batch_size,
            "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
            **_IN_FLOAT32,
        }

    def _check(self, trainer: Any) -> None:
        """Raise ``UserCodeError`` for a training whose first step is not determined by its samples."""
        if generates(trainer.args):
            raise UserCodeError("what it trains on is generated anew in each run")
        if trainer.args.n_gpu > 1:
            raise RuntimeError(f"{trainer.args.n_gpu} GPUs are visible; exactly one was expected")

    def _prepare(self, trainer: Any) -> None:
        """Have the training end with its first step."""
        in_full_float32()

        def finish(step: FirstStep) -> NoReturn:
            self._answer(LookAnswer((step,)))

        prepare_look(
            trainer,
            self._candidate.samples_per_step,
            None if self._is_unmodified else applied_settings(self._candidate.arm),
            finish,
            seed=self._look.seed,
            noise=self._look.noise,
            most_bytes=self._look.cap_bytes // 2,
        )

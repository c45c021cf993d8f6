"""Judge whether each step trains with the samples, passes and precision that it was asked for.

``StepChecks`` compares what a ``TrainingWatch`` counted with what a step should have done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from autotune.core.outcome import FailureReason
from autotune.core.real_training import RealTraining
from autotune.space.precision_names import HALF
from autotune.worker.trial.listener import Listener
from autotune.worker.trial.training_watch import Call, StepCounts, TrainingWatch

NO_GRADIENTS = "{} steps an optimizer whose parameters get no gradients"
NO_GRADIENTS_HINT = "make the optimizer of the parameters of the model that is trained, after the last change of it"


class NotTrainedError(Exception):
    """A step did not train; ``is_out_of_memory`` where it lacks something for want of memory, of which somebody caught
    the error."""

    def __init__(
        self, message: str, hint: str = "", *, is_out_of_memory: bool = False, reason: FailureReason = "error"
    ) -> None:
        super().__init__(f"{message}: {hint}" if hint else message)
        self.message, self.hint, self.is_out_of_memory, self.reason = message, hint, is_out_of_memory, reason


class StepChecks:
    """Judges each step of a training by what a watch counted in it; ``refuse`` ends the trial.

    ``batch`` is the samples of a micro-step, ``None`` where they are not known. ``until_timed`` takes the watch off
    before the timed steps, where they can train in no other way than those before: its hooks take 55 to 110 µs of the
    host in a micro-step (docs/explanation/measuring.md).
    """

    def __init__(
        self, name: str, batch: int | None, refuse: Callable[[NotTrainedError], NoReturn], *, until_timed: bool = False
    ) -> None:
        self.watch = TrainingWatch()
        self.refuse = refuse
        self.precision: tuple[str, str] | None = None
        """Device and name of the precision that the code's own autocast has to be of: ``("cuda", "bf16")``."""
        self._name, self._batch, self._until_timed = name, batch, until_timed
        self._has_judged = self._ran_out = self._is_timed = False

    def begin_timed(self) -> None:
        """Judge the updates so far, and begin the timed steps."""
        if self._is_timed:
            return
        self._is_timed = True
        self.end_close_look()
        if self.watch.trained is not None and not self.watch.has_gradients:
            self._refuse(NO_GRADIENTS.format(self._name), NO_GRADIENTS_HINT)
        # Where no step came before the timed ones, the first of them is judged.
        if self._until_timed and self._has_judged:
            self.watch.remove()

    def end_close_look(self) -> None:
        """Judge the precision, and stop looking at gradients."""
        self.watch.begin_timed()
        if self.precision is None:
            return
        device, precision = self.precision
        watch, told, asked = self.watch, f"{self._name} was asked for {precision} and", HALF.get(precision)
        around = [dtype for kind, dtype in sorted(watch.called_in) if kind == device]
        if asked is None and around:
            self._refuse(
                f"{told} calls its model in an autocast of {around[0]}",
                f"have it enter none there for {precision}, or search without {precision}",
            )
        if asked is not None and asked not in watch.weight_dtypes and (device, asked) not in watch.autocasts:
            self._refuse(
                f"{told} enters no autocast of it on this {device}",
                f"have it enter one there, or search without {precision}",
            )

    def _refuse(self, message: str, hint: str = "", *, is_out_of_memory: bool = False) -> None:
        place = f" ({self.watch.place})" if self.watch.place else ""
        self.refuse(NotTrainedError(message + place, hint, is_out_of_memory=is_out_of_memory))

    def step_ends(self, micro_steps: int) -> StepCounts:
        """Judge a whole step, and return its counts."""
        if self.watch.is_removed:
            return StepCounts()
        seen = self.step_is_dropped()
        if seen.memory_errors:
            self._refuse(f"{self._name} ran out of memory and caught the error", is_out_of_memory=True)
        if seen.backward_passes < micro_steps:
            batches = f"{micro_steps} {'batch' if micro_steps == 1 else 'batches'}"
            self._refuse(
                f"{self._name} made {seen.backward_passes} backward passes in a step of {batches}",
                "call backward() on the loss of each batch (torch.autograd.grad is not seen), and catch no error of it",
            )
        if self._batch is not None and not fills(seen.calls, micro_steps, self._batch):
            rows = max(call.rows for call in seen.calls)
            self._refuse(
                f"{self._name} gives its model {rows} samples of a batch of {self._batch}",
                "have all samples of the batch go into the model",
            )
        self._has_judged = True
        if self._is_timed and self._until_timed:
            self.watch.remove()
        return seen

    def step_is_dropped(self) -> StepCounts:
        """Return the counts of a step that is not judged."""
        seen = self.watch.take()
        self._ran_out = self._ran_out or seen.memory_errors > 0
        return seen

    def has_run_out(self) -> bool:
        """Return whether any call or backward pass so far ran out of memory, even if the error was caught."""
        self.step_is_dropped()
        return self._ran_out


def fills(calls: Sequence[Call], micro_steps: int, batch: int) -> bool:
    """Return whether all samples of a step may have gone into a model; ``True`` where no input tensors are seen."""
    rows: dict[int, int] = {}
    for call in calls:
        rows[call.module_id] = rows.get(call.module_id, 0) + call.rows
    if not any(rows.values()) or max(rows.values()) >= micro_steps * batch:
        return True
    # The batch is the second dimension where the first is time.
    second = any(len(shape) > 1 and shape[0] > 1 and shape[1] == batch for call in calls for shape in call.shapes)
    return second or any(call.is_packed for call in calls)


End = Callable[[str, str], NoReturn]
"""Ends the training, with what is wrong and what to do."""


class FirstStepWatch(Listener):
    """Watches a real training up to its first update, and ends it where that is otherwise than it was set."""

    def __init__(self, training: RealTraining, end: End, accumulation: int | None, look: Callable[[], None]) -> None:
        self._training, self._end, self._look = training, end, look
        self._accumulation = accumulation
        """Backward passes of a step; ``None`` where they are not known."""
        self._passes = 0
        # A loop decides itself what a batch of its config is.
        batch = None if training.source.kind == "loop" else training.candidate.per_device_train_batch_size
        self.checks = StepChecks(training.source.name, batch, self._refuse)
        self.checks.watch.listener = self
        self.checks.watch.install()

    def backward_begins(self, tensors: Any) -> None:
        """Count a backward pass."""
        self._passes += 1

    def optimizer_ends(self, optimizer: Any) -> None:
        """Judge the step, and stop watching."""
        if not self._passes:
            return
        wanted, name, arm = self._accumulation, self._training.source.name, self._training.candidate.arm
        # A gradient scaler may have left out steps.
        if (
            wanted is not None
            and self._passes != wanted
            and not (arm.precision == "fp16" and not self._passes % wanted)
        ):
            self._end(
                f"{name} makes {self._passes} backward passes for a step of its optimizer, asked was {wanted}",
                "have it accumulate as many batches as it is told",
            )
        if "precision" in self._training.source.interface.searched and self._training.source.framework != "trainer":
            model = self.checks.watch.model
            self.checks.precision = next(model.parameters()).device.type, arm.precision
        self.checks.step_ends(self._passes)
        self.checks.end_close_look()
        self.checks.watch.remove()
        self._look()

    def _refuse(self, found: NotTrainedError) -> NoReturn:
        self._end(found.message, found.hint)

"""Judge whether each step trains: with the samples, passes and precision that it was asked for, and a finite loss.

``StepChecks`` compares what a ``TrainingWatch`` counted with what a step should have done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from autotune.core.outcome import FailureReason
from autotune.core.real_training import RealTraining
from autotune.space.levers import HALF
from autotune.worker.trial.training_watch import Call, Listener, StepCounts, TrainingWatch
from autotune.worker.wrapping import after

# Default of torch.amp.GradScaler, which accelerate does not change.
_FIRST_SCALE = 2.0**16
End = Callable[[str, str], NoReturn]


def on_each_micro_step(trainer: Any, take: Callable[[Any, Any], None]) -> None:
    """Have ``take`` called with batch and loss of every micro-step; the loss is a device tensor, not waited for.

    Works with any subclass of ``Trainer``, since it wraps the instance's own ``training_step``.
    """
    after(trainer, "training_step", lambda loss, _, inputs, *__, **___: take(inputs, loss.detach()))


class LossWatch:
    """Keeps the loss of a trainer's latest micro-step.

    A weight that became NaN makes every later loss NaN, so checking the last one is enough. The ``Trainer`` itself
    leaves such losses out of its log (``logging_nan_inf_filter``).
    """

    def __init__(self, trainer: Any) -> None:
        self._latest: Any = None
        on_each_micro_step(trainer, self._take)

    def _take(self, _: Any, loss: Any) -> None:
        self._latest = loss

    def problem(self) -> str | None:
        """Return the problem of the last loss in words; ``None`` where it is finite or there is none."""
        return problem_of_loss(None if self._latest is None else float(self._latest))


def problem_of_loss(last: float | None) -> str | None:
    """Return the problem of a training's last loss in words; ``None`` where it is finite or there is none."""
    return None if last is None or math.isfinite(last) else f"the loss of the last step is {last}"


class ScalerWatch:
    """Tells which updates a gradient scaler skips, step by step: each of them lowers its scale.

    Reading the scale waits for the device. Without a scaler no update counts as skipped.
    """

    def __init__(self, optimizer: Any = None) -> None:
        """Take the optimizer as accelerate wrapped it. DeepSpeed's optimizer scales the loss without a scaler."""
        self._of_deepspeed = optimizer if type(optimizer).__name__ == "DeepSpeedOptimizerWrapper" else None
        scaler = getattr(optimizer, "scaler", None)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scale = self._scaler.get_scale() if self._scaler is not None else 0.0

    def step_was_skipped(self) -> bool:
        """Return whether the step that just ended skipped its update. Call this once a step."""
        is_skipped = self._of_deepspeed is not None and bool(self._of_deepspeed.step_was_skipped)
        if self._scaler is not None:
            before, self._scale = self._scale, self._scaler.get_scale()
            is_skipped = bool(self._scale < before)
        return is_skipped


def skipped_steps(scaler: Any, steps: int) -> int | None:
    """Return how many steps a gradient scaler has skipped, from its scale; 0 without a scaler.

    Each skipped update multiplied it by the backoff factor. ``None`` where the scale may have grown, too, as it does
    after ``growth_interval`` (2,000) good steps. accelerate does not count the updates that fused optimizers skip on
    the device. Waits for the device.
    """
    if scaler is None or not scaler.is_enabled():
        return 0
    if steps >= scaler.get_growth_interval():
        return None
    return round(math.log(_FIRST_SCALE / scaler.get_scale()) / -math.log(scaler.get_backoff_factor()))


NO_GRADIENTS = "{} steps an optimizer whose parameters get no gradients"
NO_GRADIENTS_HINT = "make the optimizer of the parameters of the model that is trained, after the last change of it"


class NotTrainedError(Exception):
    """A step did not train. ``is_out_of_memory``: memory ran out in it, and the training's code caught that error."""

    def __init__(
        self, message: str, hint: str = "", *, is_out_of_memory: bool = False, reason: FailureReason = "error"
    ) -> None:
        super().__init__(f"{message}: {hint}" if hint else message)
        self.message, self.hint, self.is_out_of_memory, self.reason = message, hint, is_out_of_memory, reason


class StepChecks:
    """Judges each step of a training by what a watch counted in it; ``refuse`` ends the trial.

    Messages call the training ``name``. ``batch`` is the number of samples in a micro-step, ``None`` where not known.
    ``until_timed`` removes the watch before the timed steps, for a training whose timed steps cannot differ from those
    before: its hooks take 55 to 110 µs of the host in a micro-step (docs/explanation/measuring.md).
    """

    def __init__(
        self, name: str, batch: int | None, refuse: Callable[[NotTrainedError], NoReturn], *, until_timed: bool = False
    ) -> None:
        self.watch = TrainingWatch()
        self.refuse = refuse
        self.precision: tuple[str, str] | None = None
        """Device and precision that the code's own autocast must have: ``("cuda", "bf16")``; ``None``: not checked."""
        self._name, self._batch, self._until_timed = name, batch, until_timed
        self._has_judged = self._has_run_out = self._is_timed = False

    def begin_timed(self) -> None:
        """Judge precision and gradients of the updates so far, and begin the timed steps. Only the first call acts."""
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
        """Stop looking at gradients and dtypes, and judge by them whether the code trains in ``self.precision``."""
        self.watch.begin_timed()
        if self.precision is None:
            return
        device, precision = self.precision
        watch, subject, half_dtype = self.watch, f"{self._name} was asked for {precision} and", HALF.get(precision)
        called_in = [dtype for kind, dtype in sorted(watch.called_in) if kind == device]
        if half_dtype is None and called_in:
            self._refuse(
                f"{subject} calls its model in an autocast of {called_in[0]}",
                f"have it enter none there for {precision}, or search without {precision}",
            )
        if half_dtype and half_dtype not in watch.weight_dtypes and (device, half_dtype) not in watch.autocasts:
            self._refuse(
                f"{subject} enters no autocast of it on this {device}",
                f"have it enter one there, or search without {precision}",
            )

    def _refuse(self, message: str, hint: str = "", *, is_out_of_memory: bool = False) -> None:
        """End the trial with a message that names the line of code which called the model."""
        place = f" ({self.watch.place})" if self.watch.place else ""
        self.refuse(NotTrainedError(message + place, hint, is_out_of_memory=is_out_of_memory))

    def step_ends(self, micro_steps: int) -> StepCounts:
        """Judge a whole step, refuse it if it did not train, and return its counts (0 once the watch is removed)."""
        if self.watch.is_removed:
            return StepCounts()
        counts = self.watch.take()
        if counts.memory_errors:
            self._refuse(f"{self._name} ran out of memory and caught the error", is_out_of_memory=True)
        if counts.backward_passes < micro_steps:
            batches = f"{micro_steps} {'batch' if micro_steps == 1 else 'batches'}"
            self._refuse(
                f"{self._name} made {counts.backward_passes} backward passes in a step of {batches}",
                "call backward() on the loss of each batch (torch.autograd.grad is not seen), and catch no error of it",
            )
        if self._batch is not None and not may_have_all_samples(counts.calls, micro_steps, self._batch):
            rows = max(call.rows for call in counts.calls)
            self._refuse(
                f"{self._name} gives its model {rows} samples of a batch of {self._batch}",
                "have all samples of the batch go into the model",
            )
        self._has_judged = True
        if self._is_timed and self._until_timed:
            self.watch.remove()
        return counts

    def step_is_dropped(self) -> None:
        """Forget the counts of the step that ends, without judging it and without waiting for the device."""
        self._has_run_out = self.watch.drop() > 0 or self._has_run_out

    def has_run_out(self) -> bool:
        """Return whether any call or backward pass so far ran out of memory, even if the error was caught."""
        self.step_is_dropped()
        return self._has_run_out


def may_have_all_samples(calls: Sequence[Call], micro_steps: int, samples: int) -> bool:
    """Return whether all samples of a step, ``samples`` in each micro-step, may have gone into one of the modules.

    ``True`` also where the samples cannot be counted: without input tensors, and where they are packed in rows.
    """
    rows: dict[int, int] = {}
    for call in calls:
        rows[call.module_id] = rows.get(call.module_id, 0) + call.rows
    if not any(rows.values()) or max(rows.values()) >= micro_steps * samples:
        return True
    # The second dimension is the batch where the first is time.
    is_second = any(len(shape) > 1 and shape[0] > 1 and shape[1] == samples for call in calls for shape in call.shapes)
    return is_second or any(call.is_packed for call in calls)


class FirstStepWatch(Listener):
    """Watches a real training with a winner's settings up to its first update, and ends it where that step differs.

    ``end`` gets a message and a hint; ``on_good_step`` is called after a step without a problem. ``accumulation`` is
    the expected number of backward passes in the step; ``None`` where not known.
    """

    def __init__(
        self, training: RealTraining, end: End, accumulation: int | None, on_good_step: Callable[[], None]
    ) -> None:
        self._training, self._end, self._on_good_step = training, end, on_good_step
        self._accumulation = accumulation
        self._passes = 0
        # In a loop, the user's code decides what the batch size of its config means.
        batch = None if training.source.kind == "loop" else training.candidate.per_device_train_batch_size
        self.checks = StepChecks(training.source.name, batch, self._refuse)
        self.checks.watch.listener = self
        self.checks.watch.install()

    def backward_begins(self, tensors: Any) -> None:
        """Count a backward pass."""
        self._passes += 1

    def optimizer_ends(self, optimizer: Any) -> None:
        """Judge the first step that had a backward pass, and stop watching."""
        if not self._passes:
            return
        name, arm = self._training.source.name, self._training.candidate.arm
        wanted = self._accumulation if self._accumulation is not None else self._passes
        # A gradient scaler may have skipped updates, whose backward passes are counted here.
        is_whole = self._passes % wanted == 0 if arm.precision == "fp16" else self._passes == wanted
        if not is_whole:
            self._end(
                f"{name} makes {self._passes} backward passes for a step of its optimizer, asked was {wanted}",
                "have it accumulate as many batches as it is told",
            )
        # A Trainer takes its precision from its arguments.
        if "precision" in self._training.source.interface.searched and self._training.source.framework != "trainer":
            model = self.checks.watch.model
            self.checks.precision = next(model.parameters()).device.type, arm.precision
        self.checks.step_ends(self._passes)
        self.checks.end_close_look()
        self.checks.watch.remove()
        self._on_good_step()

    def _refuse(self, found: NotTrainedError) -> NoReturn:
        self._end(found.message, found.hint)

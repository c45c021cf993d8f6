"""Judge whether each step trains with the samples, passes and precision that it was asked for.

``StepChecks`` compares what a ``TrainingWatch`` counted with what a step should have done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from autotune.core.outcome import FailureReason
from autotune.space.precision_names import HALF
from autotune.worker.trial.training_watch import Call, Seen, TrainingWatch

NO_GRADIENTS = "{} steps an optimizer whose parameters get no gradients"
NO_GRADIENTS_HINT = "make the optimizer of the parameters of the model that is trained, after the last change of it"


@dataclass(frozen=True, slots=True)
class NotTrained:
    """Why a step does not count."""

    message: str
    hint: str = ""
    is_out_of_memory: bool = False
    """Whether it lacks something for want of memory, of which somebody caught the error."""
    reason: FailureReason = "error"


class NotTrainedError(Exception):
    """A step was run that did not train."""

    def __init__(self, found: NotTrained) -> None:
        super().__init__(f"{found.message}: {found.hint}" if found.hint else found.message)
        self.found = found


class StepChecks:
    """Judges each step of a training by what a watch counted in it.

    ``out_of_memory_count`` returns how often the device's allocator found no memory, also where it then did with less.
    ``until_timed`` takes the watch off before the timed steps, where they can train in no other way than those before:
    its hooks take 55 to 110 µs of the host in a micro-step (docs/explanation/measuring.md).
    """

    def __init__(
        self,
        name: str,
        batch: int | None,
        refuse: Callable[[NotTrained], NoReturn],
        *,
        out_of_memory_count: Callable[[], int | None] = lambda: None,
        until_timed: bool = False,
    ) -> None:
        self.watch = TrainingWatch()
        self._name = name
        self._batch = batch
        """Samples of a micro-step; ``None`` where they are not known."""
        self.refuse = refuse
        """Ends the trial; called with the first step that did not train."""
        self._count = out_of_memory_count
        self.precision: tuple[str, str] | None = None
        """Device and name of the precision that the code's own autocast has to be of: ``("cuda", "bf16")``."""
        self._count_before: int | None = None
        self._has_judged = False
        """Whether a step was judged."""
        self._ran_out = False
        self._is_timed = False
        self._until_timed = until_timed

    def begin(self) -> None:
        """Forget what was seen before the first step."""
        self.watch.begin()
        self._count_before = self._count()

    def begin_timed(self) -> None:
        """Judge the updates of the steps so far; those that follow are timed."""
        if self._is_timed:
            return
        self._is_timed = True
        self.watch.begin_timed()
        if self.precision is not None:
            self._judge_precision(*self.precision)
        if self.watch.trained is not None:
            if not self.watch.has_gradients:
                self._refuse(NO_GRADIENTS.format(self._name), NO_GRADIENTS_HINT)
            if not self.watch.has_finite_gradients:
                self._refuse(f"the gradients of {self._name} are not finite", reason="non_finite")
        # Where no step came before the timed ones, the first of them is judged.
        if self._until_timed and self._has_judged:
            self.watch.remove()

    def judge_first(self, micro_steps: int) -> None:
        """Judge the first step of a training that is not timed, and see nothing any more."""
        self.step_ends(micro_steps)
        self.watch.begin_timed()
        if self.precision is not None:
            self._judge_precision(*self.precision)
        self.watch.remove()

    def _judge_precision(self, device: str, precision: str) -> None:
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

    def _refuse(self, message: str, hint: str = "", reason: FailureReason = "error") -> None:
        self.refuse(NotTrained(message + self._at, hint, reason=reason))

    @property
    def _at(self) -> str:
        return f" ({self.watch.place})" if self.watch.place else ""

    def step_ends(self, micro_steps: int) -> Seen:
        """Judge a whole step of so many micro-steps, and return what was seen of it."""
        if self.watch.is_removed:
            return Seen()
        seen = self._take()
        if (found := self._problem(seen, micro_steps)) is not None:
            self.refuse(found)
        self._has_judged = True
        self._count_before = self._count()
        if self._is_timed and self._until_timed:
            self.watch.remove()
        return seen

    def step_is_dropped(self) -> None:
        """Forget what was seen of a step that does not count."""
        self._take()

    def _take(self) -> Seen:
        seen = self.watch.take()
        self._ran_out = self._ran_out or seen.memory_errors > 0
        return seen

    def has_run_out(self) -> bool:
        """Return whether a call or a backward pass ended with an error of memory so far, whoever caught it."""
        self._take()
        return self._ran_out

    def _problem(self, seen: Seen, micro_steps: int) -> NotTrained | None:
        if seen.memory_errors:
            return NotTrained(f"{self._name} ran out of memory and caught the error{self._at}", is_out_of_memory=True)
        if seen.backward_passes < micro_steps:
            batches = f"{micro_steps} {'batch' if micro_steps == 1 else 'batches'}"
            return self._lacks(
                f"{self._name} made {seen.backward_passes} backward passes in a step of {batches}{self._at}",
                "call backward() on the loss of each batch (torch.autograd.grad is not seen), and catch no error of it",
            )
        if self._batch is not None and not fills(seen.calls, micro_steps, self._batch):
            rows = max(call.rows for call in seen.calls)
            return self._lacks(
                f"{self._name} gives its model {rows} samples of a batch of {self._batch}{self._at}",
                "have all samples of the batch go into the model",
            )
        return None

    def _lacks(self, message: str, hint: str) -> NotTrained:
        """Return why a step does not count, as out of memory where the allocator found too little in it."""
        now = self._count()
        if now is not None and self._count_before is not None and now > self._count_before:
            return NotTrained(f"{message}, after it ran out of memory and caught the error", hint, True)
        return NotTrained(message, hint)


def fills(calls: Sequence[Call], micro_steps: int, batch: int) -> bool:
    """Return whether all samples of a step may have gone into a model; ``True`` where no tensors are seen to go in."""
    rows: dict[int, int] = {}
    for call in calls:
        rows[call.module_id] = rows.get(call.module_id, 0) + call.rows
    if not any(rows.values()) or max(rows.values()) >= micro_steps * batch:
        return True
    # The batch is the second dimension where the first is time.
    second = any(len(shape) > 1 and shape[0] > 1 and shape[1] == batch for call in calls for shape in call.shapes)
    return second or any(call.is_packed for call in calls)

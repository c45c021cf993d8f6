"""Judge whether the steps that are timed train, by what torch itself tells of them, whatever the loop around them is.

``StepChecks`` compares what a ``TrainingWatch`` saw with what a step should have done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from autotune.core.outcome import FailureReason
from autotune.space.precision_names import HALF
from autotune.worker.trial.training_watch import Call, Seen, Shapes, TrainingWatch, shapes_in

NO_GRADIENTS = "{} steps an optimizer whose parameters get no gradients"
NO_GRADIENTS_HINT = "make the optimizer of the parameters of the model that is trained, after the last change of it"


@dataclass(frozen=True, slots=True)
class OtherBatch:
    """What one batch was seen to be made of, with another batch size than is trained with now."""

    batch: int
    shapes: Shapes

    def is_followed_by(self, shapes: Shapes, batch: int) -> bool:
        """Return whether these shapes are of a batch of so many samples, in one of the first two dimensions."""
        if any(batch in shape[:1] or (shape[0:1] > (1,) and shape[1:2] == (batch,)) for shape in shapes):
            return True
        if batch == self.batch or len(shapes) != len(self.shapes):
            return False
        pairs = [
            pair for now, then in zip(shapes, self.shapes, strict=True) for pair in zip(now[:2], then, strict=False)
        ]
        return any(now * self.batch == then * batch for now, then in pairs)


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
    """Judges each step of a training by what a watch saw of it.

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
        self.may_be_zero = False
        """Whether a step may have nothing to learn from, as where all samples of a rollout have the same reward."""
        self.other_batch: OtherBatch | None = None
        """Set where no loader says how many samples a batch has, so that its tensors have to."""
        self.precision: tuple[str, str] | None = None
        """Device and name of the precision that the code's own autocast has to be of: ``("cuda", "bf16")``."""
        self._given: list[Shapes] = []
        self._count_before: int | None = None
        self._usual: frozenset[int] | None = None
        self._is_filled = False
        """Whether a call was given as many samples as the batch has."""
        self._uneven: set[int] = set()
        """Models of whose calls before the timed steps some had no output with the first dimension of an input."""
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
        self._judge_numerics()
        self._judge_update()
        # Where no step came before the timed ones, the first of them is judged.
        if self._until_timed and self._usual is not None:
            self.watch.remove()

    def end_timed(self) -> None:
        """Judge whether the steps that were timed trained what those before them did."""
        if not self.watch.is_removed and self.watch.trains_otherwise():
            self._refuse(
                f"{self._name} trains other weights in later steps than in its first, or in another precision",
                "have each step train the same weights in one precision, and search each stage by itself",
            )

    def _judge_numerics(self) -> None:
        batch, sizes = self._batch, self.watch.inner_sizes
        # Tensors of such first dimensions may be of all samples of the batch.
        holds_all = any(size[0] % batch == 0 or size[1:] == (batch,) for size in sizes) if batch is not None else True
        if self._is_filled and sizes and not holds_all:
            self._refuse(
                f"the model of {self._name} is given a batch of {batch} and computes with fewer samples",
                "have the model train with all samples of the batch that it is given",
            )
        if self.precision is not None:
            self._judge_precision(*self.precision)

    def _judge_precision(self, device: str, precision: str) -> None:
        watch, told = self.watch, f"{self._name} was asked for {precision} and"
        entered = {dtype for kind, dtype in watch.autocasts if kind == device}
        asked = HALF.get(precision)
        around = [cast[1] for cast in watch.casts_before if cast is not None and cast[0] == device]
        if asked is None and around:
            self._refuse(
                f"{told} calls its model in an autocast of {around[0]}",
                f"have it enter none there for {precision}, or search without {precision}",
            )
        if asked is None or asked in watch.weight_dtypes:
            return
        if asked not in entered:
            self._refuse(
                f"{told} enters no autocast of it on this {device}",
                f"have it enter one there, or search without {precision}",
            )
        if watch.keeps_weights and asked not in watch.inner_dtypes and not watch.compiles:
            self._refuse(
                f"{told} its model computes nothing in it",
                f"have the model enter no autocast that is off, or search without {precision}",
            )

    def _judge_update(self) -> None:
        update = self.watch.update
        if update is None or update.is_honest:
            return
        if not update.has_gradients:
            self._refuse(NO_GRADIENTS.format(self._name), NO_GRADIENTS_HINT)
        if not update.is_finite:
            self._refuse(f"the gradients of {self._name} are not finite", reason="non_finite")
        if update.is_zero and not self.may_be_zero:
            self.refuse(
                self._with_memory(
                    f"all gradients of {self._name} are zero{self._at}",
                    "compute its loss from the output of the model",
                )
            )
        if update.is_lost:
            self._refuse(
                f"the optimizer of {self._name} leaves the weights as they are",
                "have it step the parameters of the model that is trained",
            )

    def _refuse(self, message: str, hint: str = "", reason: FailureReason = "error") -> None:
        self.refuse(NotTrained(message + self._at, hint, reason=reason))

    @property
    def _at(self) -> str:
        return f" ({self.watch.place})" if self.watch.place else ""

    def give(self, batch: Any) -> None:
        """Take down what a batch is made of that the code is given."""
        if self.other_batch is not None:
            self._given.append(tuple(shapes_in((batch,))))

    def step_ends(self, micro_steps: int) -> Seen:
        """Judge a whole step of so many micro-steps, and return what was seen of it."""
        if self.watch.is_removed:
            return Seen()
        seen = self._take()
        given, self._given = self._given, []
        if (found := self._problem(seen, micro_steps, given)) is not None:
            self.refuse(found)
        filled = (not call.is_packed and call.rows >= (self._batch or 0) for call in seen.calls)
        self._is_filled = self._is_filled or any(filled)
        trained = frozenset(call.module_id for call in seen.calls)
        if not self._is_timed:
            self._usual = trained | (self._usual or frozenset())
            self._uneven.update(call.module_id for call in seen.calls if not call.is_even)
        self._count_before = self._count()
        if self._is_timed and self._until_timed:
            self.watch.remove()
        return seen

    def step_is_dropped(self) -> None:
        """Forget what was seen of a step that does not count."""
        self._take()
        self._given.clear()

    def _take(self) -> Seen:
        seen = self.watch.take()
        self._ran_out = self._ran_out or seen.memory_errors > 0
        return seen

    def has_run_out(self) -> bool:
        """Return whether a call or a backward pass ended with an error of memory so far, whoever caught it."""
        self._take()
        return self._ran_out

    def _problem(self, seen: Seen, micro_steps: int, given: Sequence[Shapes]) -> NotTrained | None:
        at, lacks = self._at, functools.partial(self._with_memory, errors=seen.memory_errors)
        batches = f"{micro_steps} {'batch' if micro_steps == 1 else 'batches'}"
        if seen.is_elsewhere:
            return NotTrained(
                f"{self._name} makes its backward passes in another thread{at}, where their time is not seen",
                "have it train in the thread that asks for the batches",
            )
        if seen.backward_passes < micro_steps:
            return lacks(
                f"{self._name} made {seen.backward_passes} backward passes in a step of {batches}{at}",
                "call backward() on the loss of each batch (torch.autograd.grad is not seen), and catch no error of it",
            )
        if not seen.calls and (seen.forward_calls or seen.memory_errors or self._usual):
            return lacks(
                f"no gradient came back to the model of {self._name}{at}",
                "compute its loss from the output of the model, and catch no error of it",
            )
        if self._usual is not None and self._is_timed and not self._usual <= {call.module_id for call in seen.calls}:
            return lacks(
                f"{self._name} trains with other models in some steps than in its first{at}",
                "have each step train the same models",
            )
        if self._is_timed and any(
            not call.is_even and call.module_id in (self._usual or ()) and call.module_id not in self._uneven
            for call in seen.calls
        ):
            return lacks(
                f"the model of {self._name} computes with fewer samples in later steps than in its first{at}",
                "have the model train with all samples of the batch that it is given",
            )
        if (found := self._problem_of_batch(seen, given)) is not None:
            return found
        if self._batch is not None and not fills(seen.calls, micro_steps, self._batch):
            rows = max(call.rows for call in seen.calls)
            return lacks(
                f"{self._name} gives its model {rows} samples of a batch of {self._batch}{at}",
                "have all samples of the batch go into the model",
            )
        return None

    def _problem_of_batch(self, seen: Seen, given: Sequence[Shapes]) -> NotTrained | None:
        """Return what is wrong with batches whose loader does not say how large they are."""
        other, batch = self.other_batch, self._batch
        fed = [shapes for shapes in given or [call.shapes for call in seen.calls] if shapes]
        if other is None or batch is None or all(other.is_followed_by(shapes, batch) for shapes in fed):
            return None
        sizes = sorted({shapes[0][0] for shapes in fed if shapes[0]})
        found = ", ".join(map(str, sizes[:3]))
        return NotTrained(
            f"{self._name} trains with batches of {found} where {batch} samples were asked for{self._at}",
            "have its batches made of as many samples as it is told",
        )

    def _with_memory(self, message: str, hint: str, errors: int = 0) -> NotTrained:
        """Return why a step does not count, as out of memory where there was too little in it."""
        now = self._count()
        ran_out = errors > 0 or (now is not None and self._count_before is not None and now > self._count_before)
        if ran_out:
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

"""Define what the module of a framework has, and what it is given; look at loops of scripts of any framework."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from autotune.core.candidate import Candidate, Precision
from autotune.core.code_interface import CodeInterface, Framework
from autotune.core.inspection import ModelFacts
from autotune.core.jobs import InspectionWork
from autotune.core.training_source import TrainingSource
from autotune.worker.checkpointing import enable_checkpointing
from autotune.worker.trial.listener import Listener
from autotune.worker.user.script_options import watch_options
from autotune.worker.wrapping import around

if TYPE_CHECKING:
    from autotune.worker.user.loop_steps import LoopSteps

Say = Callable[[str], None]


@dataclass(frozen=True)
class Changes:
    """What is put over a script's own settings; ``None`` leaves its own."""

    interface: CodeInterface = field(default_factory=CodeInterface)
    precision: Precision | None = None
    accumulation: int | None = None
    checkpointing: bool = False
    options: Mapping[str, int] = field(default_factory=dict)
    """The script's own options, and what they are to say."""
    say: Say = lambda _: None
    """Told what the script had said instead."""
    overrules: Callable[[int], None] = lambda _: None
    """Told the accumulation that the script had said, where its code is not told another by an option."""
    epoch_batches: int | None = None
    """After which an epoch ends, and its validation comes; ``None`` in a trial, which has none."""

    @classmethod
    def of(
        cls, source: TrainingSource, candidate: Candidate, takes: Collection[str], accumulation: int, say: Say
    ) -> Changes:
        """Return a candidate's settings, as far as the script ``takes`` them; it runs so many micro-steps of a step.

        What an option decides is told by that as well, since the script may make more of it, such as a schedule.
        """
        values = {"batch": candidate.per_device_train_batch_size, "accumulation": accumulation}
        flags = source.interface.flags
        return cls(
            source.interface,
            candidate.arm.precision if "precision" in takes else None,
            accumulation if "accumulation" in takes else None,
            candidate.arm.gradient_checkpointing and "checkpointing" in takes,
            {flags[what]: value for what, value in values.items() if what in takes and what in flags},
            say,
        )

    def over(self, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with those that are ``wanted`` in place of what the script gave for them."""
        for name, value in wanted.items():
            if (said := given.get(name)) not in (None, value):
                self.say(f"the script says {name}={said!r}; {value!r} is set")
        return {**given, **wanted}

    def apply_to(self, model: Any) -> None:
        """Have a model recompute activations, and float32 matrices be multiplied, as is wanted."""
        if self.precision in ("fp32", "tf32"):
            sys.modules["torch"].set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        if self.checkpointing:
            enable_checkpointing(model)


@dataclass(frozen=True)
class ScriptInspection:
    """A script that runs up to its training, to be looked at."""

    work: InspectionWork
    source: TrainingSource
    output_dir: str
    finish: Callable[[ModelFacts], NoReturn]
    """Ends the process with what the script trains with."""


class Adapter(Protocol):
    """What the module of a framework has."""

    def overlay(self, changes: Changes) -> None:
        """Have the framework train with other settings, in this process from now on."""

    def measure(self, changes: Changes, steps: LoopSteps, output_dir: str, *, on_cpu: bool) -> None:
        """Do that in a trial, and tell of the batches and steps."""

    def inspect(self, inspecting: ScriptInspection) -> Callable[[], bool]:
        """Look at what the script trains with, from now on; return what tells whether it has begun to."""


def silence(kind: Any, *names: str, returned: Any = None) -> None:
    """Have methods of a class do nothing in this process."""
    for name in names:
        setattr(kind, name, lambda *_, **__: returned)


GivesBatches = Callable[[Any, Callable[[], Iterator[Any]]], Iterator[Any]]
"""Gives the batches of a loader; called with the loader, and with what gives its own."""


def give_batches(kinds: Iterable[Any], gives: GivesBatches) -> None:
    """Have a function give the batches of every loader of some classes."""
    for kind in kinds:
        around(kind, "__iter__", lambda own, loader: gives(loader, lambda: own(loader)))


def measured_batches(changes: Changes, steps: LoopSteps) -> GivesBatches:
    """Return what measures the batches of the loader that is trained with."""

    class Batches:
        def __init__(self, give: Callable[[], Iterator[Any]]) -> None:
            self._give = give

        def __iter__(self) -> Iterator[Any]:
            return self._give()

    def gives(loader: Any, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        from autotune.worker.user.loader_overlay import key_of

        is_trained_with = key_of(loader) == changes.interface.loader_key
        return steps.batches(Batches(own)) if is_trained_with else own()

    return gives


class LoopInspection(Listener):
    """What a loop is seen to train with; the loader is the one whose batch came last before a backward pass."""

    framework: Framework
    known_options: Mapping[str, Sequence[str]]
    """The framework's usual options, by what they decide."""
    overlay: Any
    """What is put over the framework, and seen of it."""

    def __init__(self, inspecting: ScriptInspection) -> None:
        from autotune.worker.trial.training_watch import TrainingWatch

        self.inspecting = inspecting
        self.options = watch_options()
        self.loader: Any = None
        self.passes = 0
        """Backward passes of a step."""
        self._watch = TrainingWatch()
        self._watch.listener = self
        self._given: Any = None
        self._steps = 0

    def install(self) -> Callable[[], bool]:
        """Watch from now on what the script makes; return what tells whether it has begun to train."""
        self.overlay.install()
        self._watch.install(calls=False)
        return self.is_at_work

    def precision(self) -> Precision | None:
        """Return what the framework was told to compute in; ``None`` where no trial can tell it another."""
        raise NotImplementedError

    def told_accumulation(self) -> int | None:
        """Return the accumulation that the framework was told, where it is: no second step is needed then."""
        return None

    def interface(self) -> dict[str, Any]:
        """Return what else is known of how the script takes its settings."""
        return {}

    def is_at_work(self) -> bool:
        """Return whether the script has begun to train."""
        return self._given is not None

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Give the batches of a loader."""
        from autotune.worker.user.inspection import facts_of

        for batch in batches():
            self._given = loader
            if self.inspecting.work.arms is not None:
                # This process is there to trace a Trainer, and this is none.
                self.inspecting.finish(facts_of(None, loader))
            yield batch

    def backward_begins(self, tensors: Any) -> None:
        """Take down which loader is trained with, and count the pass."""
        if not self.is_at_work():
            return
        if self.loader is None:
            self.loader = self._given
        self.passes += 1

    def optimizer_ends(self, optimizer: Any) -> None:
        """End the inspection once it is known how the script accumulates."""
        if self.loader is None:
            return
        self._steps += 1
        if self.told_accumulation() is not None or self._steps == 2:
            self.finish()
        self.passes = 0

    def finish(self) -> None:
        """End the process with what was seen."""
        from autotune.worker.user.inspection import check_gradients, facts_of_script
        from autotune.worker.user.loader_overlay import batch_of

        source, models, options = self.inspecting.source, self.overlay.models, self.options
        check_gradients(self._watch, source)
        told, passes, precision = self.told_accumulation(), self.passes, self.precision()
        is_option = "accumulation" in options.flags({}, {"accumulation": passes})
        by: Literal["accelerator", "option", "script"] = (
            "accelerator" if told is not None else "option" if is_option else "script"
        )
        accumulation = passes if told is None else told
        flags = options.flags(self.known_options, {"batch": batch_of(self.loader), "accumulation": accumulation})
        is_tf32 = sys.modules["torch"].backends.cuda.matmul.allow_tf32
        facts = facts_of_script(
            source,
            CodeInterface(self.framework, accumulates_by=by, flags=flags, **self.interface()),
            models[0] if models else None,
            self.loader,
            accumulation=accumulation,
            # Weights of 16 bits are computed in without an autocast.
            precision="tf32" if is_tf32 and precision == "fp32" else precision or "fp32",
            takes_accumulation=by != "script",
            takes_precision=precision is not None,
        )
        self.inspecting.finish(facts)

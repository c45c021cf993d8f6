"""Define ``Overlay``, which changes the framework that a script trains with, and ``Observer``, which watches it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from autotune.core.candidate import Candidate, Precision
from autotune.core.code_interface import CodeInterface, Framework
from autotune.core.training_source import TrainingSource
from autotune.worker.checkpointing import enable_checkpointing
from autotune.worker.wrapping import around

if TYPE_CHECKING:
    from autotune.worker.user.loop_steps import LoopSteps


@dataclass(frozen=True)
class Changes:
    """Settings that replace a script's own; ``None`` leaves the script's own setting."""

    interface: CodeInterface = field(default_factory=CodeInterface)
    precision: Precision | None = None
    accumulation: int | None = None
    checkpointing: bool = False
    options: Mapping[str, int] = field(default_factory=dict)
    """Values for the script's own command-line options, by their names."""
    say: Callable[[str], None] = lambda _: None
    """Called with a message for each of the script's values that is replaced."""
    overrules: Callable[[int], None] = lambda _: None
    """Called with the accumulation that the script gave its ``Accelerator``, where another one replaces it."""
    epoch_batches: int | None = None
    """Batches after which an epoch ends and its validation begins; ``None`` in a trial, which has no validation."""

    @classmethod
    def of(
        cls, source: TrainingSource, candidate: Candidate, searched: Collection[str], accumulation: int, **others: Any
    ) -> Changes:
        """Return the changes of a script for a candidate: the settings named in ``searched``, such as ``"batch"``.

        ``accumulation`` replaces the candidate's. Batch and accumulation are also set by options of the script, where
        it has them, since the script may use the option elsewhere, such as for a schedule.
        """
        values = {"batch": candidate.per_device_train_batch_size, "accumulation": accumulation}
        flags = source.interface.flags
        return cls(
            source.interface,
            candidate.arm.precision if "precision" in searched else None,
            accumulation if "accumulation" in searched else None,
            candidate.arm.gradient_checkpointing and "checkpointing" in searched,
            {flags[what]: value for what, value in values.items() if what in searched and what in flags},
            **others,
        )

    def override(self, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the script has ``given`` with the ``wanted`` ones, and report replaced values."""
        for name, value in wanted.items():
            if (own := given.get(name)) not in (None, value):
                self.say(f"the script says {name}={own!r}; {value!r} is set")
        return {**given, **wanted}

    def apply_to(self, model: Any) -> None:
        """Enable checkpointing of a model if asked; for fp32 and tf32, set the precision of float32 matrix products."""
        if self.precision in ("fp32", "tf32"):
            sys.modules["torch"].set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        if self.checkpointing:
            enable_checkpointing(model)


AccumulatesBy = Literal["accelerator", "option", "script"]
MakeIterator = Callable[[], Iterator[Any]]


class Observer:
    """Observes a training on a framework, to measure its steps. An inspection has a subclass of its own."""

    def __init__(
        self, output_dir: str, *, on_cpu: bool, steps: LoopSteps | None = None, loader_key: str | None = None
    ) -> None:
        self.output_dir, self.on_cpu = output_dir, on_cpu
        self.steps, self._loader_key = steps, loader_key
        """What measures the steps, and the key of the training loader; ``None`` in an inspection."""

    def batches(self, overlay: Overlay, loader: Any, make_iterator: MakeIterator) -> Iterator[Any]:
        """Return ``make_iterator()``, or for the training loader an endless iterator whose steps are timed."""
        from autotune.worker.user.loader_overlay import key_of

        assert self.steps is not None
        return self.steps.repeated(make_iterator) if key_of(loader) == self._loader_key else make_iterator()

    def begins(self, overlay: Overlay, loader: Any) -> None:
        """Handle the start of a framework's own training loop over a loader."""


class Overlay:
    """Changes a framework in this process once it is imported, and records what the script does with it.

    With an ``observer`` the training is only measured or inspected; without one it is a real training.
    """

    framework: Framework
    known_options: ClassVar[Mapping[str, Sequence[str]]]
    """Usual names of command-line options in the framework's scripts, by the setting that they decide."""

    def __init__(self, changes: Changes, observer: Observer | None = None) -> None:
        self._changes, self._observer = changes, observer
        self.models: list[Any] = []
        """Models that the framework has prepared."""

    def install(self) -> None:
        """Wrap the framework's classes once they are imported, from any of its packages."""
        raise NotImplementedError

    def precision(self, name: str) -> Precision | None:
        """Return the precision in which the framework trains; ``None`` where trials cannot change it.

        An overlay may raise ``UserCodeError`` for a precision that no trial has. ``name`` is the script's.
        """
        raise NotImplementedError

    def told_accumulation(self) -> tuple[AccumulatesBy | None, int] | None:
        """Return what sets the accumulation (``None``: a ``Trainer``) and its value; ``None`` if unknown."""
        return None

    def interface(self) -> dict[str, Any]:
        """Return further fields of the script's ``CodeInterface``."""
        return {}

    def _take_model(self, _: Any, *given: Any, **named: Any) -> None:
        """Record a model that the framework prepares, and apply the settings to it.

        The model is the first positional argument, or ``module``, as Fabric calls it.
        """
        model = given[0] if given else named["module"]
        self.models.append(model)
        self._changes.apply_to(model)

    def _observe_batches(self, loader_classes: Iterable[Any]) -> None:
        """Have every loader of these classes iterate by ``Observer.batches``, if there is an observer."""
        if (observer := self._observer) is None:
            return
        for kind in loader_classes:
            around(kind, "__iter__", lambda own_iter, loader: observer.batches(self, loader, lambda: own_iter(loader)))


def silence(kind: Any, *names: str, returned: Any = None) -> None:
    """Make methods of a class do nothing but return ``returned`` in this process."""
    for name in names:
        setattr(kind, name, lambda *_, **__: returned)

"""Run the user's code up to the training of its ``Trainer``, with fields of its ``TrainingArguments`` replaced."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from transformers import Trainer, TrainingArguments

from autotune.core.candidate import Document
from autotune.core.code_interface import MadeFrom
from autotune.core.launch_command import NOT_BY_SAMPLE
from autotune.core.training_source import TrainingSource
from autotune.space.training_arguments import checkpointing_field
from autotune.worker.trial.run import known_fields
from autotune.worker.user.code import UserCodeError, load_function, run_script
from autotune.worker.user.trainer_fields import BATCH, TrainerFields, generates
from autotune.worker.wrapping import around, before, lines_above, module_of, users_line


def intercept(on_train: Callable[[Any, Callable[[], Any]], NoReturn]) -> None:
    """Make every ``Trainer.train`` in this process call ``on_train`` with the Trainer and the original ``train``."""
    around(Trainer, "train", lambda train, trainer, *_, **__: on_train(trainer, lambda: train(trainer)))


def run_source(source: TrainingSource, overrides: Document, output_dir: str) -> NoReturn:
    """Run the user's code until it trains, where ``intercept`` takes over. Raises an error if it never does."""
    if source.kind == "build":
        build_trainer(source, overrides).train()
        raise UserCodeError(f"the Trainer of {source.name} has a train method that never calls Trainer.train")
    try:
        run_script(source, output_dir)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    raise UserCodeError(
        f"{source.name} ended without having trained",
        "give it the options with which it trains, such as --do_train; what is measured trains with "
        "transformers.Trainer, an Accelerator or Lightning",
    )


def build_trainer(source: TrainingSource, overrides: Document) -> Any:
    """Call the user's function; return its ``Trainer``. Raises ``UserCodeError`` without one, or if it trains."""

    refusals: list[UserCodeError] = []

    def refuse_to_train(*_: Any, **__: Any) -> NoReturn:
        refusals.append(UserCodeError(f"{source.name} calls train itself", "have it return the Trainer untrained"))
        raise refusals[0]

    usual_train, Trainer.train = Trainer.train, refuse_to_train
    try:
        trainer = load_function(source)(dict(overrides))
    finally:
        Trainer.train = usual_train
    if refusals:
        # The function caught the error.
        raise refusals[0]
    if not isinstance(trainer, Trainer):
        kind = "the class" if isinstance(trainer, type) else "an object of type"
        name = trainer.__name__ if isinstance(trainer, type) else type(trainer).__name__
        if name == "Trainer":
            name = f"{trainer.__module__}.{name}"
        raise UserCodeError(
            f"{source.name} returned {'None' if trainer is None else f'{kind} {name}'}, not a transformers.Trainer",
            "return the Trainer, ready to train",
        )
    return trainer


# A trial reports to nobody, pushes nothing, evaluates nothing before its first step, and takes no smaller
# batch than it was told to where memory runs out.
_QUIET: Document = {
    "report_to": "none",
    "push_to_hub": False,
    "eval_on_start": False,
    "auto_find_batch_size": False,
    "disable_tqdm": True,
    "resume_from_checkpoint": None,
}


@dataclass
class TrialFields(TrainerFields):
    """The fields of ``TrainerFields``, and fields that silence the Trainer, for a trial or an inspection."""

    output_dir: str
    shortened_accumulation: tuple[int, int] | None = None
    """The accumulation that is asked for, and the smaller number of micro-steps to run; ``None`` to run all."""
    on_cpu: bool = False
    refuse: Callable[[UserCodeError], NoReturn] | None = None
    """Ends an inspection with a problem, since the user's code might catch an error. ``None`` in a trial: its settings
    are the candidate's."""
    is_probing: bool = False
    """Whether to set another batch, if possible of the same effective batch, to see whether the code keeps it."""
    made_from: MadeFrom = "flags"
    """Where the arguments come from."""
    place: str | None = None
    """The file, or the line of code, that makes the arguments."""
    why_batch_matters: str | None = None
    """Why another batch of the same effective batch is another training; ``None`` where nothing shows it."""
    own_checkpointing: bool = False
    """Whether the arguments themselves turn checkpointing on."""
    _last_own_batch: tuple[int, int] | None = None

    def install(self) -> None:
        """Wrap the classes for the rest of this process."""
        self.watch_arguments(TrainingArguments)
        before(Trainer, "__init__", self._take_arguments)

    def apply_again(self, arguments: Any) -> None:
        """Set the fields and silence the Trainer again; record a batch that the code has set since."""
        as_set = getattr(arguments, "_autotune_batch_as_set", None)
        if as_set is not None:
            own_pair = list(arguments._autotune_own_batch)
            for at, found in enumerate(_batch_and_accumulation(arguments)):
                if found != as_set[at]:
                    own_pair[at] = found
                    self.set_since.add(BATCH[at])
            arguments._autotune_own_batch = tuple(own_pair)
        super().apply_again(arguments)
        # Once the arguments are made, an empty list means no reporting, not "none".
        _set(arguments, {**_QUIET, "report_to": [], "output_dir": self.output_dir})
        self._shorten(arguments)
        arguments._autotune_batch_as_set = _batch_and_accumulation(arguments)

    def apply_to_new(self, arguments: Any) -> None:
        """Set the fields and silence the Trainer; record the arguments' own batch, and where they are created."""
        self.made_from, self.place = _origin()
        self._refuse_sharing_ranks(arguments)
        self._record_own(arguments)
        if self.is_probing and not self.tuned:
            # A model that recomputes activations in spite of this was told so by the code.
            self.tuned = {**probe(*_batch_and_accumulation(arguments)), checkpointing_field(known_fields()): False}
        quiet = {**_QUIET, "output_dir": self.output_dir, **({"use_cpu": True} if self.on_cpu else {})}
        _set(arguments, quiet)
        super().apply_to_new(arguments)
        if generates(arguments):
            # Samples are generated for a whole step at once: a shorter one would generate fewer.
            self.shortened_accumulation = None
        self._shorten(arguments)
        arguments._autotune_batch_as_set = _batch_and_accumulation(arguments)

    def _refuse_sharing_ranks(self, arguments: Any) -> None:
        """End an inspection where the code asks for FSDP, or for several ranks that share a sample."""
        if self.refuse is None:
            return
        if getattr(arguments, "fsdp", None):
            # A Trainer in a single process, such as the inspection's, refuses FSDP.
            hint = "leave fsdp out, and ask for it with --strategy fsdp"
            self.refuse(UserCodeError("the TrainingArguments of the code set fsdp", hint))
        parallelism = getattr(arguments, "parallelism_config", None)
        if parallelism is not None and parallelism.non_data_parallel_size > 1:
            # Its process groups cannot be made in a single process.
            shares = "the TrainingArguments of the code have several ranks share a sample (parallelism_config)"
            self.refuse(UserCodeError(f"{shares}, which is not searched", NOT_BY_SAMPLE))

    def _record_own(self, arguments: Any) -> None:
        """Record the batch and checkpointing that the code gives, before they are replaced."""
        given = _batch_and_accumulation(arguments)
        # The code may copy arguments whose fields were set already: these are not its own values.
        if self._last_own_batch is None or given != tuple(self.tuned.get(name) for name in BATCH):
            self._last_own_batch = given
        arguments._autotune_own_batch = self._last_own_batch
        # TRL derives this field from the accumulation, but only later: a value at this point is the code's.
        if (batches := getattr(arguments, "steps_per_generation", None)) is not None:
            self.why_batch_matters = (
                f"steps_per_generation={batches} counts batches, where generation_batch_size counts completions"
            )
        names = checkpointing_field(known_fields()), "gradient_checkpointing"
        # Once on, it stays: a copy of arguments that had it turned off says nothing.
        self.own_checkpointing = self.own_checkpointing or any(getattr(arguments, name, False) for name in names)

    def _shorten(self, arguments: Any) -> None:
        """Replace the accumulation by the number of micro-steps to run."""
        if self.shortened_accumulation and arguments.gradient_accumulation_steps == self.shortened_accumulation[0]:
            arguments.gradient_accumulation_steps = self.shortened_accumulation[1]

    def first_ignored(self, arguments: Any, wanted: Mapping[str, Any]) -> str | None:
        """Return the first field without its ``wanted`` value, in words; the accumulation may be the shortened one."""
        name = BATCH[1]
        if self.shortened_accumulation and wanted.get(name) == self.shortened_accumulation[0]:
            wanted = {**wanted, name: self.shortened_accumulation[1]}
        return super().first_ignored(arguments, wanted)

    def check(self, source: TrainingSource, arguments: Any, wanted: Mapping[str, Any]) -> None:
        """Raise ``UserCodeError`` where the arguments of the user's ``Trainer`` lack a wanted field."""
        if (ignored := self.first_ignored(arguments, wanted)) is None:
            return
        if source.kind == "build":
            why = f"{source.name} ignored its overrides: {ignored}; pass them all on to its TrainingArguments"
            raise UserCodeError(why)
        raise UserCodeError(f"{source.name} trains otherwise than its TrainingArguments were told: {ignored}")


def _set(arguments: Any, fields: Document) -> None:
    """Set those of the ``fields`` that this version's arguments have."""
    for name, value in fields.items():
        if hasattr(arguments, name):
            setattr(arguments, name, value)


def probe(batch: int, accumulation: int) -> Document:
    """Return fields with another batch than the user's own, by which an inspection sees whether the code keeps it.

    If possible, the effective batch stays the same. Losses that compare the samples of a batch need two.
    """
    if batch >= 4 and batch % 2 == 0:
        pair = batch // 2, accumulation * 2
    elif accumulation % 2 == 0:
        pair = batch * 2, accumulation // 2
    else:
        pair = batch * 2, accumulation
    return dict(zip(BATCH, pair, strict=True))


def _origin() -> tuple[MadeFrom, str | None]:
    """Return whether flags, a file or code decide the arguments that are being created, to tell the user what to edit.

    With it comes the file's name (empty where unknown) or the line of code; ``None`` for flags. All is found in the
    call stack and the command line.
    """
    lines = list(lines_above())
    for frame, _ in lines:
        function, module = frame.f_code.co_name, module_of(frame)
        if "argparser" in module or module.startswith(("trl.scripts.utils", "trl.trainer.utils")):
            if function.startswith("parse_args"):
                return "flags", None
            if function in ("parse_json_file", "parse_yaml_file"):
                given = frame.f_locals.get("json_file") or frame.f_locals.get("yaml_file")
                return "file", os.path.basename(os.fsdecode(given)) if given else ""
    if (place := users_line(lines)) is None:
        # No code of the user calls this: a library's own command does, which takes flags.
        return "flags", None
    # The one configuration file on the command line is likely to decide them, whoever reads it.
    values = [word.rpartition("=")[2] for word in sys.argv[1:]]
    files = [path for path in values if path.endswith((".yaml", ".yml", ".json", ".toml")) and os.path.isfile(path)]
    return ("file", os.path.basename(files[0])) if len(files) == 1 else ("code", place)


def own_batch(arguments: Any) -> tuple[int, int]:
    """Return per-device batch and accumulation that the user's code gave for ``arguments``."""
    return getattr(arguments, "_autotune_own_batch", None) or _batch_and_accumulation(arguments)


def _batch_and_accumulation(arguments: Any) -> tuple[int, int]:
    return int(arguments.per_device_train_batch_size), int(arguments.gradient_accumulation_steps)

"""Run the user's code up to the training of its ``Trainer``, with fields of its ``TrainingArguments`` replaced.

Trials, inspections and ``autotune run`` do both by this module. It imports no library: where code trains for real, what
it does before its own imports has its effect.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from transformers import Trainer, TrainingArguments

from autotune.core.candidate import Candidate, Document
from autotune.core.code_interface import MadeFrom
from autotune.core.launch_command import NOT_BY_SAMPLE
from autotune.core.training_source import TrainingSource
from autotune.space.levers import ACCELERATE
from autotune.space.training_arguments import checkpointing_field, linked_fields
from autotune.worker.trial.run import known_fields
from autotune.worker.user.code import LAUNCHED_PRECISION, UserCodeError, load_function, run_script
from autotune.worker.wrapping import around, before, lines_above, module_of, users_line

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
# What follows from them is made with the arguments, so that they cannot be set once there are some.
_MADE_ONCE = ("fsdp", "fsdp_config", "deepspeed", "accelerator_config", "tf32", "use_cpu")


@dataclass
class TrainerFields:
    """What is put over every ``TrainingArguments`` that is made in this process.

    The base class's ``__post_init__`` is wrapped, which all subclasses go through. Fields are set before it runs, so
    that it checks and derives from them as from the user's own. Code that sets them otherwise once the arguments are
    made has them set again, as a ``Trainer`` is made of them and as it begins to train.
    """

    tuned: Document = field(default_factory=dict, kw_only=True)
    """Fields to set; empty for the user's unmodified settings."""
    say: Callable[[str], None] = field(default=lambda _: None, kw_only=True)
    """Told what the code had said instead."""
    set_since: set[str] = field(default_factory=set, kw_only=True)
    """Names of the fields that the code has set once its arguments were made."""

    def watch_arguments(self, kind: Any) -> None:
        """Wrap the class ``TrainingArguments`` for the rest of this process."""
        before(kind, "__post_init__", self.put)

    def watch_trainer(self, kind: Any) -> None:
        """Wrap the class ``Trainer`` for the rest of this process."""
        before(kind, "__init__", self._take_arguments)
        before(kind, "train", lambda trainer, *_, **__: self.begin(trainer))

    def put(self, arguments: Any) -> None:
        """Set the fields of arguments during their creation."""
        wanted = {**linked_fields(self.tuned), **self.tuned}
        defaults = {each.name: each.default for each in dataclasses.fields(arguments)}
        for name, value in wanted.items():
            if hasattr(arguments, name):
                self._tell(name, getattr(arguments, name), value, defaults.get(name))
                setattr(arguments, name, value)
        if "bf16" in self.tuned or "fp16" in self.tuned:
            # What ``accelerate launch`` says counts where the arguments say neither of two.
            os.environ[LAUNCHED_PRECISION] = self._half

    def begin(self, trainer: Any) -> None:
        """Set the fields of a ``Trainer`` before it trains."""
        self.put_again(trainer.args)
        if self.tuned:
            from autotune.worker.private.transformers import take_batch_of_arguments

            take_batch_of_arguments(trainer)

    def put_again(self, arguments: Any) -> None:
        """Set the fields of existing arguments again, where the code has changed them."""
        for name, value in {**linked_fields(self.tuned), **self.tuned}.items():
            found = getattr(arguments, name, value)
            if name not in _MADE_ONCE and not has(found, value):
                self.set_since.add(name)
                self._tell(name, found, value, None)
                setattr(arguments, name, value)
                if name in ("bf16", "fp16"):
                    arguments.mixed_precision = self._half

    @property
    def _half(self) -> str:
        """The 16-bit precision of the fields, in accelerate's words."""
        return next((half for half in ("bf16", "fp16") if self.tuned.get(half)), "no")

    def _tell(self, name: str, said: Any, value: Any, default: Any) -> None:
        """Report a field that the script sets to another value."""
        if not has(said, value) and said != default:
            self.say(f"the script says {name}={plain(said)!r}; {value!r} is set")

    def _take_arguments(self, _: Any, *args: Any, **kwargs: Any) -> None:
        """Set the fields of arguments that are passed to a ``Trainer``."""
        kind: Any = sys.modules["transformers.training_args"].TrainingArguments
        for given in (*args, *kwargs.values()):
            if isinstance(given, kind):
                self.put_again(given)

    def ignored(self, arguments: Any, wanted: Mapping[str, Any]) -> str | None:
        """Return the first ``wanted`` field with another value, as ``name is …, asked was …``, or ``None``."""
        for name, value in wanted.items():
            found, asked = getattr(arguments, name, None), value
            if name == "fsdp":
                # A list of options in some versions, whichever way it was said.
                found, asked = bool(found), bool(asked)
            if not has(found, asked) and name != "use_cpu":
                return f"{name} is {plain(found)!r}, asked was {asked!r}"
        return None


def otherwise(trainer: Any, candidate: Candidate, train_dataloader: Any) -> str | None:
    """Return how a ``Trainer`` differs from a candidate before it trains; ``None`` without a difference."""
    facts = _facts(trainer, candidate, train_dataloader)
    return next((f"{what} is {found!r}, asked was {asked!r}" for what, found, asked in facts if found != asked), None)


def _facts(trainer: Any, candidate: Candidate, loader: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings that decide the speed of a training: name, value found, value requested."""
    from autotune.worker.checkpointing import is_checkpointing
    from autotune.worker.private.transformers import attention_of
    from autotune.worker.user.loader_overlay import batch_of

    arm, args, model = candidate.arm, trainer.args, trainer.model
    batch = args.train_batch_size
    found = batch_of(loader)
    # Of several ranks, a loader that is divided among them may have the batches of all.
    if found not in (None, batch * args.world_size) and not generates(args):
        yield "the batch of its training loader", found, batch
    if arm.zero_stage is None:
        yield "the accelerator's mixed_precision", trainer.accelerator.mixed_precision, ACCELERATE[arm.precision]
    # One that the code compiles itself stays so.
    is_own = hasattr(model, "_orig_mod") and not args.torch_compile
    if not arm.regional_compilation and not arm.is_sharded and not is_own:
        yield "torch.compile of its model", hasattr(trainer.model_wrapped, "_orig_mod"), arm.torch_compile
    if not arm.is_sharded and (is_checkpointing(model) or arm.checkpointed_layers is None):
        yield "checkpointing of its model", is_checkpointing(model), arm.gradient_checkpointing
    if (config := getattr(model, "config", None)) is not None and not arm.padding_free:
        yield "the attention of its model", attention_of(config), arm.attn_implementation


# Of TRL's GRPOConfig, RLOOConfig and others like them: completions are generated for all micro-steps of a step at once.
_ROLLOUT_FIELDS = ("generation_batch_size", "steps_per_generation", "num_generations")


def generates(arguments: Any) -> bool:
    """Return whether a training generates its own completions, as TRL's GRPO does."""
    return any(getattr(arguments, name, None) is not None for name in _ROLLOUT_FIELDS)


def has(found: Any, asked: Any) -> bool:
    """Return whether a field has the requested value.

    ``TrainingArguments`` turns some settings into objects, and adds missing values.
    """
    if isinstance(asked, dict) and found is not None:
        settings = found if isinstance(found, Mapping) else vars(found)
        return all(has(settings.get(name), value) for name, value in asked.items())
    return bool(plain(found) == asked)


def plain(value: Any) -> Any:
    """Return a field's value as in JSON, with enumerations as their values."""
    return value.value if isinstance(value, enum.Enum) else value


OnTrain = Callable[[Any, Callable[[], Any]], NoReturn]


def intercept(on_train: OnTrain) -> None:
    """Make every ``Trainer.train`` in this process call ``on_train`` with the Trainer and the original ``train``."""
    around(Trainer, "train", lambda train, trainer, *_, **__: on_train(trainer, lambda: train(trainer)))


def run_source(source: TrainingSource, overrides: Document, output_dir: str) -> NoReturn:
    """Run the user's code up to and into its training. Raises an error where it ends or fails before."""
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
    """Call the user's function and return its ``Trainer``. Raises ``UserCodeError`` for any other result."""

    refusals: list[UserCodeError] = []

    def train(*_: Any, **__: Any) -> NoReturn:
        refusals.append(UserCodeError(f"{source.name} calls train itself", "have it return the Trainer untrained"))
        raise refusals[0]

    intercepted, Trainer.train = Trainer.train, train
    try:
        trainer = load_function(source)(dict(overrides))
    finally:
        Trainer.train = intercepted
    if refusals:
        # The function caught it.
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


def ignored_message(source: TrainingSource, ignored: str) -> str:
    """Return the message for a ``Trainer`` that ignored its settings."""
    if source.kind == "build":
        return f"{source.name} ignored its overrides: {ignored}; pass them all on to its TrainingArguments"
    return f"{source.name} trains otherwise than its TrainingArguments were told: {ignored}"


# Fields of its TrainingArguments


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
class Overlay(TrainerFields):
    """The same in a trial or an inspection, with what keeps it quiet: that is set once more for each ``Trainer``."""

    output_dir: str
    shortened: tuple[int, int] | None = None
    """Accumulation steps to run fewer of, and how many to run."""
    on_cpu: bool = False
    refuse: Callable[[str, str], NoReturn] | None = None
    """Ends an inspection, with what is wrong and what to do: the user's code might catch an error. ``None`` in a trial,
    whose settings are the candidate's."""
    is_probing: bool = False
    """Set another batch of the same effective batch than is given, to see whether what is asked for is done."""
    made_from: MadeFrom = "flags"
    """Where the arguments come from."""
    place: str | None = None
    """The file or line that they come from."""
    why_batch_matters: str | None = None
    """Why another batch of the same effective batch is another training; ``None`` where nothing shows it."""
    own_checkpointing: bool = False
    """Whether the arguments themselves turn checkpointing on."""
    _last_own_batch: tuple[int, int] | None = None

    def install(self) -> None:
        """Wrap the classes for the rest of this process."""
        self.watch_arguments(TrainingArguments)
        before(Trainer, "__init__", self._take_arguments)

    def put_again(self, arguments: Any) -> None:
        """Set the fields and silence the Trainer again, as later code such as ``set_push_to_hub`` may change them."""
        left = getattr(arguments, "_autotune_left", None)
        if left is not None:
            found = _batch_and_accumulation(arguments)
            own = zip(found, left, arguments._autotune_own_batch, strict=True)
            arguments._autotune_own_batch = tuple(now if now != then else said for now, then, said in own)
            self.set_since |= {name for name, now, then in zip(BATCH, found, left, strict=True) if now != then}
        super().put_again(arguments)
        # In arguments that are made, nobody is reported to by an empty list.
        _set(arguments, {**_QUIET, "report_to": [], "output_dir": self.output_dir})
        self._shorten(arguments)
        arguments._autotune_left = _batch_and_accumulation(arguments)

    def put(self, arguments: Any) -> None:
        """Set the fields and silence the Trainer; record where the arguments are created."""
        given = _batch_and_accumulation(arguments)
        # A copy of arguments that were overlaid shows the overlay, not the user's own.
        if self._last_own_batch is None or given != tuple(self.tuned.get(name) for name in BATCH):
            self._last_own_batch = given
        arguments._autotune_own_batch = self._last_own_batch
        # TRL makes it of the accumulation where the code says nothing.
        if (batches := getattr(arguments, "steps_per_generation", None)) is not None:
            self.why_batch_matters = (
                f"steps_per_generation={batches} counts batches, where generation_batch_size counts completions"
            )
        self.made_from, self.place = _origin()
        if self.refuse is not None and getattr(arguments, "fsdp", None):
            # A Trainer refuses it in a single process, as the one that is inspected is.
            self.refuse(
                "the TrainingArguments of the code set fsdp", "leave fsdp out, and ask for it with --strategy fsdp"
            )
        parallelism = getattr(arguments, "parallelism_config", None)
        if self.refuse is not None and parallelism is not None and parallelism.non_data_parallel_size > 1:
            # Its process groups cannot be made in a single process.
            self.refuse(
                "the TrainingArguments of the code have several ranks share a sample (parallelism_config), which is "
                "not searched", NOT_BY_SAMPLE,
            )  # fmt: skip
        checkpointing = checkpointing_field(known_fields())
        said = (getattr(arguments, name, False) for name in (checkpointing, "gradient_checkpointing"))
        # A copy of arguments that were overlaid shows none.
        self.own_checkpointing = self.own_checkpointing or any(said)
        if self.is_probing and not self.tuned:
            # A model that recomputes all the same has that from the code.
            self.tuned = {**probe(*given), checkpointing: False}
        quiet = {**_QUIET, "output_dir": self.output_dir, **({"use_cpu": True} if self.on_cpu else {})}
        _set(arguments, quiet)
        super().put(arguments)
        if generates(arguments):
            # What is generated for a whole step would be another amount.
            self.shortened = None
        self._shorten(arguments)
        arguments._autotune_left = _batch_and_accumulation(arguments)

    def _shorten(self, arguments: Any) -> None:
        """Replace the accumulation by the number of micro-steps to run."""
        if self.shortened and arguments.gradient_accumulation_steps == self.shortened[0]:
            arguments.gradient_accumulation_steps = self.shortened[1]

    def ignored(self, arguments: Any, wanted: Mapping[str, Any]) -> str | None:
        """Return the first ignored field, see ``TrainerFields.ignored``, allowing for skipped micro-steps."""
        accumulation = BATCH[1]
        if self.shortened and wanted.get(accumulation) == self.shortened[0]:
            wanted = {**wanted, accumulation: self.shortened[1]}
        return super().ignored(arguments, wanted)


def _set(arguments: Any, fields: Document) -> None:
    """Set those of the ``fields`` that this version's arguments have."""
    for name, value in fields.items():
        if hasattr(arguments, name):
            setattr(arguments, name, value)


def probe(batch: int, accumulation: int) -> Document:
    """Return a batch other than the user's own, if possible with the same effective batch and at least two samples.

    Losses that compare the samples of a batch need two.
    """
    if batch >= 4 and batch % 2 == 0:
        pair = batch // 2, accumulation * 2
    elif accumulation % 2 == 0:
        pair = batch * 2, accumulation // 2
    else:
        pair = batch * 2, accumulation
    return dict(zip(BATCH, pair, strict=True))


def _origin() -> tuple[MadeFrom, str | None]:
    """Return where the arguments are created, from the call stack and the command line.

    It is a hint for the user: where to set the result.
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
        return "flags", None
    files = [path for word in sys.argv[1:] if os.path.isfile(path := word.rpartition("=")[2])]
    named = [os.path.basename(path) for path in files if path.endswith((".yaml", ".yml", ".json", ".toml"))]
    return ("file", named[0]) if len(named) == 1 else ("code", place)


def own_batch(arguments: Any) -> tuple[int, int]:
    """Return per-device batch and accumulation that the user's code gave for ``arguments``."""
    return getattr(arguments, "_autotune_own_batch", None) or _batch_and_accumulation(arguments)


def _batch_and_accumulation(arguments: Any) -> tuple[int, int]:
    return int(arguments.per_device_train_batch_size), int(arguments.gradient_accumulation_steps)

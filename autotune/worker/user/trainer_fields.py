"""Set fields of the ``TrainingArguments`` of the user's code, and find settings in which its ``Trainer`` differs.

Trials, inspections and ``autotune run`` use this module. It imports no library, so that in a real training what the
code does before its own imports has its effect.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.candidate import Candidate, Document
from autotune.space.levers import ACCELERATE
from autotune.space.training_arguments import linked_fields
from autotune.worker.user.code import LAUNCHED_PRECISION
from autotune.worker.wrapping import before

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
# Other values are derived from these fields as the arguments are made, so they cannot be set afterwards.
_MADE_ONCE = ("fsdp", "fsdp_config", "deepspeed", "accelerator_config", "tf32", "use_cpu")


@dataclass
class TrainerFields:
    """The fields that are set in every ``TrainingArguments`` made in this process.

    The base class's ``__post_init__`` is wrapped, which all subclasses go through. Fields are set before it runs, so
    that it checks and derives from them as from the user's own. The code may change them afterwards. So they are set
    again when a ``Trainer`` gets the arguments, and when it begins to train.
    """

    tuned: Document = field(default_factory=dict, kw_only=True)
    """Fields to set, with their values; empty for the user's unmodified settings."""
    say: Callable[[str], None] = field(default=lambda _: None, kw_only=True)
    """Called with a message for each field that the code had set to another value."""
    set_since: set[str] = field(default_factory=set, kw_only=True)
    """Names of the fields that the code has changed after its arguments were made."""

    def watch_arguments(self, arguments_class: Any) -> None:
        """Wrap the class ``TrainingArguments`` for the rest of this process."""
        before(arguments_class, "__post_init__", self.apply_to_new)

    def watch_trainer(self, trainer_class: Any) -> None:
        """Wrap the class ``Trainer`` for the rest of this process."""
        before(trainer_class, "__init__", self._take_arguments)
        before(trainer_class, "train", lambda trainer, *_, **__: self.begin(trainer))

    def apply_to_new(self, arguments: Any) -> None:
        """Set the fields in ``TrainingArguments`` that are being created, before their ``__post_init__``."""
        # A linked field must be turned off, too: torch_compile_backend would turn torch_compile on.
        wanted = {**linked_fields(self.tuned), **self.tuned}
        defaults = {each.name: each.default for each in dataclasses.fields(arguments)}
        for name, value in wanted.items():
            if hasattr(arguments, name):
                own = getattr(arguments, name)
                self._report_replaced(name, own, value, defaults.get(name))
                setattr(arguments, name, _merged_settings(own, value) if name == "accelerator_config" else value)
        if "bf16" in self.tuned or "fp16" in self.tuned:
            # Arguments with neither bf16 nor fp16 would take the precision of ``accelerate launch`` from here.
            os.environ[LAUNCHED_PRECISION] = self._half

    def begin(self, trainer: Any) -> None:
        """Set the fields again in the arguments of a ``Trainer`` that begins to train, and in its copy of the batch."""
        self.apply_again(trainer.args)
        if self.tuned:
            from autotune.worker.private.transformers import take_batch_of_arguments

            take_batch_of_arguments(trainer)

    def apply_again(self, arguments: Any) -> None:
        """Set the fields of existing arguments again, where the code has changed them."""
        for name, value in {**linked_fields(self.tuned), **self.tuned}.items():
            found = getattr(arguments, name, value)
            if name not in _MADE_ONCE and not has_value(found, value):
                self.set_since.add(name)
                self._report_replaced(name, found, value, None)
                setattr(arguments, name, value)
                if name in ("bf16", "fp16"):
                    # __post_init__ derived it from these fields.
                    arguments.mixed_precision = self._half

    @property
    def _half(self) -> str:
        """The precision that the fields set, as accelerate's ``mixed_precision``."""
        return next((half for half in ("bf16", "fp16") if self.tuned.get(half)), "no")

    def _report_replaced(self, name: str, own: Any, value: Any, default: Any) -> None:
        """Report that ``value`` replaces the script's ``own`` one, unless both are equal or that is the default."""
        if not has_value(own, value) and own != default:
            self.say(f"the script says {name}={json_value(own)!r}; {value!r} is set")

    def _take_arguments(self, _: Any, *args: Any, **kwargs: Any) -> None:
        """Set the fields again in the ``TrainingArguments`` among the arguments of ``Trainer.__init__``."""
        arguments_class: Any = sys.modules["transformers.training_args"].TrainingArguments
        for given in (*args, *kwargs.values()):
            if isinstance(given, arguments_class):
                self.apply_again(given)

    def first_ignored(self, arguments: Any, wanted: Mapping[str, Any]) -> str | None:
        """Return the first field whose value is not the ``wanted`` one, as ``name is …, asked was …``, or ``None``.

        ``use_cpu`` is not compared.
        """
        for name, value in wanted.items():
            found, asked = getattr(arguments, name, None), value
            if name == "fsdp":
                # Some versions turn whatever was given into a list of options.
                found, asked = bool(found), bool(asked)
            if not has_value(found, asked) and name != "use_cpu":
                return f"{name} is {json_value(found)!r}, asked was {asked!r}"
        return None


def difference_from_candidate(trainer: Any, candidate: Candidate, train_dataloader: Any) -> str | None:
    """Return the first difference between a ``Trainer`` about to train and a candidate; ``None`` without one."""
    facts = _found_and_asked(trainer, candidate, train_dataloader)
    return next((f"{what} is {found!r}, asked was {asked!r}" for what, found, asked in facts if found != asked), None)


def _found_and_asked(trainer: Any, candidate: Candidate, loader: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield settings that decide a training's speed, found in the ``Trainer``, its model and loader, not in arguments.

    Each is a name, the value found and the value of the candidate. A setting that cannot be compared is left out.
    """
    from autotune.worker.checkpointing import is_checkpointing
    from autotune.worker.private.transformers import attention_of
    from autotune.worker.user.loader_overlay import batch_of

    arm, args, model = candidate.arm, trainer.args, trainer.model
    batch_size, loader_batch_size = args.train_batch_size, batch_of(loader)
    # A loader that is divided among several ranks may have the batch size of all ranks together.
    if loader_batch_size not in (None, batch_size * args.world_size) and not generates(args):
        yield "the batch of its training loader", loader_batch_size, batch_size
    # With ZeRO, DeepSpeed's own configuration has the precision.
    if arm.zero_stage is None:
        yield "the accelerator's mixed_precision", trainer.accelerator.mixed_precision, ACCELERATE[arm.precision]
    # A model that the code compiles itself stays compiled.
    is_compiled_by_code = hasattr(model, "_orig_mod") and not args.torch_compile
    if not arm.regional_compilation and not arm.is_sharded and not is_compiled_by_code:
        yield "torch.compile of its model", hasattr(trainer.model_wrapped, "_orig_mod"), arm.torch_compile
    # With ``checkpointed_layers`` only some layers are checkpointed, which the model itself may not show.
    if not arm.is_sharded and (is_checkpointing(model) or arm.checkpointed_layers is None):
        yield "checkpointing of its model", is_checkpointing(model), arm.gradient_checkpointing
    if (config := getattr(model, "config", None)) is not None and not arm.padding_free:
        yield "the attention of its model", attention_of(config), arm.attn_implementation


# Of TRL's GRPOConfig, RLOOConfig and others like them: completions are generated for all micro-steps of a step at once.
_ROLLOUT_FIELDS = ("generation_batch_size", "steps_per_generation", "num_generations")


def generates(arguments: Any) -> bool:
    """Return whether a training generates its own completions, as TRL's GRPO does."""
    return any(getattr(arguments, name, None) is not None for name in _ROLLOUT_FIELDS)


def _merged_settings(own: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings ``wanted`` into the user's own ones, recursively, and return a dictionary.

    ``own`` is the user's value of a field such as ``accelerator_config``: a dictionary, JSON, the path of a JSON file,
    an object with ``to_dict``, or ``None``.
    """
    if isinstance(own, str):
        own = json.loads(own if own.lstrip().startswith("{") else Path(own).read_text(encoding="utf-8"))
    if own is None:
        return dict(wanted)
    own = own if isinstance(own, Mapping) else own.to_dict()
    parts = {name: _merged_settings(own.get(name), each) for name, each in wanted.items() if isinstance(each, Mapping)}
    return {**own, **wanted, **parts}


def has_value(found: Any, asked: Any) -> bool:
    """Return whether a field has the requested value, or, for a dictionary, all of its entries.

    ``TrainingArguments`` turns some dictionaries into objects, and adds missing entries.
    """
    if isinstance(asked, dict) and found is not None:
        settings = found if isinstance(found, Mapping) else vars(found)
        return all(has_value(settings.get(name), value) for name, value in asked.items())
    return bool(json_value(found) == asked)


def json_value(value: Any) -> Any:
    """Return a field's value as in JSON, with enumerations as their values."""
    return value.value if isinstance(value, enum.Enum) else value

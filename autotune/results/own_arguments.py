"""Write the winner as options that the user's own code accepts, and say how to pass them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, cast

from autotune.core.candidate import Candidate
from autotune.core.loop import FIELDS, loop_arguments
from autotune.core.training_source import TrainingSource
from autotune.space.levers import ACCELERATE, LIGHTNING

# By framework: the names that its code has for batch, accumulation, precision, checkpointing and data loader settings.
# A LoopConfig has none of the last.
_PLACEHOLDERS = {**FIELDS, "batch": "per_device_train_batch_size"}
_LOADER = {"workers": "num_workers", "prefetch": "prefetch_factor"}
_FABRIC = {**FIELDS, "batch": "batch_size", **_LOADER}
_NAMES: dict[str, dict[str, str]] = {
    "loop": FIELDS,
    "accelerate": {
        **_PLACEHOLDERS,
        "precision": "mixed_precision",
        "workers": "dataloader_num_workers",
        "prefetch": "dataloader_prefetch_factor",
    },
    "fabric": _FABRIC,
    "lightning": {**_FABRIC, "accumulation": "accumulate_grad_batches"},
    "placeholders": _PLACEHOLDERS,
}
_PRECISIONS = {"accelerate": ACCELERATE, "fabric": LIGHTNING, "lightning": LIGHTNING}


class OwnArguments(TypedDict, total=False):
    """A winner under the names of what the user's own code trains with: Accelerate, Lightning, a loop, a command line
    with placeholders."""

    per_device_train_batch_size: int
    per_device_batch_size: int
    gradient_accumulation_steps: int
    mixed_precision: str
    gradient_checkpointing: bool
    dataloader_num_workers: int
    dataloader_prefetch_factor: int
    batch_size: int
    accumulate_grad_batches: int
    precision: str
    num_workers: int
    prefetch_factor: int


def own_arguments(source: TrainingSource, candidate: Candidate) -> OwnArguments:
    """Return a candidate's settings under the names that the user's code has for them; only those that it uses."""
    names = _NAMES[source.framework]
    in_loop = loop_arguments(candidate)
    values = {setting: in_loop[field] for setting, field in FIELDS.items()}
    if source.framework in _PRECISIONS:
        values["precision"] = _PRECISIONS[source.framework][candidate.arm.precision]
    taken = {names[setting]: value for setting, value in values.items() if setting in source.interface.searched}
    taken |= {names[setting]: value for setting, value in _loader_settings(candidate).items() if setting in names}
    return cast("OwnArguments", taken)


def _loader_settings(candidate: Candidate) -> dict[str, int]:
    """Return those of ``workers`` and ``prefetch`` (of the data loader) that a candidate sets."""
    arm = candidate.arm
    values = {"workers": arm.dataloader_num_workers, "prefetch": arm.dataloader_prefetch_factor}
    return {setting: value for setting, value in values.items() if value}


def flags(source: TrainingSource, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the script's own command-line flags by the names of these arguments, those that have a flag."""
    own, names = source.interface.flags, _NAMES[source.framework]
    return {name: own[setting] for setting, name in names.items() if setting in own and name in arguments}


def hand_over(source: TrainingSource, arguments: Mapping[str, Any], candidate: Candidate) -> list[str]:
    """Return sentences that tell the user how to pass the arguments to code without a Trainer: by flag or by hand."""
    interface, kind, name = source.interface, source.framework, source.name
    at_loader = f" at {interface.loader}" if interface.loader else ""
    is_tf32 = candidate.arm.precision == "tf32"
    tf32 = ["call torch.set_float32_matmul_precision('high') before the training"] if is_tf32 else []
    if kind == "loop":
        function = name.rpartition(":")[2]
        return [
            f"train with them: {function}(autotune.LoopConfig(**json.load(open('settings.json')))), the file from "
            "--format json",
            *(
                f"set by hand: {_LOADER[setting]} of the training DataLoader{at_loader} = {value}"
                for setting, value in _loader_settings(candidate).items()
            ),
            *tf32,
        ]
    by_flag = flags(source, arguments)
    by_hand = {argument: value for argument, value in arguments.items() if argument not in by_flag}
    lines = [f"give them to {name} after its other options (--format cli)"] if by_flag else []
    # Where in the code each argument is set, in words.
    places = {
        "batch_size": "batch_size of the training DataLoader",
        "per_device_train_batch_size": "batch_size of the training DataLoader",
        "accumulate_grad_batches": "accumulate_grad_batches of the Trainer",
        "gradient_accumulation_steps": (
            "the batches of an optimizer step" if kind == "fabric" else "gradient_accumulation_steps of the Accelerator"
        ),
        "mixed_precision": "mixed_precision of the Accelerator",
        "precision": "precision of Fabric" if kind == "fabric" else "precision of the Trainer",
        **{_NAMES[kind][setting]: f"{name} of the training DataLoader" for setting, name in _LOADER.items()},
    }
    for argument, value in by_hand.items():
        if argument == "gradient_checkpointing":
            if value:
                lines.append("call gradient_checkpointing_enable() of the model")
            continue
        if argument == "mixed_precision" and argument not in interface.passed:
            lines.append(
                f"start it with accelerate launch --mixed_precision {value}, or with the file from --format accelerate"
            )
            continue
        at = at_loader if "DataLoader" in places[argument] else ""
        if "Accelerator" in places[argument] and interface.accelerator:
            at = f" at {interface.accelerator}"
        lines.append(f"set by hand: {places[argument]}{at} = {value!r}")
    if "accumulation" not in interface.searched:
        # The code counts its batches itself, whatever its framework is told.
        lines.append(f"leave the accumulation that the code makes itself, {candidate.gradient_accumulation_steps}")
    return [*lines, *tf32]

"""Say a winner under the names that the user's own code takes, and how to hand it over."""

from __future__ import annotations

from typing import Any

from autotune.core.candidate import Candidate, Document
from autotune.core.loop import FIELDS, loop_arguments

# By what the code trains with: the names of batch, accumulation, precision and checkpointing there.
_NAMES: dict[str, dict[str, str]] = {
    "loop": FIELDS,
    "accelerate": {
        "batch": "per_device_train_batch_size",
        "accumulation": "gradient_accumulation_steps",
        "precision": "mixed_precision",
        "checkpointing": "gradient_checkpointing",
    },
    "lightning": {
        "batch": "batch_size",
        "accumulation": "accumulate_grad_batches",
        "precision": "precision",
        "checkpointing": "gradient_checkpointing",
    },
}
_PRECISIONS: dict[str, dict[str, str]] = {
    "accelerate": {"fp32": "no", "tf32": "no"},
    "lightning": {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"},
}


def kind_of(interface: Document) -> str:
    """Return what the code trains with: ``trainer``, ``loop``, ``accelerate`` or ``lightning``."""
    return str(interface.get("kind", "trainer"))


def own_arguments(interface: Document, candidate: Candidate) -> dict[str, Any]:
    """Return a candidate under the code's names; only what the code was seen to use."""
    kind = kind_of(interface)
    names = _NAMES[kind]
    values = dict(zip(FIELDS, loop_arguments(candidate).values(), strict=True))
    values["precision"] = _PRECISIONS.get(kind, {}).get(values["precision"], values["precision"])
    return {names[what]: value for what, value in values.items() if what in interface.get("searched", FIELDS)}


def flags(interface: Document, arguments: dict[str, Any]) -> dict[str, str]:
    """Return the command-line flag of each argument for which the script's own parser has one."""
    known = interface.get("flags", {})
    names = _NAMES[kind_of(interface)]
    return {names[what]: known[what] for what in FIELDS if what in known and names[what] in arguments}


def hand_over(interface: Document, name: str, arguments: dict[str, Any]) -> list[str]:
    """Return lines that say what to do with the arguments, for code that is no Trainer's."""
    kind = kind_of(interface)
    if kind == "loop":
        function = name.rpartition(":")[2]
        return [
            f"train with them: {function}(autotune.LoopConfig(**json.load(open('settings.json')))), the file from "
            "--format json"
        ]
    given = flags(interface, arguments)
    by_hand = {name: value for name, value in arguments.items() if name not in given}
    lines = [f"give them to {name} after its other options (--format cli)"] if given else []
    places = {
        "batch_size": "batch_size of the training DataLoader",
        "per_device_train_batch_size": "batch_size of the training DataLoader",
        "accumulate_grad_batches": "accumulate_grad_batches of the Trainer",
        "gradient_accumulation_steps": "gradient_accumulation_steps of the Accelerator",
        "precision": "precision of the Trainer",
    }
    for argument, value in by_hand.items():
        if argument == "gradient_checkpointing":
            if value:
                lines.append("call gradient_checkpointing_enable() of the model")
            continue
        if argument == "mixed_precision":
            lines.append(
                f"start it with accelerate launch --mixed_precision {value}, or with the file from --format accelerate"
            )
            continue
        at = f" at {interface['loader']}" if "DataLoader" in places[argument] and interface.get("loader") else ""
        lines.append(f"set by hand: {places[argument]}{at} = {value!r}")
    return lines

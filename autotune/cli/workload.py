"""The workload that a command's options describe; shared by ``search`` and ``predict``."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from autotune.errors import InvalidRequestError

if TYPE_CHECKING:
    from autotune.model_source import ModelSource
    from autotune.workload import Task, Workload


def build_workload(options: dict[str, Any]) -> Workload:
    """From ``model``, ``task``, ``seq_len``, ``padding``, ``dtype`` and ``pretrained``, as far as they are there."""
    from autotune.model_source import resolve_model
    from autotune.workload import Workload, choose_seq_len, infer_task

    source = resolve_model(options["model"])
    task = options["task"] or infer_task(source.config)
    _check_meaning(options, task)
    return Workload(
        model=source.name,
        config=source.config,
        task=task,
        seq_len=choose_seq_len(source.config, task, options["seq_len"]),
        padding=options.get("padding") or 0.0,
        dtype=options["dtype"],
        weights=_weights(source) if options.get("pretrained") else None,
    )


# What the user's own code decides, so that an option for it would do nothing.
_DECIDED_BY_OWN_CODE = ("model", "task", "seq_len", "padding", "dtype", "pretrained", "attn")


def own_workload(options: dict[str, Any], given: Collection[str]) -> Workload | None:
    """From ``trainer`` or ``script``: the user's own code; ``None`` where a model is named instead.

    Raises ``InvalidRequestError`` where not exactly one of them is there, or beside options (``given`` on the
    command line) that would do nothing.
    """
    from autotune.training_source import find_script, find_trainer
    from autotune.workload import Workload

    trainer, script = options["trainer"], options["script"]
    if not trainer and not script:
        if options["model"] is None:
            raise InvalidRequestError(
                "nothing to train is named", "give --model NAME, --trainer train.py:build, or a script after --"
            )
        return None
    if trainer and script:
        raise InvalidRequestError(
            f"--trainer {trainer} and the script {' '.join(script)[:80]} are two trainings", "leave one of them out"
        )
    what = f"--trainer {trainer}" if trainer else f"the script {' '.join(script)[:80]}"
    for name in _DECIDED_BY_OWN_CODE:
        if name in given:
            option = "--" + name.replace("_", "-")
            raise InvalidRequestError(
                f"{option} means nothing beside {what}, which decides that", f"leave {option} out"
            )
    return Workload.of_source(find_trainer(trainer) if trainer else find_script(script))


def _check_meaning(options: dict[str, Any], task: Task) -> None:
    """Raise for options that would silently do nothing with the others."""
    if task == "image-classification" and options["seq_len"] is not None:
        raise InvalidRequestError(
            f"--seq-len {options['seq_len']} means nothing to {task}, whose samples are images", "leave --seq-len out"
        )
    if task in ("image-classification", "speech-seq2seq") and options.get("padding"):
        raise InvalidRequestError(
            f"--padding {options['padding']:g} means nothing to {task}, whose samples are not text",
            "leave --padding out",
        )
    if options["world_size"] > 1 and options["effective_batch"] is None:
        raise InvalidRequestError(
            f"--world-size {options['world_size']} has no effective batch to share",
            "give --effective-batch, or leave --world-size out",
        )


def _weights(source: ModelSource) -> str:
    """Where the model's weights are; an error where there are none to load."""
    found = source.repository or source.path
    if found is None:
        raise InvalidRequestError(f"--pretrained: {source.name!r} has no weights anywhere", "leave --pretrained out")
    return found

"""The workload that a command's options describe; shared by ``search`` and ``predict``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.errors import InvalidRequestError

if TYPE_CHECKING:
    from autotune.model_source import ModelSource
    from autotune.workload import Workload


def build_workload(options: dict[str, Any]) -> Workload:
    """From ``model``, ``task``, ``seq_len``, ``padding``, ``dtype`` and ``pretrained``, as far as they are there."""
    from autotune.model_source import resolve_model
    from autotune.workload import Workload, choose_seq_len, infer_task

    source = resolve_model(options["model"])
    task = options["task"] or infer_task(source.config)
    return Workload(
        model=source.name,
        config=source.config,
        task=task,
        seq_len=choose_seq_len(source.config, task, options["seq_len"]),
        padding=options.get("padding") or 0.0,
        dtype=options["dtype"],
        weights=_weights(source) if options.get("pretrained") else None,
    )


def _weights(source: ModelSource) -> str:
    """Where the model's weights are; an error where there are none to load."""
    found = source.repository or source.path
    if found is None:
        raise InvalidRequestError(f"--pretrained: {source.name!r} has no weights anywhere", "leave --pretrained out")
    return found

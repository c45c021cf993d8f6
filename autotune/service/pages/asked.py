"""Write what was asked of a search: as fields of the form, as a command, and as a request to search again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.core.candidate import Document
from autotune.core.option_kinds import BYTES, FLAG, SECONDS
from autotune.core.options import BY_NAME
from autotune.core.units import GIB, format_bytes
from autotune.store.queue import JobRecord, Needs

CHECKED = "on"
"""What a form sends of a box that is checked: the option then has not its default."""


def fields_of(job: JobRecord) -> dict[str, str]:
    """Return what a job asks for as fields of the form."""
    asked = {name: value for name, value in job.request.items() if name in BY_NAME}
    if device := _device(job.needs):
        asked["device"] = job.needs.gpu or device
    if job.needs.count > 1:
        asked["gpus"] = job.needs.count
    if job.priority:
        asked["priority"] = job.priority
    return {name: text for name, value in asked.items() if (text := _text(name, value))}


def _device(needs: Needs) -> str | None:
    # With several GPUs, their count says that they are no CPU.
    return needs.device_kind if needs.device_kind == "cpu" or needs.gpu is not None or needs.count == 1 else None


def _text(name: str, value: Any) -> str:
    """Return a recorded value of an option as it is written on the command line; nothing where it has its default."""
    option = BY_NAME[name]
    if option.kind is FLAG:
        return "" if value == option.default else CHECKED
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if option.kind is BYTES and isinstance(value, int):
        in_gib = f"{value / GIB:g}GiB"
        return in_gib if option.kind.read(in_gib) == value else f"{value}B"
    return f"{value:.15g}s" if option.kind is SECONDS else str(value)


def not_in_fields(job: JobRecord) -> str | None:
    """Say what a job asks for that neither the form nor a command can ask for; ``None`` where there is no such."""
    if job.needs.memory_bytes is None:
        return None
    return (
        f"The request also asks for a device with {format_bytes(job.needs.memory_bytes)} of memory. Neither the form "
        "nor the command can ask for that: send it as needs.memory_bytes to /v1/searches."
    )


def command_of(fields: Mapping[str, str], url: str) -> str:
    """Return the command that asks the service at ``url`` for the same as the fields of a form."""
    words = ["autotune", "search", "--server", url.rstrip("/")]
    return shlex.join(words + [word for name, text in filled_in(fields) for word in arguments(name, text)])


def arguments(name: str, text: str) -> list[str]:
    """Return a field of the form as words of a command: an option's name, and its value where it takes one."""
    option = BY_NAME[name]
    if option.is_lever:
        return ["--lever", f"{name}={text}"]
    return [option.parameter] if option.kind is FLAG else [option.parameter, text]


def filled_in(fields: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Return the fields that are options and have a value, in the order in which options are listed."""
    for name in BY_NAME:
        if text := str(fields.get(name) or "").strip():
            yield name, text


def request_again(job: JobRecord, *, continues: bool) -> Document:
    """Return the request that searches the same once more: measured anew, or where it ``continues`` its study."""
    needs = {"gpu": job.needs.gpu, "memory_bytes": job.needs.memory_bytes, "count": job.needs.count}
    document = {**job.request, "needs": needs, "device": _device(job.needs), "priority": job.priority}
    if continues:
        return {**document, "study": job.study}
    document.pop("study", None)
    return {**document, "fresh": True} if job.state == "finished" else document

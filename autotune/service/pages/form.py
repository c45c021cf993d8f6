"""Describe the form for a search: its fields, how a job fills them in, and how a filled-in form becomes a request."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError
from autotune.core.option_kinds import BYTES, COUNT, FLAG, SECONDS, SEED
from autotune.core.options import BY_NAME
from autotune.core.units import GIB, format_bytes
from autotune.service.requests import OPTION_NAMES
from autotune.store.queue import JobRecord, Needs

CHECKED = "on"
"""What a form sends for a checked box, which stands for the opposite of the option's default."""


def fields_of(job: JobRecord) -> dict[str, str]:
    """Return a job's request as the texts of the form's fields, by name; fields at their default are left out."""
    asked = {name: value for name, value in job.request.items() if name in BY_NAME}
    if device := _device(job.needs):
        asked["device"] = job.needs.gpu or device
    if job.needs.count > 1:
        asked["gpus"] = job.needs.count
    if job.priority:
        asked["priority"] = job.priority
    return {name: text for name, value in asked.items() if (text := _text(name, value))}


def _device(needs: Needs) -> str | None:
    """Return the form's device for a job's needs; ``None`` for any."""
    # With more than 1 in its field, ``gpus`` already says that they are GPUs.
    is_counted = needs.device_kind == "cuda" and needs.gpu is None and needs.count > 1
    return None if is_counted else needs.device_kind


def _text(name: str, value: Any) -> str:
    """Return an option's recorded value as text for its field; an empty string for no value or an unchecked box."""
    option = BY_NAME[name]
    if option.kind is FLAG:
        return "" if value == option.default else CHECKED
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if option.kind is BYTES and isinstance(value, int):
        in_gib = f"{value / GIB:g}GiB"
        # Rounded, it might be another size.
        return in_gib if option.kind.read(in_gib) == value else f"{value}B"
    return f"{value:.15g}s" if option.kind is SECONDS else str(value)


def not_in_fields(job: JobRecord) -> str | None:
    """Return a sentence on needs that neither the form nor the command can ask for; ``None`` without such needs."""
    if job.needs.memory_bytes is None:
        return None
    return (
        f"The request also asks for a device with {format_bytes(job.needs.memory_bytes)} of memory. Neither the form "
        "nor the command can ask for that: send it as needs.memory_bytes to /v1/searches."
    )


def command_of(fields: Mapping[str, str], url: str) -> str:
    """Return the ``autotune search --server`` command for the fields of a form."""
    options = (on_command_line(name, text) for name, text in filled_in(fields))
    return " ".join(["autotune search --server", shlex.quote(url.rstrip("/")), *options])


def on_command_line(name: str, text: str) -> str:
    """Return a field of the form as a command-line option, with its value unless it is a flag."""
    option = BY_NAME[name]
    is_flag = option.kind is FLAG and not option.is_lever
    return option.parameter if is_flag else option.said(shlex.quote(text))


def filled_in(fields: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the form's options that have a value, in the order of the options."""
    for name in BY_NAME:
        if text := str(fields.get(name) or "").strip():
            yield name, text


def request_again(job: JobRecord, *, continues: bool) -> Document:
    """Return the request to repeat a job's search: in a new study, or if it ``continues``, in the job's own."""
    needs = {"gpu": job.needs.gpu, "memory_bytes": job.needs.memory_bytes, "count": job.needs.count}
    document = {**job.request, "needs": needs, "device": _device(job.needs), "priority": job.priority}
    if continues:
        return {**document, "study": job.study}
    document.pop("study", None)
    # Without ``fresh``, the service would answer with the result of the finished job.
    return {**document, "fresh": True} if job.state == "finished" else document


@dataclass(frozen=True)
class Field:
    """A field of the form; its name is that of an option."""

    name: str
    label: str
    example: str = ""
    help: str = ""
    list: str = ""
    """Id of the HTML ``datalist`` with suggestions, if any."""

    @property
    def is_flag(self) -> bool:
        """Whether the field is a checkbox."""
        return BY_NAME[self.name].kind is FLAG

    @property
    def is_number(self) -> bool:
        """Whether the field is for digits."""
        return BY_NAME[self.name].kind in (COUNT, SEED)


FIELDS = (
    Field("model", "Model", "bert-large-uncased", "Of the catalog or the hub.", "models"),
    Field("effective_batch", "Effective batch", "64", "Empty: any batch."),
    Field("device", "GPU", "any", "A part of its name, or cpu.", "gpus"),
    Field("gpus", "GPUs together", "1", "How many train together."),
    Field("memory_limit", "Memory limit", "24GiB", "Empty: all that is free."),
)
MORE_FIELDS = (
    Field("code", "Listed code", "in place of a model", list="codes"),
    Field("seq_len", "Tokens a sample", "512 or the model's most"),
    Field("precision", "Precisions", "bf16,tf32"),
    Field("dataset", "Dataset", "on the hub, or an allowed path"),
    Field("trials", "At most trials", "as many as it takes"),
    Field("time_budget", "Time budget", "5m"),
    Field("study", "Name of the study", "chosen for you"),
    Field("priority", "Priority", "0 to 10"),
)
_LABELS = {field.name: field.label.lower() for field in (*FIELDS, *MORE_FIELDS)}


class FieldError(InvalidRequestError):
    """A field of the form has a value that is not valid."""

    def __init__(self, field: str, error: ValueError) -> None:
        super().__init__(f"{_LABELS.get(field, field)}: {error}", "correct it in the form")
        self.field = field


def more_fields(asked: Mapping[str, str], *, has_codes: bool) -> tuple[Field, ...]:
    """Return the collapsed fields: the usual ones, and one for each other option that is filled in in ``asked``."""
    usual = [field for field in MORE_FIELDS if field.name != "code" or has_codes]
    others = [name for name in OPTION_NAMES if name not in _LABELS and asked.get(name)]
    return (*usual, *(Field(name, name.replace("_", " ").capitalize()) for name in others))


def read_form(form: Mapping[str, Any]) -> Document:
    """Return a form's fields as a request, parsed as on the command line. Raises ``FieldError`` for an invalid one."""
    found: Document = {}
    for name, text in filled_in({name: form.get(name) for name in (*OPTION_NAMES, "priority")}):
        option = BY_NAME[name]
        try:
            value = not option.default if option.kind is FLAG else option.kind.read(text)
        except ValueError as error:
            raise FieldError(name, error) from error
        found[name] = list(value) if isinstance(value, tuple) else value
    return found

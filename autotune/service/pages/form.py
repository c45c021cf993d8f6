"""Say which fields the form that asks for a search has, and read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError
from autotune.core.option_kinds import COUNT, FLAG, SEED
from autotune.core.options import BY_NAME
from autotune.service.pages.asked import filled_in
from autotune.service.requests import OPTION_NAMES


@dataclass(frozen=True)
class Field:
    """A field of the form; its name is that of an option."""

    name: str
    label: str
    example: str = ""
    help: str = ""
    list: str = ""
    """The id of the list of what may be chosen."""

    @property
    def is_flag(self) -> bool:
        """Whether it is a box to check."""
        return BY_NAME[self.name].kind is FLAG

    @property
    def is_number(self) -> bool:
        """Whether it takes digits."""
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
    """Return the fields that are folded away: the usual ones, and one for each other option that is asked for."""
    usual = [field for field in MORE_FIELDS if field.name != "code" or has_codes]
    others = [name for name in OPTION_NAMES if name not in _LABELS and asked.get(name)]
    return (*usual, *(Field(name, name.replace("_", " ").capitalize()) for name in others))


def read_form(form: Mapping[str, Any]) -> Document:
    """Return a form's fields as a request, each read as the command line reads it; raises ``FieldError``."""
    found: Document = {}
    for name, text in filled_in({name: form.get(name) for name in (*OPTION_NAMES, "priority")}):
        option = BY_NAME[name]
        try:
            value = not option.default if option.kind is FLAG else option.kind.read(text)
        except ValueError as error:
            raise FieldError(name, error) from error
        found[name] = list(value) if isinstance(value, tuple) else value
    return found

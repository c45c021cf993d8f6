"""Render the form that asks for a search, read it, and write the command that asks for the same."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError
from autotune.core.options import BY_NAME
from autotune.models import catalog
from autotune.results.html.markup import Markup, element

# The fields, each with its label and an example; the second half is folded away.
_FIELDS = (
    ("model", "Model", "bert-large-uncased"),
    ("effective_batch", "Effective batch", "64"),
    ("device", "GPU", "any"),
    ("gpus", "GPUs together", "1"),
    ("memory_limit", "Memory limit", "24GiB"),
)
_MORE_FIELDS = (
    ("code", "Listed code", "in place of a model"),
    ("seq_len", "Tokens a sample", "512 or the model's most"),
    ("precision", "Precisions", "bf16,tf32"),
    ("dataset", "Dataset", "a name on the hub, or a path the operator allows"),
    ("trials", "At most trials", "as many as it takes"),
    ("time_budget", "Time budget", "5m"),
    ("study", "Name of the study", "chosen from the model and the batch"),
    ("priority", "Priority", "0 to 10"),
)
_HELP = {
    "model": "Of the catalog or the hub.",
    "effective_batch": "Empty: any batch.",
    "device": "A part of its name, or cpu.",
    "gpus": "How many train together.",
    "memory_limit": "Empty: all that is free.",
}
_NUMBERS = ("effective_batch", "gpus", "seq_len", "trials", "priority")


class FieldError(InvalidRequestError):
    """A field of the form has a value that is not valid."""

    def __init__(self, field: str, error: ValueError) -> None:
        super().__init__(f"{_label(field)}: {error}", "correct it in the form")
        self.field = field


def _label(field: str) -> str:
    return next(label for name, label, _ in (*_FIELDS, *_MORE_FIELDS) if name == field).lower()


def _texts(form: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Return the fields that were filled in."""
    for name, _, _ in (*_FIELDS, *_MORE_FIELDS):
        if text := str(form.get(name) or "").strip():
            yield name, text


def read_form(form: Mapping[str, Any]) -> Document:
    """Return a form's fields as a request, each read as the command line reads it; raises ``FieldError``."""
    found: Document = {}
    for name, text in _texts(form):
        try:
            value = BY_NAME[name].kind.read(text)
        except ValueError as error:
            raise FieldError(name, error) from error
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def command_of(form: Mapping[str, Any], url: str) -> str:
    """Return the command that asks the service at ``url`` for the same as a form."""
    words = ["autotune", "search", "--server", url.rstrip("/")]
    for name, text in _texts(form):
        words += [BY_NAME[name].parameter, text]
    return shlex.join(words)


def render_form(asked: Mapping[str, str], devices: Collection[str], codes: Collection[str] = ()) -> Markup:
    """Render the form with what was asked for; these devices and this code can be chosen."""
    more = [field for field in _MORE_FIELDS if field[0] != "code" or codes]
    is_more_open = any(asked.get(name) for name, _, _ in _MORE_FIELDS)
    return element(
        "form",
        [_field(asked, *field, is_required=field[0] == "model" and not codes) for field in _FIELDS],
        element(
            "details",
            element("summary", "More options"),
            element("div", [_field(asked, *field) for field in more], class_="side"),
            class_="wide",
            open=is_more_open,
        ),
        element("datalist", [element("option", value=entry.name) for entry in catalog.entries()], id="models"),
        element("datalist", [element("option", value=name) for name in sorted(devices)], id="gpus"),
        element("datalist", [element("option", value=name) for name in sorted(codes)], id="codes") if codes else None,
        element(
            "div",
            element("div", "The same on a command line", class_="soft", id="command-name"),
            element("pre", element("code", id="command"), tabindex=0, role="region", aria_labelledby="command-name"),
            element("p", id="command-note", class_="note", role="status"),
            element("button", "Search", class_="main", data_busy="Queueing …"),
            " ",
            element("button", "Copy the command", type="button", data_copy="command"),
            class_="wide",
        ),
        class_="search",
        method="post",
        action="/searches",
        data_command="/command",
    )


def _field(asked: Mapping[str, str], name: str, label: str, example: str, *, is_required: bool = False) -> Markup:
    told = _HELP.get(name)
    box = element(
        "input",
        name_=name,
        id=f"field-{name}",
        value=asked.get(name) or None,
        placeholder=example,
        autocomplete="off",
        spellcheck="false",
        list={"model": "models", "device": "gpus", "code": "codes"}.get(name),
        required=is_required,
        inputmode="numeric" if name in _NUMBERS else None,
        aria_describedby=f"help-{name}" if told else None,
    )
    help_line = element("div", told, class_="soft", id=f"help-{name}") if told else None
    is_long = name == "model"
    return element(
        "div", element("label", label, for_=f"field-{name}"), box, help_line, class_="long" if is_long else None
    )

"""Read what a client asks to be verified: a study of this service, with the number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError
from autotune.core.options import BY_NAME
from autotune.service.requests import read_priority
from autotune.store.queue import Needs
from autotune.tuning.request import check_study_name
from autotune.verify.throughput import check_steps

VERIFIES = "verify_study"
"""The name in a job's request under which the study is that it verifies."""
_NAMES = ("study", "steps", "priority")


@dataclass(frozen=True)
class VerificationSubmission:
    """A verification that may be queued."""

    study: str
    options: Document
    priority: int


def read_verification(document: Any) -> VerificationSubmission:
    """Return what a client asks for; raises ``InvalidRequestError`` for what no verification takes."""
    if not isinstance(document, dict) or not isinstance(document.get("study"), str):
        raise InvalidRequestError("no study is named", 'send {"study": "bert-large-uncased-64"}')
    for name in document:
        if name not in _NAMES:
            raise InvalidRequestError(f"{str(name)[:60]!r} is not an option of verify", f"use {', '.join(_NAMES)}")
    check_study_name(document["study"])
    options: Document = {VERIFIES: document["study"]}
    if document.get("steps") is not None:
        options["steps"] = int(BY_NAME["steps"].kind.check("steps", document["steps"]))
        check_steps(options["steps"])
    return VerificationSubmission(document["study"], options, read_priority(document))


def needs_of_study(environment: Document) -> Needs:
    """Return what a machine must have for a study's promise to hold on it."""
    if environment["device_kind"] != "cuda":
        return Needs("cpu")
    ranks = environment.get("ranks", {}).get("world_size", 1)
    return Needs("cuda", str(environment["device_name"]).lower(), int(environment["device_memory_bytes"]), int(ranks))

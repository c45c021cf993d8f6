"""Define the errors that a user can act on, each with its exit code.

Each has a message (what was wrong with which value), a hint (what to do next) and the exit code of the command line.
Out of memory inside a trial is not among them: that is a result.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(word: str, known: Iterable[str], *, most: int = 2, least_ratio: float = 0.6) -> str:
    """Return ``did you mean this or that?``, or an empty string where no known word is similar enough."""
    near = near_misses(word, known, most=most, least_ratio=least_ratio)
    return f"did you mean {' or '.join(near)}?" if near else ""


def near_misses(word: str, known: Iterable[str], *, most: int, least_ratio: float = 0.6) -> list[str]:
    """Return at most ``most`` known names that begin with the word, else the names most similar to it.

    ``least_ratio`` is the least similarity, as ``difflib`` measures it from 0 to 1.
    """
    names = list(known)
    completions = [name for name in names if word and name.startswith(word)][:most]
    return completions or difflib.get_close_matches(word, names, n=most, cutoff=least_ratio)


def error_with_code(exit_code: object, message: str, hint: str) -> AutotuneError | None:
    """Return an error of the class with an exit code that another process reported; ``None`` for an unknown code."""
    kinds: list[type[AutotuneError]] = [AutotuneError, *AutotuneError.__subclasses__()]
    for kind in kinds:
        if kind.exit_code == exit_code:
            return kind(message, hint)
    return None


class AutotuneError(Exception):
    """Something else failed, such as writing to stdout.

    Base class of all errors that a user can act on: ``message`` names the value that was wrong, ``hint`` the next step.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message

    def document(self) -> dict[str, Any]:
        """Return the error as JSON-ready data, for the record of the search and for clients."""
        return {"exit_code": self.exit_code, "message": self.message, "hint": self.hint}


class InvalidRequestError(AutotuneError):
    """A value is not valid, alone or together with the others."""

    exit_code = 2


class UnknownModelError(AutotuneError):
    """No catalog entry, folder, cached model or hub model has this name, or its config cannot be used."""

    exit_code = 3


class DeviceError(AutotuneError):
    """The device is absent, busy, lost, or lacks what was asked of it."""

    exit_code = 4


class StorageError(AutotuneError):
    """The database cannot be opened, written or read, or an output file cannot be written."""

    exit_code = 5

    def __init__(self, message: str, hint: str = "", *, may_pass: bool = False) -> None:
        super().__init__(message, hint)
        self.may_pass = may_pass
        """Whether the same may work later: the database's server, file or disk failed."""


class NothingFitsError(AutotuneError):
    """No candidate fits under the memory ceiling."""

    exit_code = 6


class NoResultError(AutotuneError):
    """The search ended without one completed trial, for reasons other than memory."""

    exit_code = 7


class TrialServerError(AutotuneError):
    """The process that runs trials could not start or did not answer."""

    exit_code = 8


class UnknownStudyError(AutotuneError):
    """The database holds no study of this name."""

    exit_code = 9


class TrainingSourceError(AutotuneError):
    """The user's own script or Trainer failed before it trained, or cannot be measured."""

    exit_code = 10


class PromiseMissedError(AutotuneError):
    """A stock Trainer was slower or needed more memory than the search promised."""

    exit_code = 11


class DifferentTrainingError(AutotuneError):
    """The winner's first step has another loss or other gradients than the baseline's."""

    exit_code = 12


class TooNoisyError(AutotuneError):
    """The measurements are too noisy to tell which candidate is the fastest."""

    exit_code = 14


class NotReadyError(AutotuneError):
    """This machine or the installation keeps searches from starting, or spoils what they measure."""

    exit_code = 15


class ServiceError(AutotuneError):
    """The service cannot be reached, or refuses what it was asked for."""

    exit_code = 13

    def __init__(self, message: str, hint: str = "", *, status: int = 400) -> None:
        super().__init__(message, hint)
        self.status = status
        """Of the HTTP answer."""

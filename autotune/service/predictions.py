"""Answer requests for predictions of memory and speed, and keep the latest answers."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from autotune.core.arguments import json_value
from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError, ServiceError
from autotune.core.options import BY_NAME, options_of
from autotune.execution.oneshot import NoAnswerError, OneShot, TooLateError
from autotune.service.problems import error_of
from autotune.service.requests import canonical, read_options

# What belongs to the terminal, or names a file of the caller's.
_NOT_OVER_HTTP = frozenset(
    {"storage", "as_json", "server", "all_batches", "anatomy", "fail_if_not_fit", "gpu_spec", "prices", "lever"}
)
Command = Literal["predict", "advise"]
COMMANDS: tuple[Command, ...] = get_args(Command)
NAMES: dict[Command, tuple[str, ...]] = {
    command: tuple(option.name for option in options_of(command) if option.name not in _NOT_OVER_HTTP)
    for command in COMMANDS
}
"""The options that a command takes over HTTP."""
_MOST_KEPT = 256
_MOST_WAITING = 8
"""More questions at once are refused: each may take a minute of the processor."""

_MOST_OF_A_TOKEN = 2
MOST_SECONDS = 30.0
"""How long a prediction may take: nobody is to hold the processors for longer."""


@dataclass
class Predictions:
    """Answers requests for predictions, each in a separate process, one at a time, and keeps the latest answers.

    The process is killed where it takes longer than ``most_seconds``, or the service ends.
    """

    storage: str
    data_folders: Sequence[Path] = ()
    most_seconds: float = MOST_SECONDS
    module: str = "autotune.service.predict_process"
    """The module that is run as the process."""
    _running: OneShot | None = None
    _is_closing: bool = False
    _kept: OrderedDict[str, Document] = field(default_factory=OrderedDict)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while a prediction is made."""
    _waiting: Counter[str] = field(default_factory=Counter)
    """Number of requests without an answer yet, by the token's name."""

    def answer(self, document: Any, by: str, command: Command = "predict") -> Document:
        """Return the prediction that a client requests; ``by`` is its token's name.

        Raises the command's errors, and ``ServiceError`` where too many predictions are under way.
        """
        options = _read(command, document, self.data_folders)
        given = {name: json_value(value) for name, value in options.items()}
        key = canonical({"command": command, **given})
        if (known := self._kept.get(key)) is not None:
            return known
        if self._waiting.total() >= _MOST_WAITING:
            raise ServiceError(f"{_MOST_WAITING} predictions are under way", "ask again in a minute", status=429)
        if self._waiting[by] >= _MOST_OF_A_TOKEN:
            raise ServiceError(f"{by!r} has {_MOST_OF_A_TOKEN} predictions under way", "wait for their end", status=429)
        self._waiting[by] += 1
        try:
            with self._turn:
                # The same may have been predicted for another request meanwhile.
                found = self._kept.get(key) or self.predict(command, given)
                self._kept[key] = found
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
                return found
        finally:
            self._waiting[by] -= 1

    def predict(self, command: Command, options: Document) -> Document:
        """Return the document of a command for its options, all of them, given or at their defaults.

        Raises the command's errors, and ``ServiceError`` after a timeout.
        """
        work = {"command": command, "options": options, "storage": self.storage}
        with OneShot(self.module, work, os.environ, Path(os.devnull)) as process:
            self._running = process
            try:
                # ``close`` may have been called before there was a process to kill.
                if self._is_closing:
                    process.kill()
                answer = process.answer(dict[str, Any], self.most_seconds)
            except TooLateError as error:
                raise ServiceError(
                    f"the prediction took longer than {self.most_seconds:.0f} s",
                    "ask for a smaller effective batch or fewer settings, or run the command without --server",
                    status=503,
                ) from error
            except NoAnswerError as error:
                message = "the prediction was ended: it needed too much memory, or the service ends"
                raise ServiceError(message, "run the command without --server", status=503) from error
            finally:
                self._running = None
        if "problem" in answer:
            raise error_of(answer["problem"])
        document: Document = answer["document"]
        return document

    def close(self) -> None:
        """End the prediction under way, and those that wait."""
        self._is_closing = True
        if (process := self._running) is not None:
            process.kill()


def _read(command: Command, document: Any, data_folders: Sequence[Path]) -> Document:
    """Return the checked options of a request for a prediction, with defaults."""
    names = NAMES[command]
    given = read_options(document, names, f"autotune {command}", data_folders)
    if command == "advise" and given.get("effective_batch") is None and given.get("effective_tokens") is None:
        raise InvalidRequestError("no effective batch was given", 'give "effective_batch": 64')
    return {name: given.get(name, BY_NAME[name].default) for name in names}

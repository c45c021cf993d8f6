"""Answer requests for predictions of memory and speed, and keep the latest answers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError, ServiceError
from autotune.core.options import BY_NAME, check_arguments, json_value, options_of
from autotune.service.requests import canonical, check_names, check_path, check_sizes

# What belongs to the terminal, or names a file of the caller's.
_NOT_OVER_HTTP = frozenset({"storage", "as_json", "server", "all_batches", "anatomy", "gpu_spec"})
PREDICTED_NAMES: tuple[str, ...] = tuple(o.name for o in options_of("predict") if o.name not in _NOT_OVER_HTTP)
_MOST_KEPT = 256
_MOST_WAITING = 8
"""More questions at once are refused: each may take a minute of the processor."""

Predict = Callable[[Document], Document]
"""Returns the document of ``predict --json`` for options by name, each given or at its default."""


@dataclass
class Predictions:
    """Answers to predictions, the latest of them kept. ``predict`` makes one; it is called by one thread at a time."""

    predict: Predict | None
    data_folders: Sequence[Path] = ()
    _kept: OrderedDict[str, Document] = field(default_factory=OrderedDict)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _waiting: int = 0

    def answer(self, document: Any) -> Document:
        """Return the prediction that a client asks for; raises as the command does."""
        if self.predict is None:
            raise ServiceError("this service predicts nothing", "run autotune predict on a machine", status=501)
        options = _read(document, self.data_folders)
        key = canonical({name: json_value(value) for name, value in options.items()})
        if (known := self._kept.get(key)) is not None:
            return known
        if self._waiting >= _MOST_WAITING:
            raise ServiceError(f"{_MOST_WAITING} predictions are under way", "ask again in a minute", status=429)
        self._waiting += 1
        try:
            with self._turn:
                found = self._kept.get(key) or self.predict(options)
                self._kept[key] = found
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
                return found
        finally:
            self._waiting -= 1


def _read(document: Any, data_folders: Sequence[Path]) -> Document:
    if not isinstance(document, dict):
        raise InvalidRequestError("a request is a JSON object", 'send {"model": "gpt2", "gpu": ["rtx-3090"]}')
    check_names(document, PREDICTED_NAMES, "a prediction")
    check_sizes(document)
    given = check_arguments({name: value for name, value in document.items() if value is not None})
    if given.get("model") is None:
        raise InvalidRequestError("nothing to train was given", 'give "model": a catalog or hub name')
    check_path("model", str(given["model"]), data_folders)
    return {name: given.get(name, BY_NAME[name].default) for name in PREDICTED_NAMES}

"""Cache what trial processes find out, so that each question is asked once.

An answer needs a process that imports torch. Its key is a digest of this package, the installed libraries, and the
question, and no part of it needs torch. So a command whose answers are all stored starts no process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import autotune
from autotune.core.device import Device
from autotune.core.errors import StorageError
from autotune.core.inspection import Inspection
from autotune.core.look import LookAnswer, LookWork
from autotune.core.prediction import PredictionAnswer, PredictionWork
from autotune.core.schema import digest, encode
from autotune.core.workload import Workload
from autotune.space.features import library_versions, version_of
from autotune.store.answers import AnswerFile, Answers, T, open_answers

if TYPE_CHECKING:
    from autotune.store.repository import Store

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "nvidia-ml-py", "numpy", "tokenizers", "peft")
# Short, since a lookup should not wait for a search that writes.
_LOCK_TIMEOUT_SECONDS = 2.0


def inspection_key(device: Device, workload: Workload, ranks: int = 1) -> str | None:
    """Return the cache key of an inspection (facts about machine and model) by ``autotune.worker.facts.inspect``.

    ``None`` for the user's own code: its imports and files are unknown without running it.
    """
    if workload.source is not None:
        return None
    return _key(
        "inspection",
        device=[device.kind, device.uuid, device.name, device.memory_total_bytes, device.driver],
        workload=workload.document(),
        ranks=ranks,
        libraries=library_versions(),
        # Folders from which other builds of cuDNN and cuBLAS may be loaded.
        searched=[os.environ.get(name) for name in ("LD_LIBRARY_PATH", "LD_PRELOAD")],
    )


def look_key(device: Device, workload: Workload, work: LookWork) -> str | None:
    """Return the cache key of the first steps of a look, which compares two trainings; ``None`` for own code."""
    asked = {name: value for name, value in encode(work).items() if name not in ("devices", "cap_bytes", "data_folder")}
    inspected = inspection_key(device, workload)
    return None if inspected is None else _key("look", asked=asked, inspected=inspected)


def prediction_key(identity: PredictionWork, workload: Workload) -> str:
    """Return the cache key of a prediction by ``autotune.worker.fake.step``.

    ``identity`` is all that is asked of a workload, see ``autotune.estimate.memory.Question.identity``. The model's
    architecture counts, not its name, and of its dataset only the longest sample, which ``at_its_worst`` gives.
    """
    worst = workload.at_its_worst()
    lengths = worst.data.facts.lengths if worst.data and worst.data.facts else None
    traced = replace(worst, model="", weights=None, data=None).document()
    return _key(
        "prediction",
        asked=encode(identity),
        workload=traced,
        longest_target=lengths.longest_target if lengths else None,
    )


def _key(kind: str, **asked: Any) -> str:
    """Return the hash of a question and of the installed software."""
    return digest({"kind": kind, "installed": _installed(), **asked}, 32)


@functools.cache
def _installed() -> str:
    """Return a hash of the software that answers: this package, Python, and the libraries of a training."""
    installed = {
        "code": code_digest(),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
        # Builds of one version for different CUDA versions; torch writes its CUDA version here.
        "torch": _torch_build(),
    }
    return digest(installed, 32)


def _torch_build() -> str:
    """Return the content of torch's file about its build; an empty string without such a file."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            return (Path(folder) / "version.py").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return ""


@functools.cache
def code_digest() -> str:
    """Return a hash of the source code of this package, which changes with every edit."""
    code = hashlib.sha256()
    for path in sorted(Path(autotune.__file__).parent.glob("**/*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


class AnswerCache:
    """The answers in a database that may be missing, locked or damaged: then nothing is found, and nothing is stored.

    A context manager. A database that is named is created or upgraded when the first answer is stored. So a command
    that finds every answer, or fails before, does not change it. ``storage`` may also be answers that are open already.
    """

    def __init__(self, storage: str | Answers) -> None:
        self._storage = storage
        self._answers: AnswerFile | Answers | None = None if isinstance(storage, str) else storage
        self._store: Store | None = None
        self._is_readable = True
        self.problem: StorageError | None = None
        """Why nothing is stored; ``None`` unless storing failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in (self._answers, self._store):
            if opened is not None:
                opened.close()

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the answer that is stored under a key, decoded as ``kind``; ``None`` where there is none."""
        if not self._is_readable:
            return None
        try:
            if self._answers is None and isinstance(self._storage, str):
                self._answers = open_answers(self._storage, _LOCK_TIMEOUT_SECONDS)
            return self._answers.find(key, kind) if self._answers is not None else None
        except StorageError:
            # An older database has no table of answers. Storing the first one upgrades it.
            self._is_readable = False
            return None

    def keep(self, key: str, answer: Inspection | LookAnswer | PredictionAnswer) -> None:
        """Store an answer. A database that cannot be written is ignored, but recorded in ``problem``."""
        if self.problem is not None:
            return
        try:
            writable = self._storage
            if isinstance(writable, str):
                if self._store is None:
                    # Imports Alembic, which reading does not need.
                    from autotune.store.opening import open_store

                    self._store = open_store(writable, lock_timeout_seconds=_LOCK_TIMEOUT_SECONDS)
                writable = self._store.answers
            writable.keep(key, answer)
            self._is_readable = True
        except StorageError as error:
            self.problem = error


@dataclass(frozen=True)
class KeptPredictions:
    """The cached predictions of one workload."""

    cache: AnswerCache
    workload: Workload

    def find(self, identity: PredictionWork) -> PredictionAnswer | None:
        """Return the cached answer to a ``Question.identity``; ``None`` where there is none."""
        return self.cache.find(prediction_key(identity, self.workload), PredictionAnswer)

    def keep(self, identity: PredictionWork, answer: PredictionAnswer) -> None:
        """Cache an answer."""
        self.cache.keep(prediction_key(identity, self.workload), answer)

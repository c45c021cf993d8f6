"""What trial processes say, asked once and then remembered in the database.

Asking takes a process that imports torch. Each answer is kept under a key of all that it depends on,
none of which needs torch to be known; so whoever is told everything by earlier ones starts no process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import autotune
from autotune.core.candidate import Document
from autotune.core.errors import StorageError
from autotune.core.workload import Workload
from autotune.devices import Device
from autotune.store import AnswerKind, Answers, open_answers
from autotune.tuning.environment import library_versions

if TYPE_CHECKING:
    from autotune.store import Store

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "nvidia-ml-py", "numpy", "tokenizers", "peft")
# With what a step is traced on fake tensors.
_PREDICTING_PACKAGES = ("torch", "transformers", "accelerate", "peft")
# What the worker uses besides itself to predict; a test compares this with its imports.
PREDICTING_MODULES = (
    "core/candidate.py",
    "core/ceiling.py",
    "core/dataset_spec.py",
    "core/workload.py",
    "devices/gpus.py",
    "models/tasks.py",
)

# Whoever predicts does not stand in line behind a search that writes.
_LOCK_TIMEOUT_SECONDS = 2.0


def inspection_key(device: Device, workload: Workload) -> str | None:
    """The same exactly while ``autotune.worker.facts.inspect`` would say the same; ``None`` for code of the user's.

    What that imports and reads is not known without running it.
    """
    if workload.source is not None:
        return None
    return _digest(
        {
            "device": [device.kind, device.uuid, device.name, device.memory_total_bytes, device.driver],
            "worker": _code_digest("worker/*.py", "worker/private/*.py", "worker/trial/*.py"),
            "workload": workload.document(),
            "libraries": library_versions(),
            # Where other builds of cuDNN and cuBLAS may be loaded from.
            "searched": [os.environ.get(name) for name in ("LD_LIBRARY_PATH", "LD_PRELOAD")],
            **_installed(_PACKAGES),
        }
    )


def prediction_key(question: Document, workload: Workload) -> str:
    """The same exactly while ``autotune.worker.fake.predict`` would answer the same.

    ``question`` is all that is asked about the workload, see ``autotune.estimate.memory.Question.identity``.
    """
    return _digest(
        {
            "question": question,
            "worker": _code_digest("worker/**/*.py", *PREDICTING_MODULES),
            "workload": _what_is_traced(workload),
            **_installed(_PREDICTING_PACKAGES),
        }
    )


def _what_is_traced(workload: Workload) -> Document:
    """The part of a workload that the bytes of a step follow from: of its data only how long it gets."""
    worst = workload.at_its_worst()
    lengths = worst.data.facts.lengths if worst.data and worst.data.facts else None
    traced = replace(worst, model="", weights=None, data=None).document()
    return {**traced, "longest_target": lengths.longest_target if lengths else None}


def _installed(packages: Sequence[str]) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        # Builds of one version differ in the CUDA that they were made for; torch writes it here.
        "torch": _torch_build(),
    }


def _digest(known: Document) -> str:
    text = json.dumps(known, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _torch_build() -> str:
    """torch's own note of how it was built; empty where it has none."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            return (Path(folder) / "version.py").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return ""


@functools.cache
def _code_digest(*patterns: str) -> str:
    """The code that is asked."""
    package = Path(autotune.__file__).parent
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in package.glob(pattern)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Answers(Protocol):
    """Where answers are kept."""

    def find(self, key: str) -> Document | None:
        """The answer that was kept under this key, if any."""

    def keep(self, key: str, kind: AnswerKind, document: Document) -> None:
        """Keeps an answer."""


class KeptPredictions:
    """The predictions of one workload among the answers; see ``autotune.estimate.memory_jobs.Kept``.

    A database that cannot be read or written is no reason to fail: it is then asked no more.
    """

    def __init__(self, answers: _Answers, workload: Workload) -> None:
        self._answers = answers
        self._workload = workload
        self._is_usable = True

    def find(self, question: Document) -> Document | None:
        """What was predicted, if anything was."""
        if self._is_usable:
            with self._giving_up():
                return self._answers.find(prediction_key(question, self._workload))
        return None

    def keep(self, question: Document, prediction: Document) -> None:
        """Keeps what was predicted."""
        if self._is_usable:
            with self._giving_up():
                self._answers.keep(prediction_key(question, self._workload), "prediction", prediction)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            self._is_usable = False


class AnswersBeside:
    """The answers in a database that may be missing, locked or of no use: then nothing is found, and nothing kept.

    A context manager. The database is made or upgraded when the first answer is kept, so that whoever is told
    everything, or fails before, leaves it as it was.
    """

    def __init__(self, storage: str) -> None:
        self._storage = storage
        self._reading: Answers | None = None
        self._store: Store | None = None
        self.problem: StorageError | None = None
        """Why nothing is kept, once that was tried."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in (self._reading, self._store):
            if opened is not None:
                opened.close()

    def find(self, key: str) -> Document | None:
        """The answer that was kept under this key, if any."""
        # An older database has no table of answers; the first one that is kept brings it up to date.
        with contextlib.suppress(StorageError):
            self._reading = self._reading or open_answers(self._storage, _LOCK_TIMEOUT_SECONDS)
            return self._reading.find(key) if self._reading is not None else None
        return None

    def keep(self, key: str, kind: AnswerKind, document: Document) -> None:
        """Keeps an answer where that is possible."""
        if self.problem is not None:
            return
        # Imports Alembic and Optuna, which reading does without.
        from autotune.store import open_store

        try:
            self._store = self._store or open_store(self._storage, lock_timeout_seconds=_LOCK_TIMEOUT_SECONDS)
            self._store.answers.keep(key, kind, document)
        except StorageError as error:
            self.problem = error

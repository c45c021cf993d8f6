"""Cache what trial processes find out, so that each inspection and prediction is made once.

An answer needs a process that imports torch. It is stored under a key of everything that it depends on, and no part of
the key needs torch. So a command whose answers are all stored starts no process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import autotune
from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import StorageError
from autotune.core.inspection import Inspection
from autotune.core.look import LookWork
from autotune.core.prediction import PredictionAnswer, PredictionWork
from autotune.core.schema import encode
from autotune.core.workload import Workload
from autotune.space.features import library_versions, version_of
from autotune.store.answer_file import open_answers

if TYPE_CHECKING:
    from autotune.store.answer_file import AnswerFile
    from autotune.store.repository import Store
    from autotune.store.stored_answers import Answers

T = TypeVar("T", Inspection, PredictionAnswer)

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "nvidia-ml-py", "numpy", "tokenizers", "peft")
# Libraries with which a step is traced on fake tensors.
_PREDICTING_PACKAGES = ("torch", "transformers", "accelerate", "peft")
# Packages besides the worker that predictions use; a test compares this with the worker's imports.
PREDICTING_MODULES = (
    "core/candidate.py",
    "core/ceiling.py",
    "core/chip.py",
    "core/dataset_spec.py",
    "core/errors.py",
    "core/inspection.py",
    "core/outcome.py",
    "core/prediction.py",
    "core/schema.py",
    "core/workload.py",
    "models/images.py",
    "models/tasks.py",
    "space/features.py",
    "space/precision_names.py",
    "space/training_arguments.py",
    "training/errors.py",
    "training/__init__.py",
    "training/loss.py",
)

# Short, since a lookup should not wait for a search that writes.
_LOCK_TIMEOUT_SECONDS = 2.0


def inspection_key(device: Device, workload: Workload, ranks: int = 1) -> str | None:
    """Return a key that is equal while ``autotune.worker.facts.inspect`` would answer the same.

    ``None`` for the user's own code: what that imports and reads is not known without running it.
    """
    if workload.source is not None:
        return None
    return _digest(
        {
            "device": [device.kind, device.uuid, device.name, device.memory_total_bytes, device.driver],
            "worker": code_digest("worker/*.py", "worker/private/*.py", "worker/trial/*.py", "core/inspection.py"),
            "workload": workload.document(),
            "libraries": library_versions(),
            # Folders from which other builds of cuDNN and cuBLAS may be loaded.
            "searched": [os.environ.get(name) for name in ("LD_LIBRARY_PATH", "LD_PRELOAD")],
            **_installed(PACKAGES),
            **({"ranks": ranks, "fake": code_digest("worker/fake/*.py")} if ranks > 1 else {}),
        }
    )


def look_key(device: Device, workload: Workload, work: LookWork) -> str | None:
    """Return a key that is equal while a look at these settings would answer the same; ``None`` for one's own code."""
    inspected = inspection_key(device, workload)
    if inspected is None:
        return None
    asked = {name: value for name, value in encode(work).items() if name not in ("devices", "cap_bytes", "data_folder")}
    return _digest({"look": asked, "inspected": inspected, "training": code_digest("training/*.py")})


def prediction_key(identity: PredictionWork, workload: Workload) -> str:
    """Return a key that is equal while ``autotune.worker.fake.predict`` would answer the same.

    ``identity`` is everything that is asked about the workload, see ``autotune.estimate.memory.Question.identity``.
    """
    return _digest(
        {
            "question": encode(identity),
            "worker": code_digest("worker/**/*.py", *PREDICTING_MODULES),
            "workload": _what_is_traced(workload),
            **_installed(_PREDICTING_PACKAGES),
        }
    )


def _what_is_traced(workload: Workload) -> Document:
    """Return the part of a workload that determines the memory of a step: of its dataset only the lengths."""
    worst = workload.at_its_worst()
    lengths = worst.data.facts.lengths if worst.data and worst.data.facts else None
    traced = replace(worst, model="", weights=None, data=None).document()
    return {**traced, "longest_target": lengths.longest_target if lengths else None}


def _installed(packages: Sequence[str]) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in packages},
        # Builds of one version for different CUDA versions; torch writes its CUDA version here.
        "torch": _torch_build(),
    }


def _digest(known: Document) -> str:
    text = json.dumps(known, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


@functools.cache
def _torch_build() -> str:
    """Return torch's file about its own build; empty where there is none."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            return (Path(folder) / "version.py").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return ""


@functools.cache
def code_digest(*patterns: str) -> str:
    """Return a hash of the modules of this package whose paths match."""
    package = Path(autotune.__file__).parent
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in package.glob(pattern)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class StoredAnswers(Protocol):
    """Stores answers of trial processes."""

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the answer of this type that is stored under a key; ``None`` where there is none."""

    def keep(self, key: str, answer: Inspection | PredictionAnswer) -> None:
        """Store an answer."""


class KeptPredictions:
    """The predictions of one workload among the answers; see ``autotune.estimate.memory_jobs.Kept``.

    A database that cannot be read or written is no error: it is not used any more.
    """

    def __init__(self, answers: StoredAnswers, workload: Workload) -> None:
        self._answers = answers
        self._workload = workload
        self._is_usable = True

    def find(self, identity: PredictionWork) -> PredictionAnswer | None:
        """Return the stored prediction; ``None`` where there is none."""
        if self._is_usable:
            with self._giving_up():
                return self._answers.find(prediction_key(identity, self._workload), PredictionAnswer)
        return None

    def keep(self, identity: PredictionWork, answer: PredictionAnswer) -> None:
        """Store a prediction."""
        if self._is_usable:
            with self._giving_up():
                self._answers.keep(prediction_key(identity, self._workload), answer)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            self._is_usable = False


class AnswersBeside:
    """The answers in a database that may be missing, locked or damaged: then nothing is found, and nothing is stored.

    A context manager. The database is created or upgraded when the first answer is stored. So a command that finds
    every answer, or fails before, does not change it.
    """

    def __init__(self, storage: str) -> None:
        self._storage = storage
        self._reading: AnswerFile | Answers | None = None
        self._store: Store | None = None
        self.problem: StorageError | None = None
        """Why nothing is stored; ``None`` unless storing failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in (self._reading, self._store):
            if opened is not None:
                opened.close()

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the answer of this type that is stored under a key; ``None`` where there is none."""
        # An older database has no table of answers. Storing the first one upgrades it.
        with contextlib.suppress(StorageError):
            self._reading = self._reading or open_answers(self._storage, _LOCK_TIMEOUT_SECONDS)
            return self._reading.find(key, kind) if self._reading is not None else None
        return None

    def keep(self, key: str, answer: Inspection | PredictionAnswer) -> None:
        """Store an answer where that is possible."""
        if self.problem is not None:
            return
        # Imports Alembic and Optuna, which reading does not need.
        from autotune.store.opening import open_store

        try:
            self._store = self._store or open_store(self._storage, lock_timeout_seconds=_LOCK_TIMEOUT_SECONDS)
            self._store.answers.keep(key, answer)
        except StorageError as error:
            self.problem = error

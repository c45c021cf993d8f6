"""Import in the server, once for all its trials, what they need, without starting CUDA."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.core.device import CAPABILITY_VARIABLE
from autotune.core.training_source import TrainingSource
from autotune.core.workload import Workload

COLD_VARIABLE = "AUTOTUNE_COLD_TRIALS"
"""If set, the server imports torch alone, and each trial imports the rest, which takes seconds."""

# transformers imports these where they are installed, for features that no training step uses (assisted decoding, the
# losses of object detection). Without scipy, datasets and peft a server takes 116 MiB less, and 0.2 to 0.6 of 4 seconds
# less (transformers 5.23, datasets 5.2; neither sklearn nor peft was installed).
_NO_STEP_NEEDS = ("sklearn", "scipy")

# Functions of torch.cuda that are answered without starting CUDA, in the order of their answers.
_ASKED = ("get_device_capability", "get_device_properties", "current_device")


class CudaStartedError(Exception):
    """An import started CUDA in the server, so that forked trials could not use it."""


class _Properties:
    """A GPU's properties: the given compute capability, and everything else from torch, which starts CUDA."""

    def __init__(self, major: int, minor: int, ask_torch: Callable[[int], Any]) -> None:
        self.major = major
        self.minor = minor
        self._ask_torch = ask_torch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # While a copy of this object is made, it has no attributes yet.
            raise AttributeError(name)
        return getattr(self._ask_torch(0), name)


@contextlib.contextmanager
def _cuda_not_started() -> Iterator[None]:
    """Answer questions about the GPU that imports in the block ask, without starting CUDA.

    transformers imports peft where it is installed, which imports bitsandbytes and torchao, which ask torch for the
    compute capability. The controller knows it from the driver. Raises ``CudaStartedError`` where an import started
    CUDA all the same, since no forked child could then use the GPU.
    """
    import torch

    from autotune.worker.private.torch import cuda_answers

    capability_text = os.environ.get(CAPABILITY_VARIABLE)
    answers: dict[str, Any] = {}
    if capability_text:
        major, minor = map(int, capability_text.split("."))
        properties = _Properties(major, minor, torch.cuda.get_device_properties)
        answers = dict(zip(_ASKED, ((major, minor), properties, 0), strict=True))
    with cuda_answers(answers):
        yield
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise CudaStartedError


@contextlib.contextmanager
def _without(packages: tuple[str, ...], forever: tuple[str, ...]) -> Iterator[None]:
    """Have imports in the block fail for some packages, as if not installed; those in ``forever`` fail later, too."""
    hidden = [name for name in (*packages, *forever) if name not in sys.modules]
    # ``None`` in sys.modules makes Python raise ModuleNotFoundError.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            if name not in forever:
                del sys.modules[name]


def renew_thread_pool_in_forks() -> None:
    """Make forks of this process create their thread pool before their threads use it.

    After a fork, torch creates the pool of caffe2 (``pthreadpool-cpp.cc``) anew on first use, without a lock. OpenMP's
    threads ask for it all at once in their first nested operation, such as attention with dropout on a CPU. One of them
    creates the pool, and others find none: "Invalid thread pool!". Seen with torch 2.11 on 16 cores, in forks of a fork
    that had set its number of threads.
    """
    import torch

    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def import_everything(preload: dict[str, Any] | None, *, is_plain: bool = False) -> int:
    """Import what trials need; return torch's number of threads from before this sets it to 1.

    ``preload`` is the document of the workload to serve. Without it, import what any workload may need, or with
    ``is_plain`` what any workload without dataset and adapters may need.
    """
    import torch

    threads = torch.get_num_threads()
    # After a parallel operation in this process, children would wait for threads that fork does not copy.
    torch.set_num_threads(1)
    renew_thread_pool_in_forks()
    if COLD_VARIABLE in os.environ:
        return threads
    workload = Workload.from_document(preload) if preload else None
    source = workload.source if workload is not None else None
    if source is not None:
        # The user's own code may use any package.
        workload = None
    from autotune.worker.private.transformers_imports import import_models

    with _cuda_not_started(), _without(*_hidden_from(workload, is_plain=is_plain)):
        import_models()
        import autotune.worker.facts
        import autotune.worker.trial.run

        if workload is not None:
            _import_class(workload)
        if source is not None:
            import autotune.worker.user.run  # noqa: F401

            for module, name in imports_of(source):
                # An import that fails is repeated by the user's code.
                with contextlib.suppress(Exception):
                    imported = importlib.import_module(module)
                    if name is not None:
                        # Some libraries import a part only when its attribute is read.
                        getattr(imported, name)
    return threads


def import_model(document: dict[str, Any]) -> None:
    """Import the model class of another workload, after everything else."""
    if COLD_VARIABLE in os.environ:
        return
    workload = Workload.from_document(document)
    with _cuda_not_started(), _without(*_hidden_from(workload)):
        _import_class(workload)


def import_compiler() -> None:
    """Import what ``torch.compile`` needs, after everything else, so that only the first trial that compiles waits.

    The import took 3.3 s of each trial (torch 2.11.0, the host of an H200, 28 November 2026).
    """
    if COLD_VARIABLE in os.environ:
        return
    # Where the compiler of kernels that torch needs is missing, the trial reports it.
    with contextlib.suppress(ImportError), _cuda_not_started():
        import torch._inductor.compile_fx  # noqa: F401
    # As all that was imported before, it is left out of the trials' garbage collections.
    gc.freeze()


def _hidden_from(workload: Workload | None, *, is_plain: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the packages that a workload does not need: those to hide during imports, and those to hide forever."""
    if workload is None:
        return (_NO_STEP_NEEDS, ("datasets", "peft")) if is_plain else ((), ())
    # transformers' Trainer imports these, and this workload does not use them.
    unused = []
    if not workload.data:
        unused.append("datasets")
    if not (workload.peft or workload.quantize):
        unused.append("peft")
    return _NO_STEP_NEEDS, tuple(unused)


def _import_class(workload: Workload) -> None:
    """Import the class of a workload's model."""
    from autotune.worker.trial.build import model_class

    # The import only saves time. If the workload is wrong, the inspection reports why.
    with contextlib.suppress(Exception):
        model_class(workload)


# The libraries that the user's code imports. A trial of a script on Lightning spent 0.7 s on importing Lightning (CPU
# time), one on TRL several seconds.

# Libraries of models, data and training that compute nothing and start no threads when they are imported, as far as
# they are known. Others are imported by each run.
_LIBRARIES = frozenset((
    "accelerate", "datasets", "diffusers", "evaluate", "lightning", "pandas", "peft", "pytorch_lightning", "scipy",
    "sentence_transformers", "sklearn", "timm", "torchmetrics", "torchvision", "transformers", "trl",
))  # fmt: skip
# Files of the user's own that are read for imports. A choice.
_MOST_FILES = 20
_CHANGING = ("environ", "putenv", "load_dotenv")
"""Names in statements that may change the environment."""

Import = tuple[str, str | None]
"""A module, and the name that is imported from it; ``None`` for the module itself."""


def imports_of(source: TrainingSource) -> list[Import]:
    """Return the imports of ``_LIBRARIES`` in the user's file, and in modules of the user's own that it imports."""
    reading = _Reading([Path(source.file).parent, Path(source.cwd)])
    reading.read(Path(source.file))
    return list(reading.found)


class _Reading:
    """Reads files in the order in which Python runs them, up to where one of them may change the environment.

    Libraries may read the environment when they are imported, so those after the change are imported by each run.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.found: dict[Import, None] = {}
        self._folders = folders
        self._seen: set[Path] = set()
        self._changing = {*_CHANGING}
        """Names whose use may change the environment: also those of functions that use such a name."""

    def read(self, file: Path) -> bool:
        """Add a file's top-level imports; return ``False`` where reading ended at a change of the environment."""
        if file in self._seen or len(self._seen) == _MOST_FILES:
            return True
        self._seen.add(file)
        try:
            statements = ast.parse(file.read_bytes()).body
        except (OSError, SyntaxError, ValueError):
            return True
        while statements:
            statement = statements.pop(0)
            if isinstance(statement, ast.Try):
                statements[:0] = statement.body
                continue
            if isinstance(statement, ast.Import | ast.ImportFrom):
                if not all(self._add(module, name) for module, name in _imports_in(statement)):
                    return False
                continue
            nodes = list(ast.walk(statement))
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            if not self._changing.isdisjoint(names):
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    return False
                # A function or class changes the environment only when it is used, by its name.
                self._changing.add(statement.name)
        return True

    def _add(self, module: str, name: str | None) -> bool:
        """Add an import of a library; for a module of the user's own, add its imports. Return as ``read`` does."""
        package = module.partition(".")[0]
        if package in _LIBRARIES and not any(_files_of(folder, package) for folder in self._folders):
            self.found[module, name] = None
            return True
        files = [file for folder in self._folders for file in _files_of(folder, module)]
        return all(self.read(file) for file in files[:1])


def _imports_in(statement: ast.Import | ast.ImportFrom) -> list[Import]:
    """Return the absolute imports of a statement; relative ones are left out."""
    if isinstance(statement, ast.Import):
        return [(alias.name, None) for alias in statement.names]
    if not statement.module or statement.level:
        return []
    return [(statement.module, alias.name if alias.name != "*" else None) for alias in statement.names]


def _files_of(folder: Path, module: str) -> list[Path]:
    """Return the existing files that define a module in a folder: first a package's ``__init__.py``."""
    path = folder.joinpath(*module.split("."))
    return [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]

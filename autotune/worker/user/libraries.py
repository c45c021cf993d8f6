"""Find the libraries that the user's code imports, and import them once for all of its runs.

A trial of a script on Lightning spent 0.7 s on importing it (CPU time), on TRL several seconds.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path

from autotune.core.training_source import TrainingSource

# Libraries of models, data and training that compute nothing and start no threads when they are imported, as far as
# they are known. Others are imported by each run.
_LIBRARIES = frozenset((
    "accelerate", "datasets", "diffusers", "evaluate", "lightning", "pandas", "peft", "pytorch_lightning", "scipy",
    "sentence_transformers", "sklearn", "timm", "torchmetrics", "torchvision", "transformers", "trl",
))  # fmt: skip
# Files of the user's own that are read for imports. A choice.
_MOST_FILES = 20

Import = tuple[str, str | None]
"""A module, and what of it is imported; ``None`` for all of it."""


def import_libraries(source: TrainingSource) -> None:
    """Import what the user's code imports of known libraries; what fails is left to their code."""
    for module, name in imports_of(source):
        with contextlib.suppress(Exception):
            found = importlib.import_module(module)
            if name is not None:
                # Libraries import their parts when they are asked for.
                getattr(found, name)


def imports_of(source: TrainingSource) -> list[Import]:
    """Return the imports of known libraries in the user's file, and in those of their own that it imports."""
    folders = [Path(source.file).parent, Path(source.cwd)]
    found: dict[Import, None] = {}
    files = [Path(source.file)]
    seen: set[Path] = set()
    while files and len(seen) < _MOST_FILES:
        file = files.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for module, name in _imports_in(file):
            if module.partition(".")[0] in _LIBRARIES:
                found[module, name] = None
            else:
                files += [path for folder in folders for path in _files_of(folder, module)][:1]
    return list(found)


def _files_of(folder: Path, module: str) -> list[Path]:
    """Return the file of a module in a folder, if it is there."""
    path = folder.joinpath(*module.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


def _imports_in(file: Path) -> Iterator[Import]:
    """Yield what a file imports at its top level, up to where it changes the environment, which imports may read."""
    try:
        statements = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    while statements:
        statement = statements.pop(0)
        if isinstance(statement, ast.Import):
            yield from ((alias.name, None) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield from ((statement.module, alias.name if alias.name != "*" else None) for alias in statement.names)
        elif isinstance(statement, ast.Try):
            statements[:0] = statement.body
        elif isinstance(statement, ast.Expr | ast.Assign) and "environ" in ast.dump(statement):
            return

"""Find the libraries that the user's code imports, and import them once for all of its runs.

A trial of a script on Lightning spent 0.7 s on importing it (CPU time), on TRL several seconds.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections.abc import Sequence
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
_CHANGING = ("environ", "putenv", "load_dotenv")
"""Names in statements that may change the environment."""

Import = tuple[str, str | None]
"""A module, and what of it is imported; ``None`` for all of it."""


def import_libraries(source: TrainingSource) -> None:
    """Import what the user's code imports of known libraries; what fails is left to their code."""
    for module, name in imports_of(source):
        with contextlib.suppress(Exception):
            imported = importlib.import_module(module)
            if name is not None:
                # Libraries import their parts when they are asked for.
                getattr(imported, name)


def imports_of(source: TrainingSource) -> list[Import]:
    """Return the imports of known libraries in the user's file, and in those of their own that it imports."""
    reading = _Reading([Path(source.file).parent, Path(source.cwd)])
    reading.read(Path(source.file))
    return list(reading.found)


class _Reading:
    """Reads files in the order in which Python runs them, up to where one of them may change the environment.

    Libraries may read the environment when they are imported, so that those after it are imported by each run.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.found: dict[Import, None] = {}
        self._folders = folders
        self._seen: set[Path] = set()
        self._changing = {*_CHANGING}

    def read(self, file: Path) -> bool:
        """Add what a file imports at its top level; return ``False`` where the environment may have been changed."""
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
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                if not all(self._add(module, name) for module, name in _imports_in(statement)):
                    return False
            elif self._may_change_environment(statement):
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    return False
                # Only when it is called.
                self._changing.add(statement.name)
        return True

    def _add(self, module: str, name: str | None) -> bool:
        """Add an import, or what the user's own file of that name imports, which Python finds before a library."""
        package = module.partition(".")[0]
        if package in _LIBRARIES and not any(_files_of(folder, package) for folder in self._folders):
            self.found[module, name] = None
            return True
        files = [file for folder in self._folders for file in _files_of(folder, module)]
        return all(self.read(file) for file in files[:1])

    def _may_change_environment(self, statement: ast.stmt) -> bool:
        nodes = list(ast.walk(statement))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        return not self._changing.isdisjoint(names)


def _imports_in(statement: ast.Import | ast.ImportFrom) -> list[Import]:
    if isinstance(statement, ast.Import):
        return [(alias.name, None) for alias in statement.names]
    if not statement.module or statement.level:
        return []
    return [(statement.module, alias.name if alias.name != "*" else None) for alias in statement.names]


def _files_of(folder: Path, module: str) -> list[Path]:
    """Return the file of a module in a folder, if it is there."""
    path = folder.joinpath(*module.split("."))
    return [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]

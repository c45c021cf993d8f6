"""Test that a library is changed as it is imported, however its importer goes about it."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from autotune.worker.wrapping import on_import


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_library.py").write_text("import os\nVALUE = os.environ.get('SOME_VALUE') or int('none')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "some_library", raising=False)
    return "some_library"


def test_a_library_is_changed_once_though_it_was_asked_for_before(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``datasets`` asks for torch; a first import may fail, too."""
    changed: list[tuple[str, ModuleType]] = []
    for name in ("first", "second"):
        on_import(library, lambda module, name=name: changed.append((name, module.VALUE)))  # type: ignore[misc]
    assert importlib.util.find_spec(library) is not None
    with pytest.raises(ValueError, match="none"):
        importlib.import_module(library)
    assert changed == []
    monkeypatch.setenv("SOME_VALUE", "there")
    importlib.import_module(library)
    importlib.import_module(library)
    assert changed == [("first", "there"), ("second", "there")]

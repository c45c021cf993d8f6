"""Import ``transformers.models`` without reading the files of all models a second time."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

_MODELS = "transformers.models"
_PREFIX = "models."

Structure = dict[Any, dict[str, set[str]]]
"""Names that modules export, by the packages that they need and by module."""


def import_models() -> None:
    """Import ``transformers.models`` with the list of modules that ``import transformers`` has built.

    transformers reads a thousand files for that list, and reads them again for ``transformers.models``, since its cache
    has room for 128 folders (5.23 has more than 400): 0.4 of 4 seconds on an idle core. Where the first list is not
    available, as in other versions, the package is left to be imported as usual.
    """
    if _MODELS in sys.modules:
        return
    import transformers
    from transformers.utils import import_utils

    folder = Path(transformers.__file__).parent / "models"
    with contextlib.suppress(Exception):
        listed = listed_models(import_utils, folder)
        original = import_utils.define_import_structure

        def answered(path: Any, *rest: Any, **named: Any) -> Any:
            is_models = Path(path) == folder / "__init__.py" and not rest and not named
            return listed if is_models else original(path, *rest, **named)

        import_utils.define_import_structure = answered
        try:
            importlib.import_module(_MODELS)
        finally:
            import_utils.define_import_structure = original


def listed_models(import_utils: Any, folder: Path) -> Structure:
    """Return the list of model modules from ``import transformers``. Raises ``LookupError`` where there is none."""
    before = import_utils.define_import_structure.cache_info()
    if not before.currsize:
        raise LookupError("transformers keeps no list")
    whole = import_utils.define_import_structure(folder, prefix="models")
    if import_utils.define_import_structure.cache_info().misses != before.misses:
        raise LookupError("transformers made the list in another way")
    return {
        needed: {name.removeprefix(_PREFIX): set(names) for name, names in modules.items() if name.startswith(_PREFIX)}
        for needed, modules in whole.items()
    }

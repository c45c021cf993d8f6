"""Write documents as JSON that every database accepts.

Python writes NaN and infinity as words of its own, which SQLite keeps and PostgreSQL refuses.
"""

from __future__ import annotations

import json
import math
from typing import Any

# The key of an object that stands for a number that JSON has no way to write.
_KEY = "$float"


def write_strict_json(value: Any) -> str:
    """Return a document as JSON, with objects in place of NaN and infinity."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_replaced(value), separators=(",", ":"), allow_nan=False)


def read_strict_json(text: str | bytes) -> Any:
    """Return the document that ``write_strict_json`` was given."""
    marked = _KEY.encode() if isinstance(text, bytes) else _KEY
    return json.loads(text, object_hook=_number if marked in text else None)  # type: ignore[operator]


def _replaced(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_KEY: str(value)}
    if isinstance(value, dict):
        return {key: _replaced(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each) for each in value]
    return value


def _number(found: dict[str, Any]) -> Any:
    return float(found[_KEY]) if found.keys() == {_KEY} else found

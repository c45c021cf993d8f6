"""Convert between typed values and JSON documents, and describe their types as JSON Schema: the one user of msgspec.

msgspec checks and converts standard dataclasses, needs no other package and is quick to import: 26 ms, cattrs 26.2.1
50 ms, pydantic 2.14.3 112 ms (medians of five, msgspec 0.22.0, Python 3.11.7, two CPU cores of a busy host,
2026-11-22). The first conversion imports it, so help does without: `autotune --help` takes 0.11 s, as it did before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

T = TypeVar("T")

VERSION = 1
"""Version of stored and printed documents. It grows if a field changes its meaning; new fields have defaults."""
_VERSION_FIELD = "schema_version"


def encode(value: Any) -> Any:
    """Return a value, such as a dataclass, as JSON-ready dictionaries, lists and scalars."""
    import msgspec

    return msgspec.to_builtins(value)


def decode(document: Any, kind: type[T]) -> T:
    """Decode a JSON document to a value of the type ``kind``. Raises ``ValueError`` where it does not fit.

    A field that the dataclass lacks is an error, since it may change what the document means. A dictionary's keys may
    be numbers written as text, since JSON has no others.
    """
    import msgspec

    name = getattr(kind, "__name__", "document")
    if dataclasses.is_dataclass(kind) and isinstance(document, dict):
        unknown = sorted(map(str, document.keys() - {field.name for field in dataclasses.fields(kind)}))
        if unknown:
            raise ValueError(f"malformed {name}: this autotune does not know its fields {', '.join(unknown)}")
    try:
        return msgspec.convert(document, kind, str_keys=True)
    except ValueError as error:
        raise ValueError(f"malformed {name}: {error}") from error


def digest(document: Any, digits: int = 16) -> str:
    """Return a hash of JSON-ready data with this number of hexadecimal digits."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:digits]


def with_version(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with the format version that is stored or printed with it."""
    return {_VERSION_FIELD: VERSION, **document}


def without_version(document: Any) -> dict[str, Any]:
    """Return the fields of a stored document without its version.

    Raises ``ValueError`` for an invalid document or a later version. Documents without a version have the meaning of
    version 1.
    """
    if not isinstance(document, dict):
        raise ValueError("it is no document")
    version = document.get(_VERSION_FIELD, VERSION)
    if not isinstance(version, int) or version > VERSION:
        raise ValueError(f"it has the schema version {version!r}, and this autotune knows {VERSION}")
    return {name: value for name, value in document.items() if name != _VERSION_FIELD}


def make_record(name: str, fields: Sequence[tuple[Any, ...]]) -> type[Any]:
    """Make a type for documents with exactly these fields: tuples of a name, a type and (if any) a default."""
    import msgspec

    return msgspec.defstruct(name, fields, forbid_unknown_fields=True)


def record_fields(kind: type[Any]) -> list[tuple[str, Any]]:
    """Return names and types of a dataclass's fields, for ``make_record``."""
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def at_least(kind: Any, least: float | None) -> Any:
    """Return the type annotated with a minimum: of a number its value, of a list its length. ``None``: no minimum."""
    import msgspec

    if least is None:
        return kind
    return Annotated[kind, msgspec.Meta(ge=least) if kind in (int, float) else msgspec.Meta(min_length=int(least))]


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record, whose type is from ``make_record``, by name."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


def json_schemas(kinds: Iterable[Any], ref_template: str) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
    """Return the JSON schemas of several types, and by name those within; ``ref_template`` refers to these."""
    import msgspec

    return msgspec.json.schema_components(kinds, ref_template=ref_template)

"""Find the columns of a dataset that hold text, labels or tokens, and check what is in them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow.compute as arrow
from datasets import ClassLabel
from pyarrow import types

from autotune.core.dataset_spec import DataSpec
from autotune.core.errors import InvalidRequestError

_TEXT_NAMES = ("text", "sentence", "content", "document")
# Up to so many samples, each may have a class of its own without an error.
_FEW_SAMPLES = 20
_LABEL_NAMES = ("label", "labels", "target")


def wrong_data(spec: DataSpec, problem: str, hint: str) -> InvalidRequestError:
    """Return the error for a wrong dataset: its name, then ``problem``, which begins with a space or a colon."""
    return InvalidRequestError(f"--dataset {spec.label}{problem}", hint)


def find_column(dataset: Any, spec: DataSpec, asked: str | None, option: str, usual: tuple[str, ...], what: str) -> str:
    """Return the column that the user named (``asked``), or the first existing one of the ``usual`` names.

    Raises ``InvalidRequestError`` where there is none; it says ``what`` is looked for, and which ``option`` names it.
    """
    names = dataset.column_names
    if asked is not None:
        if asked not in names:
            raise wrong_data(spec, f" has no column {asked!r}", f"it has {', '.join(names)}; name one with {option}")
        return asked
    found: str | None = next((name for name in usual if name in names), None)
    if found is None:
        raise wrong_data(
            spec,
            f": no column is called {' or '.join(usual)}, so the {what} is unknown",
            f"it has {', '.join(names)}; name one with {option}",
        )
    return found


def find_text_columns(dataset: Any, spec: DataSpec, not_text: str | None) -> tuple[str, ...]:
    """Return the columns to tokenize together: those that the user named, else one with a usual name.

    The only column of strings, apart from the column ``not_text``, is taken under any name. Raises
    ``InvalidRequestError`` where there is none.
    """
    asked = spec.text_columns
    if asked is not None:
        return tuple(find_column(dataset, spec, name, "--text-column", (), "text") for name in asked)
    strings = [name for name in dataset.column_names if is_string(dataset.features[name]) and name != not_text]
    usual = (*_TEXT_NAMES, *strings) if len(strings) == 1 else _TEXT_NAMES
    return (find_column(dataset, spec, None, "--text-column", usual, "text"),)


def is_string(feature: Any) -> bool:
    """Return whether a column holds text."""
    return getattr(feature, "dtype", None) in ("string", "large_string")


def token_counts(lists: Any) -> Any:
    """Return the lengths of an Arrow column of lists as an array (samples,)."""
    return arrow.list_value_length(lists).to_numpy().astype(np.int64)


def real_counts(masks: Any) -> Any:
    """Return how many tokens each attention mask of an Arrow column leaves unmasked, as an array (samples,)."""
    is_real = arrow.list_flatten(masks).to_numpy() != 0
    samples = np.repeat(np.arange(len(masks)), token_counts(masks))
    return np.bincount(samples[is_real], minlength=len(masks))


def check_holds_tokens(dataset: Any, spec: DataSpec, name: str, hint: str) -> None:
    """Raise ``InvalidRequestError`` where a column of tokens holds anything but lists of integers."""
    column = dataset.data.column(name)
    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_integer(kind.value_type):
        raise wrong_data(spec, f": the column {name!r} holds no token lists, but {kind}", hint)
    if column.null_count or arrow.list_flatten(column).null_count:
        raise wrong_data(spec, f": samples without a value in {name!r}", "remove them from the dataset")


def check_in_vocabulary(largest: int, vocabulary: Any, spec: DataSpec, model: str, what: str) -> None:
    """Raise ``InvalidRequestError`` if a model lacks the ``largest`` token that ``what`` (a tokenizer) produced."""
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise InvalidRequestError(
            f"the {what} in {spec.tokenizer} produces token {largest}, but {model} has only {vocabulary} tokens",
            f"give the {what} that belongs to the model with --tokenizer",
        )


def read_labels(dataset: Any, spec: DataSpec) -> tuple[list[Any], int]:
    """Return each sample's label, and the number of classes (at least 2); for regression, the numbers and 1.

    Classes are numbered from 0. Raises ``InvalidRequestError`` for labels that are missing, mixed or not usable.
    """
    name = find_column(dataset, spec, spec.label_column, "--label-column", _LABEL_NAMES, "label")
    feature = dataset.features[name]
    values = dataset[name][:]
    if any(value is None for value in values):
        raise wrong_data(spec, f": samples without a value in {name!r}", "remove them from the dataset")
    if isinstance(feature, ClassLabel):
        if min(values) < 0:
            raise wrong_data(spec, f": samples of --split {spec.split} have no label", "name a split with labels")
        return values, max(feature.num_classes, 2)
    if all(isinstance(value, float) for value in values):
        # Every loss would be NaN.
        if wrong := [value for value in values if not math.isfinite(value)]:
            raise wrong_data(
                spec,
                f": {len(wrong):,} of {len(values):,} labels in the column {name!r} are NaN or infinite ({wrong[0]})",
                "remove these samples, or name another column with --label-column",
            )
        return values, 1
    where = f"--dataset {spec.label}: the column {name!r}"
    if not all(isinstance(value, int | str) for value in values):
        raise InvalidRequestError(
            f"{where} holds neither classes nor numbers", "name another column with --label-column"
        )
    if len({isinstance(value, str) for value in values}) > 1:
        text, number = (next(v for v in values if isinstance(v, str) is is_text) for is_text in (True, False))
        raise InvalidRequestError(
            f"{where} holds both text and numbers ({text[:40]!r} and {number})",
            "make them all one or the other, or name another with --label-column",
        )
    classes = set(values)
    if len(classes) == len(values) > _FEW_SAMPLES:
        raise wrong_data(
            spec,
            f": each of the {len(values):,} samples has a different class in the column {name!r}",
            "name the column of the classes with --label-column",
        )
    number_of = {value: index for index, value in enumerate(sorted(classes))}
    return [number_of[value] for value in values], max(len(number_of), 2)

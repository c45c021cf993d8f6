"""Adapt private names of datasets."""

from __future__ import annotations

from typing import Any


def in_stored_order(dataset: Any) -> Any:
    """Return a dataset stored anew in its own order: without a table of indices, which slows down every access."""
    return dataset.flatten_indices() if dataset._indices is not None else dataset


def without_features(dataset: Any) -> Any:
    """Return the dataset as plain Arrow columns, so that nothing decodes its images or copies them into its files."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    return Dataset(InMemoryTable(dataset.data.table.replace_schema_metadata(None)))

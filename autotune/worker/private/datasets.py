"""Adapt private names of datasets."""

from __future__ import annotations

from typing import Any


def in_stored_order(dataset: Any) -> Any:
    """Return the dataset stored anew in its own order, without an index table, which slows down every access."""
    return dataset.flatten_indices() if dataset._indices is not None else dataset


def dataset_of_table(table: Any) -> Any:
    """Return a dataset over an Arrow table in memory."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    return Dataset(InMemoryTable(table))

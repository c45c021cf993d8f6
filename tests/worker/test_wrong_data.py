"""Test errors for invalid datasets: one line that names the column or the file."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_reading import Read, spec
from own_data import samples, texts, write_csv, write_jsonl, write_parquet


def rows_with_labels(labels: list[Any]) -> list[dict[str, Any]]:
    return [{"text": text, "label": label} for text, label in zip(texts([3] * len(labels)), labels, strict=True)]


WRONG_VALUES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "labels of two kinds": (
        rows_with_labels([*["a"] * 30, *range(30)]),
        "'label' holds both text and numbers ('a' and 0) | make",
    ),
    "labels of no number": (
        rows_with_labels([0.5, math.nan, 1.5, math.nan]),
        "2 of 4 labels in the column 'label' are NaN or infinite (nan) | remove these samples",
    ),
    "endless labels": (
        rows_with_labels([0.5, math.inf]),
        "1 of 2 labels in the column 'label' are NaN or infinite (inf) | remove",
    ),
    "tokens as text": (
        [{"input_ids": "hello", "label": 0}] * 4,
        "'input_ids' holds no token lists, but string | name a column of text with --text-column",
    ),
    "tokens as fractions": (
        [{"input_ids": [1.5, 2.0], "label": 0}] * 4,
        "holds no token lists, but list<item: double>",
    ),
    "samples of nothing": ([{"input_ids": [5, 6], "label": 0}, {"input_ids": None, "label": 0}], "without a value in"),
    "gaps in tokens": ([{"input_ids": [5, None], "label": 0}] * 4, "without a value in 'input_ids'"),
    "a token below all": (
        [{"input_ids": [5, 6], "label": 0}, {"input_ids": [5, -1], "label": 0}],
        "'input_ids' holds -1, which is not a token of bert-tiny; it has",
    ),
    "a token above all": (
        [{"input_ids": [5, 99_999], "label": 0}] * 4,
        "'input_ids' holds 99999, which is not a token of bert-tiny; it has",
    ),
}


@pytest.mark.parametrize(("rows", "words"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_wrong_values_are_refused_by_their_column(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path, rows: list[dict[str, Any]], words: str
) -> None:
    refusal = read("bert-tiny", spec(write_jsonl(tmp_path / "data.jsonl", rows), tokenizer)).refusal
    assert "--dataset data.jsonl" in refusal
    assert words in refusal


def test_a_target_of_tokens_is_looked_at_too(read: Callable[..., Read], tokenizer: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [5, 6], "labels": "a"}] * 4)
    refusal = read("t5-tiny", spec(path, tokenizer), task="seq2seq-lm").refusal
    assert "'labels' holds no token lists, but string | name another with --label-column" in refusal


@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_parquet])
def test_files_of_other_columns_are_named(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path, write: Callable[..., Path]
) -> None:
    suffix = {write_jsonl: "jsonl", write_csv: "csv", write_parquet: "parquet"}[write]
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a", "b"):
        write(folder / f"{name}.{suffix}", samples([3] * 8))
    write(folder / f"c.{suffix}", [{"text": 1, "other": 3}] * 8)
    refusal = read("bert-tiny", spec(folder, tokenizer)).refusal
    assert f"c.{suffix} has the columns text (number), other (number)" in refusal
    assert f"but a.{suffix} has text (text), label (text)" in refusal
    assert "give files with the same columns" in refusal


def test_files_of_which_one_is_broken_are_not_said_to_differ(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", samples([3] * 8))
    (folder / "b.jsonl").write_text('{"text": "a", "label": 0}\n{"text": \n')
    assert "--dataset folder cannot be read" in read("bert-tiny", spec(folder, tokenizer)).refusal

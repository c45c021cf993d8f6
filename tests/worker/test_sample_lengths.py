"""Test what is read of the lengths of a training's samples, and how its collator pads them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset

from autotune.worker.user.samples import lengths_of_loader, sample_lengths

TEXTS = [{"input_ids": list(range(1, 4 + at % 37))} for at in range(500)]


def collate(samples: list[dict[str, Any]], multiple: int = 1, to: int = 0) -> dict[str, torch.Tensor]:
    longest = max(to, *(len(sample["input_ids"]) for sample in samples))
    tokens = -(-longest // multiple) * multiple
    ids = torch.tensor([sample["input_ids"] + [0] * (tokens - len(sample["input_ids"])) for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def batches(**how: int) -> list[dict[str, torch.Tensor]]:
    return [collate(TEXTS[at : at + 4], **how) for at in range(0, 32, 4)]


@pytest.mark.parametrize(("how", "multiple"), [({}, 1), ({"multiple": 8}, 8), ({"to": 50}, 50), ({"multiple": 64}, 64)])
def test_padding_is_seen_in_batches(how: dict[str, int], multiple: int) -> None:
    found = sample_lengths(TEXTS, batches(**how), 4, "random")
    assert (found.longest, found.samples, found.multiple) == (39, 500, multiple)
    assert found.longest_samples[0] % 37 == 36


def test_tokens_that_the_collator_makes_are_read_from_batches() -> None:
    found = sample_lengths([{"text": "a"}] * 500, batches(), 4, "random")
    assert (sum(count for _, count in found.counts), found.longest, found.longest_samples) == (32, 34, ())


def test_samples_that_are_padded_already_count_as_long_as_they_are() -> None:
    padded = [{"input_ids": [5] * 40, "attention_mask": [1] * (1 + at) + [0] * (39 - at)} for at in range(10)]
    found = sample_lengths(padded, batches(to=40), 4, "random")
    assert found.counts == tuple((tokens, 1) for tokens in range(1, 11))


def test_a_row_of_samples_is_no_long_sample() -> None:
    rows = [{"input_ids": torch.ones(1, 60, dtype=torch.long)}] * 4
    found = sample_lengths(TEXTS, rows, 4, "random")
    assert (found.padding, found.longest) == ("rows", 39)
    unread = sample_lengths([{"text": ""}] * 9, rows, 4, "random")
    assert unread.counts == ()
    assert unread.unknown is not None


@pytest.mark.parametrize("stored", [None, "torch", "numpy", "custom"])
def test_all_samples_of_a_stored_dataset_are_read_as_they_are_given(
    stored: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine two seconds are not enough for all.
    monkeypatch.setattr("autotune.worker.user.samples._MOST_SECONDS", 60.0)
    texts = [
        {"input_ids": [5] * 40, "attention_mask": [1] * (1 + at % 40) + [0] * (39 - at % 40)} for at in range(9000)
    ]
    data = Dataset.from_list(texts).shuffle(seed=1)
    if stored == "custom":
        data = data.with_transform(lambda batch: {"input_ids": [[7, 7, 7] for _ in batch["input_ids"]]})
    else:
        data = data.with_format(stored)
    found = sample_lengths(data, batches(), 4, "random")
    assert found.samples == 9000
    expected = ((3, 9000),) if stored == "custom" else tuple((tokens, 225) for tokens in range(1, 41))
    assert found.counts == expected
    if stored != "custom":
        assert {sum(data.with_format(None)[index]["attention_mask"]) for index in found.longest_samples} == {40}


class Stream(IterableDataset[dict[str, Any]]):
    """Texts without end."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from TEXTS


def test_a_loader_tells_its_lengths_without_being_gone_over() -> None:
    found = lengths_of_loader(DataLoader(TEXTS, batch_size=4, collate_fn=collate))  # type: ignore[arg-type]
    assert (found.longest, found.vary) == (39, True)
    assert lengths_of_loader(DataLoader(Stream(), batch_size=4, collate_fn=collate)) is None
    images = DataLoader([torch.zeros(3, 8, 8)] * 8, batch_size=4)  # type: ignore[arg-type]
    assert lengths_of_loader(images) is None
    assert lengths_of_loader(DataLoader(TEXTS, batch_size=4)) is None, "its collator cannot pad"  # type: ignore[arg-type]

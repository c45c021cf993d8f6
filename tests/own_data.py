"""Make datasets as users have them: texts of any length, a tokenizer trained on them, images."""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BESIDE_WORDS = 2
"""Tokens that the tokenizer adds to the words of a text."""


def texts(words: Sequence[int], seed: int = 0) -> list[str]:
    """A text for each number of words."""
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS, k=count)) for count in words]


def samples(words: Sequence[int], labels: Sequence[Any] = ("no", "yes")) -> list[dict[str, Any]]:
    """Texts with labels in turn."""
    return [{"text": text, "label": labels[index % len(labels)]} for index, text in enumerate(texts(words))]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A line of JSON a sample."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A head and a line a sample."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """One table."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def write_saved(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A folder from ``save_to_disk``, of two splits."""
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list(list(rows))
    DatasetDict({"train": data, "test": data.select(range(4))}).save_to_disk(str(path))
    return path


def write_images(path: Path, count: int, side: int) -> Path:
    """A folder of images, a folder a class; only where Pillow is installed."""
    from PIL import Image

    chooser = random.Random(0)
    for index in range(count):
        folder = path / ("cat", "dog", "fish")[index % 3]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = bytes(chooser.randrange(256) for _ in range(side * side * 3))
        Image.frombytes("RGB", (side, side), pixels).save(folder / f"{index}.png")
    return path


def write_tokenizer(path: Path, *, special: Sequence[str] = SPECIAL, eos: str | None = None) -> Path:
    """A tokenizer of whole words, trained on all of them; ``[CLS] text [SEP]`` where it has these."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=list(special)))
    names = {"unk_token": special[1]}
    if "[CLS]" in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
        )
        names |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    if eos:
        names["eos_token"] = eos
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(str(path))
    return path

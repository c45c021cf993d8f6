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


PLACE = {"qwen2.5-vl-tiny": "<|vision_start|><|image_pad|><|vision_end|>", "smolvlm-tiny": "<image>"}
"""What stands for an image in a text for these models' processors."""
_CHAT = (
    "{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}PLACE {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}"
)


def write_pictures(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[str]:
    """A picture of each size in a folder of its own; their paths from ``folder``."""
    from PIL import Image

    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    names = [f"pictures/{number}.png" for number in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        Image.effect_noise(size, 50).convert("RGB").save(folder / name)
    return names


def write_processor(path: Path, model: str, *, chats: bool = True) -> Path:
    """A processor of a tiny model of images and text, which neither takes films nor needs torchvision."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    placeholder = {"qwen2.5-vl-tiny": "<|image_pad|>", "smolvlm-tiny": "<image>"}[model]
    # In the order of their numbers in the models' configs.
    special = ["<unk>", "<s>", "</s>", "<pad>", "<fake_token_around_image>", placeholder, "<global-img>",
               "<|vision_start|>", "<|vision_end|>"]  # fmt: skip
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate((*special, *WORDS))}, special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=special[0], bos_token=special[1], eos_token=special[2],
        pad_token=special[3], extra_special_tokens={"image_token": placeholder, "start": special[7], "end": special[8]},
    )  # fmt: skip
    template = _CHAT.replace("PLACE", PLACE[model]) if chats else None
    if model == "smolvlm-tiny":
        # Tiles of the model's size, of as many tokens as it makes of one.
        tiles = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
        made = transformers.Idefics3Processor(tiles, fast, image_seq_len=4, chat_template=template)
    else:
        # Replaces a placeholder by as many tokens as there are merged patches, as that of Qwen2.5-VL does.
        patches = transformers.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112)
        made = transformers.PaddleOCRVLProcessor(patches, fast, chat_template=template)
    made.save_pretrained(str(path))
    return path

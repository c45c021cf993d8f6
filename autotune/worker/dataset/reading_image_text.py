"""Prepare a dataset of images and text: find its columns, count the tokens of each sample, and save it undecoded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Image, Sequence, Value

from autotune.core.dataset_spec import DataSpec
from autotune.core.errors import InvalidRequestError
from autotune.core.workload import Workload
from autotune.worker.dataset.columns import check_in_vocabulary, find_column, find_text_columns, is_string, wrong_data
from autotune.worker.dataset.prepared import IMAGE_TOKENS_FILE, LENGTHS_FILE, PROCESSOR_FOLDER, SAMPLES_FOLDER
from autotune.worker.dataset.tokenizer import IMAGES, TEXT, images_in, load_processor, open_upright
from autotune.worker.failures import first_line
from autotune.worker.private.datasets import without_features

_IMAGE_NAMES = ("images", "image", "img")
_MESSAGES = "messages"


def check_has_pillow() -> None:
    """Raise ``InvalidRequestError`` where Pillow is missing."""
    if find_spec("PIL") is None:
        raise InvalidRequestError("reading images needs Pillow, which is not installed", "pip install pillow")


def read_images_with_text(dataset: Any, workload: Workload, folder: Path) -> Any:
    """Save samples and processor in a folder; return token counts as an array (samples,).

    Images are not decoded; trials do this while loading. Raises ``InvalidRequestError`` for samples that the model does
    not support.
    """
    assert workload.data is not None
    check_has_pillow()
    reading = _ImageTextReading(dataset, workload, workload.data)
    reading.count()
    reading.check()
    reading.samples().save_to_disk(str(folder / SAMPLES_FOLDER))
    reading.processor.save_pretrained(str(folder / PROCESSOR_FOLDER))
    lengths = np.array(reading.lengths, dtype=np.int64)
    np.save(folder / LENGTHS_FILE, lengths)
    np.save(folder / IMAGE_TOKENS_FILE, np.array(reading.image_tokens, dtype=np.int64))
    return lengths


class _ImageTextReading:
    """Finds the columns of images and text, counts the tokens of each sample in one pass, and checks the samples."""

    def __init__(self, dataset: Any, workload: Workload, spec: DataSpec) -> None:
        self._workload = workload
        self._spec = spec
        self.processor = load_processor(spec.tokenizer)
        self._placeholder: str = self.processor.image_token
        token = self.processor.tokenizer.convert_tokens_to_ids(self._placeholder)
        if workload.config.get("image_token_id", token) != token:
            raise InvalidRequestError(
                f"the processor in {spec.tokenizer} writes images as token {token}, and {workload.model} reads token "
                f"{workload.config['image_token_id']} as images",
                "give the processor that belongs to the model with --tokenizer",
            )
        # A token before an image's own ones; a model that has one finds images by it.
        self._start_token: int | None = workload.config.get("vision_start_token_id")
        images = find_column(dataset, spec, spec.image_column, "--image-column", _IMAGE_NAMES, "image")
        self._text = self._text_column(dataset, images)
        self._is_chat = not is_string(dataset.features[self._text])
        self._images = images
        self._dataset = self._undecoded(dataset.select_columns([self._text, images]), images)
        self._texts: list[str] = []
        # Each sample's images, where the dataset holds paths of images.
        self._paths: list[list[dict[str, Any]]] = []
        self.lengths: list[int] = []
        self.image_tokens: list[int] = []
        # Indices of samples without an image, or whose text has not one placeholder for each image.
        self._without_image: list[int] = []
        self._miscounted: list[int] = []
        self._largest_token = 0
        self._tokens_of_size: dict[tuple[int, int], int] = {}

    # The columns

    def _text_column(self, dataset: Any, images: str) -> str:
        """Return the column of messages or text: the one that the user named, else ``messages``, else one of text."""
        names = self._spec.text_columns
        if names is None and _MESSAGES in dataset.column_names:
            return _MESSAGES
        (name,) = find_text_columns(dataset, self._spec, images)
        kind = dataset.features[name]
        if not is_string(kind) and isinstance(kind, Value | Image):
            raise wrong_data(
                self._spec, f": the column {name!r} holds neither text nor messages", "name another with --text-column"
            )
        return name

    def _undecoded(self, dataset: Any, name: str) -> Any:
        """Return the dataset with undecoded images: structs of ``bytes`` and ``path``, or paths."""
        kind = dataset.features[name]
        item = _item(kind)
        is_stored = isinstance(item, dict) and item.keys() == {"bytes", "path"}
        if is_string(item) or is_stored:
            return dataset
        if not isinstance(item, Image):
            raise wrong_data(self._spec, f": the column {name!r} holds no images", "name another with --image-column")
        plain = Image(decode=False)
        return dataset.cast_column(name, plain if item is kind else Sequence(plain))

    # The samples

    def count(self) -> None:
        """Count the tokens of each sample's text and images, and note samples without one placeholder per image."""
        tokenizer = self.processor.tokenizer
        token = tokenizer.convert_tokens_to_ids(self._placeholder)
        for number, (text, images) in enumerate(self._samples()):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            places = ids.count(token)
            starts = places if self._start_token is None else list(pairwise(ids)).count((self._start_token, token))
            if not images:
                self._without_image.append(number)
            elif not places == starts == len(images):
                self._miscounted.append(number)
            of_images = sum(self._tokens_of(stored, number) for stored in images)
            self._texts.append(text)
            # The processor replaces each placeholder by all tokens of an image.
            self.lengths.append(len(ids) - places + of_images)
            self.image_tokens.append(of_images)
            self._largest_token = max(self._largest_token, *ids, 0)

    def _samples(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield the text and the undecoded images of each sample."""
        root = Path(self._spec.source)
        root = root if root.is_dir() else root.parent
        is_paths = is_string(_item(self._dataset.features[self._images]))
        for row in self._dataset:
            images = images_in(row[self._images])
            if is_paths:
                # Relative paths begin at the folder of the dataset, wherever the process runs.
                images = [{"bytes": None, "path": os.path.join(root, os.path.expanduser(path))} for path in images]
                self._paths.append(images)
            text: str = row[self._text] or ""
            if self._is_chat:
                try:
                    text = self.processor.apply_chat_template(
                        _in_parts(row[self._text] or [], len(images)), tokenize=False
                    )
                except Exception as error:
                    raise wrong_data(
                        self._spec,
                        f": {self._text!r} cannot be written with the chat template in "
                        f"{self._spec.tokenizer}: {first_line(error)}",
                        "name a column of text with --text-column, or give a processor with a chat template with "
                        "--tokenizer",
                    ) from error
            yield text, images

    def _tokens_of(self, stored: dict[str, Any], number: int) -> int:
        """Return an image's number of tokens, which follows from its size; errors name its sample's ``number``."""
        where = f"--dataset {self._spec.label}: an image of sample {number + 1:,}"
        try:
            with open_upright(stored) as image:
                size: tuple[int, int] = image.size
        except OSError as error:
            raise InvalidRequestError(
                f"{where} cannot be read: {first_line(error)}",
                "remove the sample, or correct the path, which begins at the folder of the dataset",
            ) from error
        if size not in self._tokens_of_size:
            from PIL import Image as Picture

            try:
                made = self.processor(
                    text=[self._placeholder], images=[[Picture.new("RGB", size)]], add_special_tokens=False,
                    return_tensors="pt",
                )["input_ids"]  # fmt: skip
            except Exception as error:
                raise InvalidRequestError(
                    f"{where}, of {size[0]} × {size[1]} pixels, cannot be processed: {first_line(error)}",
                    "remove the sample, or give another processor with --tokenizer",
                ) from error
            self._tokens_of_size[size] = made.shape[1]
            self._largest_token = max(self._largest_token, int(made.max()))
        return self._tokens_of_size[size]

    def check(self) -> None:
        """Raise ``InvalidRequestError`` for samples that the model or the sequence length does not support."""
        spec, limit = self._spec, self._workload.seq_len
        whole = len(self.lengths)
        if self._without_image:
            raise wrong_data(
                spec,
                f": {len(self._without_image):,} of {whole:,} samples have no image in {self._images!r}",
                "remove these samples, or name another column with --image-column",
            )
        if self._miscounted:
            # The tokens that stand for an image in a text.
            around = [self._workload.config.get(f"vision_{end}_token_id") for end in ("start", "end")]
            names = self.processor.tokenizer.convert_ids_to_tokens
            start, end = ("" if id is None else str(names(id)) for id in around)
            first, written = self._miscounted[0], f"{start}{self._placeholder}{end}"
            raise wrong_data(
                spec,
                f": {len(self._miscounted):,} of {whole:,} samples have not one {written} in "
                f"{self._text!r} for each image; the first is sample {first + 1:,}",
                f"write {written} where an image belongs, or give messages, whose images come first"
                if not self._is_chat
                else "give each image its part of the messages, or none any, for the first message to have them all",
            )
        if long := [length for length in self.lengths if length > limit]:
            raise wrong_data(
                spec,
                f": {len(long):,} of {whole:,} samples have more than --seq-len {limit} tokens, and images are not cut",
                f"give --seq-len {max(long)}, remove the samples, or give a processor that makes images smaller",
            )
        vocabulary = (self._workload.config.get("text_config") or {}).get("vocab_size")
        check_in_vocabulary(self._largest_token, vocabulary, spec, self._workload.model, "processor")

    def samples(self) -> Any:
        """Return a dataset of the texts and the undecoded images."""
        if self._paths:
            return Dataset.from_dict({IMAGES: self._paths, TEXT: self._texts})
        # As plain bytes or paths, so that nothing decodes them but the collator.
        plain = without_features(self._dataset.select_columns([self._images]))
        if self._images != IMAGES:
            plain = plain.rename_column(self._images, IMAGES)
        return plain.add_column(TEXT, self._texts)


def _item(kind: Any) -> Any:
    """Return the feature type of one image from that of its column, which holds images or lists of images."""
    if isinstance(kind, list):
        return kind[0]
    return getattr(kind, "feature", kind)


def _in_parts(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return a sample's messages as chat templates read them: each content a list of parts of text and images.

    Where no message has an image part, all ``images`` of the sample go to the start of the user's first message, as in
    TRL.
    """
    made = [{"role": message["role"], "content": _parts_of(message["content"])} for message in messages]
    if not any(part.get("type") == "image" for message in made for part in message["content"]):
        of_user = [message for message in made if message["role"] == "user"]
        if of_user:
            of_user[0]["content"] = [{"type": "image"}] * images + of_user[0]["content"]
    return made


def _parts_of(content: Any) -> list[dict[str, Any]]:
    """Return a message's content as a list of parts, without the empty fields that Arrow adds to every part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{name: value for name, value in part.items() if value is not None} for part in content or []]

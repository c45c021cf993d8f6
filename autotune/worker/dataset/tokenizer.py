"""Load the tokenizer or processor that samples are read with, and make batches of images and text with it."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoProcessor, AutoTokenizer

from autotune.core.errors import InvalidRequestError
from autotune.training.batches import IGNORED
from autotune.worker.failures import first_line

_HUB_TIMEOUT_SECONDS = 10.0
# Packages that processors need which take films as well as images: Qwen-VL's, and SmolVLM2's.
_FOR_FILMS = ("torchvision", "num2words")
_NEXT_STEP = "give --tokenizer a folder that save_pretrained wrote, or a name on the hub"


def load_tokenizer(name: str | None) -> Any:
    """Return a tokenizer with a padding token. Raises ``InvalidRequestError`` where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not _is_at_hand(name))
    except Exception as error:
        is_elsewhere = isinstance(error, OSError) and name is not None and not os.path.isdir(name)
        why = "none is on this machine, and the hub gave none" if is_elsewhere else first_line(error)
        raise InvalidRequestError(f"there is no tokenizer in {name}: {why}", _NEXT_STEP) from error
    _ensure_padding_token(tokenizer, name)
    return tokenizer


def load_processor(name: str | None) -> Any:
    """Return a processor of images and text with a padding token. Raises ``InvalidRequestError`` without one."""
    try:
        processor = AutoProcessor.from_pretrained(name, local_files_only=not _is_at_hand(name))
    except ImportError as error:
        missing = [package for package in _FOR_FILMS if find_spec(package) is None]
        raise InvalidRequestError(
            f"the processor in {name} needs a package: {first_line(error)}",
            f"pip install {' '.join(missing) or 'it'}, and search again",
        ) from error
    except Exception as error:
        raise InvalidRequestError(f"there is no processor in {name}: {first_line(error)}", _NEXT_STEP) from error
    # AutoProcessor returns a tokenizer or an image processor where a folder has only that.
    if not all(hasattr(processor, part) for part in ("image_processor", "tokenizer", "image_token")):
        raise InvalidRequestError(
            f"there is no processor of images and text in {name}, but a {type(processor).__name__}", _NEXT_STEP
        )
    _ensure_padding_token(processor.tokenizer, name)
    # As in training. Padding on the left is for generation.
    processor.tokenizer.padding_side = "right"
    return processor


def _ensure_padding_token(tokenizer: Any, name: str | None) -> None:
    """Make sure that a tokenizer has a padding token. Raises ``InvalidRequestError`` where it cannot have one."""
    if len(tokenizer) == 0:
        raise InvalidRequestError(f"the tokenizer in {name} has no tokens", _NEXT_STEP)
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise InvalidRequestError(
            f"the tokenizer in {name} has neither a padding token nor an end-of-text token",
            "set its pad_token and save it again",
        )
    # As transformers' examples do for GPT-2 and similar models.
    tokenizer.pad_token = tokenizer.eos_token


def _is_at_hand(name: str | None) -> bool:
    """Return whether ``from_pretrained`` can find a tokenizer fast: its folder exists, or the hub answers.

    The hub is asked once, with a short time limit, since ``from_pretrained`` retries for a minute.
    """
    if name is None or os.path.isdir(name):
        return True
    try:
        get_hf_file_metadata(hf_hub_url(name, "tokenizer_config.json"), timeout=_HUB_TIMEOUT_SECONDS)
    except HfHubHTTPError:
        # The hub answered, if only that there is no such file.
        return True
    except Exception:
        return False
    return True


TEXT = "text"
"""The column of texts, with a placeholder for each image."""
IMAGES = "images"
"""The column of undecoded images: a struct of ``bytes`` and ``path``, or a list of them."""


def open_stored(stored: dict[str, Any]) -> Any:
    """Open a stored image without decoding it."""
    from PIL import Image

    return Image.open(io.BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"])


def open_upright(stored: dict[str, Any]) -> Any:
    """Open a stored image and correct its orientation; it is decoded only if that is necessary."""
    from PIL import ImageOps

    image = open_stored(stored)
    # As datasets does when it decodes.
    ImageOps.exif_transpose(image, in_place=True)
    return image


def images_in(value: Any) -> list[Any]:
    """Return a list of the images in a column's value, which is an image, a list of images or ``None``."""
    return [image for image in (value if isinstance(value, list) else [value]) if image]


def _pixels(stored: dict[str, Any]) -> Any:
    with open_upright(stored) as image:
        return image.convert("RGB")


@dataclass(frozen=True)
class ImageTextCollator:
    """Makes batches of images and text: decodes images, calls the processor, and adds labels.

    Padding and tokens of images (``image_token``) have no label. ``padding``: how the processor pads.
    """

    processor: Any
    image_token: int
    padding: dict[str, Any]

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        # Special tokens are in the text already, from the chat template if there is one, as in TRL's collator.
        batch = self.processor(
            text=[sample[TEXT] for sample in samples],
            images=[[_pixels(stored) for stored in images_in(sample[IMAGES])] for sample in samples],
            add_special_tokens=False,
            return_tensors="pt",
            **self.padding,
        )
        tokens = batch["input_ids"]
        is_learned = (batch["attention_mask"] == 1) & (tokens != self.image_token)
        return {**batch, "labels": tokens.masked_fill(~is_learned, IGNORED)}

"""Make batches of images and text with the model's own processor, as the collator of a training does."""

from __future__ import annotations

import io
from typing import Any

import torch

TEXT = "text"
"""The column of texts, with a placeholder for each image."""
IMAGES = "images"
"""The column of undecoded images: a struct of ``bytes`` and ``path``, or a list of them."""
# What torch.nn.CrossEntropyLoss leaves out by default.
_IGNORED = -100


def open_stored(stored: dict[str, Any]) -> Any:
    """Open a stored image without decoding it."""
    from PIL import Image

    return Image.open(io.BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"])


def opened(stored: dict[str, Any]) -> Any:
    """Open a stored image, decoded only if its orientation must be corrected."""
    from PIL import ImageOps

    image = open_stored(stored)
    # As datasets does when it decodes.
    ImageOps.exif_transpose(image, in_place=True)
    return image


def images_in(value: Any) -> list[Any]:
    """Return the images in a column's value, which is an image or a list."""
    return [image for image in (value if isinstance(value, list) else [value]) if image]


def _pixels(stored: dict[str, Any]) -> Any:
    with opened(stored) as image:
        return image.convert("RGB")


class ImageTextCollator:
    """Decodes the images of a batch, and has the processor make them and the texts the inputs of the model."""

    def __init__(self, processor: Any, image_token: int, padding: dict[str, Any]) -> None:
        self._processor = processor
        self._image_token = image_token
        self._padding = padding

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        # Special tokens are in the text, or the chat template's, as in TRL's collator.
        batch = self._processor(
            text=[sample[TEXT] for sample in samples],
            images=[[_pixels(stored) for stored in images_in(sample[IMAGES])] for sample in samples],
            add_special_tokens=False,
            return_tensors="pt",
            **self._padding,
        )
        tokens = batch["input_ids"]
        is_learned = (batch["attention_mask"] == 1) & (tokens != self._image_token)
        return {**batch, "labels": tokens.masked_fill(~is_learned, _IGNORED)}

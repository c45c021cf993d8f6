"""Say how many tokens an image becomes in a model of images and text."""

from __future__ import annotations

from typing import Any

from autotune.core.errors import InvalidRequestError

# An image is divided in patches, of which squares of so many each side become a token (Qwen2VLImageProcessor).
_MERGING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# An image, or each tile that a larger one is cut in, has one size (Idefics3Processor).
_TILING = ("idefics3", "smolvlm")
# 256 tokens of 28 pixels each side. A choice: such models take any size.
_USUAL_SIDE = 448

# Fields of vision configs that are left out where they have the default of transformers.
_DEFAULT_PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "idefics3": 32, "smolvlm": 32}
_DEFAULT_TILE = 224
_DEFAULT_SCALE = 2


def takes_images(config: dict[str, Any]) -> bool:
    """Return whether a config is of a model of images and text."""
    return isinstance(config.get("vision_config"), dict)


def is_merging(model_type: str) -> bool:
    """Return whether a model takes the patches of all images of a batch as one list, and their sizes beside it."""
    return model_type in _MERGING


def choose_image_side(config: dict[str, Any], asked: int | None) -> int:
    """Return the pixels of each side of the images to measure with: what was asked for, else what is usual.

    Raises ``InvalidRequestError`` for a model whose images are not known, or a size that it does not take.
    """
    model_type = str(config.get("model_type"))
    vision = config.get("vision_config") or {}
    if model_type in _MERGING:
        step = _step(config)
        side = asked or _USUAL_SIDE // step * step
        if side % step:
            near = [whole for whole in (side // step * step, (side // step + 1) * step) if whole]
            raise InvalidRequestError(
                f"--image-size {side}: {model_type} takes images whose sides are multiples of {step} pixels",
                f"give {' or '.join(map(str, near))}",
            )
        return side
    if model_type not in _TILING:
        known = ", ".join((*_MERGING, *_TILING))
        raise InvalidRequestError(
            f"the images of models of type {model_type!r} are not known",
            f"use one of the types {known}, or name another --task, such as causal-lm, to train without images",
        )
    side = int(vision.get("image_size", _DEFAULT_TILE))
    if asked not in (None, side):
        raise InvalidRequestError(
            f"--image-size {asked}: {model_type} takes images of {side} pixels, and cuts larger ones in such tiles",
            "leave it out, and give the number of tiles with --images",
        )
    return side


def tokens_of_image(config: dict[str, Any], side: int) -> int:
    """Return the tokens of one image of so many pixels each side."""
    if config["model_type"] in _MERGING:
        return (side // _step(config)) ** 2
    patches = (side // _patch(config)) ** 2
    return int(patches / int(config.get("scale_factor", _DEFAULT_SCALE)) ** 2)


def check_images_fit(config: dict[str, Any], images: int, side: int, seq_len: int) -> None:
    """Raise ``InvalidRequestError`` where the images of a sample leave no room for text."""
    tokens = images * (tokens_of_image(config, side) + _BESIDE_IMAGE) + _LEAST_TEXT
    if tokens > seq_len:
        raise InvalidRequestError(
            f"--images {images} of {side} pixels take {tokens - _LEAST_TEXT} tokens, and a sample has {seq_len}",
            f"give --seq-len {tokens} or more, or fewer images",
        )


def _step(config: dict[str, Any]) -> int:
    vision = config.get("vision_config") or {}
    return _patch(config) * int(vision.get("spatial_merge_size", 2))


def _patch(config: dict[str, Any]) -> int:
    vision = config.get("vision_config") or {}
    return int(vision.get("patch_size", _DEFAULT_PATCH[str(config["model_type"])]))


# Before each image a token says that one begins.
_BESIDE_IMAGE = 1
# A model learns from text; so much of it is the least that is measured. A choice.
_LEAST_TEXT = 2

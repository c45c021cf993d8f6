"""Load the tokenizer that texts are read with, or the processor that images and texts are read with."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoProcessor, AutoTokenizer

from autotune.core.errors import InvalidRequestError
from autotune.worker.failures import first_line

_HUB_TIMEOUT_SECONDS = 10.0
# Processors of images and text that take films as well cannot be made without: Qwen-VL's, and SmolVLM2's.
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
    # Where a folder has only one of the two, that one is what comes.
    if not all(hasattr(processor, part) for part in ("image_processor", "tokenizer", "image_token")):
        raise InvalidRequestError(
            f"there is no processor of images and text in {name}, but a {type(processor).__name__}", _NEXT_STEP
        )
    _ensure_padding_token(processor.tokenizer, name)
    # As in trainings; what generates pads on the left.
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
    """Return whether a tokenizer's folder exists or the hub answers.

    The hub is asked once and briefly, since ``from_pretrained`` retries for a minute.
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

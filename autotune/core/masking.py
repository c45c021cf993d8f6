"""Mask what looks like a secret on the command line of a user's script, before it is recorded or shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"
"""Stands for a value that is not recorded."""

# Matched against an option's name in lower case with underscores. Most other options with "token" in them are no
# secrets: --pad_token, --max_tokens, --tokenizer_name.
_SECRET_NAME = re.compile(
    r"^token$|(^|_)(hub|hf|huggingface|auth|access|api|bearer|refresh|session|secret|wandb|comet|github|gitlab)_?token$"
    r"|(^|_)(api|access|secret|private|auth|encryption)_?key$"
    r"|passw(or)?d|passphrase|(^|_)secret|credential"
)
# Hub access tokens, masked wherever they stand.
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")
# Values of such an option that are no secret: --use_auth_token True.
_TELLS_NOTHING = frozenset({"", "true", "false", "yes", "no", "none", "null", "0", "1"})


def mask_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """Return a script's command line with ``***`` in place of every value that looks like a secret."""
    masked: list[str] = []
    is_secret = False
    for word in words:
        name, equals, value = word.partition("=")
        if is_secret and not word.startswith("--"):
            masked.append(_mask(word))
        elif equals and _names_a_secret(name):
            masked.append(f"{name}={_mask(value)}")
        else:
            masked.append(_HUB_TOKEN.sub(MASK, word))
        # The value of --hub_token X is the next word.
        is_secret = not equals and word.startswith("-") and _names_a_secret(word)
    return tuple(masked)


def masked_options(words: Sequence[str]) -> list[str]:
    """Return the options of a command line whose values ``mask_secrets`` replaced."""
    options = []
    for before, word in zip(("", *words), words, strict=False):
        if word == MASK:
            options.append(before)
        elif MASK in word:
            options.append(word.partition("=")[0])
    return options


def _mask(value: str) -> str:
    """Return the mask, or the value itself where it reveals nothing, such as ``true``."""
    return value if value.lower() in _TELLS_NOTHING else MASK


def _names_a_secret(option: str) -> bool:
    """Return whether an option's name says that its value is a secret: ``--hub_token``, ``+trainer.hub_token``."""
    name = option.lstrip("-+~").lower().replace("-", "_").rpartition(".")[2]
    return _SECRET_NAME.search(name) is not None

"""Say whether the user accepts measurements of a busy machine."""

from __future__ import annotations

import os

ACCEPT_NOISE_VARIABLE = "AUTOTUNE_ACCEPT_NOISE"


def accepts_noise() -> bool:
    """Return whether the user accepts measurements on a busy machine, by an environment variable."""
    return os.environ.get(ACCEPT_NOISE_VARIABLE) == "1"

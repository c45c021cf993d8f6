"""Create files that no other user of the machine can read: logs and databases name models, data and commands."""

from __future__ import annotations

import os


def private_opener(path: str, flags: int) -> int:
    """Open a file with mode 0600, for ``open(opener=…)``."""
    return os.open(path, flags, 0o600)

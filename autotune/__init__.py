"""autotune finds the fastest way to train a transformer on one device at a fixed effective batch size."""

from __future__ import annotations

__version__ = "0.1.0"

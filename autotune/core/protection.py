"""Name what keeps the user's own code from touching their files while it is tried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProtectionKind = Literal["overlay", "read-only", "landlock", "none"]
"""``overlay``: what is written goes to a layer over the files, which is thrown away. ``read-only``: other mounts of the
same name space are read-only. ``landlock``: the kernel refuses to write to anything but a trial's own folders."""

PROTECTED: dict[ProtectionKind, str] = {
    "overlay": "what your code writes goes to a layer over your files that is thrown away (overlayfs)",
    "read-only": "your files are read-only for your code: no layer can be laid over them here (mount name space)",
    "landlock": "your files are read-only for your code: no layer can be laid over them here (Landlock)",
    "none": "your files are not protected: your code writes, renames and deletes in every trial as it would by itself",
}
"""What is told of each before a search."""


@dataclass(frozen=True, slots=True)
class Protection:
    """What protects the user's files from a job."""

    kind: ProtectionKind = "none"
    layer: str | None = None
    """A folder that gets what the inspection of the code writes, and lies below what its trials write."""


@dataclass(frozen=True, slots=True)
class FoundProtection:
    """What this machine offers, and why nothing better."""

    kind: ProtectionKind
    why_not_better: str = ""

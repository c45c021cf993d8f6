"""What a trial process says of machine and model, asked once and then remembered in the database.

Asking takes a process that imports torch. The answer is kept under a key of all that it depends on,
none of which needs torch to be known; so a search that is told everything by earlier ones starts no process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from pathlib import Path

import autotune
from autotune.device import Device
from autotune.workload import Workload

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "nvidia-ml-py", "numpy", "tokenizers")


def inspection_key(device: Device, workload: Workload) -> str | None:
    """The same exactly while ``autotune.worker.facts.inspect`` would say the same; ``None`` for code of the user's.

    What that imports and reads is not known without running it.
    """
    if workload.source is not None:
        return None
    known = {
        "device": [device.kind, device.uuid, device.name, device.memory_total_bytes, device.driver],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        # Builds of one version differ in the CUDA that they were made for; torch writes it here.
        "torch": _torch_build(),
        "worker": _worker_digest(),
        "workload": workload.document(),
    }
    text = json.dumps(known, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> str:
    """torch's own note of how it was built; empty where it has none."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            return (Path(folder) / "version.py").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return ""


def _worker_digest() -> str:
    """The code that is asked."""
    digest = hashlib.sha256()
    for path in sorted((Path(autotune.__file__).parent / "worker").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

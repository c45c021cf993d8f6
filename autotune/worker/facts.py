"""What only a process with torch can say: versions, the CUDA context's size, facts about the model."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from autotune.core.candidate import Document
from autotune.core.workload import Workload
from autotune.worker.context import context_bytes
from autotune.worker.failures import first_line
from autotune.worker.private.transformers import attention_implementations, optimizer_names
from autotune.worker.trial.build import build_config, build_model, model_class

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "nvidia-ml-py")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions() -> dict[str, str | None]:
    """The versions of the libraries on which a measurement depends; ``None`` for one that is not installed."""
    return {name: _version(name) for name in _PACKAGES}


def _cudnn_version() -> int | None:
    """Return the version of the cuDNN that torch has loaded, 91900 for 9.19.0, say."""
    try:
        return torch.backends.cudnn.version()  # type: ignore[no-untyped-call, no-any-return, unused-ignore]
    except Exception:
        # Of a library that does not go with this torch, which a trial would say, too.
        return None


def _cublas_version() -> str | None:
    """Return the version of the cuBLAS that this process has loaded; torch has no function for it."""
    try:
        mapped = {
            line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
        }
        path = next(path for path in sorted(mapped) if Path(path).name.startswith("libcublas.so"))
        library, number, parts = ctypes.CDLL(path), ctypes.c_int(), []
        # library_types.h: MAJOR_VERSION, MINOR_VERSION and PATCH_LEVEL are 0, 1 and 2.
        for part in range(3):
            if library.cublasGetProperty(part, ctypes.byref(number)) != 0:
                return None
            parts.append(str(number.value))
        return ".".join(parts)
    except (OSError, StopIteration, AttributeError):
        return None


def _model_facts(workload: Workload) -> Document:
    """Parameters and abilities of the model, from a build on the ``meta`` device (no memory)."""
    model_type: Any = model_class(workload)
    attentions = attention_implementations(model_type)
    random_weights = dataclasses.replace(workload, weights=None)
    model = build_model(random_weights, "sdpa" if "sdpa" in attentions else "eager", torch.device("meta"))
    return {
        "class": model_type.__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "attn_implementations": attentions,
        "gradient_checkpointing": bool(getattr(model, "supports_gradient_checkpointing", False)),
        "num_labels": getattr(build_config(workload), "num_labels", None),
    }


def inspect(job: Document) -> Document:
    """Facts about the environment and the workload's model; ``model_error`` where it cannot be built."""
    facts = inspect_environment(job)
    try:
        facts["model"] = _model_facts(Workload.from_document(job["workload"]))
    except Exception as error:
        facts["model_error"] = first_line(error)
    return facts


def inspect_environment(job: Document) -> Document:
    """Facts about the environment alone."""
    workload, is_cuda = Workload.from_document(job["workload"]), job["device_kind"] == "cuda"
    facts: Document = {
        "context_bytes": context_bytes(job["device_uuid"], convolves=not workload.is_text) if is_cuda else 0,
        "optims": optimizer_names(),
        "environment": {
            "python": platform.python_version(),
            "packages": package_versions(),
            "cuda": torch.version.cuda if job["device_kind"] == "cuda" else None,
            "cudnn": _cudnn_version() if job["device_kind"] == "cuda" else None,
            "cublas": _cublas_version() if job["device_kind"] == "cuda" else None,
            "training_arguments_fields": sorted(f.name for f in dataclasses.fields(TrainingArguments)),
        },
    }
    if job["device_kind"] == "cuda":
        facts["environment"]["device_capability"] = list(torch.cuda.get_device_capability(0))
        properties = torch.cuda.get_device_properties(0)
        facts["chip"] = {
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "threads_per_multiprocessor": properties.max_threads_per_multi_processor,
            "name": properties.name,
        }
    return facts

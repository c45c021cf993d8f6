"""Check optional features of an arm: the packages they need, how to install them, settings of CUDA's allocator."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlparse

from autotune.core.candidate import Arm
from autotune.core.errors import InvalidRequestError
from autotune.core.workload import Workload

_NAME = "traintune"
"""Name of the distribution: on the package index, ``autotune`` is another project."""


def how_to_add(extra: str) -> str:
    """Return the command that installs an extra of this package into the environment of this process."""
    # Several are found where the working directory is a checkout: its ``egg-info`` comes first, without a record of
    # where the package was installed from.
    found = importlib.metadata.distributions(name=_NAME)
    direct_url = next((record for each in found if (record := each.read_text("direct_url.json"))), None)
    return command_to_add(extra, Path(sys.prefix), direct_url)


def command_to_add(extra: str, prefix: Path, direct_url: str | None) -> str:
    """Return the command that installs an extra into the environment at ``prefix``, as the package was installed.

    ``direct_url`` is the record of where the package came from (PEP 610), if there is one. uv and pipx leave a file of
    their own in the environment of a tool.
    """
    requirement, is_editable = f"{_NAME}[{extra}]", False
    if direct_url is not None:
        record = json.loads(direct_url)
        url = str(record.get("url", ""))
        is_editable = bool(record.get("dir_info", {}).get("editable"))
        if url.startswith("file:"):
            requirement = f"{unquote(urlparse(url).path)}[{extra}]"
        elif (repository := record.get("vcs_info")) is not None:
            requirement += f" @ {repository['vcs']}+{url}@{repository['commit_id']}"
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx install --force '{requirement}'"
    tool = "uv tool install" if (prefix / "uv-receipt.toml").exists() else "pip install"
    return f"{tool} {'-e ' if is_editable else ''}'{requirement}'"


# torch reads the older name first, and the newer one since 2.9 (c10/cuda/CUDAAllocatorConfig.h).
ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
OLD_ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_NEW_NAME_SINCE = (2, 9)
# Older torch kept what goes into the functions of bitsandbytes within a compiled checkpoint (bitsandbytes 0.50.2:
# tensors that torch 2.11.0, 2.12.0 and 2.13.0 saved on a CPU, 24 November 2026).
_RECOMPUTES_QUANTIZED_SINCE = (2, 12)
# Since then a layer checkpoints its own forward; before, its caller did (5.22.2 and 5.23.0, modeling_layers.py).
_CHECKPOINTS_WITHIN_SINCE = (5, 23)
_EXPANDABLE = "expandable_segments"
# Distributions whose code runs in a step wherever they are installed: the libraries that torch loads, and the kernels
# that transformers and accelerate choose by themselves when they find them.
_LIBRARIES = (
    "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "pytorch-triton", "triton",
    "apex", "causal-conv1d", "flash-attn", "flash-attn-3", "flash-linear-attention", "intel-extension-for-pytorch",
    "kernels", "mamba-ssm",
)  # fmt: skip

# Prefixes of TrainingArguments.optim values that need a package (transformers/trainer_optimizer.py).
_BITSANDBYTES = ("adamw_8bit", "paged_", "ademamix", "lion_", "rmsprop_bnb", "adamw_bnb_8bit")
_TORCHAO = ("adamw_torch_4bit", "adamw_torch_8bit")
_PACKAGE_OF_OPTIM: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("torchao", _TORCHAO),
    ("bitsandbytes", _BITSANDBYTES),
    ("galore-torch", ("galore_",)),
    ("apollo-torch", ("apollo_",)),
    ("lomo-optim", ("lomo", "adalomo")),
    ("grokadamw", ("grokadamw",)),
    ("schedulefree", ("schedule_free_",)),
    ("torch-optimi", ("stable_adamw",)),
)
DEEPSPEED = "deepspeed"
EXTRAS = {
    "bitsandbytes": "bitsandbytes", "torchao": "torchao", "liger-kernel": "liger", "peft": "peft",
    DEEPSPEED: "deepspeed",
}  # fmt: skip
"""Packages that an extra of autotune installs, with the extra's name."""
OPTIONAL = (*EXTRAS, "flash-attn")
"""The optional packages that are used most."""
FLASH_ATTENTION = "flash_attention_2"


def optim_package(optim: str) -> str | None:
    """Return the package that an optimizer needs; ``None`` where torch and transformers have it."""
    return next((package for package, names in _PACKAGE_OF_OPTIM if optim.startswith(names)), None)


# Optimizers of bitsandbytes whose state is known.
_PREDICTED_OPTIMS = frozenset(
    {"adamw_bnb_8bit", "adamw_8bit", "paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit"}
    | {"lion_8bit", "paged_lion_32bit", "paged_lion_8bit"}
)


def is_state_known(optim: str) -> bool:
    """Return whether the memory of an optimizer's state can be predicted."""
    return optim_package(optim) is None or optim in _PREDICTED_OPTIMS


# Optimizers of torch that update each element by itself. FSDP2: DTensor has sharding rules for their operations
# (torch/distributed/tensor/_ops/_pointwise_ops.py); bitsandbytes' kernels take no DTensor; of others nothing is known.
# ZeRO gives an optimizer a part of all weights as one flat tensor, of which Adafactor, for one, cannot tell the rows.
_SHARDING_OPTIMS = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})


def shards_with(optim: str) -> bool:
    """Return whether an optimizer is known to update weights sharded by FSDP2 or ZeRO."""
    return optim in _SHARDING_OPTIMS


def offloading_threads(cores: int, ranks: int) -> int:
    """Return each rank's number of CPU threads for an optimizer that runs on the CPU: an equal share of the cores."""
    return max(1, cores // ranks)


def packages_of_workload(workload: Workload) -> tuple[str, ...]:
    """Return the optional packages that every trial of a workload needs."""
    return (*(["peft"] if workload.peft else []), *(["bitsandbytes"] if workload.quantize else []))


def version_of(package: str) -> str | None:
    """Return the installed version of a package; ``None`` where it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def library_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that a training step may run, without importing them."""
    versions = {package: version_of(package) for package in _LIBRARIES}
    return {package: version for package, version in versions.items() if version is not None}


def require(package: str, lever: str) -> None:
    """Raise ``InvalidRequestError`` with the install command where the package that a lever needs is missing."""
    if version_of(package) is None:
        raise InvalidRequestError(f"{lever} needs {package}, which is not installed", how_to_install(package))


def require_compiler(device_kind: str, lever: str) -> None:
    """Raise ``InvalidRequestError`` where ``torch.compile`` would lack a C or C++ compiler, or a GPU's Triton.

    Where torch and Triton look: ``torch/_inductor/config.py`` (``cpp.cxx``) for a CPU, ``triton/runtime/build.py`` for
    a GPU. ``lever`` is named in the error.
    """
    variable, names = ("CXX", ("g++",)) if device_kind == "cpu" else ("CC", ("gcc", "clang"))
    chosen = os.environ.get(variable)
    if not any(map(shutil.which, (chosen,) if chosen else names)):
        missing = f"{variable} is {chosen}, which is not there" if chosen else f"there is no {' or '.join(names)}"
        raise InvalidRequestError(
            f"{lever} needs a compiler: {missing}", f"install one, name it in {variable}, or leave {lever} out"
        )
    # A torch for CPUs comes without Triton.
    is_for_cpus = (version_of("torch") or "").endswith("+cpu")
    if device_kind == "cuda" and not is_for_cpus and importlib.util.find_spec("triton") is None:
        raise InvalidRequestError(f"{lever} needs triton, which is not installed", how_to_install("triton"))


def how_to_install(package: str) -> str:
    """Return the command that installs a package."""
    return how_to_add(EXTRAS[package]) if package in EXTRAS else f"pip install {package}"


def is_compatible(arm: Arm, weight_dtype: str) -> bool:
    """Return whether attention and precision of an arm are compatible: flash attention computes in 16 bits only."""
    half = arm.precision in ("fp16", "bf16") or weight_dtype != "float32"
    return half or arm.attn_implementation != FLASH_ATTENTION


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Parse the environment's settings of CUDA's caching allocator, such as ``name:value,name:[value,value]``."""
    text = environment.get(OLD_ALLOCATOR_VARIABLE) or environment.get(ALLOCATOR_VARIABLE) or ""
    settings: dict[str, str] = {}
    # A list in brackets (roundup_power2_divisions) contains commas that separate no settings.
    depth, piece = 0, ""
    # The last comma ends the last setting.
    for character in text + ",":
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            name, _, value = piece.partition(":")
            if name.strip():
                settings[name.strip()] = value.strip()
            piece = ""
        else:
            piece += character
    return settings


def segments_expand(environment: Mapping[str, str]) -> bool | None:
    """Return whether the environment turns on expandable segments; ``None`` where it does not set them."""
    value = allocator_settings(environment).get(_EXPANDABLE)
    return value.lower() == "true" if value is not None else None


def with_expandable_segments(environment: Mapping[str, str], *, expand: bool) -> str | None:
    """Return the text of the allocator's environment variable with expandable segments on or off.

    ``None`` where the variable may stay as it is: they are to be off, and it does not set them.
    """
    settings = allocator_settings(environment)
    if not expand and _EXPANDABLE not in settings:
        return None
    return ",".join(f"{name}:{value}" for name, value in {**settings, _EXPANDABLE: str(expand)}.items())


def major_minor(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version; an empty tuple where the version has no such numbers."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def allocator_variable(torch_version: str) -> str:
    """Return the environment variable for allocator settings that this torch reads without a warning."""
    return ALLOCATOR_VARIABLE if major_minor(torch_version) >= _NEW_NAME_SINCE else OLD_ALLOCATOR_VARIABLE


def compiled_recomputes(torch_version: str, transformers_version: str) -> bool:
    """Return whether compiled layers with quantized weights recompute activations in gradient checkpointing."""
    # Older transformers checkpoint around the compiled layer, so that torch recomputes it as a whole.
    is_around_layer = major_minor(transformers_version) < _CHECKPOINTS_WITHIN_SINCE
    return is_around_layer or major_minor(torch_version) >= _RECOMPUTES_QUANTIZED_SINCE

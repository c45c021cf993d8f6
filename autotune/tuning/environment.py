"""Record what a measurement depends on besides the candidate and the workload, and compare two such records.

Trials are reused between studies only where the fingerprints of their environments are equal, which includes the
machine: two of one kind differed by up to 40 % in the same training. What another machine of the kind measured informs
predictions and the order of trials, and proves nothing. A study that an earlier autotune recorded lacks facts that are
recorded today; when it is continued, such facts are not compared.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from autotune.core.candidate import Arm, Document
from autotune.core.inspection import Software
from autotune.core.placement import Placement
from autotune.core.schema import digest, encode
from autotune.core.workload import Workload
from autotune.devices.host import machine_id, processor_name
from autotune.devices.nvml import current_session
from autotune.space.arms import packages_of
from autotune.space.features import library_versions, packages_of_workload, version_of
from autotune.space.space import usable_cores

_NOT_IN_KIND = frozenset({"training_arguments_fields", "device_uuid", "device_uuids", "device_label", "machine"})

# Variables that change how fast torch trains or how much memory it takes. Sources: the notes on CUDA and the page
# "CUDA Environment Variables" of PyTorch's documentation, and the CUDA programming guide.
_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    # The memory allocator of the C library, and its settings.
    "GLIBC_TUNABLES", "LD_PRELOAD",
    # Whether transformers replaces layers with kernels of the package ``kernels``.
    "USE_HUB_KERNELS",
}  # fmt: skip
_VARIABLE_PREFIXES = ("DNNL_", "GOMP_", "KMP_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "TORCHINDUCTOR_")
# Where compiled code is cached; a trial that compiles starts with its own empty folder.
_NOT_MEASURED = frozenset({"TORCHINDUCTOR_CACHE_DIR"})


def measured_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables on which speed or memory of a training depends, sorted by name."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if (name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)) and name not in _NOT_MEASURED
    }


def describe_environment(
    placement: Placement, workload: Workload, arms: Sequence[Arm], software: Software, measurement_revision: int
) -> Document:
    """Return the record of machine and software on which a search's measurements depend.

    A process with torch reported the ``software``. ``measurement_revision`` grows where trials measure otherwise.
    """
    device = placement.device
    # Optional packages count only where this search measures with them: others may come and go.
    needed = {*packages_of_workload(workload), *(package for arm in arms for package in packages_of(arm))}
    optional = {package: version_of(package) for package in sorted(needed)}
    return {
        "device_label": device.label,
        "device_kind": device.kind,
        "device_name": device.name,
        "device_uuid": device.uuid,
        # A GPU is told apart by its UUID, a CPU by its machine.
        "machine": machine_id() if device.kind == "cpu" else None,
        "device_memory_bytes": device.memory_total_bytes,
        "device_capability": list(device.capability) if device.capability else None,
        "driver": device.driver,
        "gpu_policy": current_session().policy(device.uuid) if device.kind == "cuda" else None,
        # The host launches a GPU's kernels, so its speed counts for trials on a GPU, too.
        "host": {"processor": processor_name(), "usable_cores": usable_cores()},
        "libraries": library_versions(),
        "measurement_revision": measurement_revision,
        "cpus": usable_cores() if device.kind == "cpu" else None,
        "variables": measured_variables(os.environ),
        **encode(dataclasses.replace(software, packages={**software.packages, **optional})),
        **(_ranks(placement) if placement.ranks > 1 else {}),
    }


# PyPI's wheels of torch load NCCL from one of these.
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def _ranks(placement: Placement) -> Document:
    """Return the record of several ranks: their number, NCCL, and the links between the GPUs."""
    nccl = {
        "version": next(filter(None, map(version_of, _NCCL)), None),
        # These variables choose links, protocols and the number of channels.
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
    }
    return {
        **({"nccl": nccl} if placement.kind == "cuda" else {}),
        "device_uuids": [device.uuid for device in placement.devices],
        "ranks": {
            "world_size": placement.ranks,
            "backend": "nccl" if placement.kind == "cuda" else "gloo",
            "links": list(current_session().links(placement.uuids)) if placement.kind == "cuda" else [],
        },
    }


def measured_environment(environment: Document) -> Document:
    """Return the part of an environment's record that affects measurements, without what identifies the machine."""
    return {key: value for key, value in environment.items() if key not in _NOT_IN_KIND}


def environment_fingerprint(environment: Document) -> str:
    """Return a hash that is equal for two environments exactly when measurements of one are valid in the other."""
    return digest({**measured_environment(environment), "machine": _machine(environment)})


def is_of_kind(environment: Document, other: Document) -> bool:
    """Return whether two environments are equal except for the machine."""
    return digest(measured_environment(environment)) == digest(measured_environment(other))


def is_same_machine(recorded: Document, today: Document) -> bool:
    """Return whether two environments are of one machine; what was not recorded then counts as the same."""
    (devices_then, host_then), (devices_now, host_now) = _machine(recorded), _machine(today)
    return devices_then in ([None], devices_now) and host_then in (None, host_now)


def _machine(environment: Document) -> tuple[list[str | None], str | None]:
    """Return the identity of a machine: the UUIDs of its devices, and for a CPU the host."""
    uuids = environment.get("device_uuids") or [environment.get("device_uuid")]
    return sorted(uuids, key=str), environment.get("machine")


def comparable_environment(today: Document, recorded: Document) -> Document:
    """Return the facts of today's environment that a study of an earlier autotune recorded too, to compare both."""
    return {key: value for key, value in measured_environment(today).items() if key in recorded or value is None}

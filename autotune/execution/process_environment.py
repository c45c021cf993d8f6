"""Set the environment of the trial server: its devices alone, no variable of a launcher, and no secret of autotune."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from autotune.core.compiler_cache import keep_compiled
from autotune.core.device import CAPABILITY_VARIABLE
from autotune.core.placement import Placement

# Left in place by torchrun, accelerate launch, MPI and Slurm wrappers; any of them makes the
# Trainer believe that it is one of several ranks (accelerate.utils.get_int_from_env looks for them).
_DISTRIBUTED = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "NODE_RANK",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    }
)
_DISTRIBUTED_PREFIXES = ("MASTER_", "ACCELERATE_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "TORCHELASTIC_", "FSDP_",
                         "PARALLELISM_CONFIG_")  # fmt: skip
# What is autotune's own stays with the process that searches: tokens, and addresses of databases with their passwords.
_OWN_PREFIX = "AUTOTUNE_"
_RAY_TOKENS = frozenset({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"})


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without credentials of autotune's service, database or cluster."""
    return {
        name: value for name, value in variables.items() if name not in _RAY_TOKENS and not name.startswith(_OWN_PREFIX)
    }


def server_environment(
    placement: Placement, current: Mapping[str, str], *, offline: bool, own_code: bool = False
) -> dict[str, str]:
    """Return the environment for a server that runs trials only on the devices of ``placement``.

    It contains no credentials of autotune's service, database or cluster. ``offline`` stops the hub client from
    unneeded network requests; ``own_code`` keeps variables that the user's own code may depend on.
    """
    environment = {
        name: value
        for name, value in without_secrets(current).items()
        if name not in _DISTRIBUTED and not name.startswith(_DISTRIBUTED_PREFIXES)
    }
    # By UUID, since CUDA and NVML count devices differently; -1 is what CUDA reads as "none".
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(placement.uuids) if placement.kind == "cuda" else "-1"
    # torch.cuda.is_available() would otherwise start CUDA in the server, and its children have none.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if placement.ranks > 1:
        # As torchrun sets it for several processes on a host; read when OpenMP is loaded, before any fork.
        environment.setdefault("OMP_NUM_THREADS", "1")
    if not own_code:
        environment["TOKENIZERS_PARALLELISM"] = "false"
    capability = placement.device.capability
    if capability is not None:
        environment[CAPABILITY_VARIABLE] = ".".join(map(str, capability))
    # What this process can import; an empty entry means its working directory.
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    keep_compiled(environment)
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return environment

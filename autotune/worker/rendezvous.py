"""Let the ranks of a trial find each other: the trial server's store, and the variables that ``torchrun`` sets."""

from __future__ import annotations

import datetime
import json
import os
import socket
from typing import Any, TypeVar

from autotune.core.placement import RankDevices
from autotune.devices.nvml import gpu_number
from autotune.space.features import offloading_threads
from autotune.space.space import usable_cores

T = TypeVar("T")

_HOST = "127.0.0.1"


def open_store() -> Any:
    """Return a ``TCPStore`` for the ranks of one trial, on a free port of this host.

    The process that starts the ranks holds the store, as ``torchrun`` does, so no rank depends on a port that was free
    a moment before. torch itself would listen on every network interface, and a store has no password.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    # The store closes the socket.
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def lacks_nccl(devices: RankDevices) -> bool:
    """Return whether ranks on these devices need NCCL but torch lacks it."""
    from torch.distributed import is_nccl_available

    return devices.kind == "cuda" and devices.ranks > 1 and not is_nccl_available()


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables of ``torchrun`` for a rank on one host, with a store at ``port``.

    Source: ``torch/distributed/elastic/agent/server/local_elastic_agent.py`` of torch 2.13.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def prepare_deepspeed(device_kind: str, ranks: int, *, offloads: bool) -> None:
    """Set the environment variables and the threads of this process for DeepSpeed, before DeepSpeed is imported.

    DeepSpeed needs a process group even for one rank, as ``torchrun --nproc_per_node 1`` makes it. With port 0 the
    store takes a free port. For a training on the CPU, DeepSpeed would otherwise choose a GPU that it finds. Where it
    ``offloads`` the optimizer to the CPU, that gets this rank's share of the cores instead of a single thread.
    """
    import torch

    if ranks == 1 and "RANK" not in os.environ:
        os.environ.update({**rank_variables(0, 1, 0), "TORCHELASTIC_USE_AGENT_STORE": "False"})
    if device_kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        # Name GPUs by their numbers in NVML: DeepSpeed 0.19 cannot read UUIDs (``_get_nvml_gpu_id``). CUDA reads the
        # variable once, so CUDA is started first.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        numbers = [gpu_number(uuid) for uuid in named]
        if None not in numbers:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    if offloads:
        torch.set_num_threads(offloading_threads(usable_cores(), ranks))


class Ranks:
    """This process and the others that train with it; they exchange small values through a store, not through GPUs."""

    def __init__(self, rank: int = 0, count: int = 1, store: Any = None) -> None:
        self.rank = rank
        self.count = count
        self._store = store
        self._exchanges = 0
        self._later_stores: list[Any] = []

    @classmethod
    def join(cls, rank: int, count: int, timeout_seconds: float) -> Ranks:
        """Connect this process, rank ``rank`` of ``count``, to the store of its job; return its ``Ranks``."""
        if count == 1:
            return cls()
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        limit = datetime.timedelta(seconds=timeout_seconds)
        store = TCPStore(_HOST, int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
        return cls(rank, count, PrefixStore("autotune", store))

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in order of ranks, as JSON carries it. Every rank waits for all others."""
        if self._store is None:
            return [value]
        self._exchanges += 1
        self._store.set(f"{self._exchanges}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._exchanges}/{rank}")) for rank in range(self.count)]

    def open_store_anew(self) -> None:
        """Open a new store for another run of the user's code, and name it in ``MASTER_PORT``; every rank calls this.

        The old store still has the addresses of the earlier run's processes.
        """
        if self.rank == 0:
            self._later_stores.append(open_store())
        ports = self.gather(self._later_stores[-1].port if self.rank == 0 else None)
        os.environ["MASTER_PORT"] = str(ports[0])

    def announce(self, word: str) -> None:
        """Publish a word to all ranks without waiting."""
        if self._store is not None:
            self._store.set(word, "")

    def was_announced(self, word: str) -> bool:
        """Return whether any rank has published this word."""
        return self._store is not None and bool(self._store.check([word]))

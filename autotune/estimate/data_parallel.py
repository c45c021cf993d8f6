"""Predict what several ranks that train together with DDP add to a step: exchanging and copying the gradients.

DDP reduces the gradients of the last micro-step in buckets while the backward pass still runs. What it cannot hide is
the last bucket, and whatever the backward pass is too short for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.core.errors import InvalidRequestError
from autotune.core.prediction import Operations
from autotune.devices.gpus import Chip
from autotune.estimate.gpu_time import EFFICIENCIES

_BUCKET_BYTES = 25 * 2**20
"""``bucket_cap_mb`` of DistributedDataParallel, whose default the Trainer keeps."""
_COPIES = 4
"""Reads and writes of a gradient: into its bucket, and back (the Trainer leaves ``gradient_as_bucket_view`` off)."""
_SMALLEST_WORK_SECONDS = 2e-5
"""Least time of one all-reduce: 20 to 40 microseconds for 8 bytes on PCIe and NVLink hosts (nccl-tests; 42 microseconds
on eight RTX 4090 in github.com/NVIDIA/nccl/issues/1530)."""

Case = Literal["best", "usual", "worst"]
_CASES: tuple[Case, ...] = ("worst", "usual", "best")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds that the gradients of a step need between ranks, if nothing else runs."""

    all_reduce: float
    last_bucket: float
    copies: float

    def added_seconds(self, backward_seconds: float, *, overlaps: bool = True) -> float:
        """Return how much longer a step takes whose last backward pass takes this long."""
        hidden = backward_seconds if overlaps else 0.0
        return self.copies + max(self.last_bucket, self.all_reduce - hidden)


def exchange(operations: Operations, chip: Chip, ranks: int, case: Case = "usual") -> Exchange:
    """Return the exchange of gradients between ranks on GPUs of one host.

    A ring sends each byte 2 (n - 1) / n times. Raises ``InvalidRequestError`` for GPUs that have no link.
    """
    rates = chip.rates
    assert rates is not None
    if rates.link is None:
        raise InvalidRequestError(f"several {chip.name} in one host are not predicted", "ask for one")
    share = rates.link.shares[_CASES.index(case)]
    rate = rates.link.bytes_per_second * share
    sent = 2 * (ranks - 1) / ranks
    buckets = max(1, -(-operations.gradient_bytes // _BUCKET_BYTES))
    least = buckets * _SMALLEST_WORK_SECONDS
    return Exchange(
        all_reduce=least + sent * operations.gradient_bytes / rate,
        last_bucket=_SMALLEST_WORK_SECONDS + sent * min(_BUCKET_BYTES, operations.gradient_bytes) / rate,
        copies=_COPIES * operations.gradient_bytes / (rates.bandwidth_bytes_per_second * EFFICIENCIES.copy),
    )

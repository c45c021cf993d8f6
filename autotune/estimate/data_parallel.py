"""Predict the time that several ranks add to a step: communicating and copying gradients and weights.

DDP reduces the gradients of the last micro-step in buckets while the backward pass still runs. What it cannot hide is
the last bucket, and whatever the backward pass is too short for. FSDP gathers the weights of each layer before it
computes, and reduces gradients to the rank that keeps them; for that the host has more to do in every micro-step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.core.candidate import Candidate
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

_GATHER_HOST_SECONDS = 2.3e-5
"""What the host takes for each parameter of a micro-step, to gather it, to free it and to reduce its gradient."""
_GATHER_AGAIN_HOST_SECONDS = 3.9e-5
"""What it takes besides where weights are freed after the forward pass and gathered again."""
_SHARDED_UPDATE_HOST_SECONDS = 8.2e-5
"""What it takes for each parameter besides in clipping and in the optimizer, whose tensors are then DTensors.

These three are from steps of BERT-large in bf16 on two H200 (studies/landscapes): two with FSDP that frees weights, and
one that keeps them, compared with two of DDP that the host limited as well. They are divided by 1.55, by which that
host was slower than the one that ``HostSpeed`` describes."""

_PARAMETERS_OF_LAYER = 12
"""Of GPT-2; 16 of BERT and ViT, 9 of Llama."""

Case = Literal["best", "usual", "worst"]
_CASES: tuple[Case, ...] = ("worst", "usual", "best")


@dataclass(frozen=True, slots=True)
class Exchange:
    """What communication adds to the steps of a rank, in seconds."""

    exchanged: float
    """Of a whole step, for which gradients are reduced and weights gathered if nothing else runs, hidden or not."""
    shown: float
    """Of it what nothing hides: the last bucket; under FSDP the first gathering and the last reduction."""
    copies: float = 0.0
    """Of gradients into buckets, and back."""
    host_micro_step: float = 0.0
    """Of the host, for its calls in a micro-step."""
    host_step: float = 0.0

    def added_seconds(self, busy_seconds: float, *, overlaps: bool = True) -> float:
        """Return how much longer a step takes in which the GPU or the host is busy for this long meanwhile.

        That is the last backward pass; under FSDP all that is computed.
        """
        hidden = busy_seconds if overlaps else 0.0
        return self.copies + max(self.shown, self.exchanged - hidden)


def gathering(operations: Operations, chip: Chip, candidate: Candidate, case: Case = "usual") -> Exchange:
    """Return what FSDP adds to a candidate's steps on GPUs of one host; raises as ``exchange`` does.

    In a ring each rank receives all parts of the others once. In bf16 and fp16 weights are gathered and gradients
    reduced in 16 bits (accelerate's mixed precision of FSDP2).
    """
    arm = candidate.arm
    sent = (arm.ranks - 1) / arm.ranks * operations.gradient_bytes
    sent /= 2 if arm.precision in ("bf16", "fp16") else 1
    rate = _rate(chip, case)
    gathers = candidate.gradient_accumulation_steps * (1 if arm.strategy == "fsdp-keep" else 2)
    reductions = candidate.gradient_accumulation_steps if arm.sync_each_batch else 1
    tensors = operations.gradient_tensors
    units = max(1, tensors // _PARAMETERS_OF_LAYER)
    least = (gathers + reductions) * units * _SMALLEST_WORK_SECONDS
    host = _GATHER_HOST_SECONDS + (0.0 if arm.strategy == "fsdp-keep" else _GATHER_AGAIN_HOST_SECONDS)
    return Exchange(
        exchanged=least + (gathers + reductions) * sent / rate,
        shown=2 * (_SMALLEST_WORK_SECONDS + sent / units / rate),
        host_micro_step=host * tensors,
        host_step=_SHARDED_UPDATE_HOST_SECONDS * tensors,
    )


def _rate(chip: Chip, case: Case) -> float:
    """Return the bytes a second that a rank sends; raises ``InvalidRequestError`` for GPUs that have no link."""
    rates = chip.rates
    assert rates is not None
    if rates.link is None:
        raise InvalidRequestError(f"several {chip.name} in one host are not predicted", "ask for one")
    return rates.link.bytes_per_second * rates.link.shares[_CASES.index(case)]


def exchange(operations: Operations, chip: Chip, ranks: int, case: Case = "usual") -> Exchange:
    """Return the exchange of gradients between ranks on GPUs of one host.

    A ring sends each byte 2 (n - 1) / n times. Raises ``InvalidRequestError`` for GPUs that have no link.
    """
    rate, rates = _rate(chip, case), chip.rates
    assert rates is not None
    sent = 2 * (ranks - 1) / ranks
    buckets = max(1, -(-operations.gradient_bytes // _BUCKET_BYTES))
    least = buckets * _SMALLEST_WORK_SECONDS
    return Exchange(
        exchanged=least + sent * operations.gradient_bytes / rate,
        shown=_SMALLEST_WORK_SECONDS + sent * min(_BUCKET_BYTES, operations.gradient_bytes) / rate,
        copies=_COPIES * operations.gradient_bytes / (rates.bandwidth_bytes_per_second * EFFICIENCIES.copy),
    )

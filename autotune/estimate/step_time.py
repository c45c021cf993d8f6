"""Predict how long an optimizer step takes, from its GPU time and from the time the host takes to issue it.

The Trainer waits for the loss at the end of each micro-step. So a micro-step takes as long as the longest of three: the
GPU time of all operations; the host's forward pass followed by the GPU's backward pass; the host time of all
operations. A p-norm smooths the transition between them. Waiting for data is not predicted.

Several ranks communicate and copy gradients and weights as well. DDP reduces the gradients of the last micro-step in
buckets while the backward pass still runs. What it cannot hide is the last bucket, and whatever the backward pass is
too short for. FSDP gathers the weights of each layer before it computes, and reduces gradients to the rank that keeps
them; for that the host has more to do in every micro-step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

from autotune.core.candidate import Arm, Candidate
from autotune.core.device import Chip, Link, Precision, Rates
from autotune.core.errors import InvalidRequestError
from autotune.core.prediction import Operations
from autotune.estimate.gpu_time import EFFICIENCIES, FITTED_CHIP, GpuModel, GpuTime, gpu_time
from autotune.estimate.memory import MemoryModel

_BUCKET_BYTES = 25 * 2**20
"""``bucket_cap_mb`` of DistributedDataParallel, whose default the Trainer keeps."""
_COPIES = 4
"""Reads and writes of a gradient: into its bucket, and back (the Trainer leaves ``gradient_as_bucket_view`` off)."""

_GATHER_HOST_SECONDS = 2.3e-5
"""Host time for each parameter in a micro-step, to gather it, to free it and to reduce its gradient."""
_GATHER_AGAIN_HOST_SECONDS = 3.9e-5
"""Host time added to that where weights are freed after the forward pass and gathered again."""
_SHARDED_UPDATE_HOST_SECONDS = 8.2e-5
"""Host time added for each parameter in clipping and in the optimizer, whose tensors are then DTensors.

These three are from steps of BERT-large in bf16 on two H200 (studies/landscapes): two with FSDP that frees weights, and
one that keeps them, compared with two of DDP that the host limited as well. They are divided by 1.55, by which that
host was slower than the one that ``HostSpeed`` describes."""

_PARAMETERS_OF_LAYER = 12
"""Parameter tensors of a layer: 12 in GPT-2 (16 in BERT and ViT, 9 in Llama)."""

Case = Literal["best", "usual", "worst"]
_CASES: tuple[Case, ...] = ("worst", "usual", "best")
"""In the order of ``Link.cases``."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What communication adds to the steps of a rank, in seconds."""

    exchanged: float
    """Time to reduce gradients and gather weights in a whole step, hidden or not, if nothing else runs."""
    shown: float
    """The part that computation cannot hide: the last bucket; under FSDP the first gathering and the last reduction."""
    copies: float = 0.0
    """Time to copy gradients into buckets, and back."""
    host_micro_step: float = 0.0
    """Host time for communication calls in a micro-step."""
    host_step: float = 0.0
    """Host time that sharded tensors add to clipping and the optimizer."""

    def added_seconds(self, busy_seconds: float, *, overlaps: bool = True) -> float:
        """Return the seconds that communication adds to a step, after overlap with computation of ``busy_seconds``.

        Under DDP it overlaps with the last backward pass, under FSDP with all computation.
        """
        hidden = busy_seconds if overlaps else 0.0
        return self.copies + max(self.shown, self.exchanged - hidden)


def gathering(operations: Operations, chip: Chip, candidate: Candidate, case: Case = "usual") -> Exchange:
    """Return the communication that FSDP adds to a candidate's optimizer steps on GPUs of one host.

    In a ring each rank receives the parts of all other ranks once. In bf16 and fp16, weights are gathered and gradients
    reduced in 16 bits (accelerate's mixed precision of FSDP2). Under hybrid sharding, ranks of different groups then
    all-reduce the gradients of their part. Raises ``InvalidRequestError`` for GPUs without a known link.
    """
    arm, link = candidate.arm, _link(chip)
    exchanged_bytes = operations.gradient_bytes / (2 if arm.precision in ("bf16", "fp16") else 1)
    sent_bytes = (arm.sharing - 1) / arm.sharing * exchanged_bytes
    all_gather = link.group_gather if arm.dp_shard_size else link.all_gather
    gather, all_reduce = (link.cases(collective)[_CASES.index(case)] for collective in (all_gather, link.all_reduce))
    keeps_weights = arm.strategy == "fsdp-keep"
    # Weights that are freed after the forward pass are gathered again for the backward pass.
    gathers = candidate.gradient_accumulation_steps * (1 if keeps_weights else 2)
    reductions = candidate.gradient_accumulation_steps if arm.sync_each_batch else 1
    tensors = operations.gradient_tensors
    layers = max(1, tensors // _PARAMETERS_OF_LAYER)
    groups = arm.ranks // arm.sharing
    bytes_between_groups = 2 * (groups - 1) / groups * exchanged_bytes / arm.sharing
    between_groups = 0.0
    if groups > 1:
        between_groups = layers * all_reduce.call_seconds + bytes_between_groups / all_reduce.bytes_per_second
    host = _GATHER_HOST_SECONDS + (0.0 if keeps_weights else _GATHER_AGAIN_HOST_SECONDS)
    return Exchange(
        exchanged=(gathers + reductions) * (layers * gather.call_seconds + sent_bytes / gather.bytes_per_second)
        + reductions * between_groups,
        shown=2 * (gather.call_seconds + sent_bytes / layers / gather.bytes_per_second) + between_groups / layers,
        host_micro_step=host * tensors,
        host_step=_SHARDED_UPDATE_HOST_SECONDS * tensors,
    )


def _link(chip: Chip) -> Link:
    """Return the link between the GPUs. Raises ``InvalidRequestError`` for GPUs without a known link."""
    assert chip.rates is not None
    if chip.rates.link is None:
        raise InvalidRequestError(f"several {chip.name} in one host are not predicted", "ask for one")
    return chip.rates.link


def exchange(operations: Operations, chip: Chip, ranks: int, case: Case = "usual") -> Exchange:
    """Return what DDP's all-reduce of gradients adds to the optimizer steps of a rank, on GPUs of one host.

    A ring of n ranks sends each byte 2 (n - 1) / n times. Raises ``InvalidRequestError`` for GPUs without a known link.
    """
    link, rates = _link(chip), chip.rates
    assert rates is not None
    all_reduce = link.cases(link.all_reduce)[_CASES.index(case)]
    seconds_per_byte = 2 * (ranks - 1) / ranks / all_reduce.bytes_per_second
    buckets = max(1, math.ceil(operations.gradient_bytes / _BUCKET_BYTES))
    return Exchange(
        exchanged=buckets * all_reduce.call_seconds + seconds_per_byte * operations.gradient_bytes,
        shown=all_reduce.call_seconds + seconds_per_byte * min(_BUCKET_BYTES, operations.gradient_bytes),
        copies=_COPIES * operations.gradient_bytes / (rates.bandwidth_bytes_per_second * EFFICIENCIES.copy),
    )


Limiter = Literal["matrix products", "memory traffic", "host", "network"]

_ARITHMETIC = frozenset(("matrix_product", "attention", "attention_backward", "convolution"))


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """Time that a host takes to issue a step. Defaults were fitted to recorded H200 steps (``studies/step_times.py
    fit``).

    They belong to the median of the hosts there: Intel processors of 2.1 to 2.6 GHz in virtual machines.
    """

    forward_seconds: float = 1.4e-5
    """Seconds for each operation that Python dispatches, including views."""
    backward_seconds: float = 9.4e-6
    """Seconds for each operation that autograd dispatches."""
    recomputation_seconds: float = 2.5e-5
    """Seconds for each operation that a checkpoint repeats."""
    micro_step_seconds: float = 1.7e-3
    """Seconds before the first kernel of a micro-step and after its last."""
    step_seconds: float = 1.1e-3
    """Seconds in each optimizer step, outside of its micro-steps."""
    tensor_seconds: float = 2.7e-5
    """Seconds for each trained tensor, in clipping and in the optimizer."""
    sharding_seconds: float = 0.0
    """Seconds in each micro-step for gathering weights and reducing gradients; half of them in the forward pass."""

    def micro_step(self, operations: Operations) -> tuple[float, float]:
        """Return the seconds that the host takes to issue the forward and the backward pass."""
        dispatched = operations.dispatched
        backward = self.backward_seconds * dispatched["backward"]
        backward += self.recomputation_seconds * dispatched["recomputation"]
        half = self.sharding_seconds / 2
        return self.forward_seconds * dispatched["forward"] + half, backward + half

    def seconds(self, operations: Operations, accumulation: int) -> float:
        """Return the seconds that the host takes to issue an optimizer step of ``accumulation`` micro-steps."""
        micro_step = sum(self.micro_step(operations)) + self.micro_step_seconds
        return accumulation * micro_step + self.step_seconds + self.tensor_seconds * operations.gradient_tensors

    def scaled(self, factor: float) -> HostSpeed:
        """Return a host that is slower by ``factor``."""
        return HostSpeed(*(seconds * factor for seconds in astuple(self)))


# The smallest and the largest factor on a predicted time, of the GPU and of the host.
# All 57 recorded GPU times of the eight models that took no part in the fit were between 0.92 and 1.12 of the predicted
# ones (studies/kernel_times.py compare); earlier constants left 0.86 to 1.14. Hosts were between 0.6 and 1.8 of the
# median one (studies/step_times.py compare).
_MEASURED_CHIP, _HOST = (0.86, 1.14), (0.6, 1.8)
# On other chips the shares of the specified rates are assumed to be those of the H200. A factor of 1.6 either way held
# 96 of 100 published throughputs of 18 other GPUs (studies/published.py), which are of other training code mostly.
_OTHER_CHIP = (0.62, 1.6)

# Factors by which several ranks are slower than one, besides what the exchange adds: they wait for the slowest, share
# the host, and the exchange takes multiprocessors. The usual one is from two H200, 5 to 6 % slower than predicted where
# the GPU limits; the worst one holds 27 of 30 recorded and published cells of nine GPUs (studies/several_gpus.py).
_RANKS_USUAL, _RANKS_WORST = 1.05, 1.3

# FSDP2 computes in 16 bits throughout. The casts of autocast are left out, which predicts the steps of GPT-2 medium on
# two H200 within 7 %; normalisation and the loss in 16 bits may save more, a fifth at most (a choice).
_SHARDED_BEST = 0.8
_CASTS = frozenset(("cast", "elementwise_cast"))

_CORNER = 7.8
"""Exponent of the p-norm that combines the three limits of a micro-step."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted optimizer step."""

    candidate: Candidate
    seconds: float
    interval_seconds: tuple[float, float]
    gpu_seconds: float
    """Seconds for which the GPU computes."""
    host_seconds: float
    """Seconds until the host has issued everything, if it never waits for the GPU."""
    gpu_seconds_by_kind: dict[str, float]
    model_flops: float
    """Floating-point operations of matrix products in a step, without recomputation."""
    peak_flops: float
    """The specified rate of the chip in this precision."""
    exchange_seconds: float = 0.0
    """Seconds for which gradients are exchanged between ranks, hidden behind the backward pass or not."""
    unknown_operations: dict[str, int] = field(default_factory=dict)
    """How often a micro-step and the update run each operation of which only the memory traffic is predicted."""
    alone_seconds: float = 0.0
    """Seconds of a step if there were one rank only."""

    @property
    def scaling_efficiency(self) -> float | None:
        """Return throughput over that of the same number of independent GPUs; ``None`` for one GPU."""
        return self.alone_seconds / self.seconds if self.candidate.arm.ranks > 1 else None

    @property
    def unknown_share(self) -> float:
        """Return the share of GPU time in operations of unknown kind, whose memory traffic is assumed."""
        return self.gpu_seconds_by_kind.get("unknown", 0.0) / self.gpu_seconds if self.gpu_seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Return the throughput of all ranks together."""
        return self.candidate.samples_per_step / self.seconds

    @property
    def interval_samples_per_second(self) -> tuple[float, float]:
        """Return the throughputs at the ends of the interval, the lower one first."""
        low, high = self.interval_seconds
        return self.candidate.samples_per_step / high, self.candidate.samples_per_step / low

    @property
    def utilisation(self) -> float:
        """Return the model FLOPs utilization (MFU): model operations per second over the GPU's specified peak."""
        return self.model_flops / self.seconds / self.peak_flops

    @property
    def limited_by(self) -> Limiter:
        """Return what limits a step: matrix products, memory traffic, the host or the exchange of gradients."""
        if self.exchange_seconds > max(self.host_seconds, self.gpu_seconds):
            return "network"
        if self.host_seconds > self.gpu_seconds:
            return "host"
        arithmetic = sum(s for kind, s in self.gpu_seconds_by_kind.items() if kind in _ARITHMETIC)
        return "matrix products" if arithmetic >= self.gpu_seconds / 2 else "memory traffic"


def peak_flops(rates: Rates, precision: Precision) -> float:
    """Return the specified rate of matrix products in a precision."""
    if precision in ("bf16", "fp16"):
        return rates.half_flops
    return rates.tf32_flops if precision == "tf32" and rates.tf32_flops is not None else rates.fp32_flops


class StepTimeModel:
    """Predicts steps on one chip and host."""

    def __init__(self, chip: Chip, host: HostSpeed | None = None) -> None:
        assert chip.rates is not None
        self._chip = chip
        self._rates = chip.rates
        self._host = host or HostSpeed()
        self._doubt = _MEASURED_CHIP if chip.name.lower() == FITTED_CHIP else _OTHER_CHIP
        self._models: dict[Precision, GpuModel] = {}

    def knows(self, arm: Arm) -> bool:
        """Return whether steps of an arm can be predicted: on one GPU, or on several with a known link."""
        return arm.ranks == 1 or self._rates.link is not None

    def predict(self, operations: Operations, candidate: Candidate) -> StepTime:
        """Return the predicted optimizer step of a candidate with these traced operations, where ``knows`` is true."""
        precision = candidate.arm.precision
        if precision not in self._models:
            self._models[precision] = GpuModel(self._rates, precision, EFFICIENCIES)
        batch, accumulation = candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps
        gpu = gpu_time(operations, self._models[precision], batch, accumulation)
        alone = step_seconds(operations, gpu, self._host, accumulation)
        if candidate.arm.is_sharded and precision in ("bf16", "fp16"):
            # FSDP computes in 16 bits, without the casts that were traced.
            kept = {kind: seconds for kind, seconds in gpu.by_kind.items() if kind not in _CASTS}
            total = sum(gpu.by_kind.values())
            casts = sum(seconds for kind, seconds in gpu.by_kind.items() if kind in _CASTS)
            gpu = replace(_scaled_gpu_time(gpu, 1 - (casts / total if total else 0.0)), by_kind=kept)
        ranks, host = candidate.arm.ranks, self._host
        if candidate.arm.is_sharded:
            worst, usual, best = (gathering(operations, self._chip, candidate, case) for case in _CASES)
            tensor_seconds = host.tensor_seconds + usual.host_step / max(1, operations.gradient_tensors)
            host = replace(host, sharding_seconds=usual.host_micro_step, tensor_seconds=tensor_seconds)
        low, high = (
            step_seconds(operations, _scaled_gpu_time(gpu, gpu_factor), host.scaled(host_factor), accumulation)
            for gpu_factor, host_factor in zip(self._doubt, _HOST, strict=True)
        )
        seconds, exchanged = step_seconds(operations, gpu, host, accumulation), 0.0
        if candidate.arm.is_sharded:
            low = low * _SHARDED_BEST + best.added_seconds(low)
            seconds = seconds * _RANKS_USUAL + usual.added_seconds(seconds)
            high = high * _RANKS_WORST + worst.added_seconds(0.0, overlaps=False)
            exchanged = usual.exchanged
        elif ranks > 1:
            worst, usual, best = (exchange(operations, self._chip, ranks, case) for case in _CASES)
            backward = max(gpu.backward, self._host.micro_step(operations)[1])
            low += best.added_seconds(backward * self._doubt[0])
            seconds = seconds * _RANKS_USUAL + usual.added_seconds(backward)
            # Links that are shared, and buckets that are exchanged only after the backward pass.
            high = high * _RANKS_WORST + worst.added_seconds(0.0, overlaps=False)
            exchanged = usual.exchanged
        return StepTime(
            candidate,
            seconds,
            (low, high),
            gpu.of_step(accumulation),
            host.seconds(operations, accumulation),
            gpu.by_kind,
            accumulation * operations.product_flops(batch),
            self._rates.half_flops if operations.is_in_half(batch) else peak_flops(self._rates, precision),
            exchanged,
            operations.unknown,
            alone,
        )


def _scaled_gpu_time(gpu: GpuTime, factor: float) -> GpuTime:
    """Return the times of all parts multiplied by ``factor``; ``by_kind`` stays as it is."""
    return replace(
        gpu,
        forward=gpu.forward * factor,
        backward=gpu.backward * factor,
        accumulation=gpu.accumulation * factor,
        update=gpu.update * factor,
    )


def step_seconds(operations: Operations, gpu: GpuTime, host: HostSpeed, accumulation: int) -> float:
    """Return the seconds of an optimizer step from the times of the GPU and the host for its parts."""
    host_forward, host_backward = host.micro_step(operations)
    # All micro-steps but the first add gradients: the mean over micro-steps.
    adding = gpu.accumulation * (accumulation - 1) / accumulation
    gpu_seconds = gpu.forward + gpu.backward + adding
    # The limits are the GPU, the host until the GPU's backward pass, and the host, as the module describes.
    micro_step = _smooth_maximum(gpu_seconds, host_forward + gpu.backward, host_forward + host_backward)
    update = max(gpu.update, host.tensor_seconds * operations.gradient_tensors)
    return accumulation * (micro_step + host.micro_step_seconds) + update + host.step_seconds


def _smooth_maximum(*seconds: float) -> float:
    """Return the p-norm of several times: about the longest, and more where two are about as long."""
    longest = max(seconds)
    # Divided by the longest, since powers of small times are close to zero.
    total: float = math.fsum((each / longest) ** _CORNER for each in seconds)
    return longest * math.pow(total, 1 / _CORNER)


class StepForecast:
    """Predicts the optimizer steps of candidates from the operations of their arms, each step once."""

    def __init__(self, memory: MemoryModel, chip: Chip) -> None:
        self._memory = memory
        self._model = StepTimeModel(chip)
        self._known: dict[Candidate, StepTime] = {}

    def predicted(self, candidate: Candidate) -> StepTime | None:
        """Return a candidate's predicted step; ``None`` without traced operations or a known link of several GPUs."""
        if candidate not in self._known:
            operations = self._memory.operations(candidate.arm)
            if operations is None or not self._model.knows(candidate.arm):
                return None
            self._known[candidate] = self._model.predict(operations, candidate)
        return self._known[candidate]

    def known(self) -> Iterable[StepTime]:
        """Return the steps that were predicted so far."""
        return self._known.values()

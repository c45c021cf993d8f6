"""Predict how long the GPU computes in a training step, from the operations of a step traced with fake tensors.

Each operation takes as long as the slower of its arithmetic and its memory traffic (a roofline), and at least as long
as an empty kernel. Matrix products are cut into tiles, which the multiprocessors compute in waves. Rates of the chip
are specified ones; the share of them that each class of operation reaches was fitted to recorded GPU times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

from autotune.core.device import PCIE_4, Calibration, Chip, Precision, Rates
from autotune.core.prediction import Operation, Operations, amount_at


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Share of a chip's specified rates that each class of operation reaches.

    The defaults were fitted by ``studies/kernel_times.py fit`` to kernel and GPU times of nine models on an H200 (torch
    2.11, CUDA 13.0).
    """

    half_products: float = 0.853
    tf32_products: float = 0.643
    fp32_products: float = 0.812
    unaligned_half_products: float = 0.156
    """Further factor for matrices whose rows are not multiples of 16 bytes, which cannot be loaded in blocks."""
    unaligned_tf32_products: float = 0.394
    half_rate_products: float = 1.0
    """Share on chips whose tensor cores sum in float32 at half rate, for 16-bit and TF32 products. Not fitted: 1.01 on
    an RTX 3090 Ti and 1.04 on an RTX 4090, where 0.74 of an A100's rate was reached (github.com/mli/
    transformers-benchmarks, micro-benchmarks of 2022 and 2024). These chips are not held back by their power limit."""
    product_overhead: float = 28.6
    """Overhead at the beginning and end of each tile of a product, in steps of its inner dimension."""
    product_traffic: float = 0.652
    flash_forward: float = 0.409
    """Share of the 16-bit peak that attention over long sequences reaches, without dropout and causal masks."""
    flash_backward: float = 0.294
    efficient_forward: float = 0.168
    efficient_backward: float = 0.135
    float32_forward: float = 0.584
    """Share of the float32 peak that attention in float32 reaches, whatever the precision of other products."""
    float32_backward: float = 0.648
    flash_forward_ramp: float = 161.0
    """Number of keys at which attention takes twice as long as its operations would at that share."""
    flash_backward_ramp: float = 140.0
    flash_backward_causal: float = 154.0
    """What a causal mask adds to the ramp: tiles on the diagonal are computed whole."""
    flash_dropout: float = 1.39
    """What dropout adds in the forward pass, in times of attention without; causal masks do not halve it."""
    efficient_ramp: float = 49.2
    """The ramp of attention in float32 and of attention with a bias, in both passes."""
    efficient_causal: float = 57.4
    efficient_dropout: float = 0.306
    convolution: float = 0.509
    """Share of the rate of matrix products of the same dtype."""
    elementwise: float = 0.765
    """This and all that follow: shares of the memory bandwidth."""
    elementwise_cast: float = 0.726
    """Operations on mixed dtypes, whose elements are converted one by one."""
    dropout: float = 0.646
    cast: float = 0.705
    copy: float = 0.787
    transpose: float = 0.386
    normalisation: float = 0.516
    normalisation_backward: float = 0.307
    softmax: float = 0.776
    reduction: float = 0.272
    gather: float = 0.329
    update: float = 0.712
    kernel_seconds: float = 1.67e-06
    """Shortest time of a kernel."""


EFFICIENCIES = Efficiencies()

# Number of kernels that an operation starts, where it is not one.
_KERNELS = {
    "normalisation_backward": 2.0,
    "reduction": 1.3,
    "gather": 1.5,
    "attention": 2.5,
    "attention_backward": 6.0,
    "convolution": 2.0,
}

# Rows and columns of a tile, and its rate relative to that of the largest tile.
_TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.5))
_SPLITS = (1, 2, 4, 8, 16)
"""Numbers of parts into which the inner dimension may be cut, so that all multiprocessors have work."""
_LEAST_SPLIT = 512
"""Least inner dimension of a part."""
_ALIGNMENT_BYTES = 16
_ATTENTION_TILE = 64
"""Queries and keys of a tile of attention."""
_HALF = ("float16", "bfloat16")


class GpuModel:
    """Predicts GPU time on one chip in one precision."""

    def __init__(self, rates: Rates, precision: Precision, efficiencies: Efficiencies = EFFICIENCIES) -> None:
        """Compute the rates that matrix products reach in 16 bits and in float32, from a chip's specified rates."""
        self._rates, self._precision, self._efficiencies = rates, precision, efficiencies
        half_share, tf32_share = efficiencies.half_products, efficiencies.tf32_products
        if rates.sums_at_half_rate:
            half_share = tf32_share = efficiencies.half_rate_products
        self._half_flops = rates.half_flops * half_share
        fp32_flops, tf32_flops = rates.fp32_flops * efficiencies.fp32_products, (rates.tf32_flops or 0.0) * tf32_share
        self._uses_tf32 = precision == "tf32" and tf32_flops > fp32_flops
        self._float32_flops = tf32_flops if self._uses_tf32 else fp32_flops

    def seconds(self, operation: Operation, batch: int) -> float:
        """Return the seconds of an operation at a batch: its empty kernels, plus its arithmetic or memory traffic."""
        empty_seconds = self._efficiencies.kernel_seconds * _KERNELS.get(operation.kind, 1.0)
        if operation.kind == "matrix_product":
            return empty_seconds + self._product_seconds(operation, batch)
        size_bytes = amount_at(operation.bytes, batch)
        traffic_seconds = self._traffic_seconds(size_bytes, self._bandwidth_share(operation.kind))
        if operation.kind in ("attention", "attention_backward"):
            return empty_seconds + max(self._attention_seconds(operation, batch), traffic_seconds)
        if operation.kind == "convolution":
            flops_per_second = self._product_rate(operation.dtype) * self._efficiencies.convolution
            return empty_seconds + max(amount_at(operation.flops, batch) / flops_per_second, traffic_seconds)
        return empty_seconds + traffic_seconds

    def _bandwidth_share(self, kind: str) -> float:
        """Return the share of the memory bandwidth that the kernels of one kind of operation reach."""
        if kind == "fused_update":
            return self._efficiencies.update
        if kind in ("fill", "unknown", "attention", "attention_backward", "convolution"):
            return self._efficiencies.elementwise
        share: float = getattr(self._efficiencies, kind)
        return share

    def _product_rate(self, dtype: str) -> float:
        """Return the floating-point operations per second that large matrix products of a dtype reach."""
        return self._half_flops if dtype in _HALF else self._float32_flops

    def _attention_seconds(self, operation: Operation, batch: int) -> float:
        """Return the seconds of attention's arithmetic in whole tiles; short sequences, masks and dropout slow it."""
        own = self._efficiencies
        # ``shape`` has batch, heads, queries, keys and the size of a head, then four options that are 0 or 1.
        queries, keys = (amount_at(size, batch) for size in operation.shape[2:4])
        is_flash, _, drops, is_causal = (option[1] for option in operation.shape[5:9])
        backward = operation.kind == "attention_backward"
        if is_flash and backward:
            ramp, causal, dropout = own.flash_backward_ramp, own.flash_backward_causal, 0.0
        elif is_flash:
            ramp, causal, dropout = own.flash_forward_ramp, 0.0, own.flash_dropout
        else:
            ramp, causal, dropout = own.efficient_ramp, own.efficient_causal, own.efficient_dropout
        slowdown = 1 + (ramp + causal * is_causal) / keys + dropout * drops * (1 + is_causal)
        tiles = math.ceil(queries / _ATTENTION_TILE) * math.ceil(keys / _ATTENTION_TILE)
        padding_factor = tiles * _ATTENTION_TILE**2 / (queries * keys)
        return amount_at(operation.flops, batch) * padding_factor * slowdown / self._attention_rate(operation)

    def _attention_rate(self, operation: Operation) -> float:
        """Return the floating-point operations per second that an attention kernel reaches with long sequences."""
        own = self._efficiencies
        backward = operation.kind == "attention_backward"
        if operation.dtype not in _HALF:
            return self._rates.fp32_flops * (own.float32_backward if backward else own.float32_forward)
        is_flash = operation.shape[5][1]
        if is_flash:
            return self._rates.half_flops * (own.flash_backward if backward else own.flash_forward)
        return self._rates.half_flops * (own.efficient_backward if backward else own.efficient_forward)

    def _product_seconds(self, operation: Operation, batch: int) -> float:
        """Return the seconds of a matrix product: of its fastest tiling, or of its memory traffic if that is slower."""
        products, rows, columns, inner = (amount_at(size, batch) for size in operation.shape)
        item_bytes = 2 if operation.dtype in _HALF else 4
        rate = self._product_rate(operation.dtype)
        # Only sizes that do not grow with the batch count: these are the lengths of rows.
        row_lengths = [size[1] for size in operation.shape[1:] if size[0] == 0]
        if any(length > 1 and length * item_bytes % _ALIGNMENT_BYTES for length in row_lengths):
            rate *= self._unaligned_factor(operation.dtype)
        fastest_seconds = math.inf
        for tile_rows, tile_columns, share in _TILES:
            tiles = products * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            for parts in _SPLITS:
                if parts > 1 and inner < parts * _LEAST_SPLIT:
                    break
                waves = math.ceil(tiles * parts / self._rates.multiprocessors)
                steps = inner / parts + self._efficiencies.product_overhead
                seconds = waves * 2 * tile_rows * tile_columns * steps * self._rates.multiprocessors / (rate * share)
                if parts > 1:
                    # Each part writes its float32 sums, which are then read and added.
                    sums_bytes = (parts + 1) * 4 * products * rows * columns
                    seconds += self._traffic_seconds(sums_bytes, self._efficiencies.elementwise)
                fastest_seconds = min(fastest_seconds, seconds)
        moved_bytes = item_bytes * products * (rows * inner + inner * columns + rows * columns)
        return max(fastest_seconds, self._traffic_seconds(moved_bytes, self._efficiencies.product_traffic))

    def _unaligned_factor(self, dtype: str) -> float:
        """Return the factor, 1 or less, on the rate of products whose rows are not aligned for tensor cores."""
        if dtype in _HALF:
            return self._efficiencies.unaligned_half_products
        # Without tensor cores, elements are loaded one by one anyway.
        return self._efficiencies.unaligned_tf32_products if self._uses_tf32 else 1.0

    def _traffic_seconds(self, size_bytes: float, share: float) -> float:
        """Return the seconds to move some bytes at a share of the memory bandwidth."""
        return size_bytes / (self._rates.bandwidth_bytes_per_second * share)

    def accumulation_seconds(self, operations: Operations) -> float:
        """Return the seconds of adding a further micro-step's gradients to earlier ones: two reads and one write."""
        traffic_seconds = self._traffic_seconds(3 * operations.gradient_bytes, self._efficiencies.elementwise)
        return operations.gradient_tensors * self._efficiencies.kernel_seconds + traffic_seconds

    def clipping_seconds(self, operations: Operations) -> float:
        """Return the seconds of clipping: the norm of all gradients is computed, then they are scaled."""
        # A read for the norm, a read and a write for scaling. In fp16, undoing the loss scale is a read and a write.
        passes = 5 if self._precision == "fp16" else 3
        return self._traffic_seconds(passes * operations.gradient_bytes, self._efficiencies.elementwise)


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Seconds for which the GPU computes in the parts of an optimizer step."""

    forward: float
    """In each micro-step."""
    backward: float
    """In each micro-step, including the layers that checkpoints recompute."""
    accumulation: float
    """To add gradients, in each micro-step but the first."""
    update: float
    """Including the clipping of gradients."""
    by_kind: dict[str, float]
    """Seconds of the whole optimizer step by kind of operation."""

    def of_step(self, accumulation: int) -> float:
        """Return the seconds of an optimizer step of ``accumulation`` micro-steps."""
        return accumulation * (self.forward + self.backward) + (accumulation - 1) * self.accumulation + self.update


def gpu_time(operations: Operations, model: GpuModel, batch: int, accumulation: int) -> GpuTime:
    """Predict for how long the GPU computes in an optimizer step of ``accumulation`` micro-steps.

    ``operations`` are those of one traced micro-step and one update, ``batch`` is the per-device batch.
    """
    parts = {"forward": 0.0, "backward": 0.0, "recomputation": 0.0, "update": 0.0}
    by_kind: dict[str, float] = {}
    for operation in operations.rows:
        if operation.part == "update" and operation.kind == "fill":
            # An optimizer fills its new state in its first step alone.
            continue
        seconds = operation.count * model.seconds(operation, batch)
        parts[operation.part] += seconds
        times = 1 if operation.part == "update" else accumulation
        by_kind[operation.kind] = by_kind.get(operation.kind, 0.0) + times * seconds
    adding, clipping = model.accumulation_seconds(operations), model.clipping_seconds(operations)
    by_kind |= {"gradient_accumulation": (accumulation - 1) * adding, "gradient_clipping": clipping}
    backward = parts["backward"] + parts["recomputation"]
    return GpuTime(parts["forward"], backward, adding, parts["update"] + clipping, by_kind)


FITTED_CHIP = "h200"
"""Constants were fitted to this chip, so its matrix product rates are not corrected."""
_MOST_FACTOR = 1.6
"""Largest factor between a measured and a predicted rate that is believed, as wide as the interval of other GPUs."""


def calibrated(chip: Chip, measured: Calibration | None) -> Chip:
    """Return the chip with specified rates replaced by measured ones: of its link, and of its matrix products.

    Matrix products of the chip that the constants were fitted to stay. Without ``measured``, the chip stays as it is.

    With published micro-benchmarks of four GPUs in place of measured ones, the median error of their published
    throughputs fell from 14.6 to 7.0 % in float32 and from 9.2 to 3.0 % in TF32, and rose from 22.7 to 23.7 % in fp16
    (studies/published.py). Bandwidth, launches and dispatch are measured and recorded, but correct nothing: there is no
    data to say how.
    """
    rates = chip.rates
    if measured is None or rates is None:
        return chip
    if measured.collectives:
        rates = replace(rates, link=replace(rates.link or PCIE_4, **cast("dict[str, Any]", measured.collectives)))
        chip = replace(chip, rates=rates)
    if chip.name.lower() == FITTED_CHIP:
        return chip
    kinds: tuple[tuple[str, Precision, str], ...] = (
        ("half", "fp16", "float16"),
        ("tf32", "tf32", "float32"),
        ("fp32", "fp32", "float32"),
    )
    factors = {kind: _rate_factor(rates, precision, dtype, kind, measured) for kind, precision, dtype in kinds}
    corrected = replace(
        rates,
        half_flops=rates.half_flops * factors["half"],
        tf32_flops=None if rates.tf32_flops is None else rates.tf32_flops * factors["tf32"],
        fp32_flops=rates.fp32_flops * factors["fp32"],
    )
    # The specified rates decide whether tensor cores sum at half rate. Corrected rates that say otherwise are dropped.
    return replace(chip, rates=corrected) if corrected.sums_at_half_rate == rates.sums_at_half_rate else chip


def _rate_factor(rates: Rates, precision: Precision, dtype: str, kind: str, measured: Calibration) -> float:
    """Return measured over predicted rate of a square matrix product; 1 where none was measured, or implausibly."""
    measured_flops, side = measured.product_flops.get(kind), measured.product_size
    if not measured_flops:
        return 1.0
    product = Operation("forward", "matrix_product", dtype, (0, 0), (0, 0), ((0, 1), *[(0, side)] * 3), 1)
    predicted_seconds = GpuModel(rates, precision).seconds(product, 1)
    factor = measured_flops * predicted_seconds / (2 * side**3)
    return factor if 1 / _MOST_FACTOR <= factor <= _MOST_FACTOR else 1.0

"""Correct the specified rates of a GPU by what was measured on it (``autotune.worker.gpu_facts``)."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.chip import Calibration as Calibration
from autotune.core.chip import Chip, Rates
from autotune.core.device import Precision
from autotune.core.prediction import Operation
from autotune.estimate.gpu_time import GpuModel

_FITTED_CHIP = "h200"
"""Constants were fitted to it, so that nothing is to be corrected there."""
_MOST = 1.6
"""A measured rate further from the predicted one than the interval of other GPUs reaches is not believed."""


def calibrated(chip: Chip, measured: Calibration | None) -> Chip:
    """Return the chip with its rates of matrix products so that measured products are predicted rightly.

    With published micro-benchmarks of four GPUs in place of measured ones, the median error of their published
    throughputs fell from 14.6 to 7.0 % in float32 and from 9.2 to 3.0 % in TF32, and rose from 22.7 to 23.7 % in fp16
    (studies/published.py). Bandwidth, launches and dispatch are measured and kept, and correct nothing: there are no
    data to say how.
    """
    rates = chip.rates
    if measured is None or rates is None or chip.name.lower() == _FITTED_CHIP:
        return chip
    kinds: tuple[tuple[str, Precision, str], ...] = (
        ("half", "fp16", "float16"),
        ("tf32", "tf32", "float32"),
        ("fp32", "fp32", "float32"),
    )
    factors = {kind: _factor(rates, precision, dtype, kind, measured) for kind, precision, dtype in kinds}
    corrected = replace(
        rates,
        half_flops=rates.half_flops * factors["half"],
        tf32_flops=None if rates.tf32_flops is None else rates.tf32_flops * factors["tf32"],
        fp32_flops=rates.fp32_flops * factors["fp32"],
    )
    # What class of chip it is follows from the specified rates.
    return replace(chip, rates=corrected) if corrected.sums_at_half_rate == rates.sums_at_half_rate else chip


def _factor(rates: Rates, precision: Precision, dtype: str, kind: str, measured: Calibration) -> float:
    """Return measured over predicted rate of a product; 1 where it was not measured, or is not believed."""
    flops, size = measured.product_flops.get(kind), (0, measured.product_size)
    if not flops:
        return 1.0
    product = Operation("forward", "matrix_product", dtype, (0, 0), (0, 0), ((0, 1), size, size, size), 1)
    factor = flops * GpuModel(rates, precision).seconds(product, 1) / (2 * measured.product_size**3)
    return factor if 1 / _MOST <= factor <= _MOST else 1.0

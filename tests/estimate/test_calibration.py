"""Specified rates corrected by measured matrix products."""

import pytest
from published import calibrated_errors

from autotune.core.chip import Calibration
from autotune.core.prediction import Operation
from autotune.devices.gpus import CHIPS
from autotune.estimate.gpu_time import GpuModel, calibrated

SIZE = 4096


def measured(**flops: float) -> Calibration:
    return Calibration(SIZE, flops, None, 2e-6, 4e-6)


def seconds(name: str, precision: str, calibration: Calibration | None) -> float:
    """Predicted seconds of the product that is measured."""
    rates = calibrated(CHIPS[name], calibration).rates
    assert rates is not None
    dtype = "float16" if precision == "fp16" else "float32"
    product = Operation("forward", "matrix_product", dtype, (0, 0), (0, 0), ((0, 1), *[(0, SIZE)] * 3), 1)
    return GpuModel(rates, precision).seconds(product, 1)  # type: ignore[arg-type]


def test_a_measured_product_is_predicted_as_it_was_measured() -> None:
    known = measured(half=200e12, tf32=116e12, fp32=18e12)
    for precision, flops in (("fp16", 200e12), ("tf32", 116e12), ("fp32", 18e12)):
        assert seconds("a100-80gb", precision, known) == pytest.approx(2 * SIZE**3 / flops, rel=0.02)


def test_what_was_not_measured_or_is_not_believed_stays() -> None:
    plain = seconds("a100-80gb", "fp16", None)
    assert seconds("a100-80gb", "fp16", measured(tf32=116e12)) == plain
    assert seconds("a100-80gb", "fp16", measured(half=20e12)) == plain
    chip = CHIPS["h200"]
    assert calibrated(chip, measured(half=500e12)) is chip


def test_published_micro_benchmarks_correct_published_throughputs() -> None:
    for precision, before, after in calibrated_errors():
        if precision == "fp16":
            assert after < before + 0.02
        else:
            assert after < before

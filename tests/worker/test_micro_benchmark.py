"""The micro-benchmark of a machine, on the CPU."""

import torch

from autotune.worker.gpu_facts import calibrate


def test_the_cpu_is_measured_and_settings_are_as_before() -> None:
    precision = torch.get_float32_matmul_precision()
    measured = calibrate(torch.device("cpu"), 0.01)
    assert set(measured.product_flops) == {"half", "fp32"}
    assert all(flops > 1e6 for flops in measured.product_flops.values())
    assert measured.bytes_per_second > 1e6
    assert 0 < measured.dispatch_seconds <= measured.kernel_seconds < 1
    assert torch.get_float32_matmul_precision() == precision

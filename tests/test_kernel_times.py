"""Test that recorded kernel times are compared with predictions."""

import json
import statistics
from dataclasses import asdict
from pathlib import Path

import kernel_times
import pytest
from recorded_steps import LANDSCAPES, Subject
from step_times import H200, operations_of

from autotune.core.candidate import Arm, Document
from autotune.core.prediction import Operation
from autotune.estimate.gpu_time import EFFICIENCIES, GpuModel, gpu_time

KERNEL_TIMES = LANDSCAPES / "kernel_times_h200.jsonl.gz"


def test_recorded_kernel_times_of_models_without_a_part_in_the_fit_are_predicted() -> None:
    rows = kernel_times.measured_cells(KERNEL_TIMES)
    held_out = [row for row in rows if Subject(row["model"]).family not in kernel_times.fitted_families()]
    assert len({row["model"] for row in held_out}) >= 8
    pairs = [kernel_times.parts(kernel_times.predicted_for(row, EFFICIENCIES), row)["micro-step"] for row in held_out]
    errors = sorted(abs(ours / theirs - 1) for ours, theirs in pairs)
    assert statistics.median(errors) < 0.05
    assert errors[int(0.9 * len(errors))] < 0.1


def test_long_sequences_reach_more_of_the_peak_and_dropout_takes_time() -> None:
    model = GpuModel(H200.rates, "bf16")

    def share(length: int, drops: int, causal: int) -> float:
        shape = ((1, 0), *[(0, number) for number in (16, length, length, 64, 1, 0, drops, causal)])
        flops = 2 * 2 * 16 * length**2 * 64 // (1 + causal)
        attention = Operation("forward", "attention", "bfloat16", (flops, 0), (0, 0), shape, 1)
        return 64 * flops / model.seconds(attention, 64) / H200.rates.half_flops

    assert share(128, 0, 0) < share(512, 0, 0) < share(2048, 0, 0)
    assert share(512, 1, 1) < share(512, 1, 0) < share(512, 0, 0)


def line(subject: Subject, arm: Arm, batch: int, factor: float) -> Document:
    """A recorded cell whose GPU times are the predicted ones times a factor."""
    gpu = gpu_time(operations_of(subject, arm), GpuModel(H200.rates, arm.precision), batch, 1)
    micro_step = (gpu.forward + gpu.backward) * factor
    further = micro_step + gpu.accumulation * factor
    seconds = {"first_micro_step": micro_step, "further_micro_step": further, "update": gpu.update * factor}
    kernels = {part: [["matrix_product", "gemm", 1, int(seconds[part] * 1e9)]] for part in seconds}
    return {**asdict(subject), "batch": batch, "arm": asdict(arm), "gpu_seconds": seconds, "kernels": kernels}


def test_errors_are_told_by_what_is_known_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"meta": True},
        line(Subject("bert-large-uncased", 512), Arm("bf16"), 16, 1 / 1.02),
        line(Subject("answerdotai/ModernBERT-base", 512), Arm("bf16"), 16, 1 / 0.9),
        {**asdict(Subject("gpt2")), "batch": 8, "arm": asdict(Arm("fp32")), "error": "OutOfMemoryError: no memory"},
    ]
    path = tmp_path / "times.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    kernel_times.compare(path)

    lines = {text[:58].strip(): text[58:].split() for text in capsys.readouterr().out.splitlines()}
    assert lines["2 cells of 2 models; 1 failed"] == []
    assert lines["micro-step, fitted, bf16"] == ["1", "2.0%", "2.0%", "2.0%", "+2.0%"]
    assert lines["micro-step, held out, bf16"] == ["1", "10.0%", "10.0%", "10.0%", "-10.0%"]
    assert lines["update"][0] == "2"

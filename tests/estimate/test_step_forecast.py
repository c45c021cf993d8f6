"""What a search makes of predicted step times: where it begins, what it leaves out, and when it trusts them."""

from __future__ import annotations

import pytest
from recorded_steps import Subject, operations_key, recorded_operations

from autotune.core.candidate import Arm, Candidate
from autotune.core.units import GIB
from autotune.devices import Ceiling
from autotune.devices.gpus import CHIPS, chip_of_device
from autotune.estimate.memory import MemoryModel, Question
from autotune.estimate.step_forecast import StepForecast

BF16, CHECKPOINTED, TF32 = Arm("bf16"), Arm("bf16", True), Arm("tf32")


@pytest.fixture(scope="module")
def forecast() -> StepForecast:
    """BERT-large at 512 tokens on an H200; nothing is known of its memory."""
    recorded = recorded_operations()
    memory = MemoryModel(Ceiling(None, 139 * GIB, 0))
    for arm in (BF16, CHECKPOINTED, TF32):
        operations = recorded[operations_key(Subject("bert-large-uncased", 512), arm)]
        memory.add(Question(arm, (), None), {"batches": [], "largest_batch": None, "operations": operations})
    return StepForecast(memory, CHIPS["h200"])


def test_arms_are_ordered_as_they_were_measured(forecast: StepForecast) -> None:
    # 297, 240 and 121 samples a second on an H200.
    speeds = [
        forecast.samples_per_second(candidate)
        for candidate in (Candidate(BF16, 32, 2), Candidate(CHECKPOINTED, 64, 1), Candidate(TF32, 16, 4))
    ]
    assert speeds == sorted(speeds, key=lambda speed: -(speed or 0))


def test_nothing_is_predicted_of_what_was_not_traced(forecast: StepForecast) -> None:
    assert forecast.samples_per_second(Candidate(Arm("fp32", attn_implementation="eager"), 8)) is None
    assert forecast.samples_per_second(Candidate(Arm("bf16", torch_compile=True), 8)) is None
    assert forecast.most([Candidate(BF16, 8), Candidate(Arm("bf16", use_liger_kernel=True), 8)]) is None


def test_predictions_hold_while_all_that_was_measured_is_in_its_interval(forecast: StepForecast) -> None:
    near, far = (Candidate(BF16, 32, 2), 297.0), (Candidate(TF32, 16, 4), 20.0)
    assert forecast.has_held([near])
    assert not forecast.has_held([near, far])
    # Nothing was measured, or nothing of which there is a prediction.
    assert not forecast.has_held([])
    assert not forecast.has_held([(Candidate(Arm("bf16", torch_compile=True), 8), 100.0)])


def test_the_upper_end_of_an_arm_is_that_of_its_fastest_batch(forecast: StepForecast) -> None:
    small, large = Candidate(CHECKPOINTED, 8, 8), Candidate(CHECKPOINTED, 64, 1)
    most = forecast.most([small, large])
    assert most == forecast.most([large])
    assert most is not None
    # What was measured without checkpointing is out of its reach.
    assert 240 < most < 297


def test_a_batch_is_surely_slower_only_by_more_than_predictions_leave_open(forecast: StepForecast) -> None:
    assert forecast.is_surely_slower(Candidate(BF16, 8, 8), Candidate(BF16, 32, 2))
    assert not forecast.is_surely_slower(Candidate(BF16, 32, 2), Candidate(BF16, 8, 8))
    assert not forecast.is_surely_slower(Candidate(CHECKPOINTED, 120, 1), Candidate(CHECKPOINTED, 128, 1))


def test_chips_are_known_by_what_drivers_call_them() -> None:
    assert chip_of_device("NVIDIA H200") is CHIPS["h200"]
    assert chip_of_device("NVIDIA A100-SXM4-80GB") is CHIPS["a100-80gb"]
    assert chip_of_device("Voodoo 2") is None

"""What is told of a GPU's speed: measured there, scaled from another GPU, or predicted."""

import pytest
from histories import completed
from recorded_steps import Subject, operations_key, recorded_operations

from autotune.core.candidate import Arm, Candidate
from autotune.core.prediction import Operations
from autotune.core.schema import decode
from autotune.devices.gpus import CHIPS
from autotune.estimate.advice import SCALED_DOUBT, Grades
from autotune.estimate.pooling import Pool
from autotune.estimate.step_time import StepTime, StepTimeModel

BF16 = Arm("bf16")
LARGE, SMALLER = Candidate(BF16, 64, 1), Candidate(BF16, 32, 2)


@pytest.fixture(scope="module")
def traced() -> Operations:
    return decode(recorded_operations()[operations_key(Subject("bert-large-uncased", 512), BF16)], Operations)


def step(chip: str, traced: Operations, candidate: Candidate = LARGE) -> StepTime:
    return StepTimeModel(CHIPS[chip]).predict(traced, candidate)


def grades_of(measured: dict[str, float], traced: Operations) -> Grades:
    """A store with one trial of 64 × 1 on each of these chips, and its samples a second."""
    pools = {name: Pool([completed(BF16, 64, speed=speed)]) for name, speed in measured.items()}
    return Grades(pools, lambda _arm, _chip: traced)


def test_a_candidate_that_was_measured_on_the_gpu_is_told_as_measured(traced: Operations) -> None:
    graded = grades_of({"a100-80gb": 111.0}, traced).graded(CHIPS["a100-80gb"], step("a100-80gb", traced))
    assert graded.grade == "measured"
    assert graded.step.samples_per_second == pytest.approx(111.0)
    low, high = graded.step.interval_samples_per_second
    assert 90 < low < 111 < high < 140


def test_another_gpu_is_scaled_by_what_the_measurement_says_of_the_prediction(traced: Operations) -> None:
    slower = 0.8 * step("a100-80gb", traced).samples_per_second
    predicted = step("l4", traced)
    graded = grades_of({"a100-80gb": slower}, traced).graded(CHIPS["l4"], predicted)
    assert graded.grade == "scaled"
    assert graded.step.samples_per_second == pytest.approx(0.8 * predicted.samples_per_second)
    low, high = graded.step.interval_seconds
    assert high / low == pytest.approx(SCALED_DOUBT**2)
    assert high / low < predicted.interval_seconds[1] / predicted.interval_seconds[0]


def test_another_batch_on_the_same_gpu_is_scaled_by_that_gpu_alone(traced: Operations) -> None:
    speeds = {name: factor * step(name, traced).samples_per_second for name, factor in (("l4", 0.7), ("h200", 1.1))}
    predicted = step("l4", traced, SMALLER)
    graded = grades_of(speeds, traced).graded(CHIPS["l4"], predicted)
    assert graded.grade == "scaled"
    assert graded.step.samples_per_second == pytest.approx(0.7 * predicted.samples_per_second)


@pytest.mark.parametrize(
    "candidate",
    [
        pytest.param(Candidate(Arm("fp16"), 64), id="another precision"),
        pytest.param(Candidate(Arm("bf16", strategy="ddp", ranks=2), 32), id="several ranks"),
        pytest.param(Candidate(BF16, 1), id="the host limits it"),
    ],
)
def test_what_no_measurement_speaks_of_stays_predicted(candidate: Candidate, traced: Operations) -> None:
    predicted = step("a100-80gb", traced, candidate)
    graded = grades_of({"h200": 300.0}, traced).graded(CHIPS["a100-80gb"], predicted)
    assert (graded.grade, graded.step) == ("predicted", predicted)

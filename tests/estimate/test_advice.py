"""Test how GPUs are compared: hours, cost, Pareto front; and what is told of a speed: measured, scaled, predicted."""

from dataclasses import replace

import pytest
from histories import completed
from messages import check_messages
from recorded_steps import Subject, operations_key, recorded_operations
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.prediction import Operations
from autotune.devices.gpus import CHIPS, Prices
from autotune.estimate.advice import SCALED_DOUBT, Graded, Grades, Offer, pareto_front, rank, sort_offers
from autotune.estimate.pooling import Pool
from autotune.estimate.step_time import StepTime, StepTimeModel
from autotune.results.prediction_text import advice_lines


def offer(name: str, seconds: float, price: float | None, doubt: float = 1.1) -> Offer:
    """A GPU that takes so long for a step of 64 samples."""
    candidate = Candidate(Arm("bf16"), 32, 2)
    interval = (seconds / doubt, seconds * doubt)
    step = StepTime(candidate, seconds, interval, seconds, 0.0, {}, 1e12, 1e15)
    return Offer(CHIPS[name], Graded(step, "predicted"), None, 64 * 3600.0, price)


def test_hours_and_cost_follow_from_the_step() -> None:
    known = offer("l4", 2.0, 0.5, doubt=2.0)
    assert known.hours == pytest.approx(2.0)
    assert known.cost == pytest.approx(1.0)
    assert known.interval_cost == pytest.approx((0.5, 2.0))
    # 72 W for 32 samples a second.
    assert known.most_joules_per_sample == pytest.approx(72 / 32)


def test_several_gpus_cost_and_draw_as_many_times_as_much() -> None:
    four = replace(offer("l4", 2.0, 0.5), gpus=4)
    assert four.price_per_hour == pytest.approx(2.0)
    assert four.cost == pytest.approx(4.0)
    assert four.most_joules_per_sample == pytest.approx(4 * 72 / 32)


def test_offers_whose_intervals_overlap_share_a_rank() -> None:
    offers = [offer("l4", 2.0, 1.0), offer("a10", 2.1, 1.0), offer("h100-80gb", 1.0, 4.0), offer("h200", 1.0, None)]
    assert [rank(each, offers) for each in offers] == [1, 1, 3, None]
    assert [each.chip.name for each in sort_offers(offers)] == ["l4", "a10", "h100-80gb", "h200"]


def test_without_any_price_hours_count() -> None:
    offers = [offer("l4", 2.0, None), offer("h100-80gb", 1.0, None)]
    assert [rank(each, offers) for each in offers] == [2, 1]


def test_the_front_has_what_nothing_beats() -> None:
    cheap, fast, worse = offer("l4", 4.0, 0.5), offer("h100-80gb", 1.0, 4.0), offer("a10", 4.5, 0.6)
    none = replace(cheap, graded=None, why_not="too small")
    assert pareto_front([cheap, fast, worse, none]) == [cheap, fast]
    assert pareto_front([cheap, fast, twin := replace(cheap, chip=CHIPS["a10"])]) == [cheap, fast, twin]


def test_messages_of_gpus_that_are_compared() -> None:
    """The words of configurations are folded first in a narrow terminal; then the ends of costs are left out."""
    names = ("l4", "a10", "h100-80gb")
    offers = {
        "two overlap": [offer(*each, 1.0) for each in zip(names, (2.0, 2.1, 9.0), strict=True)],
        "all overlap": [offer(*each, 1.0) for each in zip(names, (2.0, 2.1, 2.2), strict=True)],
        "none overlap": [offer(*each, 1.0) for each in zip(names, (2.0, 4.0, 9.0), strict=True)],
        "one without a price": [offer("l4", 2.0, 1.0), offer("a10", 2.1, 1.0), offer("h200", 1.0, None)],
    }
    prices, workload = Prices({}, "USD", "as given"), tiny_workload("bert-tiny")
    cases = {name: advice_lines(each, workload, 64, 1e6, prices) for name, each in offers.items()}
    arm = Arm("bf16", gradient_checkpointing=True, optim="adafactor", strategy="ddp", ranks=8)
    wide = []
    for name, grade, gpus in (("l4", "measured", 1), ("rtx-3080-10gb", "predicted", 8)):
        one = offer(name, 2000.0, 0.5)
        step = replace(one.graded.step, candidate=replace(one.graded.step.candidate, arm=arm))
        wide.append(replace(one, graded=Graded(step, grade), gpus=gpus))  # type: ignore[arg-type]
    for columns in (None, 96, 80):
        lines = advice_lines(wide, workload, 64, 1e6, prices, columns)
        assert columns is None or max(map(len, lines[1:-1])) <= columns
        cases[f"{columns or 'any number of'} columns"] = lines
    check_messages("advice", cases)


BF16 = Arm("bf16")
LARGE, SMALLER = Candidate(BF16, 64, 1), Candidate(BF16, 32, 2)


@pytest.fixture(scope="module")
def traced() -> Operations:
    return recorded_operations()[operations_key(Subject("bert-large-uncased", 512), BF16)]


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

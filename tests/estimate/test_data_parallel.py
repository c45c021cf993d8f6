"""Predicted steps of several ranks: gradients exchanged behind the backward pass, over links of different rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_steps import Subject, operations_key, recorded_operations
from several_gpus import several

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import InvalidRequestError
from autotune.core.prediction import Operations
from autotune.core.schema import decode
from autotune.devices.gpus import CHIPS
from autotune.estimate.data_parallel import exchange
from autotune.estimate.step_time import StepTimeModel


@pytest.fixture(scope="module")
def traced() -> Operations:
    arm = Arm("bf16")
    return decode(recorded_operations()[operations_key(Subject("bert-large-uncased", 512), arm)], Operations)


def candidate(ranks: int, batch: int = 16, accumulation: int = 1) -> Candidate:
    return Candidate(Arm("bf16", strategy="ddp", ranks=ranks), batch, accumulation)


def test_recorded_and_published_steps_of_several_gpus_are_in_their_intervals() -> None:
    every = several()
    assert len(every) >= 30
    assert sum(known.is_inside for known in every) >= 0.85 * len(every)
    own = [known for known in every if known.gpu == "h200"]
    assert all(known.is_inside for known in own)
    limited_by_gpu = own[0]
    expected, _, _ = limited_by_gpu.expected
    assert expected == pytest.approx(limited_by_gpu.measured, rel=0.05)


def test_a_ring_sends_each_gradient_less_than_twice(traced: Operations) -> None:
    two, eight = (exchange(traced, CHIPS["h200"], ranks).all_reduce for ranks in (2, 8))
    # 1.34 GB over 450 GB/s, of which 80 % are reached.
    assert two == pytest.approx(1.34e9 / (0.8 * 450e9), rel=0.4)
    assert 1.4 < eight / two < 1.75


def test_the_backward_pass_hides_the_exchange_but_for_its_last_bucket(traced: Operations) -> None:
    known = exchange(traced, CHIPS["rtx-4090"], 2)
    assert known.added_seconds(10.0) == pytest.approx(known.copies + known.last_bucket)
    assert known.added_seconds(0.0) == pytest.approx(known.copies + known.all_reduce)
    assert known.added_seconds(10.0, overlaps=False) == known.added_seconds(0.0)


def test_a_slow_link_limits_small_batches(traced: Operations) -> None:
    slow, fast = (StepTimeModel(CHIPS[name]) for name in ("rtx-2080-ti", "h200"))
    assert slow.predict(traced, candidate(8, 1)).limited_by == "network"
    assert fast.predict(traced, candidate(8, 1)).limited_by == "host"


def test_several_ranks_train_more_samples_and_are_known_less_well(traced: Operations) -> None:
    model = StepTimeModel(CHIPS["h200"])
    one, two = model.predict(traced, Candidate(Arm("bf16"), 32)), model.predict(traced, candidate(2, 32))
    assert 1.6 < two.samples_per_second / one.samples_per_second < 2
    assert two.interval_seconds[1] / two.interval_seconds[0] > one.interval_seconds[1] / one.interval_seconds[0]


def test_gpus_that_are_not_put_into_one_host_are_refused(traced: Operations) -> None:
    chip = CHIPS["gh200-96gb"]
    with pytest.raises(InvalidRequestError, match="gh200"):
        exchange(traced, chip, 2)
    assert chip.rates is not None
    assert exchange(traced, replace(chip, rates=replace(chip.rates, link=CHIPS["h200"].rates.link)), 2).all_reduce > 0  # type: ignore[union-attr]

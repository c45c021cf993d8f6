"""Test schedules: the largest batches first, then steps that represent an epoch."""

import numpy as np
import pytest

from autotune.core.dataset_spec import DataSpec
from autotune.core.lengths import PlannedRun
from autotune.core.measured_steps import StepEstimate
from autotune.worker.dataset.prepared import BatchShape, Schedule, make_schedule
from autotune.worker.trial.batch_shapes import Timed, estimate_run

SPEC = DataSpec("/x.jsonl", "json", "")
GROUPED = DataSpec("/x.jsonl", "json", "", group_by_length=True)
LENGTHS = np.random.default_rng(1).integers(20, 400, 5000)


def micro_batches(schedule: Schedule, shape: BatchShape) -> list[list[list[int]]]:
    """Samples by step and micro-step."""
    starts = range(0, len(schedule.order), shape.batch)
    batches = [list(schedule.order[start : start + shape.batch]) for start in starts]
    run = shape.micro_steps_run
    return [batches[start : start + run] for start in range(0, len(batches), run)]


def costs(schedule: Schedule, shape: BatchShape, spec: DataSpec = SPEC) -> list[float]:
    """Padded tokens of each measured step."""
    steps = micro_batches(schedule, shape)[shape.worst_steps + shape.ordinary_steps :]
    padded = [[spec.padded(int(LENGTHS[batch].max()), 512) for batch in step] for step in steps]
    return [shape.batch * float(np.mean(step)) * shape.micro_steps for step in padded]


@pytest.mark.parametrize("spec", [SPEC, GROUPED])
@pytest.mark.parametrize(
    "shape", [BatchShape(8, 1, 1, 3, 0, 5), BatchShape(4, 8, 3, 3, 2, 6), BatchShape(64, 2, 2, 2, 0, 4)]
)
def test_the_worst_batches_come_first(spec: DataSpec, shape: BatchShape) -> None:
    lengths = LENGTHS.copy()
    lengths[4321] = 512
    schedule = make_schedule(5000, lengths, None, spec, 512, shape, 0)
    steps = micro_batches(schedule, shape)
    assert len(steps) == shape.worst_steps + shape.ordinary_steps + shape.measured_steps
    for step in steps[: shape.worst_steps]:
        assert len(step) == shape.micro_steps_run
        for batch in step:
            assert max(lengths[batch]) == 512, "every micro-step has the longest of all"
    longest = sorted(lengths[steps[0][0]])
    assert longest == sorted(np.sort(lengths)[-shape.batch :])
    if shape.worst_steps > 2:
        assert sorted(lengths[steps[2][0]])[:-1] == sorted(np.sort(lengths)[: shape.batch - 1])


@pytest.mark.parametrize("spec", [SPEC, GROUPED])
@pytest.mark.parametrize(
    "shape", [BatchShape(8, 1, 1, 3, 0, 24), BatchShape(8, 8, 3, 3, 0, 24), BatchShape(8, 8, 3, 3, 0, 24, groups=True)]
)
def test_the_measured_steps_have_the_mean_of_an_epoch(spec: DataSpec, shape: BatchShape) -> None:
    schedule = make_schedule(5000, LENGTHS, None, spec, 512, shape, 0)
    for count in (3, 5, 7, 15, 24):
        assert np.mean(costs(schedule, shape, spec)[:count]) == pytest.approx(schedule.run.step_tokens, rel=0.08)
    # Shuffled batches of 8 are padded by about two fifths, those of like lengths hardly.
    padded = schedule.run.step_tokens / (shape.batch * shape.micro_steps) / LENGTHS.mean()
    assert padded < 1.1 if spec.group_by_length or shape.groups else padded > 1.5


def test_steps_with_padded_lengths_that_are_new_come_twice() -> None:
    shape = BatchShape(8, 2, 2, 3, 1, 12, visits=2)
    spec = DataSpec("/x", "json", "", group_by_length=True, pad_to_multiple_of=32)
    schedule = make_schedule(5000, LENGTHS, None, spec, 512, shape, 0)
    steps = micro_batches(schedule, shape)[4:]
    assert len(steps) == 12 + schedule.repeats
    assert 3 < schedule.repeats < 12, "of some steps all lengths have come before"
    again = [number for number, step in enumerate(steps) if step in steps[:number]]
    assert len(again) == schedule.repeats
    assert again[0] == 3, "a group of steps, then those of them with new lengths once more"
    assert schedule.run.new_shapes == len({-(-int(length) // 32) for length in LENGTHS})
    assert schedule.run.steps == 5000 // 16


def test_padded_targets_are_shapes_as_well() -> None:
    targets = np.random.default_rng(2).integers(5, 100, 5000)
    shape = BatchShape(8, 1, 1, 3, 0, 12, visits=2)
    schedule = make_schedule(5000, np.full(5000, 512), targets, SPEC, 512, shape, 0)
    assert schedule.repeats > 3
    assert schedule.run.new_shapes > 10
    alone = make_schedule(5000, np.full(5000, 512), None, SPEC, 512, shape, 0)
    assert (alone.repeats, alone.run.new_shapes) == (1, 1)


def test_nothing_comes_twice_where_shapes_make_no_difference() -> None:
    schedule = make_schedule(5000, LENGTHS, None, SPEC, 512, BatchShape(8, 2, 2, 3, 0, 12), 0)
    assert schedule.repeats == 0
    assert len(schedule.order) == 15 * 16


def test_few_samples_are_repeated() -> None:
    shape = BatchShape(16, 2, 2, 3, 0, 4)
    schedule = make_schedule(5, np.array([3, 4, 5, 6, 7]), None, SPEC, 512, shape, 0)
    assert len(schedule.order) == 16 * 2 * 7
    assert set(schedule.order) == set(range(5))


def test_both_the_longest_input_and_the_longest_target_are_in_the_worst_batch() -> None:
    lengths, targets = np.array([9, 1, 1, 1, 2, 3]), np.array([1, 1, 1, 8, 1, 1])
    schedule = make_schedule(6, lengths, targets, SPEC, 512, BatchShape(2, 1, 1, 3, 0, 2), 0)
    for step in micro_batches(schedule, BatchShape(2, 1, 1, 3, 0, 2))[:3]:
        assert set(step[0]) == {0, 3}


def test_padding_to_the_full_length_makes_all_steps_alike() -> None:
    spec = DataSpec("/x", "json", "", padding="max_length")
    shape = BatchShape(8, 2, 2, 3, 0, 9)
    schedule = make_schedule(5000, LENGTHS, None, spec, 512, shape, 0)
    assert set(costs(schedule, shape, spec)) == {schedule.run.step_tokens} == {8 * 2 * 512.0}
    assert schedule.run.new_shapes == 1


def test_images_have_no_length() -> None:
    schedule = make_schedule(30, None, None, SPEC, 1, BatchShape(8, 2, 2, 2, 0, 3), 0)
    assert not schedule.run.varies


def estimated(schedule: Schedule, seconds: list[float], tokens: list[float]) -> StepEstimate:
    return estimate_run([Timed(*step, 0) for step in zip(seconds, tokens, strict=True)], schedule.run).step


def test_what_the_lengths_explain_is_no_uncertainty() -> None:
    shape = BatchShape(8, 2, 2, 3, 0, 12)
    schedule = make_schedule(5000, LENGTHS, None, SPEC, 512, shape, 0)
    tokens = costs(schedule, shape)
    exact = [0.1 + cost * 1e-4 for cost in tokens]
    mean, spread = estimated(schedule, exact, tokens)
    assert mean == pytest.approx(0.1 + schedule.run.step_tokens * 1e-4, rel=1e-6)
    assert spread < 1e-6
    noisy = [seconds * (1.1 if index % 2 else 0.9) for index, seconds in enumerate(exact)]
    assert 0.02 < estimated(schedule, noisy, tokens).relative_half_width < 0.15
    assert estimated(schedule, exact[:1], tokens[:1]) == (exact[0], float("inf"))
    assert estimated(schedule, exact[:2], tokens[:2]).relative_half_width > 0


def test_noise_is_not_taken_for_a_slope_that_cannot_be() -> None:
    shape = BatchShape(8, 2, 2, 3, 0, 6)
    schedule = make_schedule(5000, LENGTHS, None, SPEC, 512, shape, 0)
    falling = [1.0 / cost for cost in costs(schedule, shape)]
    assert estimated(schedule, falling, costs(schedule, shape)).seconds == pytest.approx(np.mean(falling))


def test_a_run_far_from_the_timed_steps_is_known_less_well() -> None:
    """Three steps of 100 to 120 tokens say little of steps of 400."""
    timed = [Timed(0.22, 100, 0), Timed(0.25, 110, 0), Timed(0.26, 120, 0)]
    near, far = (estimate_run(timed, PlannedRun(step_tokens=tokens, varies=True)) for tokens in (110.0, 400.0))
    assert near.steady_error == pytest.approx(np.sqrt(6.67e-5 / 3) / 0.2433, rel=0.01)
    assert far.steady_error * far.steady_seconds > 20 * near.steady_error * near.steady_seconds


def test_ranks_take_the_batches_in_turn_and_the_slowest_decides() -> None:
    shape = BatchShape(4, 3, 3, 3, 1, 5, ranks=2)
    schedule = make_schedule(5000, LENGTHS, None, SPEC, 512, shape, 0)
    # Axes: step, micro-step, rank, sample.
    steps = np.array(schedule.order).reshape(-1, 3, 2, 4)
    # Both ranks have the longest samples in the warm-up.
    assert (LENGTHS[steps[:2]].max(axis=3) == LENGTHS.max()).all()
    # A rank pads its own batches only, and waits for the other once a step, so that a step has more than its mean.
    padded = LENGTHS[steps].max(axis=3)
    assert schedule.run.step_tokens > (4 * padded[3:]).sum(axis=1).mean()

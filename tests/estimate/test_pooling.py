"""Test how far a winner's next run may be from what was measured of it."""

import dataclasses
from collections.abc import Sequence

import pytest
from recorded import measurement

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed
from autotune.core.units import GIB
from autotune.estimate.pooling import Pool, Speed, Tried, deviations

BF16 = Arm("bf16")
REPLAYED = Arm("bf16", torch_compile=True, torch_compile_mode="reduce-overhead")
GRAPHS = Arm("bf16", cuda_graphs=True)


def process(speed: float, arm: Arm = BF16, busy: float | None = 0.97, steps: Sequence[float] = ()) -> Tried:
    """A trial at so many samples a second; ``steps`` are the times of its steps, relative to their mean."""
    candidate = Candidate(arm, 32)
    found = measurement(candidate, 32 / speed, GIB, GIB)
    each = tuple(32 / speed * step for step in steps) or found.step_seconds_each
    found = dataclasses.replace(found, gpu_busy_share=busy, step_seconds_each=each)
    return Tried(f"{speed} {arm}", candidate, Completed(found))


def pooled(*trials: Tried) -> Speed:
    found = Pool(trials).speed(trials[0].candidate)
    assert found is not None
    return found


def test_a_winner_that_replays_cuda_graphs_is_promised_by_what_was_measured_of_it() -> None:
    """bert-base on an H200: two processes that agree to 4 %. Launched kernel by kernel, it might deviate by 18 %."""
    noisy, steady = (0.95, 1.05) * 3, (0.99, 1.01) * 3
    replayed = [process(2132, REPLAYED, 0.58, noisy), process(2225, REPLAYED, 0.58, steady)]
    launched = [process(2132, BF16, 0.58, noisy), process(2225, BF16, 0.58, steady)]
    assert 0.05 < pooled(*replayed).relative_half_width < 0.1
    assert pooled(*launched).relative_half_width > 0.15


@pytest.mark.parametrize("arm", [REPLAYED, GRAPHS])
def test_how_launched_steps_deviate_says_nothing_of_replayed_ones(arm: Arm) -> None:
    launched = [process(1000, BF16, 0.5), process(700, BF16, 0.5)]
    replayed = [process(2000, arm, 0.5), process(2040, arm, 0.5)]
    assert {kind.graphs: found.degrees for kind, found in deviations([launched, replayed]).items()} == {
        False: 1,
        True: 1,
    }
    pool = Pool([*launched, *replayed])
    assert pool.speed(replayed[0].candidate) == pooled(*replayed)


def test_the_third_process_of_a_new_machine_has_the_prior_yield() -> None:
    """Two deviations of 5 %: of Student's t with two degrees of freedom, 4.3 standard errors and no less."""
    speeds = (1000.0, 1050.0, 950.0)
    assert pooled(process(1000)).relative_half_width == pytest.approx(0.03, abs=0.007)
    assert pooled(*map(process, speeds)).relative_half_width > 4.0 * 0.05


def test_steps_that_explain_how_processes_differ_leave_less_between_them() -> None:
    noisy, steady = (0.97, 1.03) * 4, (0.999, 1.001) * 4
    found = [deviations([[process(speed, steps=steps) for speed in (1000.0, 1020.0)]]) for steps in (noisy, steady)]
    explained, unexplained = (next(iter(each.values())).sum_of_squares for each in found)
    assert unexplained == pytest.approx(0.0198**2 / 2, rel=0.02)
    assert explained == pytest.approx(unexplained / 2, rel=0.02)

"""Test the bounds that measured step times set for candidates that were not measured."""

import dataclasses

import pytest
from recorded import measurement
from searching import ceiling_of

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed
from autotune.core.units import GIB
from autotune.estimate.history import History, Tried
from autotune.estimate.throughput import Speeds
from autotune.space.space import Batches, Space

BF16, TF32, FP32, FP16 = Arm("bf16"), Arm("tf32"), Arm("fp32"), Arm("fp16")
CHECKPOINTED = Arm("bf16", gradient_checkpointing=True)
RECOMPUTING = "without checkpointing it reached 100% of the best, and larger batches gain less than that costs"


def speeds(
    *measured: tuple[Arm, int, float],
    busy_share: float | None = 0.95,
    arms: tuple[Arm, ...] = (BF16, FP16, TF32, FP32),
    retries: int = 0,
) -> Speeds:
    """From arms, per-device batches and seconds a micro-step, at effective batch 64."""
    space = Space(arms, Batches(64))
    history = History(ceiling_of(24 * GIB))
    for arm, batch, seconds in measured:
        candidate = Candidate(arm, batch, 64 // batch)
        found = measurement(candidate, seconds * (64 // batch), GIB, GIB)
        outcome = Completed(dataclasses.replace(found, gpu_busy_share=busy_share, allocation_retries=retries))
        history.add(Tried(f"{len(history.tried)}", candidate, outcome))
    return Speeds(space, history)


@pytest.mark.parametrize(
    ("measured", "busy_share", "arm", "why"),
    [
        pytest.param((BF16, 32, 0.1), 0.95, FP16, "fp16 is never faster than bf16", id="fp16 after bf16"),
        pytest.param((TF32, 32, 0.3), 0.95, FP32, "fp32 is never faster than tf32", id="fp32 after tf32"),
        pytest.param((BF16, 64, 0.1), 0.98, TF32, "the GPU time measured in bf16", id="tf32 after bf16 that computes"),
        pytest.param((BF16, 64, 0.1), 0.98, FP32, "fp32 is never faster than tf32", id="fp32 through tf32"),
        # A micro-step of 0.1 s in which the GPU waits half of the time, as on a host with slow cores.
        pytest.param((BF16, 64, 0.1), 0.5, TF32, None, id="not after one that waits for the host"),
        pytest.param((BF16, 64, 0.1), None, TF32, None, id="nor where nobody measured it"),
        pytest.param((TF32, 32, 0.3), 0.95, BF16, None, id="nor the other way round"),
    ],
)
def test_why_an_arm_is_left_out(
    measured: tuple[Arm, int, float], busy_share: float | None, arm: Arm, why: str | None
) -> None:
    smaller = (measured[0], 8, measured[2] / 7)
    found = speeds(*([smaller] if busy_share == 0.98 else []), measured, busy_share=busy_share).left_out(arm)
    assert found is None if why is None else found is not None and why in found


def test_what_larger_batches_can_gain_is_bounded_by_the_slope() -> None:
    """64 samples at 1 ms each above a floor of 50 ms; then at 3 ms, which is no faster than 32 were."""
    growing = speeds((BF16, 16, 0.066), (BF16, 32, 0.082))
    assert growing.can_gain(growing.view(BF16))
    flat = speeds((BF16, 16, 0.046), (BF16, 32, 0.098))
    assert not flat.can_gain(flat.view(BF16))


def test_a_slope_that_is_uncertain_does_not_stop_the_climb() -> None:
    """The same step times where processes differ by as much as they do when the host limits."""
    flat = speeds((BF16, 16, 0.046), (BF16, 32, 0.098), busy_share=0.3)
    assert flat.can_gain(flat.view(BF16))


def test_one_larger_batch_that_is_slower_by_less_than_the_noise_does_not_either() -> None:
    found = speeds((BF16, 8, 0.0500), (BF16, 16, 0.1001), busy_share=0.3)
    assert found.can_gain(found.view(BF16))


def test_the_cost_of_a_sample_bears_the_uncertainty_of_both_ends() -> None:
    found = speeds((BF16, 16, 0.1), (BF16, 32, 0.2)).view(BF16).seconds_a_sample(32)
    assert found.value == pytest.approx(0.1 / 16)
    # Processes differ by 0.7 % where the GPU is busy; the interval has eight cases of ten.
    assert 0.9 * 0.007 * 1.4 < found.half_width * 16 / (0.1**2 + 0.2**2) ** 0.5 < 1.2 * 0.007 * 1.5
    assert speeds((BF16, 32, 0.2)).view(BF16).seconds_a_sample(32) is None


def test_every_level_that_is_looked_at_counts_for_what_is_beaten() -> None:
    """100 has no divisor that is a multiple of 8; 4, 20 and 100 are what is looked at."""
    space = Space((BF16, CHECKPOINTED, FP16), Batches(100))
    history = History(ceiling_of(24 * GIB))
    candidate = Candidate(BF16, 100, 1)
    history.add(Tried("0", candidate, Completed(measurement(candidate, 0.3, GIB, GIB))))
    found = Speeds(space, history)
    assert [each.describe() for each in found.left_out_arms()] == [
        "bf16, checkpointing: every batch that fits was measured without checkpointing, which is never slower",
        "fp16: fp16 is never faster than bf16 and needs as much memory",
    ]


def test_recomputing_is_beaten_at_a_batch_that_was_measured_without() -> None:
    found = speeds((BF16, 32, 0.1), arms=(BF16, CHECKPOINTED))
    view = found.view(CHECKPOINTED)
    assert found.is_beaten(view, 16)
    assert found.is_beaten(view, 32)
    assert not found.is_beaten(view, 64)


def test_a_trial_that_retried_allocations_rules_out_no_arm_with_less_memory() -> None:
    """At its cap the allocator frees and allocates segments in each step; recomputing may then be faster."""
    expandable = Arm("bf16", expandable_segments=True)
    arms = (BF16, CHECKPOINTED, expandable, TF32)
    for retries in (0, 7):
        found = speeds((BF16, 16, 0.02), (BF16, 32, 0.1), (TF32, 32, 0.09), arms=arms, retries=retries)
        assert found.is_beaten(found.view(CHECKPOINTED), 32) == (retries == 0)
        assert found.is_beaten(found.view(expandable), 32) == (retries == 0)
    # On a CPU's share nothing bounds the arm but its speed, which its retries made.
    for retries, told in ((0, "without checkpointing it only reached 20% of the best"), (7, None)):
        behind = speeds((TF32, 32, 0.02), (BF16, 32, 0.1), arms=arms, busy_share=None, retries=retries)
        assert behind.left_out(CHECKPOINTED) == told
        assert (behind.left_out(expandable) is None) == (retries > 0)
    # What the GPU itself took still says that larger batches cannot help.
    behind = speeds((TF32, 32, 0.02), (BF16, 32, 0.1), arms=arms, retries=7)
    assert behind.left_out(expandable) is not None


def test_an_arm_that_differs_in_several_ways_that_cost_time_is_beaten() -> None:
    keeps = Arm("bf16", strategy="fsdp-keep", ranks=2)
    worst = Arm("bf16", gradient_checkpointing=True, strategy="fsdp", ranks=2, sync_each_batch=True)
    found = speeds((keeps, 16, 0.1), arms=(keeps, worst))
    assert found.is_beaten(found.view(worst), 16)
    assert not found.is_beaten(found.view(worst), 32)
    ddp = Arm("bf16", strategy="ddp", ranks=2)
    found = speeds((ddp, 16, 0.1), arms=(ddp, worst))
    # Nothing says that DDP is never slower than FSDP.
    assert not found.is_beaten(found.view(worst), 16)


@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_checkpointing_is_left_out_without_a_gpu_time_where_the_plain_arm_is_far_behind(seconds: float) -> None:
    """On a CPU no GPU time is measured. bf16 at 16 samples in 50 ms is nearly as fast as fp32, in 200 ms it is not."""
    checkpointed = Arm("bf16", gradient_checkpointing=True)
    arms = (FP32, BF16, checkpointed)
    found = speeds((FP32, 16, 0.045), (BF16, 16, seconds), busy_share=None, arms=arms).left_out(checkpointed)
    assert found == (None if seconds == 0.05 else "without checkpointing it only reached 22% of the best")

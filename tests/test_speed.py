"""What measured step times say of those that were not measured."""

from __future__ import annotations

import pytest
from recorded import measurement
from searching import ceiling_of

from autotune.history import History, Tried
from autotune.space import Batches, Space
from autotune.speed import Speeds
from autotune.trial import Arm, Candidate, Completed
from autotune.units import GIB

BF16, TF32, FP32, FP16 = Arm("bf16"), Arm("tf32"), Arm("fp32"), Arm("fp16")
CHECKPOINTED = Arm("bf16", gradient_checkpointing=True)


def speeds(*measured: tuple[Arm, int, float], arms: tuple[Arm, ...] = (BF16, FP16, TF32, FP32)) -> Speeds:
    """From arms, per-device batches and seconds a micro-step, at effective batch 64."""
    space = Space(arms, Batches(64))
    history = History(ceiling_of(24 * GIB))
    for arm, batch, seconds in measured:
        candidate = Candidate(arm, batch, 64 // batch)
        outcome = Completed(measurement(candidate, seconds * (64 // batch), GIB, GIB))
        history.add(Tried(f"{len(history.tried)}", candidate, outcome))
    return Speeds(space, history)


@pytest.mark.parametrize(
    ("measured", "arm", "why"),
    [
        pytest.param((BF16, 32, 0.1), FP16, "fp16 is never faster than bf16", id="fp16 after bf16"),
        pytest.param((TF32, 32, 0.3), FP32, "fp32 is never faster than tf32", id="fp32 after tf32"),
        pytest.param((BF16, 32, 0.1), TF32, "bf16 fills the GPU", id="tf32 after a bf16 that computes"),
        pytest.param((BF16, 32, 0.1), FP32, "fp32 is never faster than tf32", id="fp32 through tf32"),
        pytest.param((BF16, 32, 0.02), TF32, None, id="not after one that waits for launches"),
        pytest.param((TF32, 32, 0.3), BF16, None, id="nor the other way round"),
    ],
)
def test_why_an_arm_is_left_out(measured: tuple[Arm, int, float], arm: Arm, why: str | None) -> None:
    found = speeds(measured).left_out(arm)
    assert found is None if why is None else found is not None and why in found


def test_what_larger_batches_can_gain_is_bounded_by_the_slope() -> None:
    """64 samples at 1 ms each above a floor of 50 ms; then at 3 ms, which is no faster than 32 were."""
    growing = speeds((BF16, 16, 0.066), (BF16, 32, 0.082))
    assert growing.can_gain(growing.view(BF16), 32)
    flat = speeds((BF16, 16, 0.048), (BF16, 32, 0.098))
    assert not flat.can_gain(flat.view(BF16), 32)


def test_the_cost_of_a_sample_bears_the_uncertainty_of_both_ends() -> None:
    found = speeds((BF16, 16, 0.1), (BF16, 32, 0.2)).view(BF16).seconds_a_sample(32)
    assert found is not None
    assert found.value == pytest.approx(0.1 / 16)
    # Each measurement here is uncertain by 0.5 %.
    assert found.half_width == pytest.approx((0.0005**2 + 0.001**2) ** 0.5 / 16)
    assert speeds((BF16, 32, 0.2)).view(BF16).seconds_a_sample(32) is None


def test_recomputing_is_beaten_at_a_batch_that_was_measured_without() -> None:
    found = speeds((BF16, 32, 0.1), arms=(BF16, CHECKPOINTED))
    view = found.view(CHECKPOINTED)
    assert found.is_beaten(view, 16)
    assert found.is_beaten(view, 32)
    assert not found.is_beaten(view, 64)


def test_arms_that_are_left_out_together_are_named_together() -> None:
    arms = tuple(Arm(p, c) for p in ("bf16", "fp16", "tf32") for c in (False, True))  # type: ignore[arg-type]
    lines = speeds((BF16, 64, 0.2), arms=arms).left_out_lines()
    assert lines == [
        "bf16, checkpointing: every batch that fits was measured without recomputing, which is never slower",
        "all fp16: fp16 is never faster than bf16 and needs as much memory",
        "all tf32: bf16 fills the GPU, and tf32 has half its rate on twice the bytes",
    ]

"""Test the model of speed, and what is chosen by it, in computed worlds."""

import math
from dataclasses import replace

import pytest
from recorded import ComputedRunner, fault, measurement, out_of_memory, run_candidate, run_policy
from searching import ceiling_of

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed
from autotune.core.units import GIB
from autotune.estimate.chance import Chances
from autotune.estimate.history import History, Tried
from autotune.estimate.speed_model import SpeedModel
from autotune.space.space import Batches, Space
from autotune.tuning.policy import Acquisition

PLAIN = Arm("bf16")
GRAPHED = replace(PLAIN, cuda_graphs=True)
COMPILED = replace(PLAIN, torch_compile=True, regional_compilation=True)


def history_of(busy_share: float) -> History:
    """A batch of 16 at 160 samples a second, of which the GPU computes for a share."""
    candidate, history = Candidate(PLAIN, 16), History(ceiling_of(24 * GIB))
    measured = replace(measurement(candidate, 0.1, 4 * GIB, 4 * GIB), gpu_busy_share=busy_share)
    history.add(Tried("a", candidate, Completed(measured)))
    return history


def test_a_larger_batch_promises_what_the_gpu_does_not_compute_yet() -> None:
    waits, computes = (
        float(SpeedModel(history_of(share)).expected([Candidate(PLAIN, 32)], 160.0)[0][0]) for share in (0.5, 0.95)
    )
    assert waits == pytest.approx(math.log(2), abs=0.1)
    assert computes < 0.1


def test_two_levers_that_pay_only_together_promise_it_together() -> None:
    """Graphs leave what the GPU computes, compiling what the host launches: each alone stops at the other."""
    both = replace(COMPILED, cuda_graphs=True)
    among = [Candidate(arm, 16) for arm in (GRAPHED, COMPILED, both)]
    graphed, compiled, together = SpeedModel(history_of(0.88)).expected(among, 160.0)[0]
    assert together > 1.3 * max(graphed, compiled)


def test_a_lever_that_failed_alone_is_not_tried_again_and_one_of_two_may_be() -> None:
    both, history = replace(COMPILED, cuda_graphs=True), history_of(0.5)
    history.add(Tried("b", Candidate(both, 16), fault("no capture")))
    assert 0.2 < Chances(history).runs(Candidate(GRAPHED, 16)) < 0.7
    history.add(Tried("c", Candidate(GRAPHED, 16), fault("no capture")))
    assert Chances(history).runs(Candidate(GRAPHED, 16)) == 0
    assert Chances(history).runs(Candidate(PLAIN, 16)) > 0.9


def test_what_is_never_faster_and_beside_a_trial_that_promises_as_much_is_not_tried() -> None:
    """fp32 where tf32 was measured; and while bf16 is under way, what is not expected to beat it."""
    space = Space((Arm("tf32"), Arm("fp32")), Batches(16))
    history, measured = History(ceiling_of(24 * GIB)), Candidate(Arm("tf32"), 16)
    history.add(Tried("a", measured, Completed(measurement(measured, 1.0, GIB, GIB))))
    proposed = Acquisition(space).next(history)
    assert proposed is None or proposed.arm.precision == "tf32"
    space = Space((Arm("bf16"), Arm("fp16"), Arm("tf32")), Batches(16))
    first = Acquisition(space).next(history)
    assert first == Candidate(Arm("bf16"), 16)
    history.begin(first)
    beside = Acquisition(space).next(history)
    assert beside is None or beside.arm.precision == "bf16"


def test_other_machines_of_the_kind_decide_what_is_first() -> None:
    space, history = Space((Arm("bf16"), Arm("tf32")), Batches(64)), History(ceiling_of(24 * GIB))
    history.elsewhere[Candidate(Arm("tf32"), 16, 4)] = 100.0
    assert Acquisition(space).next(history) == Candidate(Arm("tf32"), 16, 4)


def test_a_free_batch_grows_by_doubling_and_halves_the_last_step() -> None:
    space, history = Space((Arm("bf16"),), Batches(None)), History(ceiling_of(24 * GIB))
    acquisition = Acquisition(space)
    while (candidate := acquisition.next(history)) is not None and len(history.tried) < 20:
        batch = candidate.per_device_train_batch_size
        found = measurement(candidate, 0.01 + 0.001 * batch, batch * GIB // 8, batch * GIB // 8)
        outcome = Completed(found) if batch <= 180 else out_of_memory(24 * GIB)
        history.add(Tried(str(batch), candidate, outcome))
    tried = [t.candidate.per_device_train_batch_size for t in history.tried]
    assert len(tried) <= 8
    assert max(t.candidate.per_device_train_batch_size for t in history.believed()) >= 128
    assert all(batch & (batch - 1) == 0 for batch in tried[:2])


@pytest.mark.parametrize(("slower", "best"), [(1.3, "64 × 1  fp32"), (3.0, "64 × 1  fp32"), (0.9, "64 × 1  bf16")])
def test_where_nobody_knows_the_gpus_share_a_precision_may_be_slow(slower: float, best: str) -> None:
    """As on a CPU: bf16 so many times slower than fp32, after the baseline in fp32 at 8 and bf16 at 64."""

    def seconds(candidate: Candidate) -> float:
        micro = 0.05 + 0.01 * candidate.per_device_train_batch_size
        return candidate.gradient_accumulation_steps * micro * (slower if candidate.arm.precision == "bf16" else 1)

    space = Space((PLAIN, Arm("fp32")), Batches(64))
    runner = ComputedRunner(lambda _: GIB, seconds)
    history = History(ceiling_of(24 * GIB))
    run_candidate(Candidate(Arm("fp32"), 8, 8), runner, history)
    run_policy(Acquisition(space), runner, history)
    winner = history.winner()
    assert winner is not None
    assert winner.candidate.describe() == best
    assert len(history.tried) <= 4

"""Test real trials of real models on the CPU, each in its own process."""

import math
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from server_client import ServerClient
from tiny import ONE_OF_EACH_TASK, QUICK, attention_of_task, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, Effort, Measurement, OutOfMemory
from autotune.core.placement import RankDevices
from autotune.core.units import MIB
from autotune.core.workload import TASKS, Task

STEPS = QUICK.warmup_steps + QUICK.max_steps


def check_sane(outcome: Completed, candidate: Candidate) -> None:
    """What holds for every completed trial."""
    measured = outcome.measurement
    assert measured.peak_reserved_bytes >= measured.peak_allocated_bytes > MIB
    assert len(measured.step_seconds_each) >= QUICK.min_steps
    assert all(seconds > 0 for seconds in (*measured.step_seconds_each, *measured.warmup_step_seconds))
    assert min(measured.step_seconds_each) <= measured.step_seconds <= max(measured.step_seconds_each)
    assert measured.samples_per_second == pytest.approx(candidate.samples_per_step / measured.step_seconds)
    assert 0 < measured.optimizer_seconds < measured.step_seconds
    assert 0 < measured.data_seconds < measured.step_seconds
    assert measured.train_loss is not None
    assert math.isfinite(measured.train_loss)
    assert (measured.skipped_steps, measured.joules_per_sample) == (0, None)
    assert list(outcome.phase_seconds) == ["device", "model", "trainer", "train"]
    assert all(seconds >= 0 for seconds in outcome.phase_seconds.values())
    assert outcome.phase_seconds["train"] > sum(measured.warmup_step_seconds)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_completes(trial_server: ServerClient, task: Task) -> None:
    candidate = Candidate(Arm(attn_implementation=attention_of_task(task)), 4, 2)
    padding = 0.25 if task == "masked-lm" else 0.0
    answer = trial_server.trial(tiny_workload(ONE_OF_EACH_TASK[task], task=task, padding=padding), candidate)
    check_sane(answer.completed, candidate)
    assert answer.completed.measurement.micro_steps_run == 2
    phases = [progress.phase for progress in answer.progress if progress.phase]
    assert phases == ["device", "model", "trainer", "train"]
    steps = [progress.step for progress in answer.progress if progress.step is not None]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) <= STEPS
    # What the Trainer prints on standard output is in the log; the client checked that all else was protocol.
    assert "train_runtime" in answer.log
    assert answer.end.exit_code == 0


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
def test_a_decoder_classifies(trial_server: ServerClient, model: str) -> None:
    workload = tiny_workload(model, task="sequence-classification", padding=0.3)
    candidate = Candidate(Arm(), 4)
    check_sane(trial_server.trial(workload, candidate).completed, candidate)


def test_bf16_computes_otherwise_and_the_seed_decides_the_rest(trial_server: ServerClient) -> None:
    workload = tiny_workload("llama-tiny", seq_len=64)
    effort = Effort(warmup_steps=1, min_steps=1, max_steps=1)

    def loss(arm: Arm) -> float:
        found = trial_server.trial(workload, Candidate(arm, 8), effort).completed.measurement.train_loss
        assert found is not None
        return found

    full, again, autocast = loss(Arm("fp32")), loss(Arm("fp32")), loss(Arm("bf16"))
    assert again == pytest.approx(full, rel=1e-6)
    # bfloat16 has 8 bits of mantissa: the loss moves, but not far.
    assert 1e-6 < abs(autocast / full - 1) < 0.02


def test_inputs_of_micro_steps_that_are_left_out_are_in_the_peak(trial_server: ServerClient) -> None:
    workload = tiny_workload("whisper-tiny-random")
    arm = Arm(gradient_checkpointing=True)
    three, many = (trial_server.trial(workload, Candidate(arm, 32, steps)).completed.measurement for steps in (3, 83))
    assert many.micro_steps_run == 3
    # 80 mel bands of 100 frames in float32; labels are rounded up to a block.
    assert 0 <= three.micro_batch_bytes - 32 * 80 * 100 * 4 <= 8192
    assert many.micro_batch_bytes == three.micro_batch_bytes
    left_out_bytes = 80 * three.micro_batch_bytes
    assert many.peak_allocated_bytes - three.peak_allocated_bytes > 0.9 * left_out_bytes


def test_weights_in_bfloat16_take_half(trial_server: ServerClient) -> None:
    # 32 MiB of embeddings in float32; gradients and Adam's two moments come on top.
    config = {"vocab_size": 131072}
    peaks = [
        trial_server.trial(tiny_workload("gpt2-tiny", task="sequence-classification", dtype=dtype, config=config),
                           Candidate(Arm(), 1)).completed.measurement.peak_reserved_bytes
        for dtype in ("float32", "bfloat16")
    ]  # fmt: skip
    assert peaks[1] < 0.75 * peaks[0]


def test_a_part_of_an_accumulation_stands_for_the_whole(trial_server: ServerClient) -> None:
    workload, candidate = tiny_workload("bert-tiny", seq_len=64), Candidate(Arm(), 8, 8)

    def measure(max_micro_steps: int) -> Measurement:
        effort = Effort(warmup_steps=2, min_steps=4, max_steps=4, max_seconds=60.0, max_micro_steps=max_micro_steps)
        return trial_server.trial(workload, candidate, effort).completed.measurement

    ratios, quickest = list[float](), [math.inf, math.inf]
    # The quickest steps of several tries: the machine may be busy during any of them.
    while len(ratios) < 6 and not any(0.5 < ratio < 2 for ratio in ratios):
        part, whole = measure(3), measure(8)
        quickest = [min(before, *m.step_seconds_each) for before, m in zip(quickest, (part, whole), strict=True)]
        ratios.append(quickest[0] / quickest[1])
        assert (part.micro_steps_run, whole.micro_steps_run) == (3, 8)
        assert part.samples_per_second == pytest.approx(64 / part.step_seconds)
        assert part.peak_reserved_bytes == pytest.approx(whole.peak_reserved_bytes, rel=0.25)
    assert 0.5 < ratios[-1] < 2, ratios


# Memory that imports used and freed may hold the model, too.
@pytest.mark.parametrize(("cap_mib", "phases"), [(4, {"model", "trainer", "train"}), (60, {"train"})])
def test_memory_really_runs_out_and_the_next_trial_is_fine(
    trial_server: ServerClient, cap_mib: int, phases: set[str]
) -> None:
    workload, large = tiny_workload("bert-tiny", seq_len=128), Candidate(Arm(), 64)
    answer = trial_server.trial(workload, large, cap_bytes=cap_mib * MIB)
    outcome = answer.outcome
    assert outcome.during in phases
    assert outcome.where == "device"
    # Python itself says MemoryError alone, or with the line at which it was raised.
    assert "allocate memory" in outcome.message or outcome.message.startswith("MemoryError")
    assert outcome.message in answer.log
    # Pages that imports freed are not counted by the limit, but by the peak.
    assert outcome.peak_reserved_bytes <= 1.1 * cap_mib * MIB + MIB
    assert list(outcome.phase_seconds)[-1] == outcome.during
    small = Candidate(Arm(), 1)
    check_sane(trial_server.trial(tiny_workload("vit-tiny"), small, cap_bytes=300 * MIB).completed, small)


def test_a_trial_stays_under_the_cap_that_it_completed_with(trial_server: ServerClient) -> None:
    workload, candidate = tiny_workload("bert-tiny", seq_len=64), Candidate(Arm(), 8)
    needed = trial_server.trial(workload, candidate).completed.measurement.peak_reserved_bytes
    assert isinstance(trial_server.trial(workload, candidate, cap_bytes=needed // 2).outcome, OutOfMemory)
    capped = trial_server.trial(workload, candidate, cap_bytes=needed * 3 // 2).completed.measurement
    assert capped.peak_reserved_bytes <= needed * 3 // 2


@pytest.mark.parametrize(
    ("arm", "words", "phase"),
    [
        pytest.param(
            Arm(attn_implementation="flash_attention_2"),
            "flash",
            "model",
            marks=pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash_attn is installed"),
        ),
        (Arm(optim="adamw_no_such"), "adamw_no_such", "trainer"),
        (Arm(optim="galore_adamw"), "galore", "train"),
    ],
    ids=lambda value: value.describe() if isinstance(value, Arm) else "",
)
def test_what_is_not_installed_fails_with_its_evidence(
    trial_server: ServerClient, arm: Arm, words: str, phase: str
) -> None:
    answer = trial_server.trial(tiny_workload("gpt2-tiny"), Candidate(arm, 4))
    outcome = answer.outcome
    assert (outcome.reason, outcome.during) == ("error", phase)
    assert words in outcome.message.lower()
    assert "Traceback" in outcome.traceback
    assert outcome.traceback in answer.log
    assert list(outcome.phase_seconds)[-1] == phase


def test_levers_that_are_applied_train_the_same_with_less_memory(trial_server: ServerClient) -> None:
    sizes = {"num_hidden_layers": 8, "vocab_size": 4096}
    workload = tiny_workload("llama-tiny", seq_len=128, config=sizes)
    effort = Effort(warmup_steps=1, min_steps=1, max_steps=1)

    def measured(**settings: Any) -> Measurement:
        return trial_server.trial(workload, Candidate(Arm(**settings), 16), effort).completed.measurement

    stock, fused = measured(), measured(fused_loss=True)
    checkpointed = {"gradient_checkpointing": True}
    some, all_layers = measured(**checkpointed, checkpointed_layers=4), measured(**checkpointed)
    for other in (fused, some, measured(unpadded=True)):
        assert other.train_loss == pytest.approx(stock.train_loss, rel=1e-5)
    half = replace(workload, padding=0.5)
    padded, joined = (
        trial_server.trial(half, Candidate(Arm(padding_free=on), 16), effort).completed.measurement
        for on in (False, True)
    )
    assert joined.train_loss == pytest.approx(padded.train_loss, rel=1e-5)
    assert joined.peak_reserved_bytes < 0.9 * padded.peak_reserved_bytes
    assert fused.peak_reserved_bytes < 0.9 * stock.peak_reserved_bytes
    assert all_layers.peak_reserved_bytes < some.peak_reserved_bytes < stock.peak_reserved_bytes
    workload = tiny_workload("bert-tiny", seq_len=128, task="masked-lm", config={"vocab_size": 4096})
    stock, sparse = measured(), measured(sparse_prediction=True)
    assert sparse.train_loss == pytest.approx(stock.train_loss, rel=1e-5)
    assert sparse.peak_reserved_bytes < 0.9 * stock.peak_reserved_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_cannot_be_opened_is_a_failure(trial_server: ServerClient) -> None:
    nowhere = RankDevices("cuda", ("GPU-none",))
    outcome = trial_server.trial(tiny_workload("bert-tiny"), Candidate(Arm(), 4), devices=nowhere).failed
    assert outcome.during == "device"


def test_a_lever_that_a_training_cannot_have_fails_with_the_reason(trial_server: ServerClient) -> None:
    answer = trial_server.trial(tiny_workload("bert-tiny", seq_len=64), Candidate(Arm(fused_loss=True), 4))
    assert answer.failed.reason == "unavailable"
    assert "the output layer of" in answer.failed.message

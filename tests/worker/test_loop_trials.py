"""Trials of training loops that are no Trainer's, each in a process of its own, on the CPU."""

import dataclasses
import math
from pathlib import Path

import pytest
from server_client import ServerClient
from tiny import QUICK

from autotune.core.candidate import Arm, Candidate
from autotune.core.measured_steps import most_measured_steps
from autotune.core.training_source import find_loop
from autotune.core.workload import Workload

# In which nothing may appear.
pytestmark = pytest.mark.usefixtures("folder")
LOOPS = Path(__file__).resolve().parents[1] / "own_code" / "train_loop.py"


def loop(function: str = "train") -> Workload:
    """The workload of a function of ``train_loop.py``."""
    return Workload.of_source(find_loop(f"{LOOPS}:{function}"))


@pytest.mark.parametrize(
    ("candidate", "micro_steps_run"),
    # 96 samples are three steps of 32; a part of 12 micro-steps stands for all of them.
    [
        (Candidate(Arm("bf16", gradient_checkpointing=True), 16, 2), 2),
        (Candidate(Arm(dataloader_num_workers=2), 2, 12), 3),
    ],
)
def test_a_loop_is_measured_and_nothing_after_it_is_reached(
    trial_server: ServerClient, folder: Path, candidate: Candidate, micro_steps_run: int
) -> None:
    workload, _ = trial_server.prepared(loop())
    answer = trial_server.trial(workload, candidate)
    measured = answer.completed.measurement
    assert measured.micro_steps_run == micro_steps_run
    assert measured.samples_per_second == pytest.approx(candidate.samples_per_step / measured.step_seconds)
    assert len(measured.step_seconds_each) == QUICK.max_steps
    assert 0 < measured.data_seconds < measured.step_seconds  # type: ignore[operator]
    assert 0 < measured.optimizer_seconds < measured.step_seconds  # type: ignore[operator]
    assert math.isfinite(measured.train_loss or math.nan)
    arm = candidate.arm
    assert f"precision='{arm.precision}', gradient_checkpointing={arm.gradient_checkpointing})" in answer.log
    assert f"loads with {arm.dataloader_num_workers} processes" in answer.log
    assert "evaluates" not in answer.log
    assert [progress.phase for progress in answer.progress if progress.phase] == ["device", "loop", "train"]
    assert list(folder.iterdir()) == []


def test_what_a_loop_reads_of_its_config_is_known_before_any_trial(trial_server: ServerClient, folder: Path) -> None:
    model = trial_server.model(loop())
    interface = model.interface
    assert interface.searched == ("batch", "accumulation", "precision", "checkpointing")
    assert (interface.kind, interface.tunes_loader) == ("loop", True)
    assert interface.loader.startswith("train_loop.py:")
    assert (model.parameters, model.samples, model.dtype) == (32 * 64 + 64, 96, "float32")
    alone = trial_server.model(loop("take_the_batch_alone"))
    assert (alone.interface.searched, alone.interface.tunes_loader) == (("batch",), False)
    assert (alone.class_name, alone.gradient_checkpointing, alone.samples) == ("Linear", False, None)
    assert list(folder.iterdir()) == []


def test_a_step_that_the_end_of_the_data_cuts_short_is_not_counted(
    trial_server: ServerClient, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    candidate = Candidate(Arm(), 40, 2)
    measured = trial_server.trial(loop(), candidate).completed.measurement
    assert len(measured.step_seconds_each) == QUICK.max_steps


def test_a_loop_that_counts_to_the_length_of_its_loader_does_not_reach_it(trial_server: ServerClient) -> None:
    workload, _ = trial_server.prepared(loop("count_to_its_length"))
    effort = dataclasses.replace(QUICK, min_steps=8, max_steps=8)
    answer = trial_server.trial(workload, Candidate(Arm(), 8, 2), effort)
    # A slow step, as a busy machine has, is waited for again.
    assert 8 <= len(answer.completed.measurement.step_seconds_each) <= most_measured_steps(effort)
    assert ", 0 left" in answer.log


def test_a_loop_that_ends_soon_counts_as_far_as_it_went(trial_server: ServerClient) -> None:
    measured = trial_server.trial(loop("end_soon"), Candidate(Arm(), 4)).completed.measurement
    assert 1 <= len(measured.step_seconds_each) <= 4


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("forget_steps", "train_loop.py:forget_steps trains without autotune.steps at train_loop.py:"),
        (
            "parse_options",
            "train_loop.py:parse_options left with exit code 2: train_loop.py: error: the following arguments are "
            "required: --data",
        ),
        ("end_at_once", "train_loop.py:end_at_once ended without a step of an optimizer within autotune.steps"),
        ("nest", "train_loop.py:nest goes over autotune.steps within autotune.steps"),
        ("no_such", "train_loop.py has no function no_such"),
        ("say_it_twice", "train_loop.py:say_it_twice uses autotune.step within autotune.steps"),
        (
            "train_another_model",
            "train_loop.py:train_another_model steps an optimizer whose parameters get no gradients",
        ),
    ],
)
def test_a_loop_that_cannot_be_measured_says_why(trial_server: ServerClient, function: str, message: str) -> None:
    answer = trial_server.inspection(loop(function))
    assert answer.problem.message.startswith(message)
    assert answer.problem.hint


def test_a_loop_that_accumulates_otherwise_is_refused(trial_server: ServerClient) -> None:
    answer = trial_server.trial(loop("accumulate_otherwise"), Candidate(Arm(), 8, 4))
    message = "train_loop.py:accumulate_otherwise steps its optimizer after 1 batches, asked was 3"
    assert answer.failed.message == message
    assert f"{message}; have it accumulate as many batches as its gradient_accumulation_steps say\n" in answer.log


def test_a_loop_whose_batches_do_not_follow_its_config_is_told(trial_server: ServerClient) -> None:
    workload, _ = trial_server.prepared(loop("keep_its_batch"))
    outcome = trial_server.trial(workload, Candidate(Arm(), 16)).failed
    assert outcome.message == (
        "train_loop.py:keep_its_batch makes batches of 8 with a per_device_batch_size of 16, and of 8 with one of 8"
    )


def test_an_incomplete_last_batch_that_fails_is_told(trial_server: ServerClient, folder: Path) -> None:
    """Of 129 samples one is left, of which batch norm knows no deviation."""
    (folder / "run.py").write_text("""
import torch, autotune
from torch.utils.data import DataLoader, TensorDataset
def train(config):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    loader = DataLoader(TensorDataset(torch.randn(129, 4)), batch_size=config.per_device_batch_size)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for (batch,) in autotune.steps(loader):
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""")
    effort = dataclasses.replace(QUICK, max_steps=9, min_steps=9)
    outcome = trial_server.trial(Workload.of_source(find_loop("run.py:train")), Candidate(Arm(), 64), effort).failed
    assert "Expected more than 1 value per channel" in outcome.message
    assert "drop_last=True" in outcome.message

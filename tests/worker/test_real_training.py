"""Test what ``autotune run`` trains with: real scripts in processes of their own, told a winner without any search."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from server_client import ServerClient, of_command

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.real_training import VARIABLE, RealTraining
from autotune.core.schema import encode
from autotune.core.training_source import TrainingSource, find_script
from autotune.space.training_arguments import training_arguments

OWN_CODE = Path(__file__).resolve().parents[1] / "own_code"
TRAINER = ("python", str(OWN_CODE / "train_in_ways.py"))
LOOP = ("python", str(OWN_CODE / "no_trainer.py"))
FIELDS = ("activation_checkpointing",)


def run(training: RealTraining, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train with it, as ``autotune run`` starts it."""
    return warm.run(
        [sys.executable, "-m", "autotune.worker.user.real_training"],
        env={**os.environ, VARIABLE: json.dumps(encode(training))},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )


def with_trainer(
    folder: Path, candidate: Candidate, *words: str, dtype: str | None = "float32", has_adapters: bool | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the script with a ``Trainer``."""
    fields = dict(training_arguments(candidate, FIELDS, "cpu"))
    source = find_script([*TRAINER, *words])
    return run(RealTraining("s", source, candidate, fields, dtype=dtype, has_adapters=has_adapters), folder)


def test_a_trainer_has_all_that_it_was_set_or_ends_before_its_first_step(tmp_path: Path) -> None:
    late = with_trainer(tmp_path, Candidate(Arm("bf16", optim="adamw_torch"), 8, 2), "late")
    assert late.returncode == 0, late.stderr
    # A backend compiles, whatever torch_compile says, and code sets fields once its arguments are made.
    assert late.stdout.splitlines()[-1] == "8 × 2, bf16, False"
    assert "the script says torch_compile_backend='eager'; None is set" in late.stderr
    assert "the script says per_device_train_batch_size=4; 8 is set" in late.stderr


@pytest.mark.parametrize(
    ("way", "arm", "options", "told"),
    [
        ("callback", Arm(), {}, "gradient_accumulation_steps is 3, asked was 2"),
        ("checkpointing", Arm(), {}, "checkpointing of its model is True, asked was False"),
        ("half", Arm(), {}, "its weights are bfloat16, measured were float32"),
        ("plain", Arm(attn_implementation="eager"), {}, "the attention of its model is 'sdpa', asked was 'eager'"),
        ("plain", Arm(), {"has_adapters": True}, "its model has no adapters of peft"),
        ("plain", Arm(cuda_graphs=True), {}, "CUDA graphs need a CUDA device"),
    ],
)
def test_what_cannot_be_applied_ends_the_training_before_its_first_step(
    tmp_path: Path, way: str, arm: Arm, options: dict[str, bool], told: str
) -> None:
    arm = dataclasses.replace(arm, optim="adamw_torch")
    ended = with_trainer(tmp_path, Candidate(arm, 8, 2), way, **options)  # type: ignore[arg-type]
    assert (ended.returncode, ended.stdout) == (10, ""), ended.stderr
    assert told in ended.stderr.splitlines()[-1]
    assert ended.stderr.splitlines()[-1].startswith("autotune: train_in_ways.py ")


@pytest.mark.parametrize(
    "lever", ["padding_free", "fused_loss", pytest.param("regional_compilation", marks=pytest.mark.whole)]
)
def test_several_trainings_evaluations_and_generation_go_with_a_lever(tmp_path: Path, lever: str) -> None:
    compiled = lever == "regional_compilation"
    arm = Arm(optim="adamw_torch", torch_compile=compiled, **{lever: True})  # type: ignore[arg-type]
    ran = with_trainer(tmp_path, Candidate(arm, 8, 2), "again")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "done"


def inspected(server: ServerClient, *words: str) -> TrainingSource:
    """The loop as a search has seen it."""
    workload, _ = server.prepared(of_command(*LOOP, *words))
    return workload.source


def test_a_loop_trains_as_many_samples_as_by_itself(trial_server: ServerClient, folder: Path) -> None:
    """Its schedule is made of options, which are found by what they were given for and by what was seen."""
    source = inspected(trial_server)
    assert source.interface.flags == {"batch": "--per_device_train_batch_size", "accumulation": "--accum"}
    winner = Candidate(Arm("bf16", optim=OWN_OPTIM), 32, 1)
    assert warm.output_of(LOOP[1]) == "updates 16, samples 512, last lr 0.00e+00, no\n"
    with warm.cold():
        # Its libraries are changed as it imports them.
        ran = run(RealTraining("s", source, winner, {}), folder)
    assert ran.stdout == "updates 16, samples 512, last lr 0.00e+00, bf16\n", ran.stderr


def test_a_schedule_of_another_training_ends_it(trial_server: ServerClient, folder: Path) -> None:
    source = inspected(trial_server, "--constant")
    for batch, accumulation in ((32, 1), (2, 16)):
        ended = run(RealTraining("s", source, Candidate(Arm(optim=OWN_OPTIM), batch, accumulation), {}), folder)
        assert (ended.returncode, ended.stdout) == (10, ""), ended.stderr
        assert f"cannot train with an accumulation of {accumulation}: its learning rate schedule of" in ended.stderr
        assert f"write {accumulation} at no_trainer.py:" in ended.stderr
    # With the accumulation that is in the code, the schedule is right.
    ran = run(RealTraining("s", source, Candidate(Arm(optim=OWN_OPTIM), 8, 8), {}), folder)
    assert ran.stdout == "updates 8, samples 512, last lr 0.00e+00, no\n", ran.stderr


def test_a_script_that_was_changed_since_is_not_trained_with_its_own_batch(
    trial_server: ServerClient, folder: Path
) -> None:
    text = Path(LOOP[1]).read_text()
    (folder / "no_trainer.py").write_text(text)
    workload, _ = trial_server.prepared(of_command("python", "no_trainer.py"))
    (folder / "no_trainer.py").write_text(f"# One line more.\n{text}")
    ended = run(RealTraining("s", workload.source, Candidate(Arm(optim=OWN_OPTIM), 32, 1), {}), folder)
    assert (ended.returncode, ended.stdout) == (10, ""), ended.stderr
    assert "makes no training DataLoader at no_trainer.py:" in ended.stderr


@pytest.mark.parametrize("text", ["print('no training')", "import sys; sys.exit(0)"])
def test_a_script_that_trained_nothing_has_not_trained_with_the_winner(tmp_path: Path, text: str) -> None:
    (tmp_path / "idle.py").write_text(text)
    source = find_script(["python", str(tmp_path / "idle.py")])
    ended = run(RealTraining("s", source, Candidate(Arm(), 8), {}), tmp_path)
    assert ended.returncode == 10, ended.stderr
    assert "idle.py ended without a step that could be looked at" in ended.stderr


def test_no_library_is_imported_before_the_users_code() -> None:
    """What a script sets before its own imports, such as environment variables, has its effect."""
    libraries = "{'torch', 'transformers', 'accelerate', 'datasets'}"
    code = f"import sys, autotune.worker.user.real_training; print(sorted({libraries} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"

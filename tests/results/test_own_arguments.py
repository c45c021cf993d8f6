"""Test how a winner is handed to code that is no Trainer's."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.code_interface import SETTINGS, CodeInterface, Framework
from autotune.core.schema import decode
from autotune.core.training_source import TrainingSource
from autotune.results.own_arguments import OwnArguments, flags, hand_over, own_arguments

CANDIDATE = Candidate(Arm("tf32", optim=OWN_OPTIM, dataloader_num_workers=4, dataloader_prefetch_factor=8), 16, 2)
TF32 = "call torch.set_float32_matmul_precision('high') before the training"


def code(kind: Framework, **seen: Any) -> TrainingSource:
    """A script or loop, and what an inspection saw of it."""
    found = CodeInterface(kind, ("batch", "accumulation", "precision"), loader="train.py:12")
    source = TrainingSource("script", "/home/ada/train.py", "0", "/home/ada", interface=replace(found, **seen))
    return replace(source, kind="loop", function="train") if kind == "loop" else source


def test_loading_processes_have_the_scripts_own_flag_or_a_line() -> None:
    seen = code("accelerate", flags={"batch": "--batch_size", "workers": "--num_workers"})
    arguments = own_arguments(seen, CANDIDATE)
    assert arguments == {
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "mixed_precision": "no",
        "dataloader_num_workers": 4, "dataloader_prefetch_factor": 8,
    }  # fmt: skip
    given = {"per_device_train_batch_size": "--batch_size", "dataloader_num_workers": "--num_workers"}
    assert flags(seen, arguments) == given
    lines = hand_over(seen, arguments, CANDIDATE)
    assert "set by hand: prefetch_factor of the training DataLoader at train.py:12 = 8" in lines
    assert not any("num_workers" in line for line in lines)
    assert lines[-1] == TF32


@pytest.mark.parametrize("kind", ["accelerate", "lightning", "loop"])
def test_what_is_exported_is_of_the_published_type(kind: Framework) -> None:
    seen = code(kind, searched=SETTINGS)
    arguments = own_arguments(seen, CANDIDATE)
    assert arguments == decode(arguments, OwnArguments)
    assert arguments.keys() <= OwnArguments.__annotations__.keys()


def test_lightning_names_them_as_torch_does() -> None:
    seen = code("lightning")
    lines = hand_over(seen, own_arguments(seen, CANDIDATE), CANDIDATE)
    assert "set by hand: num_workers of the training DataLoader at train.py:12 = 4" in lines
    assert "set by hand: precision of the Trainer = '32-true'" in lines


def test_a_loops_settings_have_what_a_loop_config_has() -> None:
    seen = code("loop")
    arguments = own_arguments(seen, CANDIDATE)
    assert set(arguments) == {"per_device_batch_size", "gradient_accumulation_steps", "precision"}
    lines = hand_over(seen, arguments, CANDIDATE)
    assert lines[1:] == [
        "set by hand: num_workers of the training DataLoader at train.py:12 = 4",
        "set by hand: prefetch_factor of the training DataLoader at train.py:12 = 8",
        TF32,
    ]


def test_a_precision_that_the_code_passes_itself_is_set_there() -> None:
    """``accelerate launch`` would set one that the code's own counts for more than."""
    seen = code("accelerate", accelerator="train.py:30", passed=("mixed_precision",))
    candidate = Candidate(Arm("bf16", optim=OWN_OPTIM), 16, 2)
    lines = hand_over(seen, own_arguments(seen, candidate), candidate)
    assert "set by hand: mixed_precision of the Accelerator at train.py:30 = 'bf16'" in lines
    assert not any("accelerate launch" in line for line in lines)
    launched = code("accelerate")
    lines = hand_over(launched, own_arguments(launched, candidate), candidate)
    assert any("accelerate launch --mixed_precision bf16" in line for line in lines)


def test_an_accumulation_that_the_code_makes_itself_is_explained() -> None:
    seen = code("accelerate", searched=("batch", "precision"))
    lines = hand_over(seen, own_arguments(seen, CANDIDATE), CANDIDATE)
    assert "leave the accumulation that the code makes itself, 2" in lines

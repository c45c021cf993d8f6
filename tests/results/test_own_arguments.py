"""Test how a winner is handed to code that is no Trainer's."""

from dataclasses import replace
from typing import Any

import pytest
from messages import check_messages

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.code_interface import SETTINGS, CodeInterface, Framework
from autotune.core.schema import decode
from autotune.core.training_source import TrainingSource
from autotune.results.own_arguments import OwnArguments, flags, hand_over, own_arguments

CANDIDATE = Candidate(Arm("tf32", optim=OWN_OPTIM, dataloader_num_workers=4, dataloader_prefetch_factor=8), 16, 2)


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


@pytest.mark.parametrize("kind", ["accelerate", "lightning", "loop"])
def test_what_is_exported_is_of_the_published_type(kind: Framework) -> None:
    seen = code(kind, searched=SETTINGS)
    arguments = own_arguments(seen, CANDIDATE)
    assert arguments == decode(arguments, OwnArguments)
    assert arguments.keys() <= OwnArguments.__annotations__.keys()


def test_a_loops_settings_have_what_a_loop_config_has() -> None:
    seen = code("loop")
    arguments = own_arguments(seen, CANDIDATE)
    assert set(arguments) == {"per_device_batch_size", "gradient_accumulation_steps", "precision"}


def test_messages_of_code_that_is_no_trainers() -> None:
    """Loading processes have the script's own flag or a line; a precision that the code passes itself is set there."""
    loading = Candidate(Arm("bf16", optim=OWN_OPTIM), 16, 2)
    cases = {
        "its own flags": (code("accelerate", flags={"batch": "--batch_size", "workers": "--num_workers"}), CANDIDATE),
        "lightning": (code("lightning"), CANDIDATE),
        "a loop": (code("loop"), CANDIDATE),
        "it passes the precision": (code("accelerate", accelerator="a.py:3", passed=("mixed_precision",)), loading),
        "it does not pass the precision": (code("accelerate"), loading),
        "it accumulates itself": (code("accelerate", searched=("batch", "precision")), CANDIDATE),
    }
    check_messages(
        "own_code", {name: hand_over(seen, own_arguments(seen, of), of) for name, (seen, of) in cases.items()}
    )

"""Test what a shell is told that completes a command line, as the scripts of click ask for it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import ROOT, Studied, command, environment, run_process


def completed(folder: Path, *words: str) -> list[str]:
    """What bash is offered for the last of the words."""
    asked = {"_AUTOTUNE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    ran = run_process(folder=folder, **asked)
    assert not ran.stderr
    return [line.partition(",")[2] for line in ran.stdout.splitlines() if line]


def test_models_gpus_devices_and_studies_are_completed(studied: Studied, tmp_path: Path) -> None:
    assert "bert-base-uncased" in completed(tmp_path, "autotune", "search", "--model", "bert-ba")
    assert all(name.startswith("bert-ba") for name in completed(tmp_path, "autotune", "search", "--model", "bert-ba"))
    assert "rtx-4090" in completed(tmp_path, "autotune", "predict", "--gpu", "rtx-40")
    assert completed(tmp_path, "autotune", "search", "--device", "c") == ["cpu"]
    assert completed(tmp_path, "autotune", "show", "--storage", studied.storage, "t") == [studied.name]
    assert completed(tmp_path, "autotune", "verify", "--storage", studied.storage, "") == [studied.name]


def test_what_cannot_be_looked_up_is_no_error_and_writes_nothing(tmp_path: Path) -> None:
    assert completed(tmp_path, "autotune", "show", "") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_one_that_it_reads(shell: str, tmp_path: Path) -> None:
    variables = {**environment(), "_AUTOTUNE_COMPLETE": f"{shell}_source"}
    script = subprocess.run(command(), cwd=tmp_path, env=variables, capture_output=True, text=True, check=True).stdout
    assert "_AUTOTUNE_COMPLETE" in script
    assert f"_AUTOTUNE_COMPLETE={shell}_source" in (ROOT / "docs/how-to/install.md").read_text()
    if shutil.which(shell) is not None:
        flag = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([shell, flag, "-c", script], env={"PATH": os.environ["PATH"]}, check=True)


def test_levers_are_completed_with_what_each_command_has(tmp_path: Path) -> None:
    assert completed(tmp_path, "autotune", "search", "--lever", "cuda") == ["cuda_graphs"]
    assert completed(tmp_path, "autotune", "predict", "--lever", "f") == ["fused_loss"]

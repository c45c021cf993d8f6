"""Test ``autotune resume``: with the name alone and the recorded options."""

import shutil
from pathlib import Path

from command_line import Run, Studied, run_process


def test_a_device_that_is_not_here(run: Run, studied: Studied) -> None:
    ran = run("resume", "tiny", "--storage", studied.storage, "--device", "cuda:7")
    assert ran.code == 4


def test_of_a_spent_budget_shows_the_result_and_no_empty_table(studied: Studied, tmp_path: Path) -> None:
    storage = str(shutil.copy(studied.storage, tmp_path / "copy.db"))
    ran = run_process("resume", "tiny", "--storage", storage, folder=tmp_path, cold=True)
    assert ran.code == 0, ran.stderr
    assert "Best: per-device batch" in ran.stdout
    assert "continuing the study tiny, 3 trials recorded" in ran.stderr
    assert "configuration" not in ran.stderr


def test_goes_on_with_a_larger_budget(studied: Studied, tmp_path: Path) -> None:
    """The trials that are there stay as they are; the new ones have the recorded options."""
    storage = str(shutil.copy(studied.storage, tmp_path / "copy.db"))
    words = ("tiny", "--trials", "4", "--storage", storage, "--json")
    ran = run_process("resume", *words, folder=tmp_path)
    document = ran.document
    assert "continuing the study tiny, 3 trials recorded" in ran.stderr
    assert "configuration" in ran.stderr
    assert document["trials"][:3] == studied.document["trials"]
    assert len(document["trials"]) == 4
    same = ("effective_batch", "precision", "optim", "seed", "objective")
    assert {name: document["request"][name] for name in same} == {
        name: studied.document["request"][name] for name in same
    }

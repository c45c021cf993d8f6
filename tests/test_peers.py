"""Test the comparison with other batch finders, as far as possible without a GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import warm
from peers import CONTENDERS, FINDERS, candidates_of, print_table, schedule

from autotune.core.candidate import Arm, Candidate
from autotune.models.resolve import resolve_model


def test_every_contender_runs_once_a_repeat_and_another_goes_first_each_time() -> None:
    names = list(CONTENDERS)
    turns = schedule(names, 3)
    assert sorted(turns) == sorted((name, repeat) for name in names for repeat in range(3))
    firsts = [turns[repeat * len(names)][0] for repeat in range(3)]
    assert len(set(firsts)) == 3


def test_every_script_of_a_contender_is_there() -> None:
    scripts = {words[0] for words in CONTENDERS.values() if words and words[0].endswith(".py")}
    assert scripts == {path.name for path in FINDERS.glob("by_*.py")}


def test_an_answer_is_measured_at_the_effective_batch_only_where_it_divides_that() -> None:
    assert candidates_of({"per_device_train_batch_size": 36}, 64, bf16=True) == {
        "by_itself": Candidate(Arm("bf16"), 36, 1)
    }
    of_32 = candidates_of({"per_device_train_batch_size": 32}, 64, bf16=True)
    assert of_32["at_effective_batch"] == Candidate(Arm("bf16"), 32, 2)
    ours = Candidate(Arm("tf32", gradient_checkpointing=True), 16, 4)
    assert candidates_of(ours.parameters(), 64, bf16=True) == {"at_effective_batch": ours}


def test_a_failure_is_shown_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    good = {"parameters": {"per_device_train_batch_size": 36}, "tried": [40, 36]}
    print_table(
        {
            "settings": {"effective_batch": 64, "device_kind": "cuda"},
            "runs": [
                {"contender": "accelerate", "repeat": 0, "ok": True, "seconds": 20.6, "answer": good},
                {"contender": "Trainer", "repeat": 0, "ok": False, "seconds": 3.0, "error": "exit code 1: it broke"},
            ],
            "measured": {"36 × 1  bf16": {"samples_per_second": 290.4, "leaves_the_headroom": False}},
        }
    )
    shown = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "|" in line}
    assert all(word in shown["accelerate"] for word in ("20.6", "batch 36", "cannot", "290 (over the headroom)"))
    assert "it broke" in shown["Trainer"]


@pytest.mark.whole
def test_a_finder_tells_its_answer(tmp_path: Path) -> None:
    """A real process; the others need what the project does not depend on, or more time."""
    settings = {"config": resolve_model("bert-tiny").config, "seq_len": 16, "device": "cpu", "bf16": False}
    settings |= {"cap_bytes": None, "start": 4, "steps": 1}
    asked, told = tmp_path / "settings.json", tmp_path / "result.json"
    asked.write_text(json.dumps(settings))
    words = [sys.executable, str(FINDERS / "by_accelerate.py"), str(asked), str(told)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    ended = warm.run(words, capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(told.read_text()) == {"per_device_train_batch_size": 4, "tried": [4]}

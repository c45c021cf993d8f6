"""``autotune predict``, for a small model and GPUs that are not here."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from command_line import ROOT, Run, run_process

from autotune.store import open_store

_SMALL = ("predict", "--model", "bert-tiny", "--seq-len", "64", "--precision", "bf16,tf32")


def test_predict_says_what_fits_on_named_gpus(tmp_path: Path) -> None:
    done = run_process(
        *_SMALL,
        "--effective-batch",
        "64",
        "--gpu",
        "rtx-3090,v100-16gb",
        "--json",
        "--precision",
        "fp16",
        folder=tmp_path,
    )
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["predicted"] is True
    assert [gpu["gpu"] for gpu in document["gpus"]] == ["rtx-3090", "v100-16gb"]
    for arm in document["arms"]:
        assert arm["precision"] == "fp16"
        assert arm["largest_batch"] == 64
        for row in arm["batches"]:
            assert row["per_device_train_batch_size"] * row["gradient_accumulation_steps"] == 64
            assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 16 * 4_000_000
            assert row["fits"]


def test_predict_finds_the_largest_free_batch_and_what_the_peak_consists_of(tmp_path: Path) -> None:
    done = run_process(
        *_SMALL, "--memory-limit", "2GiB", "--gradient-checkpointing", "off", "--anatomy", folder=tmp_path
    )
    assert done.code == 0, done.stderr
    assert "activations" in done.stdout
    assert "yes" in done.stdout
    assert "no" in done.stdout
    assert "not measured" in done.stderr


def test_predict_needs_to_know_the_memory(tmp_path: Path) -> None:
    done = run_process(*_SMALL, folder=tmp_path)
    assert done.code == 2
    assert "--gpu rtx-3090" in done.stderr


def test_an_unknown_gpu_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    done = run_process(*_SMALL, "--gpu", "voodoo-2", folder=tmp_path)
    assert done.code == 2
    assert "voodoo-2" in done.stderr
    assert "rtx-3090" in done.stderr


# A module that Python imports at its start: no process can be started any more.
_ALONE = """
import sys

def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"):
        raise RuntimeError(f"{event} by a command that is to start no process")

sys.addaudithook(refuse)
"""


def alone(folder: Path) -> dict[str, str]:
    """The variables with which a command can start no process."""
    site = folder / "alone"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_ALONE)
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def test_a_second_prediction_of_the_same_starts_no_process(tmp_path: Path) -> None:
    gpus = (*_SMALL, "--effective-batch", "64", "--memory-limit", "8GiB", "--gpu", "v100-16gb,v100-32gb,rtx-3090")
    first = run_process(*gpus, "--precision", "fp32", "--json", folder=tmp_path)
    assert first.code == 0, first.stderr
    database = tmp_path / "studies" / "autotune.db"
    with open_store(str(database)) as store:
        assert store.studies() == []
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT kind, count(*) FROM autotune_answers GROUP BY kind").fetchall()
    # With and without checkpointing; the V100s differ in nothing but their memory, of which no more than 8 GiB counts.
    assert dict(rows) == {"inspection": 1, "prediction": 4}
    variables = alone(tmp_path)
    second = run_process(*gpus, "--precision", "fp32", "--json", folder=tmp_path, **variables)
    assert second.code == 0, second.stderr
    assert second.stdout == first.stdout
    gpu, twin, other = json.loads(second.stdout)["gpus"]
    assert gpu["arms"] == twin["arms"]
    assert [arm["largest_batch"] for arm in other["arms"]] == [64, 64]
    # The refusal is real: what was not asked before cannot be asked so.
    assert run_process(*gpus, "--precision", "fp16", folder=tmp_path, **variables).code != 0


def test_a_prediction_where_nothing_can_be_kept_is_made_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "studies").write_text("in the way")
    few = (*_SMALL, "--memory-limit", "2GiB", "--effective-batch", "8", "--gradient-checkpointing", "off")
    done = run_process(*few, folder=tmp_path)
    assert done.code == 0, done.stderr
    assert "yes" in done.stdout
    assert "not kept" not in done.stderr
    named = run_process(*few, "--storage", "studies/own.db", folder=tmp_path)
    assert named.code == 0, named.stderr
    assert named.stdout == done.stdout
    assert "what was predicted is not kept: studies/own.db" in named.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["studies"]


@pytest.mark.parametrize(
    "refused",
    [("--gpu", "voodoo-2"), ("--memory-limit", "0.65GiB"), ("--memory-limit", "8GiB", "--effective-batch", "0")],
)
def test_a_prediction_that_is_refused_leaves_nothing_behind(refused: tuple[str, ...], tmp_path: Path) -> None:
    assert run_process(*_SMALL, *refused, folder=tmp_path).code != 0
    assert list(tmp_path.iterdir()) == []


def test_a_model_has_to_be_named(run: Run) -> None:
    ran = run("predict", "--memory-limit", "8GiB")
    assert ran.code == 2
    assert "--model" in ran.stderr

"""``autotune predict``, for a small model and GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import run_process

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

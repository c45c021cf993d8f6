"""Test the commands that list devices, models and studies, and show results."""

import json
import re
from pathlib import Path

import pytest
from command_line import TINY_MODEL, Run, Studied

from autotune.core.units import format_rate
from autotune.store.opening import head_revision

HEAD = head_revision()


def test_devices_without_a_gpu(run: Run) -> None:
    """The CPU is always a device; why there is no GPU is said on stderr."""
    ran = run("devices")
    assert ran.code == 0
    assert ran.stdout.startswith("cpu ")
    assert "total" in ran.stdout
    assert "fp32" in ran.stdout
    assert "GPU" in ran.stderr or "NVML" in ran.stderr
    document = run("devices", "--json").document
    (cpu,) = document["devices"]
    assert cpu["kind"] == "cpu"
    assert cpu["memory_total_bytes"] > 0
    assert "fp32" in cpu["precisions"]


def test_models_lists_the_catalog(run: Run) -> None:
    ran = run("models")
    head, *rows = ran.stdout.splitlines()
    assert head.split() == ["model", "parameters", "task", "about"]
    assert any(row.startswith("vit-tiny ") for row in rows)
    assert {row.index(row.split()[2]) for row in rows} == {head.index("task")}
    assert "config.json" in ran.stderr
    entries = run("models", "--json").document
    assert [entry["name"] for entry in entries] == [row.split()[0] for row in rows]
    assert all(entry["parameters"] > 0 for entry in entries)


def test_db_upgrade_makes_the_database_and_current_reads_it(run: Run, folder: Path) -> None:
    """In the default place, and a second time nothing changes."""
    first = run("db", "upgrade")
    assert first.code == 0
    assert f"none -> {HEAD}" in first.stdout
    assert (folder / "studies" / "autotune.db").is_file()
    assert "as before" in run("db", "upgrade").stdout
    assert run("db", "current").stdout.startswith(f"{HEAD} (newest: ")


def test_studies_lists_the_study(studied: Studied, run: Run) -> None:
    """One line, with its winner and the speed that is shown of that everywhere: the mean over its processes."""
    head, row = run("studies", "--storage", studied.storage).stdout.splitlines()
    assert head.split()[:3] == ["study", "state", "device"]
    assert row.startswith("tiny   budget spent")
    best = studied.document["best"]
    assert f"{best['per_device_train_batch_size']} × {best['gradient_accumulation_steps']}" in row
    assert row.split()[-3] == format_rate(studied.document["next_run"]["samples_per_second"])


def test_studies_as_json(studied: Studied, run: Run) -> None:
    (entry,) = run("studies", "--storage", studied.storage, "--json").document
    assert entry["study"] == "tiny"
    assert entry["model"] == TINY_MODEL
    assert (entry["trials"], entry["completed"], entry["failed"]) == (3, 3, 0)
    assert entry["best"]["precision"] == studied.document["best"]["precision"]


def test_studies_of_an_empty_database(run: Run) -> None:
    run("db", "upgrade")
    ran = run("studies")
    assert (ran.code, ran.stdout) == (0, "")
    assert "autotune search" in ran.stderr
    assert run("studies", "--json").document == []


def test_the_environment_variable_names_the_database(
    studied: Studied, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AUTOTUNE_STORAGE stands for --storage."""
    monkeypatch.setenv("AUTOTUNE_STORAGE", studied.storage)
    assert "tiny" in run("studies").stdout


def test_show_has_the_summary_and_a_line_a_trial(studied: Studied, run: Run) -> None:
    ran = run("show", "tiny", "--storage", studied.storage)
    assert ran.code == 0
    assert not ran.stderr
    summary, _, table = ran.stdout.partition("\n\n")
    assert summary.startswith("Study tiny, 20")
    for words in ("Best: per-device batch", "samples/s", "× the TrainingArguments defaults", "headroom", "3 trials in"):
        assert words in summary
    head, *rows = table.splitlines()
    assert len(rows) == 3
    # It may be the best as well.
    assert "  baseline" in rows[0]
    # Where several processes measured it, their mean comes after it.
    assert sum("best" in row for row in rows) == 1
    end = head.index("samples/s") + len("samples/s")
    assert all(re.search(r" [\d.,]+$", row[:end]) for row in rows)


def test_show_as_json_is_what_the_search_printed(studied: Studied, run: Run) -> None:
    assert run("show", "tiny", "--storage", studied.storage, "--json").document == studied.document


def test_export_as_json_goes_to_stdout_alone(studied: Studied, run: Run) -> None:
    """So that it can be redirected into a file; what has no place in it is said on stderr."""
    ran = run("export", "tiny", "--storage", studied.storage)
    arguments = json.loads(ran.stdout)
    best = studied.document["best"]
    assert arguments["per_device_train_batch_size"] == best["per_device_train_batch_size"]
    assert arguments["gradient_accumulation_steps"] == best["gradient_accumulation_steps"]
    assert arguments["bf16"] is (best["precision"] == "bf16")
    assert "attn_implementation='sdpa'" in ran.stderr
    assert "dtype='float32'" in ran.stderr


def test_export_into_a_file(studied: Studied, run: Run, folder: Path) -> None:
    ran = run("export", "tiny", "--storage", studied.storage, "--output", "arguments.json")
    assert (ran.code, ran.stdout) == (0, "")
    assert (folder / "arguments.json").read_text() == run("export", "tiny", "--storage", studied.storage).stdout

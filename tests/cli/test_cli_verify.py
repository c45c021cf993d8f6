"""Test ``autotune verify``: a real stock run of a tiny model, files, and studies that cannot be verified here."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from command_line import COLD, Run, Studied, run_process
from test_cli_errors import check_error

from autotune.core.units import MIB
from autotune.verify.target import Verdict

Doctor = Callable[[str, Callable[[dict[str, Any]], None]], str]


@pytest.fixture
def doctored(studied: Studied, tmp_path: Path) -> Doctor:
    """A copy of the study's database with the documents of one column changed; its path."""

    def change(column: str, edit: Callable[[dict[str, Any]], None]) -> str:
        table, _, name = column.partition(".")
        copy = tmp_path / "doctored.db"
        shutil.copy(studied.storage, copy)
        with sqlite3.connect(copy) as connection:
            for key, text in connection.execute(f"SELECT id, {name} FROM {table}").fetchall():
                document = json.loads(text)
                edit(document)
                connection.execute(f"UPDATE {table} SET {name} = ? WHERE id = ?", (json.dumps(document), key))
        connection.close()
        return str(copy)

    return change


@COLD
def test_a_stock_run_is_compared_with_the_promise(studied: Studied, tmp_path: Path, cold: bool) -> None:
    """The numbers fit together, whichever way they turn out on a busy machine; no checkpoint is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = ("verify", "tiny", "--steps", "20", "--storage", studied.storage, "--json")
    ran = run_process(*words, folder=tmp_path, cold=cold, TMPDIR=str(temporary))
    assert ran.code in (0, 11), ran.stderr
    document = json.loads(ran.stdout)
    assert (document["verdict"] == "missed") == (ran.code == 11) == bool(document["misses"])
    assert document["verdict"] in get_args(Verdict)
    assert document["kept"] == (document["verdict"] in ("kept", "faster"))
    assert document["candidate"].items() <= studied.document["best"].items()
    assert document["promised"]["samples_per_second"] == studied.document["next_run"]["samples_per_second"]
    assert document["promised"]["samples_per_second_low"] == studied.document["next_run"]["samples_per_second_low"]
    obtained = document["obtained"]
    assert obtained["state"] == "completed"
    assert obtained["measured_steps"] == 15
    assert obtained["samples_per_second"] > 0
    assert obtained["peak_reserved_bytes"] <= obtained["peak_reserved_at_the_end_bytes"]
    assert obtained["peak_reserved_with_evaluation_bytes"] <= obtained["peak_reserved_with_save_bytes"]
    assert obtained["evaluation_seconds"] > 0
    assert obtained["save_seconds"] > 0
    assert obtained["evaluation_batch_size"] == document["candidate"]["per_device_train_batch_size"]
    assert not list(temporary.glob("autotune-*"))
    assert (Path(studied.storage).parent / "logs" / "tiny" / "verify.log").stat().st_size > 0


def test_a_promise_that_is_missed_has_its_exit_code(doctored: Doctor, tmp_path: Path) -> None:
    """A thousand times as fast was promised, which no noise makes up for; the table is printed all the same. The export
    says which study it is.

    Nothing of it is recorded.
    """

    def exaggerate(outcome: dict[str, Any]) -> None:
        measured = outcome["measurement"]
        measured["samples_per_second"] *= 1000
        measured["step_seconds"] /= 1000
        if measured["steady_step_seconds"] is not None:
            measured["steady_step_seconds"] /= 1000
        measured["step_seconds_each"] = [seconds / 1000 for seconds in measured["step_seconds_each"]]

    storage = doctored("autotune_trials.outcome", exaggerate)
    exported = run_process("export", "tiny", "--storage", storage, folder=tmp_path)
    file = tmp_path / "training_arguments.json"
    file.write_text(json.dumps({**exported.document, "learning_rate": 1e-4}))
    recorded = Path(storage).read_bytes()
    # Of a run that stood still several times it cannot be told how fast it is without.
    for _ in range(5):
        ran = run_process("verify", str(file), "--steps", "20", "--storage", storage, folder=tmp_path)
        if "cannot tell: " not in ran.stdout:
            break
    assert ran.code == 11, ran.stderr
    assert "below the promised" in ran.stderr
    assert "promised" in ran.stdout
    assert "kept" not in ran.stdout
    assert Path(storage).read_bytes() == recorded


def test_out_of_memory_is_a_promise_missed(doctored: Doctor, tmp_path: Path) -> None:
    """Under the cap that the study is said to have emulated: real memory runs out.

    It does so while the model is built. Where 4 MiB are left, oneDNN may be the first to want more, and crashes.
    """
    storage = doctored("autotune_studies.ceiling", lambda ceiling: ceiling.update({"limit_bytes": MIB}))
    ran = run_process("verify", "tiny", "--steps", "20", "--storage", storage, "--json", folder=tmp_path)
    assert ran.code == 11, ran.stderr
    assert "memory ran out during training" in ran.stderr
    document = json.loads(ran.stdout)
    assert document["obtained"]["state"] == "out_of_memory"
    assert document["cap_bytes"] == MIB


@pytest.mark.whole
def test_the_evaluation_fits_as_it_is_exported(tmp_path: Path) -> None:
    """A vocabulary's logits of the Trainer's 8 samples run out of memory where one sample trains in a third of it."""
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50000}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    asked = ("--model", "./model", "--seq-len", "128", "--effective-batch", "1", "--memory-limit", "350MiB")
    few = ("--precision", "fp32", "--gradient-checkpointing", "off", "--trials", "1", "--no-baseline")
    searched = run_process("search", *asked, *few, "--device", "cpu", "--study", "wide", folder=tmp_path)
    assert searched.code == 0, searched.stderr
    exported = run_process("export", "wide", folder=tmp_path).document
    file = tmp_path / "training_arguments.json"
    for batch, said in ((exported["per_device_eval_batch_size"], None), (8, "memory ran out during the evaluation")):
        file.write_text(json.dumps({**exported, "per_device_eval_batch_size": batch}))
        ran = run_process("verify", str(file), "--steps", "20", "--json", folder=tmp_path)
        assert json.loads(ran.stdout)["obtained"]["state"] == ("out_of_memory" if said else "completed"), ran.stderr
        assert (said or "") in ran.stderr
    assert "give it per_device_eval_batch_size=1" in ran.stderr


def test_another_device_is_refused(doctored: Doctor, run: Run) -> None:
    def elsewhere(environment: dict[str, Any]) -> None:
        environment |= {"device_kind": "cuda", "device_name": "NVIDIA H200", "device_uuid": "GPU-1"}

    storage = doctored("autotune_environments.document", elsewhere)
    told = ("was measured on NVIDIA H200; this machine has cpu", "search again")
    check_error(run("verify", "tiny", "--storage", storage), 4, *told)


def test_what_the_stock_process_cannot_build_is_refused(doctored: Doctor, run: Run) -> None:
    storage = doctored("autotune_workloads.document", lambda workload: workload.update(source={"path": "x"}))
    check_error(run("verify", "tiny", "--storage", storage), 2, "verify does not run that")


def test_losses_are_not_compared_on_data_of_ones_own(doctored: Doctor, run: Run) -> None:
    data = {"source": "train.jsonl", "kind": "json", "content": "1"}
    storage = doctored("autotune_workloads.document", lambda workload: workload.update(data=data))
    check_error(run("verify", "tiny", "--same-loss", "--storage", storage), 2, "on which losses are not compared")


def test_files_that_are_no_export_are_refused(studied: Studied, run: Run, folder: Path) -> None:
    storage = ("--storage", studied.storage)
    check_error(run("verify", "absent.json", *storage), 2, "there is no file absent.json")
    (folder / "list.json").write_text("[]")
    check_error(run("verify", "list.json", *storage), 2, "is not an export")
    (folder / "torn.json").write_text("{")
    check_error(run("verify", "torn.json", *storage), 2, "cannot be read as JSON")


def test_a_file_that_was_changed_is_refused(studied: Studied, run: Run, folder: Path) -> None:
    storage = ("--storage", studied.storage)
    exported = run("export", "tiny", *storage).document
    file = folder / "export.json"
    file.write_text(json.dumps({**exported, "per_device_train_batch_size": 3}))
    check_error(run("verify", "export.json", *storage), 9, "no study in", "--study")
    check_error(run("verify", "export.json", "--study", "tiny", *storage), 2, "in the file 3")
    file.write_text(json.dumps({**exported, "learning_rat": 1}))
    check_error(run("verify", "export.json", *storage), 2, "learning_rat in the file is not a field")


def test_studies_and_steps_that_are_not_there_are_refused(studied: Studied, run: Run) -> None:
    storage = ("--storage", studied.storage)
    check_error(run("verify", "absent", *storage), 9, "there is no study 'absent'")
    check_error(run("verify", "tiny", "--steps", "5", *storage), 2, "--steps 5 are too few")
    check_error(run("verify", "tiny", "--study", "other", *storage), 2, "--study other does not go with")


def test_a_search_verifies_at_its_end(tmp_path: Path) -> None:
    """One document, the verification within it; a model that has a loss of its own passes the other check too."""
    words = ("--effective-batch", "8", "--trials", "1", "--no-baseline", "--study", "own", "--json", "--verify")
    ran = run_process("search", "--model", "gpt2-tiny", "--seq-len", "16", "--device", "cpu", *words, folder=tmp_path)
    assert ran.code in (0, 11), ran.stderr
    document = json.loads(ran.stdout)
    assert document["verification"]["study"] == document["study"] == "own"
    assert document["verification"]["steps"] == 100
    found = run_process("verify", "own", "--same-loss", "--json", folder=tmp_path).document
    assert found["same"]
    assert found["look"]["unknown"] is None


def test_a_loss_that_nobody_divides_is_divided(studied: Studied, doctored: Doctor, run: Run, tmp_path: Path) -> None:
    """bert's head takes any keyword and ignores ``num_items_in_batch``: by itself, accumulation multiplies the loss."""

    def without_accumulation(candidate: dict[str, Any]) -> None:
        candidate |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}

    storage = doctored("autotune_trials.candidate", without_accumulation)
    ran = run_process("verify", "tiny", "--same-loss", "--storage", storage, folder=tmp_path)
    assert ran.code == 0, ran.stderr
    assert "the same training" in ran.stdout

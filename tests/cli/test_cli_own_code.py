"""Test searches with the user's own Trainers and scripts: output, exports, resuming, errors."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm
from command_line import COLD, ROOT, Ran, Run, environment, run_process
from test_cli_errors import check_error
from texts import write_texts

from autotune.space.space import usable_cores

OWN_CODE = ROOT / "tests" / "own_code"
SCRIPT = ("python", str(OWN_CODE / "classify_texts.py"))
OWN_SETTINGS = ("--train_file", "train.csv", "--do_train", "--per_device_train_batch_size", "2")


@dataclass(frozen=True)
class Searched:
    """A search over the example script, in a folder of its own."""

    folder: Path
    ran: Ran

    def search(self, *words: str, cold: bool = False) -> Ran:
        """Another one there."""
        variables = {"HF_DATASETS_CACHE": str(self.folder / "cache")}
        return run_process("search", "--device", "cpu", *words, folder=self.folder, cold=cold, **variables)


def check_trained(folder: Path, fields: dict[str, Any]) -> Any:
    """Compare what a script trained with, which it saved, with these fields."""
    import torch

    trained = torch.load(folder / "trained" / "training_args.bin", weights_only=False)
    assert {name: getattr(trained, name) for name in fields} == fields
    return trained


STUDY = ("--study", "mine", "--effective-batch", "16", "--trials", "2")


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.whole)], ids=["warm", "cold"])
def searched(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Searched:
    """One real search: the unmodified settings, then a candidate."""
    folder = tmp_path_factory.mktemp("script")
    write_texts(folder / "train.csv")
    (folder / "out").mkdir()
    (folder / "out" / "kept").touch()
    words = (*STUDY, "--", *SCRIPT, *OWN_SETTINGS, "--output_dir", "out")
    ran = Searched(folder, Ran(0, "", "")).search(*words, cold=request.param)
    return Searched(folder, ran)


def test_a_script_is_searched(searched: Searched) -> None:
    """Unmodified settings first, then candidates of the effective batch that was asked for."""
    ran = searched.ran
    assert ran.code == 0, ran.stderr
    assert "running classify_texts.py up to its training" in ran.stderr
    assert "model   classify_texts.py (BertForSequenceClassification), 4" in ran.stderr
    assert "data    as classify_texts.py makes it; effective batch 16; float32 weights" in ran.stderr
    assert re.search(r"^  3 epochs: .* instead of .* with your own settings$", ran.stdout, flags=re.MULTILINE)
    assert re.search(r"^ 0     2 × 1  fp32 .* baseline$", ran.stderr, flags=re.MULTILINE)
    assert re.search(r"^  \d+\.\d\d × your own settings \(2 × 1  fp32: ", ran.stdout, flags=re.MULTILINE)
    assert re.search(r"^  [\d,.]+ samples/s.*, [\d,]+ tokens/s; ", ran.stdout, flags=re.MULTILINE)
    assert "note: your own settings train at effective batch 2, not 16" in ran.stdout
    assert os.listdir(searched.folder / "out") == ["kept"]
    assert {path.name for path in searched.folder.iterdir()} <= {"out", "train.csv", "studies", "cache"}


def test_it_is_shown_and_documented(searched: Searched) -> None:
    shown = run_process("show", "mine", folder=searched.folder)
    assert shown.stdout.splitlines()[1] == "  classify_texts.py, float32 weights"
    document = run_process("show", "mine", "--json", folder=searched.folder).document
    source = document["workload"]["source"]
    assert (source["kind"], source["argv"]) == ("script", [*OWN_SETTINGS, "--output_dir", "out"])
    assert document["workload"]["config"]["model_type"] == "bert"
    for trial in document["trials"]:
        # Each text has 24 words at most.
        assert 1 < trial["tokens_per_second"] / trial["samples_per_second"] < 64
        own = trial["stage"] == "baseline"
        assert trial["per_device_train_batch_size"] * trial["gradient_accumulation_steps"] == (2 if own else 16)
        assert list(trial["phase_seconds"]) == ["device", "script", "train"]


def test_the_script_trains_with_what_is_exported(searched: Searched, tmp_path: Path) -> None:
    """The flags come after the script's own, false ones among them, and count; it was never changed for that."""
    exported = run_process("export", "mine", "--format", "cli", folder=searched.folder)
    fields = run_process("export", "mine", folder=searched.folder).document
    assert fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"] == 16
    assert {"bf16", "fp16", "tf32", "optim"} <= fields.keys()
    assert False in fields.values()
    assert "give them to classify_texts.py after its other options" in exported.stderr
    write_texts(tmp_path / "train.csv")
    opposite = ("--fp16", "true", "--gradient_accumulation_steps", "7", "--optim", "sgd")
    own = (*OWN_SETTINGS, *opposite, "--output_dir", "trained", "--max_steps", "2")
    variables = {**environment(), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    warm.output_of(SCRIPT[1], *own, *shlex.split(exported.stdout), cwd=tmp_path, env=variables)
    check_trained(tmp_path, fields)
    python = run_process("export", "mine", "--format", "python", folder=searched.folder).stdout
    scope: dict[str, object] = {}
    exec(python, scope)
    assert scope["overrides"] == fields


@pytest.mark.whole
def test_the_script_is_trained_with_the_winner_and_nothing_of_it_is_edited(searched: Searched, tmp_path: Path) -> None:
    fields = run_process("export", "mine", folder=searched.folder).document
    write_texts(tmp_path / "train.csv")
    storage = ("--storage", str(searched.folder / "studies" / "autotune.db"))
    own = (*SCRIPT, *OWN_SETTINGS, "--gradient_accumulation_steps", "7", "--max_steps", "2", "--output_dir", "trained")
    secrets = {"AUTOTUNE_TOKEN": "t", "AUTOTUNE_STORAGE": "postgresql://u:p@h/d", "RAY_AUTH_TOKEN": "r"}
    variables = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), **secrets}
    script = tmp_path / "classify_texts.py"
    script.write_text(
        f"import os, runpy\nprint('sees', sorted({set(secrets)} & set(os.environ)))\n"
        f"runpy.run_path({SCRIPT[1]!r}, run_name='__main__')\n"
    )
    own = ("python", str(script), *own[2:])
    ran = run_process("run", "mine", *storage, "--", *own, folder=tmp_path, **variables)
    assert ran.code == 0, ran.stderr
    assert "sees []" in ran.stdout
    batch, accumulation = fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]
    assert f"set     per_device_train_batch_size={batch}" in ran.stderr
    assert f"the script says gradient_accumulation_steps=7; {accumulation} is set" in ran.stderr
    trained = check_trained(tmp_path, fields)
    assert (trained.max_steps, trained.output_dir) == (2, "trained")
    other = run_process("run", "mine", *storage, "--", "python", str(OWN_CODE / "train_loop.py"), folder=tmp_path)
    check_error(other, 2, "mine was searched with classify_texts.py, not with train_loop.py", "autotune search --")


@pytest.mark.whole
def test_each_process_of_a_training_on_several_devices_has_the_winner(searched: Searched, tmp_path: Path) -> None:
    two = ("--study", "two", "--effective-batch", "16", "--trials", "2", "--world-size", "2")
    ran = searched.search(*two, "--", *SCRIPT, *OWN_SETTINGS, "--output_dir", "out")
    assert ran.code == 0, ran.stderr
    fields = run_process("export", "two", folder=searched.folder).document
    own = (*SCRIPT, "--train_file", str(searched.folder / "train.csv"), "--do_train", "--max_steps", "2")
    storage = ("--storage", str(searched.folder / "studies" / "autotune.db"))
    # gloo finds no network in some containers.
    words = ("run", "two", *storage, "--", *own, "--output_dir", "trained", "--use_cpu", "true")
    ran = run_process(*words, folder=tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert ran.code == 0, ran.stderr
    assert "starts  torchrun --standalone --nproc_per_node 2" in ran.stderr
    check_trained(tmp_path, fields)


def test_the_study_is_continued_only_with_the_same_script(searched: Searched) -> None:
    """Other options of the script are another search."""
    own = (*SCRIPT, *OWN_SETTINGS, "--output_dir", "out")
    again = searched.search(*STUDY, "--", *own)
    assert again.code == 0, again.stderr
    assert re.search(r"the study mine( was finished)?, 2 trials recorded", again.stderr), again.stderr
    other = searched.search(*STUDY, "--", *own, "--seed", "1")
    assert other.code == 2
    assert "was made with other settings (source.argv: " in other.stderr
    assert "up to its training" not in other.stderr, "it is refused before the script is run"


def test_a_study_whose_code_is_gone_is_not_continued(searched: Searched, tmp_path: Path) -> None:
    """As if it had been searched from a folder that is not there any more."""
    storage = shutil.copy(searched.folder / "studies" / "autotune.db", tmp_path / "copy.db")
    with closing(sqlite3.connect(storage)) as connection, connection:
        moved = "UPDATE autotune_workloads SET document = replace(document, ?, ?)"
        connection.execute(moved, (str(OWN_CODE), str(tmp_path / "nowhere")))
    resumed = run_process("resume", "mine", "--storage", str(storage), folder=tmp_path)
    assert resumed.code == 2, resumed.stderr
    assert resumed.stderr.splitlines()[-2].endswith("nowhere/classify_texts.py is gone")
    assert resumed.stderr.splitlines()[-1] == "  put it back, or search anew under another --study"


@COLD
def test_a_function_is_searched_at_its_own_effective_batch(tmp_path: Path, cold: bool) -> None:
    trainer = str(OWN_CODE / "build_trainer.py")
    words = ("--device", "cpu", "--trials", "2", "--trainer", trainer, "--json")
    document = run_process("search", *words, folder=tmp_path, cold=cold).document
    assert document["study"] == "build_trainer-build"
    assert document["request"]["effective_batch"] == 8
    assert document["baseline"]["per_device_train_batch_size"] == 4
    assert document["workload"]["source"]["function"] == "build"
    exported = run_process("export", "build_trainer-build", folder=tmp_path)
    assert "hand them to build_trainer.py:build as its overrides" in exported.stderr
    assert not (tmp_path / "own_output").exists()


@pytest.mark.whole
def test_the_loader_of_ones_own_data_is_tuned_where_it_is_the_bottleneck(tmp_path: Path) -> None:
    trainer = f"{OWN_CODE / 'build_trainer.py'}:load_slowly"
    plain = ("--precision", "fp32", "--gradient-checkpointing", "off", "--effective-batch", "8")
    ran = run_process("search", "--device", "cpu", *plain, "--trainer", trainer, folder=tmp_path)
    assert ran.code == 0, ran.stderr
    assert re.search(r"is the bottleneck: \d+\.\d% of a step is spent waiting for data", ran.stdout)
    if usable_cores() > 1:
        assert "fp32, 2 loaders" in ran.stderr
        exported = run_process("export", "build_trainer-load_slowly-8", folder=tmp_path).document
        assert exported["dataloader_num_workers"] >= 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--trainer", "none.py:build"), ("none.py", "train.py:build")),
        (("--", "torchrun", "--nproc-per-node", "2", "run.py"), ("several processes", "-- python run.py")),
        (("--", "python"), ("'python' names no script", "--do_train")),
        (("--trainer", "run.py", "--", "run.py"), ("--trainer run.py", "leave one of them out")),
        (("--model", "bert-tiny", "--", "run.py"), ("--model cannot be combined", "leave --model out")),
        (("--seq-len", "8", "--trainer", "run.py"), ("--seq-len cannot be combined", "leave --seq-len out")),
        (("--attn", "eager", "--", "run.py"), ("--attn cannot be combined",)),
        ((), ("nothing to train", "--model NAME")),
    ],
)
def test_what_cannot_be_meant_is_refused(
    run: Run, folder: Path, words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    (folder / "run.py").write_text("raise AssertionError('nobody runs this')\n")
    check_error(run("search", *words), 2, *named)
    assert [path.name for path in folder.iterdir()] == ["run.py"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import argparse\nargparse.ArgumentParser().parse_args()\n", ("left with exit code 2", "--do_train")),
        ("import os\nprint('bye', flush=True)\nos._exit(0)\n", ("run.py ended its process before", "bye")),
        ("import os\nos.kill(os.getpid(), 9)\n", ("run.py was killed by SIGKILL before",)),
        ("import time\ntime.sleep(600)\n", ("run.py had not begun to train after 5 s", "--trial-timeout")),
    ],
)
def test_a_script_that_never_trains_is_one_clear_error(tmp_path: Path, text: str, named: tuple[str, ...]) -> None:
    (tmp_path / "run.py").write_text(text)
    # Only what is to be ended has little time: a busy machine may take longer to begin.
    limit = "5s" if "sleep" in text else "200s"
    words = ("search", "--device", "cpu", "--trial-timeout", limit, "--", "run.py", "--do_train")
    ran = run_process(*words, folder=tmp_path)
    stderr = re.sub("^running run.py .*\n", "", ran.stderr, flags=re.MULTILINE)
    check_error(Ran(ran.code, ran.stdout, stderr), 10, "inspect.log", *named)
    assert list((tmp_path / "studies").iterdir()) == [tmp_path / "studies" / "logs"]


@pytest.mark.whole
def test_data_for_less_than_a_step_is_told_before_any_trial(searched: Searched) -> None:
    words = ("--study", "toomany", "--effective-batch", "4096", "--", *SCRIPT, *OWN_SETTINGS, "--output_dir", "out")
    ran = searched.search(*words)
    assert ran.code == 2, ran.stderr
    assert "classify_texts.py has 200 samples, less than one step of --effective-batch 4096" in ran.stderr
    assert "use --effective-batch 200 or less" in ran.stderr
    assert not (searched.folder / "studies" / "logs" / "toomany").exists()

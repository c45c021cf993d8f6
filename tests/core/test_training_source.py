"""Test how a command line names the user's own code, which is found but not run."""

import dataclasses
import os
from functools import partial
from pathlib import Path

import pytest
from messages import check_refusals

from autotune.core.training_source import TrainingSource, find_script, find_trainer
from autotune.core.workload import Workload


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script and a package that must not be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_glue.py").write_text("raise AssertionError('nobody runs this')\n")
    (tmp_path / "run.sh").write_text("exec python run_glue.py\n")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0")
    (tmp_path / "without_suffix").write_text("#!/usr/bin/env python\nprint('runs')\n")
    package = tmp_path / "pack" / "inner"
    package.mkdir(parents=True)
    for name in ("../__init__.py", "__init__.py", "train.py", "__main__.py"):
        (package / name).write_text("raise AssertionError('nobody imports this')\n")
    return tmp_path


@pytest.mark.parametrize(
    "before",
    [(), ("python",), ("python3",), ("/usr/bin/python3.11", "-u"), ("python", "-W", "ignore", "-X", "dev", "-B")],
)
def test_a_script_is_found_with_and_without_python(folder: Path, before: tuple[str, ...]) -> None:
    found = find_script([*before, "run_glue.py", "--do_train", "-m", "python"])
    assert (found.kind, found.file, found.cwd) == ("script", str(folder / "run_glue.py"), os.getcwd())
    assert (found.argv, found.module) == (("--do_train", "-m", "python"), None)
    assert found.name == "run_glue.py"


def test_a_script_needs_no_suffix(folder: Path) -> None:
    assert find_script(["./without_suffix", "--x"]).name == "without_suffix"


@pytest.mark.parametrize(("module", "file"), [("pack.inner.train", "train.py"), ("pack.inner", "__main__.py")])
def test_a_module_is_found_without_importing_it(folder: Path, module: str, file: str) -> None:
    found = find_script(["python", "-m", module, "--x"])
    assert found.file == str(folder / "pack" / "inner" / file)
    assert (found.module, found.argv, found.name) == (module, ("--x",), module)


def test_a_function_is_found_and_build_is_its_usual_name(folder: Path) -> None:
    for text, function in (("run_glue.py:make", "make"), ("run_glue.py", "build")):
        found = find_trainer(text)
        assert (found.kind, found.file, found.function) == ("build", str(folder / "run_glue.py"), function)
        assert found.name == f"run_glue.py:{function}"


SCRIPTS = """\
none.py
python pack
python
python -c 1
--do_train
python -m pack.none
python -m none.such
env SEED=1 python run_glue.py
./run.sh
binary run_glue.py
"""
TRAINERS = ("none.py:build", "none.py", "pack:build", "run_glue.py:no name")


def test_messages_of_code_that_cannot_be_run(folder: Path) -> None:
    cases = {line: partial(find_script, line.split()) for line in SCRIPTS.splitlines()}
    check_refusals("code", cases | {f"--trainer {name}": partial(find_trainer, name) for name in TRAINERS}, folder)


def fingerprint(source: TrainingSource) -> str:
    """That of its workload."""
    return Workload.of_source(source).fingerprint()


def test_the_fingerprint_counts_the_content_and_the_options(folder: Path) -> None:
    before = fingerprint(find_script(["run_glue.py", "--x", "1"]))
    for launcher in ("python", "torchrun"):
        assert fingerprint(find_script([launcher, "run_glue.py", "--x", "1"])) == before
    assert fingerprint(find_script(["run_glue.py", "--x", "2"])) != before
    (folder / "run_glue.py").write_text("print('another training')\n")
    assert fingerprint(find_script(["run_glue.py", "--x", "1"])) != before


def test_other_workloads_keep_their_fingerprint() -> None:
    """Studies that were recorded before there were sources are still found."""
    workload = Workload("bert-tiny", {"model_type": "bert"}, "sequence-classification", 32)
    assert workload.fingerprint() == "7e82edef3512b5cb"
    assert Workload.from_document(workload.document()) == workload
    assert Workload.from_document({k: v for k, v in workload.document().items() if k != "source"}) == workload
    assert dataclasses.replace(workload, padding=0.5).fingerprint() != workload.fingerprint()

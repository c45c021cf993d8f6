"""Share one real search among tests, and run commands quickly."""

import dataclasses
import fcntl
import json
from pathlib import Path

import pytest
from command_line import TINY_SEARCH, Ran, Run, Studied, run_process, run_within


@pytest.fixture(scope="session")
def studied(run_folder: Path) -> Studied:
    """The study; the database is one file, which tests only read. All test processes share it."""
    folder = run_folder / "studied"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ran.json").exists():
            # A grid has more than three candidates, whatever is fast here, and in however few precisions.
            options = ("--effective-batch", "16", "--sampler", "grid", "--trials", "3", "--study", "tiny")
            ran = run_process(*TINY_SEARCH, *options, "--storage", "studies.db", "--json", folder=folder, cold=True)
            (folder / "ran.json").write_text(json.dumps(dataclasses.asdict(ran)))
    ran = Ran(**json.loads((folder / "ran.json").read_text()))
    assert ran.code == 0, ran.stderr
    return Studied("tiny", str(folder / "studies.db"), ran, json.loads(ran.stdout))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, no GPU visible and no hub reachable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    # Set where huggingface_hub looks it up, since it reads the variable once, when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("models", "--json")`` within this process, in the empty folder."""
    return lambda *arguments: run_within(capsys, *arguments)

"""Share one real search among tests, and run commands quickly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import TINY_SEARCH, Run, Studied, run_process, run_within


@pytest.fixture(scope="session")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Studied:
    """The study; the database is one file, which tests only read."""
    folder = tmp_path_factory.mktemp("studied")
    options = ("--effective-batch", "16", "--trials", "3", "--study", "tiny")
    ran = run_process(*TINY_SEARCH, *options, "--storage", "studies.db", "--json", folder=folder, cold=True)
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

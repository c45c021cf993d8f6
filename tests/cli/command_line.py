"""Run the command line: within this process, in a process forked from a warm one, or from a cold start."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm
from checkout import ROOT
from printed import without_waits

from autotune.cli.main import main

COLD = pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.whole)], ids=["warm", "cold"])
"""For what starts cold in ``make test-whole`` alone: seconds each, for imports that another cold start shows, too."""

TINY_MODEL = str(Path(__file__).with_name("tiny-bert"))
"""bert-tiny with 1,000 tokens in place of 30,522: most of a step of that one is the optimizer's on its embeddings."""

TINY_SEARCH = ("search", "--model", TINY_MODEL, "--seq-len", "32", "--device", "cpu")


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit code and all that it printed, but for lines about a long wait."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """What it printed with ``--json``, where it ended well."""
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)


def environment() -> dict[str, str]:
    """This process's, without what would change what a command says; no GPU is visible."""
    foreign = {"COLUMNS", "LINES", "AUTOTUNE_STORAGE", "FORCE_COLOR", "NO_COLOR"}
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def command(*arguments: str) -> list[str]:
    """The words that start autotune with the Python that runs the tests."""
    return [sys.executable, "-m", "autotune", *arguments]


def run_process(*arguments: str, folder: Path, cold: bool = False, **variables: str) -> Ran:
    """Run a command to its end in a process of its own, in ``folder``; ``cold`` starts it as users do, see ``warm``."""
    with warm.cold(cold):
        ended = warm.run(
            command(*arguments),
            cwd=folder,
            env={**environment(), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=280,
        )
    return Ran(ended.returncode, ended.stdout, without_waits(ended.stderr))


def start(*arguments: str, folder: Path, **options: Any) -> subprocess.Popen[Any]:
    """Start a command in a process of its own, in ``folder``; see ``Popen`` for the options."""
    options = {"env": environment(), "stdin": subprocess.DEVNULL, **options}
    return warm.Popen(command(*arguments), cwd=folder, **options)


@dataclass(frozen=True)
class Studied:
    """A study of three real trials on the CPU, as ``search --json`` made it."""

    name: str
    storage: str
    ran: Ran
    document: dict[str, Any]


Run = Callable[..., Ran]


def run_within(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Run a command within this process; anything but an orderly exit is an error of the test."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return Ran(ended.value.code, printed.out, without_waits(printed.err))

"""Test ``autotune report``: an HTML page in a file or on stdout, or text."""

from pathlib import Path

import pytest
from command_line import Run
from recorded import EFFECTIVE_64, RecordedRunner
from searching import new_store, search

from autotune.core.errors import StorageError, UnknownStudyError


@pytest.fixture
def storage(folder: Path) -> str:
    """A database with the study ``bert``."""
    with new_store(folder) as store:
        search(store, RecordedRunner(EFFECTIVE_64))
    return str(folder / "autotune.db")


def test_report(storage: str, run: Run, folder: Path) -> None:
    ran = run("report", "bert", "--storage", storage, "--html", "page.html")
    assert (ran.code, ran.stdout) == (0, "")
    assert ran.stderr == "page.html written; open it in a browser\n"
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>\n<html")
    assert "Speed against memory" in page
    assert run("report", "bert", "--storage", storage, "--html", "-").stdout == page
    assert run("report", "bert", "--storage", storage).stdout == run("show", "bert", "--storage", storage).stdout
    for words, code in (
        (("bert", "--html", "no/such/folder.html"), StorageError.exit_code),
        (("bart", "--html", "page.html"), UnknownStudyError.exit_code),
    ):
        ran = run("report", *words, "--storage", storage)
        assert (ran.code, ran.stdout) == (code, "")
        assert ran.stderr.startswith("autotune: error: ")
        assert len(ran.stderr.splitlines()) == 2

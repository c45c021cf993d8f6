"""Test what commands write: whole files or none, and words for what was mistyped."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from messages import check_messages

from autotune.cli.main import main
from autotune.cli.output import write_text
from autotune.core.errors import StorageError


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Have every write beyond so many bytes of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_file_that_cannot_be_written_whole_is_not_written(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.html", tmp_path / "new.html"
    kept.write_text("before")
    for path in (kept, new):
        with files_of_at_most(100), pytest.raises(StorageError, match="cannot be written"):
            write_text(path, "x" * 10_000)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.html"]
    assert kept.read_text() == "before"
    write_text(new, "whole")
    assert new.read_text() == "whole"


def test_messages_of_what_was_forgotten_or_mistyped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "--batch-size 8",
        "--memory 8GiB",
        "--presicion bf16",
        "--effective-batch 32 python run_cls.py --model_name_or_path bert",
        "--effective-batch 32 train.py --lr=1",
        "bert-tiny --effective-batch 32",
        "--model bert-tiny --precision bfloat16",
        "--model bert-tiny --precision fp32,half",
    ]
    told = {}
    for line in lines:
        with pytest.raises(SystemExit) as ended:
            main(("search", *line.split()))
        assert ended.value.code == 2
        told[line] = capsys.readouterr().err.splitlines()
    check_messages("mistyped", told)

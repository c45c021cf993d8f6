"""Test what commands write: whole files or none, and words for what was mistyped."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("search", "--batch-size", "8"), "--effective-batch"),
        (("search", "--memory", "8GiB"), "--memory-limit"),
        (("search", "--presicion", "bf16"), "--precision"),
    ],
)
def test_options_that_share_a_word_are_meant(
    words: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    told = capsys.readouterr().err
    assert f"no such option {words[1]}; did you mean " in told
    assert meant in told
    assert "--quantize" not in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--effective-batch", "32", "python", "run_cls.py", "--model_name_or_path", "bert"),
            "put -- before the script: "
            "autotune search --effective-batch 32 -- python run_cls.py --model_name_or_path bert",
        ),
        (
            ("--effective-batch", "32", "train.py", "--lr=1"),
            "put -- before the script: autotune search --effective-batch 32 -- train.py --lr=1",
        ),
        (("bert-tiny", "--effective-batch", "32"), "did you mean --model bert-tiny?"),
        (("--model", "bert-tiny", "--precision", "bfloat16"), "; did you mean bf16?"),
        (("--model", "bert-tiny", "--precision", "fp32,half"), "'half' is not one of 'fp32', 'tf32', 'fp16', 'bf16'"),
    ],
)
def test_what_was_forgotten_or_mistyped_is_named(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(("search", *words))
    assert ended.value.code == 2
    assert told in capsys.readouterr().err

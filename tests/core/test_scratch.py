"""Test the temporary folders of processes that run jobs."""

import os
import tempfile
from pathlib import Path

import pytest

from autotune.core.scratch import make_scratch

# sys/un.h of macOS, less the final zero; Linux allows four more.
LONGEST_SOCKET_PATH = 103


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_it_lies_in_the_temporary_folder_and_is_removed_with_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        scratch = make_scratch("autotune-trial-")
        assert os.path.dirname(scratch.path) == folder
        assert os.listdir(scratch.output_dir) == []
        scratch.enter()
        assert os.path.dirname(tempfile.mkdtemp()) == os.environ["TMPDIR"] == scratch.temporary
        scratch.remove()
        assert os.listdir(folder) == []


def test_paths_of_sockets_stay_short_enough(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = temporary / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    scratch = make_scratch("autotune-trial-")
    try:
        # Those of multiprocessing and of torch's shared memory.
        for name in ("pymp-xxxxxxxx/listener-xxxxxxxx", "torch-shm-dir-XXXXXX/manager.sock"):
            assert len(os.path.join(scratch.temporary, name)) <= LONGEST_SOCKET_PATH
    finally:
        scratch.remove()
    assert list(long.iterdir()) == []


def test_another_folder_is_found_where_that_of_before_is_gone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = temporary / "gone"
    gone.mkdir()
    monkeypatch.setenv("TMPDIR", str(gone))
    assert tempfile.gettempdir() == str(gone)
    gone.rmdir()
    scratch = make_scratch("autotune-trial-")
    assert os.path.isdir(scratch.temporary)
    scratch.remove()

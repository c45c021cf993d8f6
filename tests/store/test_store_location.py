"""Test paths and URLs of databases, and file systems on which WAL must not be used."""

from functools import partial
from pathlib import Path

import pytest
from messages import check_refusals

from autotune.core.errors import StorageError
from autotune.store.location import on_network_file_system, resolve_location
from autotune.store.opening import open_store


def test_a_relative_path_becomes_absolute_and_keeps_its_name_in_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for written in ("studies/a.db", "sqlite:///studies/a.db"):
        location = resolve_location(written)
        assert location.path == tmp_path / "studies" / "a.db"
        assert location.url.database == str(location.path)
        assert location.label == written


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_location("~/a.db").path == tmp_path / "a.db"


ODD_NAMES = ["a b.db", "a {b} c.db", "100%.db", "a#c.db", "größe.db", "a:b@c&d=e.db", "'q'.db"]


@pytest.mark.parametrize(
    "name", ["a {b}100%#größe:b@c&d='q'.db", *(pytest.param(name, marks=pytest.mark.whole) for name in ODD_NAMES)]
)
def test_odd_names_are_names(tmp_path: Path, name: str) -> None:
    """All odd characters at once; one by one in ``make test-whole``."""
    with open_store(str(tmp_path / name)) as store:
        store.intern_workload({}, "fingerprint")
    assert {path.name.removesuffix("-wal").removesuffix("-shm") for path in tmp_path.iterdir()} == {name}


def test_a_name_that_a_url_may_lose_is_used_whole_or_refused(tmp_path: Path) -> None:
    refused: StorageError | None = None
    try:
        open_store(str(tmp_path / "a?b=c.db")).close()
    except StorageError as error:
        refused = error
    assert [path.name for path in tmp_path.iterdir()] == ([] if refused else ["a?b=c.db"])
    assert refused is None or "question mark" in refused.hint


NO_DATABASES = [
    "", "  ", ":memory:", "sqlite://", "sqlite:///:memory:", "sqlite:/a.db", "file:a.db", "sqlite:///file:a.db?uri=true",
    "sqlite+aiosqlite:///a.db", "postgresql://host:port/x", "nonsense://host/x", "firebird://host/x",
    "~nobody-of-this-name/studies.db", "~\0/studies.db", "bad\udcff.db", "sqlite:///bad\udcff.db",
]  # fmt: skip


def test_messages_of_what_names_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refusals("no-databases", {ascii(written): partial(open_store, written) for written in NO_DATABASES}, tmp_path)
    assert list(tmp_path.iterdir()) == []


MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/local xfs rw 0 0
me@host: /mnt/my\\040disk fuse.sshfs rw 0 0
/dev/vdc /data ext4 rw 0 0
10.0.0.1@tcp:/data /data lustre rw 0 0
short line
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/var/a.db", False),
        ("/home/me/a.db", True),
        ("/home", True),
        ("/homework/a.db", False),
        ("/home/local/a.db", False),
        ("/mnt/my disk/a.db", True),
        ("/data/a.db", True),
    ],
)
def test_the_innermost_and_last_mount_decides(path: str, shared: bool) -> None:
    assert on_network_file_system(Path(path), MOUNTS) is shared


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    mounts = f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path}/elsewhere nfs rw 0 0\n"
    assert on_network_file_system(tmp_path / "link" / "a.db", mounts)
    assert not on_network_file_system(tmp_path / "a.db", mounts)

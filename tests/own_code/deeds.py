"""What code may do to a folder: some fifty deeds, by different system calls, at five moments of a training."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

Deed = Callable[[Path], object]
DEEDS: dict[str, Deed] = {
    "opens with flags": lambda home: os.close(os.open(home / "a", os.O_WRONLY | os.O_TRUNC)),
    "truncates by name": lambda home: os.truncate(home / "a", 3),
    "removes a hard link": lambda home: (home / "other name").unlink(),
    "renames": lambda home: (home / "a").rename(home / "renamed"),
    "renames a folder": lambda home: shutil.move(home / "kept", home / "moved"),
    "renames over another": lambda home: os.rename(home / "a", home / "b"),
    "removes a tree": lambda home: shutil.rmtree(home / "kept"),
    "removes all": shutil.rmtree,
    "makes a folder": lambda home: (home / "new").mkdir(),
    "makes folders": lambda home: os.makedirs(home / "kept" / "x" / "y" / "z"),
    "removes an empty folder": lambda home: (home / "empty").rmdir(),
    "makes a link": lambda home: (home / "new").symlink_to("a"),
    "writes through a link": lambda home: (home / "link").write_text("new"),
    "writes through a link of a folder": lambda home: (home / "folder link" / "c").write_text("new"),
    "makes a hard link": lambda home: os.link(home / "a", home / "new"),
    "writes through a hard link": lambda home: (home / "other name").write_text("new"),
    "changes a mode": lambda home: os.chmod(home / "a", 0o777),
    "changes the mode of a folder": lambda home: (home / "kept").chmod(0o700),
    "changes times": lambda home: os.utime(home / "a", (1, 1)),
    "changes an owner": lambda home: os.chown(home / "a", os.getuid(), os.getgid()),
    "sets an attribute": lambda home: os.setxattr(home / "a", "user.of", b"a trial"),
    "writes in a shell": lambda home: _shell(home, "echo new > a; echo new >> b"),
    "edits in a shell": lambda home: _shell(home, "sed -i s/user/trial/ a"),
    "chmod and touch in a shell": lambda home: _shell(home, "chmod 777 a && touch b"),
    "makes a pipe": lambda home: os.mkfifo(home / "pipe"),
    "copies a tree": lambda home: shutil.copytree(home / "kept", home / "copy", symlinks=True),
}
BY_OTHER_PROGRAMS = frozenset({"chmod and touch in a shell"})
"""Change modes and times in a program that is not Python, which Landlock does not know."""
MOMENTS = ("before", "first step", "second step", "in a worker", "at exit")


def deed(does: Deed) -> Deed:
    """Name a deed after its function."""
    DEEDS[does.__name__.replace("_", " ")] = does
    return does


def chosen(moment: str) -> list[str]:
    """Return the deeds of a moment: all with ``DEEDS=all``, else its share."""
    names = list(DEEDS)
    return names if os.environ.get("DEEDS") == "all" else names[MOMENTS.index(moment) :: len(MOMENTS)]


def prepare(folder: Path) -> None:
    """Fill a folder of its own for each deed of each moment."""
    for moment in MOMENTS:
        for name in chosen(moment):
            home = place(folder, moment, name)
            (home / "kept" / "deeper").mkdir(parents=True)
            (home / "empty").mkdir()
            for path in ("a", "b", "kept/c", "kept/deeper/d"):
                (home / path).write_text(f"{path} of the user's\n" * 8)
            (home / "link").symlink_to("a")
            (home / "folder link").symlink_to("kept")
            os.link(home / "b", home / "other name")
            for mode in ("delete", "wal") if "database" in name else ():
                base = sqlite3.connect(home / f"{mode}.db")
                base.execute(f"PRAGMA journal_mode={mode}")
                base.execute("CREATE TABLE numbers (n)")
                base.execute("INSERT INTO numbers VALUES (1)")
                base.commit()
                base.close()
            for found in (*home.rglob("*"), home):
                if not found.is_symlink():
                    os.utime(found, (1_500_000_000, 1_500_000_000))


def place(folder: Path, moment: str, name: str) -> Path:
    """Return the folder of a deed."""
    return folder / moment.replace(" ", "-") / name.replace(" ", "-")


def do_all(folder: Path, moment: str) -> None:
    """Do what belongs to a moment, and print of each deed whether it was refused."""
    for name in chosen(moment):
        try:
            DEEDS[name](place(folder, moment, name))
            print(f"{moment}: {name} was done", flush=True)
        except AssertionError as error:
            print(f"{moment}: {name} was not seen: {error}", flush=True)
        except Exception as error:
            print(f"{moment}: {name} was refused: {type(error).__name__}: {error}", flush=True)


@deed
def truncates_by_opening(home: Path) -> None:
    (home / "a").write_text("new")
    assert (home / "a").read_text() == "new"


@deed
def appends(home: Path) -> None:
    with open(home / "a", "a") as file:
        file.write("more")


@deed
def edits_in_place(home: Path) -> None:
    with open(home / "a", "r+") as file:
        file.write("XXXX")


@deed
def makes_a_file(home: Path) -> None:
    with open(home / "new", "x") as file:
        file.write("new")
    assert "new" in os.listdir(home)


@deed
def truncates_an_open_file(home: Path) -> None:
    with open(home / "a", "rb+") as file:
        file.truncate(3)


@deed
def removes(home: Path) -> None:
    os.remove(home / "a")
    assert not (home / "a").exists()


@deed
def replaces_from_beside(home: Path) -> None:
    (home / "a.tmp").write_text("new")
    os.replace(home / "a.tmp", home / "a")


@deed
def replaces_from_the_temporary_folder(home: Path) -> None:
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write("new")
    shutil.move(file.name, home / "a")


@deed
def removes_and_makes_a_tree(home: Path) -> None:
    shutil.rmtree(home / "kept")
    (home / "kept").mkdir()
    assert os.listdir(home / "kept") == []


@deed
def replaces_a_link(home: Path) -> None:
    os.symlink("b", home / "link.tmp")
    os.replace(home / "link.tmp", home / "link")


@deed
def writes_through_a_new_hard_link(home: Path) -> None:
    os.link(home / "a", Path(tempfile.gettempdir()) / f"{os.getpid()}-linked")
    (Path(tempfile.gettempdir()) / f"{os.getpid()}-linked").write_text("new")


@deed
def writes_to_a_memory_map(home: Path) -> None:
    with open(home / "a", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:4] = b"XXXX"
        mapped.flush()


@deed
def changes_a_database(home: Path) -> None:
    with sqlite3.connect(home / "delete.db") as base:
        base.execute("INSERT INTO numbers VALUES (2)")
    base.close()


@deed
def changes_a_database_with_a_log(home: Path) -> None:
    with sqlite3.connect(home / "wal.db") as base:
        base.execute("INSERT INTO numbers VALUES (2)")
        assert base.execute("SELECT count(*) FROM numbers").fetchone() == (2,)
    base.close()


@deed
def changes_the_mode_of_an_open_file(home: Path) -> None:
    with open(home / "a") as file:
        os.fchmod(file.fileno(), 0o777)


def _shell(home: Path, command: str) -> None:
    if subprocess.run(["sh", "-c", command], cwd=home, capture_output=True, check=False).returncode:
        raise PermissionError(13, command)


@deed
def writes_in_another_python(home: Path) -> None:
    text = "import os; os.utime('b', (1, 1)); os.chmod('b', 0o777); open('a', 'w').write('new')"
    if subprocess.run([sys.executable, "-c", text], cwd=home, capture_output=True, check=False).returncode:
        raise PermissionError(13, text)


@deed
def writes_in_a_fork(home: Path) -> None:
    if (pid := os.fork()) == 0:
        try:
            (home / "a").write_text("new")
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise PermissionError(13, "a fork")


@deed
def leaves_a_process_that_writes(home: Path) -> None:
    """Goes on when the process that started it is gone, with the folder in its command line."""
    command = f"while kill -0 {os.getpid()}; do sleep 0.05; done; echo new > a; rm -rf kept"
    subprocess.Popen(["setsid", "sh", "-c", command, str(home)], cwd=home, stderr=subprocess.DEVNULL)


class _Writes:
    """Writes to a file when it is collected."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __del__(self) -> None:
        _write(self._path)


_kept: list[_Writes] = []


def _write(path: str | Path) -> None:
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write("new")


@deed
def writes_when_objects_are_collected(home: Path) -> None:
    """One now, and one when the interpreter ends."""
    _Writes(home / "a")
    _kept.append(_Writes(home / "b"))


@deed
def makes_a_socket(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(home)
        made.bind("socket")


@deed
def reopens_an_open_file(home: Path) -> None:
    with open(home / "a") as reads, open(f"/proc/self/fd/{reads.fileno()}", "w") as file:
        file.write("new")


@deed
def writes_beside_an_open_folder(home: Path) -> None:
    folder = os.open(home, os.O_RDONLY)
    os.close(os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
    os.unlink("a", dir_fd=folder)
    os.close(folder)


@deed
def allocates(home: Path) -> None:
    with open(home / "a", "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)


@deed
def copies_within_the_kernel(home: Path) -> None:
    with open(home / "b", "rb") as source, open(home / "a", "r+b") as target:
        os.copy_file_range(source.fileno(), target.fileno(), 8, 0, 4)


def write_at_exit(folder: Path) -> None:
    """Do everything once more when the process ends."""
    atexit.register(do_all, folder, "at exit")

"""Test the layers over the files as an ordinary user and as root, in forks that enter them."""

import ctypes
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_protection import state

from autotune.core.code_interface import Protection
from autotune.core.scratch import Scratch, make_scratch
from autotune.execution.oneshot import find_protection
from autotune.worker.rendezvous import Ranks
from autotune.worker.user import protection, sandbox

OWN_CODE = Path(__file__).resolve().parents[1] / "own_code"
sys.path.insert(0, str(OWN_CODE))

import deeds  # noqa: E402

pytestmark = pytest.mark.skipif(find_protection().kind != "overlay", reason="no overlay can be mounted here")
NOT_ROOT = 12_345
as_user = pytest.mark.parametrize("user", [0, NOT_ROOT] if os.getuid() == 0 else [os.getuid()])


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose parents every user may enter, and another one for temporary files."""
    made, temporary = (Path(tempfile.mkdtemp(dir="/tmp")) for _ in range(2))
    temporary.chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield made
    for each in (made, temporary):
        Scratch(str(each)).remove()
        assert not each.exists()


def owned(folder: Path, user: int) -> Path:
    """Give a folder and all in it to a user."""
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, user, user)
    return folder


def forked(user: int, does: Callable[[], None]) -> int:
    """Begin to do something as another user in a fork; its process, whose exit code says whether it failed."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            if user != os.getuid():
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                # As a process that a user has started.
                ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
            signal.alarm(240)
            does()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def in_fork(user: int, does: Callable[[], None]) -> None:
    """Do something as another user, and fail where it fails."""
    assert os.waitpid(forked(user, does), 0)[1] == 0


def protect(
    scratch: Scratch, folder: Path, layer: str | None = None, ranks: Ranks | None = None, *, shares: bool = True
) -> None:
    """Enter the layers in this process."""
    os.chdir(folder)
    protection.protect(Protection("overlay", layer), scratch, str(folder), ranks or Ranks(), shares=shares)


@pytest.mark.parametrize("user", [NOT_ROOT if os.getuid() == 0 else os.getuid()])
def test_an_ordinary_users_files_stay_as_they_are(
    folder: Path, user: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEDS", "some")
    monkeypatch.setenv("HOME", os.environ["TMPDIR"])
    deeds.prepare(folder)
    before = state(owned(folder, user))

    def tamper() -> None:
        scratch = make_scratch("autotune-test-")
        owner = os.getpid()

        def run() -> None:
            protect(scratch, folder)
            scratch.enter()
            assert "CapEff:\t0000000000000000" in Path("/proc/self/status").read_text() or user == 0
            for moment in deeds.MOMENTS:
                deeds.do_all(folder, moment)
            assert os.getpid() != owner

        in_fork(user, run)
        scratch.remove()
        assert not os.path.exists(scratch.path)

    in_fork(user, tamper)
    assert state(folder) == before
    said = capfd.readouterr().out.splitlines()
    assert len(said) == len(deeds.DEEDS)
    # Another user may not read this Python's own files.
    elsewhere = ("Invalid cross-device link", "numpy", "torch", "safetensors", "another python")
    assert not [line for line in said if "was done" not in line and not any(word in line for word in elsewhere)]


@as_user
def test_what_an_inspection_wrote_lies_below_what_a_trial_writes(folder: Path, user: int) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "old").write_text("theirs")
    owned(folder, user)

    def both() -> None:
        inspection, trial, layer = (make_scratch(f"autotune-test-{name}-") for name in ("one", "two", "layer"))

        def inspect() -> None:
            protect(inspection, folder)
            shutil.rmtree(folder / "data")
            (folder / "data").mkdir()
            (folder / "data" / "downloaded").write_text("of the inspection")
            protection.keep_run()

        def train() -> None:
            protect(trial, folder, layer.output_dir)
            # Deleted files are there again, for the code to delete them again.
            assert sorted(os.listdir("data")) == ["downloaded", "old"]
            (folder / "data" / "downloaded").write_text("of a trial")

        in_fork(user, inspect)
        protection.take_kept(inspection, layer.output_dir)
        for _ in range(2):
            in_fork(user, train)
        assert [path.read_text() for path in Path(layer.output_dir).rglob("downloaded")] == ["of the inspection"]
        for scratch in (inspection, trial, layer):
            scratch.remove()
            assert not os.path.exists(scratch.path)

    in_fork(user, both)
    assert (folder / "data" / "old").read_text() == "theirs"


@as_user
def test_what_a_user_works_in_is_covered_beside_any_number_of_folders(
    folder: Path, user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a home that lies among hundreds of folders beside it, and belongs to somebody else."""
    monkeypatch.setenv("HOME", os.environ["TMPDIR"])
    (folder / "notes").write_text("theirs")
    owned(folder, user)
    monkeypatch.setattr(sandbox, "_MOST_ENTRIES", 0)

    def run() -> None:
        scratch = make_scratch("autotune-test-")

        def train() -> None:
            protect(scratch, folder)
            Path("notes").write_text("of a trial")

        in_fork(user, train)
        scratch.remove()

    in_fork(user, run)
    assert (folder / "notes").read_text() == "theirs"


@as_user
def test_runs_of_one_job_do_not_see_each_other(folder: Path, user: int) -> None:
    owned(folder, user)

    def job() -> None:
        scratch = make_scratch("autotune-test-")
        protect(scratch, folder, shares=False)

        def run() -> None:
            protection.begin_run()
            os.mkdir("made")

        for _ in range(2):
            in_fork(user, run)
        run()

    in_fork(user, job)
    assert os.listdir(folder) == []


@as_user
def test_ranks_share_what_they_write(folder: Path, user: int) -> None:
    owned(folder, user)

    class Two(Ranks):
        def gather(self, value: object) -> list[object]:  # type: ignore[override]
            if self.rank == 0:
                os.write(told[1], str(value).encode().ljust(16))
                return [value]
            return [int(os.read(told[0], 16))]

    def first() -> None:
        protect(scratch, folder, ranks=Two(0, 2))
        Path("by the first").touch()
        sort_offers[0].send(b"written")
        assert sort_offers[0].recv(8) == b"written"
        assert sorted(os.listdir(".")) == ["by the first", "by the second"]

    def second() -> None:
        protect(scratch, folder, ranks=Two(1, 2))
        assert sort_offers[1].recv(8) == b"written"
        assert os.listdir(folder) == ["by the first"]
        assert os.getcwd() == str(folder)
        Path("by the second").touch()
        sort_offers[1].send(b"written")

    told, sort_offers = os.pipe(), socket.socketpair()
    scratch = make_scratch("autotune-test-")
    owned(Path(scratch.path), user)
    pid = forked(user, first)
    in_fork(user, second)
    assert os.waitpid(pid, 0)[1] == 0
    scratch.remove()
    assert os.listdir(folder) == []


@as_user
def test_sockets_of_other_processes_are_reached(folder: Path, user: int) -> None:
    owned(folder, user)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen()
        os.chmod(folder / "socket", 0o777)

        def run() -> None:
            protect(make_scratch("autotune-test-"), folder)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(folder / "socket"))

        in_fork(user, run)


@as_user
def test_a_socket_that_goes_meanwhile_is_left_out(folder: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owned(folder, user)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        (folder / "socket").unlink()
        # It is gone after somebody has looked.
        exists = os.path.exists
        monkeypatch.setattr(os.path, "exists", lambda path: path == str(folder / "socket") or exists(path))
        in_fork(user, lambda: protect(make_scratch("autotune-test-"), folder))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
class TestFailingMounts:
    def test_a_file_system_that_shuts_out_root_does_not_keep_the_others_from_being_covered(self, folder: Path) -> None:
        (folder / "of another").mkdir()

        def run() -> None:
            sandbox.open_namespace()
            options = f"fd={os.open('/dev/fuse', os.O_RDWR)},rootmode=40000,user_id=1,group_id=1"
            sandbox._mount("fuse", str(folder / "of another"), "fuse", 0, options)
            protect(make_scratch("autotune-test-"), folder)
            Path("new").touch()

        in_fork(0, run)
        assert os.listdir(folder) == ["of another"]

    def test_layers_that_neither_disk_nor_memory_can_hold_are_told(self, folder: Path) -> None:
        (over := folder / "over").mkdir()

        def run() -> None:
            sandbox.open_namespace()
            subprocess.run(["sh", "-c", OWN_FILE_SYSTEMS["an overlay"]], cwd=over, check=True)
            cover = sandbox.Cover(str(over / "layers"), [], [], has_user_namespace=False)
            with pytest.raises(OSError, match=r"mount tmpfs on .*: Invalid argument"):
                cover.lay(-1)

        in_fork(0, run)

    def test_what_cannot_lie_below_leaves_no_mount_behind(self, folder: Path) -> None:
        name = hashlib.sha256(b"/proc/sys").hexdigest()[:16]
        (folder / "below" / name).mkdir(parents=True)

        def run() -> None:
            sandbox.open_namespace()
            cover = sandbox.Cover("", [], [], has_user_namespace=False, below=str(folder / "below"))
            cover._run_fd = os.open(folder, os.O_PATH)
            before = Path("/proc/self/mounts").read_text()
            assert not cover._overlay("/proc/sys", str(folder))
            assert (folder / name / "kept").is_dir()
            assert Path("/proc/self/mounts").read_text() == before

        in_fork(0, run)


@as_user
def test_a_folder_with_a_mount_below_it_is_protected_too(folder: Path, user: int) -> None:
    """Of the mounts of a machine a user can take none away, and lay nothing over a folder above one."""
    if os.getuid() != 0:
        pytest.skip("only root can mount")
    (folder / "data").mkdir()
    (folder / "mounted").mkdir()
    (folder / "file").write_text("theirs")
    owned(folder, user)

    def run() -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"uid={user},gid={user},mode=755", "none", "mounted"],
                       cwd=folder, check=True)  # fmt: skip

        def trial() -> None:
            protect(make_scratch("autotune-test-"), folder)
            for name in ("data", "mounted"):
                (folder / name / "new").write_text("new")
                assert (folder / name / "new").read_text() == "new"
            if user == 0:
                (folder / "file").write_text("new")
                return
            with pytest.raises(OSError, match="Read-only file system"):
                (folder / "file").write_text("new")

        in_fork(user, trial)
        assert [os.listdir(folder / name) for name in ("data", "mounted")] == [[], []]

    in_fork(0, lambda: (sandbox.open_namespace(), run())[1])
    assert (folder / "file").read_text() == "theirs"


OWN_FILE_SYSTEMS = {
    "in memory": "mount -t tmpfs none .",
    "a mounted folder": "mkdir ../theirs && mount --bind ../theirs .",
    "an overlay": "mkdir ../l ../u ../w && mount -t overlay -o lowerdir=../l,upperdir=../u,workdir=../w none .",
}
"""By kind, how it is mounted over the folder in which a shell is."""


@pytest.mark.parametrize(
    ("kind", "user"),
    [
        pytest.param(kind, user, marks=() if (kind == "in memory") == (user == 0) else pytest.mark.whole)
        for kind in OWN_FILE_SYSTEMS
        for user in (0, NOT_ROOT)
    ],
)
def test_a_folder_on_a_file_system_of_its_own_stays_as_it_is(
    folder: Path, user: int, kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can mount")
    monkeypatch.setenv("DEEDS", "some")
    (home := folder / "home").mkdir()
    os.chown(folder, user, user)

    def run() -> None:
        subprocess.run(["sh", "-c", OWN_FILE_SYSTEMS[kind]], cwd=home, check=True)
        deeds.prepare(home)
        before = state(owned(home, user))

        def trial() -> None:
            protect(make_scratch("autotune-test-"), home)
            for moment in deeds.MOMENTS:
                deeds.do_all(home, moment)

        in_fork(user, trial)
        assert state(home) == before

    in_fork(0, lambda: (sandbox.open_namespace(), run())[1])
    assert sum("was done" in line for line in capfd.readouterr().out.splitlines()) > len(deeds.DEEDS) * 0.8

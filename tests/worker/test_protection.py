"""Test that the user's files stay as they are, whatever their code does, with overlays and with Landlock."""

import contextlib
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_client import Answer, ServerClient

from autotune.core.candidate import Arm, Candidate
from autotune.core.code_interface import FoundProtection, Protection, ProtectionKind
from autotune.core.device import Device
from autotune.core.errors import TrainingSourceError
from autotune.core.training_source import find_loop
from autotune.core.workload import Workload
from autotune.execution import TrialServer
from autotune.execution.oneshot import find_protection
from autotune.worker.user import sandbox
from autotune.worker.user.protection import Room, caches

OWN_CODE = Path(__file__).resolve().parents[1] / "own_code"
sys.path.insert(0, str(OWN_CODE))

import deeds  # noqa: E402

HAS_OVERLAY = find_protection().kind == "overlay"
KINDS = [
    pytest.param("overlay", marks=pytest.mark.skipif(not HAS_OVERLAY, reason="no overlay can be mounted here")),
    pytest.param(
        "landlock", marks=pytest.mark.skipif(sandbox.landlock_version() == 0, reason="this kernel has no Landlock")
    ),
]


def state(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything about a folder but the times of reading."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        about = path.lstat()
        content: object = None
        if stat.S_ISLNK(about.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(about.st_mode):
            content = path.read_bytes()
        attributes = os.listxattr(path, follow_symlinks=False)
        found[str(path)] = (
            about.st_mode, about.st_uid, about.st_gid, about.st_nlink, about.st_mtime_ns, attributes, content,
        )  # fmt: skip
    return found


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a user, in which a loop is searched; not in shared memory, where the folder of all tests may be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.chdir(made)
        monkeypatch.setenv("HOSTILE_FOLDER", made)
        yield Path(made)


def loop(function: str, **variables: str) -> Workload:
    """A loop of ``hostile_loop.py``."""
    source = find_loop(f"{OWN_CODE / 'hostile_loop.py'}:{function}")
    given = tuple({"HOSTILE_FOLDER": os.environ["HOSTILE_FOLDER"], **variables}.items())
    return Workload.of_source(replace(source, variables=given))


def run(server: ServerClient, kind: ProtectionKind, workload: Workload) -> tuple[Answer, Answer]:
    """An inspection and a trial."""
    server.protection = Protection(kind)
    try:
        return server.inspection(workload), server.trial(workload, Candidate(Arm(), 8, 2))
    finally:
        server.protection = None


def left_behind(folder: Path) -> list[int]:
    """The processes that write to the folder once the one that started them has ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"while kill -0" in (command := path.read_bytes()) and os.fsencode(folder) in command:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("share", ["some", pytest.param("all", marks=pytest.mark.whole)])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_code_does_touches_the_files(
    trial_server: ServerClient, folder: Path, kind: ProtectionKind, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEDS", share)
    deeds.prepare(folder)
    for moment in deeds.MOMENTS:
        for name in deeds.BY_OTHER_PROGRAMS if kind == "landlock" else ():
            shutil.rmtree(deeds.place(folder, moment, name), ignore_errors=True)
    before = state(folder)
    inspected, tried = run(trial_server, kind, loop("train", DEEDS=share))
    while left_behind(folder):
        time.sleep(0.05)
    assert state(folder) == before
    assert inspected.end.result is not None, inspected.end.problem
    assert tried.completed.measurement.samples_per_second > 0
    for moment in deeds.MOMENTS[:4]:
        said = [line for line in tried.log.splitlines() if line.startswith(f"{moment}: ")]
        assert len(said) >= len(deeds.chosen(moment))
        if kind == "overlay":
            # As between any two file systems.
            assert not [line for line in said if "was done" not in line and "Invalid cross-device link" not in line]


def test_the_deeds_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes something where nothing keeps it from that."""
    monkeypatch.setenv("DEEDS", "some")
    deeds.prepare(folder)
    unseen = []
    for moment in deeds.MOMENTS:
        for name in deeds.chosen(moment):
            home = deeds.place(folder, moment, name)
            before = state(home)
            deeds.DEEDS[name](home)
            os.chdir(folder)
            if home.exists() and state(home) == before:
                unseen.append(name)
    for pid in left_behind(folder):
        os.kill(pid, signal.SIGKILL)
    assert sorted(unseen) == ["changes an owner", "leaves a process that writes"]
    assert len(deeds.DEEDS) > 40


@pytest.mark.parametrize("function", ["save", "save_with_torch"])
@pytest.mark.skipif(sandbox.landlock_version() == 0, reason="this kernel has no Landlock")
def test_a_write_that_landlock_refuses_is_told_with_its_line(
    trial_server: ServerClient, folder: Path, function: str
) -> None:
    (folder / "best.pt").write_text("of the user's")
    _, tried = run(trial_server, "landlock", loop(function))
    outcome = tried.failed
    named = folder / "best.pt" if function == "save" else "a file"
    assert outcome.message.startswith(f"hostile_loop.py:{function} cannot write to {named} (hostile_loop.py:")
    assert outcome.message.endswith("): your files are read-only for trials here")
    assert (folder / "best.pt").read_text() == "of the user's"


def test_half_of_what_is_free_is_all_that_a_trial_may_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Room(str(folder)).why_exceeded() is None
    (folder / "large").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1 << 20))
    room = Room(str(folder))
    assert room.why_exceeded() == f"its code wrote 1.0 MiB, more than half of what was free in {folder.parent}"


@pytest.mark.parametrize(
    ("found", "cwd", "told"),
    [
        (FoundProtection("none", "no mount name space; no Landlock"), "/tmp", "no mount name space; no Landlock"),
        (FoundProtection("landlock"), "/dev/shm/x", "Landlock does not protect /dev/shm/x, which is shared memory"),
    ],
)
def test_code_is_refused_where_nothing_protects_from_it(
    cpu: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, found: FoundProtection, cwd: str, told: str
) -> None:
    monkeypatch.setattr("autotune.execution.trial_server.find_protection", lambda: found)
    workload = loop("save")
    workload = replace(workload, source=replace(workload.source, cwd=cwd))
    started: list[str] = []
    with (
        TrialServer(cpu, workload, folder / "logs", on_start=lambda: started.append("a process")) as server,
        pytest.raises(TrainingSourceError) as caught,
    ):
        server.inspect()
    assert caught.value.message == f"nothing keeps hostile_loop.py:save from your files here: {told}"
    assert "--unprotected" in caught.value.hint
    assert started == []


def test_what_is_offered_is_told_by_a_process_of_its_own() -> None:
    assert find_protection().kind in ("overlay", "read-only", "landlock", "none")
    if not HAS_OVERLAY:
        assert find_protection().why_not_better


def test_caches_stay_outside_unless_the_user_works_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    hub = tmp_path / "home" / ".cache" / "huggingface"
    assert not hub.exists()
    assert str(hub) in caches(str(tmp_path))
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels))
    assert str(kernels) in caches(str(tmp_path))
    assert str(kernels) not in caches(str(kernels))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert str(tmp_path) not in caches(str(tmp_path / "elsewhere"))

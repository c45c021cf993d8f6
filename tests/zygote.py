"""A process that has imported all that tests need, and forks others that go on as new Python processes would."""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any, NoReturn

_HEAD = struct.Struct("!Q")
# Above every number that a test passes on, so that moving descriptors to their places overwrites none of them.
_HIGH_FD = 500
_MOST_FDS = 32
_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
"""From linux/mman.h."""
_ALWAYS_READ = {"sitecustomize", "usercustomize"}
_STREAMS = ((0, "stdin", "rb", "strict"), (1, "stdout", "wb", "strict"), (2, "stderr", "wb", "backslashreplace"))
_ROOM = "." * 200
"""An argument that nobody reads: a command line is shown where this process's own one was, see ``_show_command``."""
_MODULES = (
    "autotune.api", "autotune.cli.main",
    "autotune.cli.search", "autotune.cli.predict", "autotune.cli.studies", "autotune.cli.doctor",
    "autotune.cli.verify", "autotune.cli.view", "autotune.cli.devices",
    "autotune.engine.local", "autotune.execution.gpu_monitor", "autotune.results.html", "autotune.results.text",
    "autotune.results.json_document", "autotune.store.opening", "autotune.tuning.answer_cache", "autotune.tuning.loop",
    "autotune.tuning.narrator", "autotune.tuning.run", "autotune.tuning.predictions",
    "autotune.worker.dataset.reading", "autotune.worker.user.run", "autotune.worker.dataset.prepared",
    "autotune.worker.private.datasets", "alembic.migration", "msgspec", "rich.console",
    "sqlalchemy.dialects.sqlite",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


class Connection:
    """Asks a warm process for forks, or hears what is asked."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def ask(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Send a request with file descriptors; the answer."""
        self._send(request, fds)
        answer, _ = self.hear()
        return answer

    def answer(self, message: dict[str, Any]) -> None:
        """Answer what was heard last, where whoever asked is still there."""
        with contextlib.suppress(BrokenPipeError):
            self._send(message, [])

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        """The next message and the file descriptors that came with it; ``EOFError`` where none will come."""
        head, fds, _, _ = socket.recv_fds(self._link, _HEAD.size, _MOST_FDS)
        (length,) = _HEAD.unpack(head + self._read(_HEAD.size - len(head)))
        return json.loads(self._read(length)), fds

    def close(self) -> None:
        """Let go of it; the warm process leaves."""
        self._link.close()

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        body = json.dumps(message).encode()
        if fds:
            socket.send_fds(self._link, [_HEAD.pack(len(body))], fds)
        else:
            self._link.sendall(_HEAD.pack(len(body)))
        self._link.sendall(body)

    def _read(self, length: int) -> bytes:
        body = b""
        while len(body) < length:
            more = self._link.recv(length - len(body))
            if not more:
                raise EOFError
            body += more
        return body


def start(python: str, environment: dict[str, str]) -> Connection:
    """Start a warm process. It leaves once the connection is closed, at the end of this process at the latest."""
    ours, theirs = socket.socketpair()
    with theirs:
        words = [python, "-P", "-c", f"import zygote; zygote.main({theirs.fileno()})", _ROOM]
        process = subprocess.Popen(
            words,
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    connection = Connection(ours)

    def end() -> None:
        connection.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    atexit.register(end)
    return connection


def main(fd: int) -> None:
    """Import everything, then fork what is asked for."""
    given = os.environ.pop("PYTHONPATH").split(os.pathsep)
    base = [path for path in sys.path if path not in given]
    variables = dict(os.environ)
    from autotune.worker.imports import import_everything

    # Nearly all of it lives to the end.
    gc.disable()
    import_everything(None)
    for module in _MODULES:
        importlib.import_module(module)
    with contextlib.suppress(ImportError):
        # What it needs need not be installed.
        importlib.import_module("autotune.service.server")
    # A fork would run the finalizers of what was imported at its end: 8,000 pages copied for nothing.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Their garbage stays: its room would be there for a trial's tensors, beside the limit on its memory.
    gc.freeze()
    gc.enable()
    _use_huge_pages()
    # A fork copies one thread only. Arrow's allocator has one of its own, and knows of forks.
    others = [int(number) for number in os.listdir("/proc/self/task") if int(number) != os.getpid()]
    names = [Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in others]
    assert set(names) <= {"jemalloc_bg_thd"}, names
    # A prediction gives way to all others, and another test always computes: it would come to its time limit.
    vars(os).pop("SCHED_IDLE", None)
    vars(os)["nice"] = lambda increment: 0
    serve(Connection(socket.socket(fileno=fd)), base, variables)


def _use_huge_pages() -> None:
    """Put what this process wrote into large pages, of which a fork copies fewer entries: 13 ms in place of 32."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split()
        if access != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        for page in range(first, end - _HUGE_PAGE_BYTES + 1, _HUGE_PAGE_BYTES):
            # Kernels before 6.1 refuse, and all refuse a range without a page.
            madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE_BYTES), _MADV_COLLAPSE)


def serve(connection: Connection, base: list[str], variables: dict[str, str]) -> NoReturn:
    """Fork what is asked for until nobody can ask any more."""
    while True:
        try:
            request, fds = connection.hear()
        except (EOFError, OSError):
            os._exit(0)
        why = _why_not(request, base)
        if why is not None:
            connection.answer({"refused": why})
        else:
            connection.answer({"pid": _fork_orphan(request, fds, connection, base, variables)})
        for fd in fds:
            os.close(fd)


def _why_not(request: dict[str, Any], base: list[str]) -> str | None:
    """What speaks against a fork: folders to import from that have other modules under names already imported."""
    for path in _import_paths(request, base):
        if path in base or Path(path) in _own_folders():
            continue
        try:
            names = {entry.name.partition(".")[0] for entry in os.scandir(path) if _can_be_imported(entry)}
        except OSError:
            continue
        shadowed = names & (sys.modules.keys() | _ALWAYS_READ) - {"__pycache__", "__main__"}
        if shadowed:
            return f"{path} has {min(shadowed)}"
    return None


def _can_be_imported(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() or entry.name.endswith((".py", ".pyc", ".so"))


def _own_folders() -> set[Path]:
    """Where the modules of this checkout are; ``tests`` has some that are named as folders elsewhere are."""
    root = Path(__file__).resolve().parents[1]
    return {root, root / "tests"}


def _import_paths(request: dict[str, Any], base: list[str]) -> list[str]:
    """``sys.path`` as a new process would have it."""
    words, folder = list(request["words"]), request["folder"]
    first = []
    if words[0] == "-P":
        words.pop(0)
    elif words[0] == "-m":
        first = [folder]
    elif words[0] == "-c":
        first = [""]
    else:
        first = [os.path.dirname(os.path.abspath(os.path.join(folder, words[0])))]
    given = request["environment"].get("PYTHONPATH", "")
    paths = [os.path.abspath(os.path.join(folder, path)) for path in given.split(os.pathsep)] if given else []
    return [*first, *paths, *base]


def _fork_orphan(
    request: dict[str, Any], fds: list[int], connection: Connection, base: list[str], variables: dict[str, str]
) -> int:
    """Fork a process whose parent ends at once, so that another adopts it; its id."""
    read_fd, write_fd = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        if os.fork() != 0:
            os._exit(0)
        # Whoever knows the id may kill the session at once.
        if request["new_session"]:
            os.setsid()
        os.write(write_fd, str(os.getpid()).encode())
        os.close(read_fd)
        os.close(write_fd)
        connection.close()
        while os.getppid() == between:
            time.sleep(0.0005)
        _become(request, fds, base, variables)
    os.close(write_fd)
    os.waitpid(between, 0)
    pid = int(os.read(read_fd, 32))
    os.close(read_fd)
    return pid


def _become(request: dict[str, Any], fds: list[int], base: list[str], variables: dict[str, str]) -> NoReturn:
    """Go on as the new process that was asked for."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request["words"][:1] != ["-P"]:
            # A command starts processes in turn, from a copy of this one as it is now.
            _have_zygote(fds, base, variables)
        _arrange_files(fds, request["targets"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = _import_paths(request, base)
        tempfile.tempdir = None
        _take_variables()
        importlib.invalidate_caches()
        importlib.import_module("numpy").random.seed()
        _show_command([sys.executable, *request["words"]])
        # What looks for a line of the user's own in a stack passes over the package.
        globals()["__name__"] = "autotune.zygote"
        code = _run(request["words"])
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _show_command(words: list[str]) -> None:
    """Have /proc say what this process runs, as far as there is room, by which tests find it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # proc(5): the 48th and the 49th field; the third is the first one here.
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _take_variables() -> None:
    """Give modules what they read from the environment when they were imported; see ``warm`` for which may differ."""
    settings = importlib.import_module("datasets").config
    cache = os.environ.get("HF_DATASETS_CACHE")
    if cache is not None:
        settings.HF_DATASETS_CACHE = Path(cache)
    is_offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    importlib.import_module("huggingface_hub").constants.HF_HUB_OFFLINE = is_offline
    settings.HF_HUB_OFFLINE = settings.HF_DATASETS_OFFLINE = is_offline


def _have_zygote(fds: list[int], base: list[str], variables: dict[str, str]) -> None:
    """Fork a process that does for this one what this one's parent did."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        for fd in fds:
            os.close(fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        serve(Connection(theirs), base, variables)
    theirs.close()
    high = fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, _HIGH_FD * 2)
    import warm

    warm.connect(Connection(socket.socket(fileno=high)), variables)
    warm.take_over()


def _arrange_files(fds: list[int], targets: list[int]) -> None:
    """Give the descriptors their numbers, close all others, and make the standard streams anew."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds]
    os.closerange(3, _HIGH_FD)
    for fd, target in zip(high, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    for number, name, mode, errors in _STREAMS:
        raw = open(number, mode, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, errors=errors, line_buffering=number == 2 or os.isatty(number))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> int:
    """Run what the words after ``python`` name, as Python itself does; the exit code."""
    words = words[1:] if words[0] == "-P" else words
    sys.orig_argv = [sys.executable, *words]
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            _run_as_main(words[1])
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int) or ended.code is None:
            code = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code if _flush() else 120


def _run_as_main(code: str) -> None:
    """What ``-c`` does."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "<string>", "exec"), module.__dict__)


def _flush() -> bool:
    """Write out what is left; whether that worked, as Python says it by its exit code."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        print(f"Exception ignored while flushing sys.stdout: {error!r}", file=sys.stderr)
        return False
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    return True

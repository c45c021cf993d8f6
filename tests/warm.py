"""Python processes without the seconds that importing torch and transformers takes: forked from one that has done it.

``Popen`` and ``run`` are those of ``subprocess``, for ``[sys.executable, …]``. The first call starts one process (see
``zygote``) that imports everything; from then on each process is a fork of that one, and a child of who asked for it:
it has its own id, exit code, signals, files and environment. What a fork would not do as a new process does is
started as usual, in ``cold()`` everything.

What such a process does not show: whether it imports all that it uses, and what importing costs. Each command has a
test for that which starts it cold.
"""

import contextlib
import ctypes
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zygote

_PYTHON = sys.executable
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""

_REPORT_VARIABLE = "WARM_REPORT"
"""Names a file that gets a line for every process asked for: forked, or why it was started cold."""

# Read where they are used, not when something is imported; others must be as they were when the imports were made.
_FREE_VARIABLES = {
    "COLUMNS", "FORCE_COLOR", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "LINES", "NO_COLOR", "OLDPWD", "PWD",
    "PYTEST_CURRENT_TEST", "PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT",
    "PYTHONPATH", "RAY_AUTH_MODE",
    "PYTORCH_NVML_BASED_CUDA_CHECK", "SHLVL", "TERM", "TMPDIR", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR",
    "_", _REPORT_VARIABLE,
    # A shell that asks for completions.
    "_AUTOTUNE_COMPLETE", "COMP_CWORD", "COMP_WORDS",
    # torch writes its address there each time that it compiles, in a test's process as well.
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}  # fmt: skip
_FREE_PREFIXES = ("AUTOTUNE_", "STAND_IN_")
_NOT_FREE = {"AUTOTUNE_COLD_TRIALS"}
_HAS_GPU = Path("/dev/nvidiactl").exists()
_NO_GPU = ("", "-1")

_lock = threading.Lock()
_is_off = threading.local()
_connection: zygote.Connection | None = None
_connected_in: int | None = None
_variables: dict[str, str] = {}
_before_tests: dict[str, str] | None = None


class NotWarmError(Exception):
    """A fork would differ from a new process in what the message says."""


@contextlib.contextmanager
def cold(is_cold: bool = True) -> Iterator[None]:
    """Start every process anew meanwhile, as users do, unless ``is_cold`` says otherwise."""
    before = getattr(_is_off, "value", False)
    _is_off.value = is_cold or before
    try:
        yield
    finally:
        _is_off.value = before


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` whose Python processes are forked from a warm one where that makes no difference."""

    def _execute_child(self, *arguments: Any) -> None:
        call = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments  # type: ignore[attr-defined]
        try:
            request, fds = _request(call)
            with _lock:
                _fork(self, request, fds)
        except NotWarmError as why:
            _report(call["args"], f"cold: {why}")
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        _report(call["args"], "warm")
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[end] for end in ends))  # type: ignore[attr-defined]


def run(
    arguments: list[str],
    *,
    input: str | bytes | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run`` with the ``Popen`` above."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(arguments, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    ended = subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)
    if check:
        ended.check_returncode()
    return ended


def start_xdist(words: list[str], **options: Any) -> Popen:
    """Start a process of pytest-xdist; ``-u`` says nothing to it, which has its streams made anew."""
    python, unbuffered, *rest = words
    assert unbuffered == "-u", words
    return Popen([python, *rest], env={**os.environ, "OMP_NUM_THREADS": "1"}, **options)


def output_of(*words: str, **options: Any) -> str:
    """What a Python program prints, which has no hub and must not fail: a script or ``-c`` with its arguments."""
    options = {"env": {**os.environ, "HF_HUB_OFFLINE": "1"}, **options}
    ended = run([sys.executable, *words], capture_output=True, text=True, timeout=280, **options)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return str(ended.stdout)


def take_over() -> None:
    """Have autotune's child processes started here as well, but within ``cold()``."""
    from asyncio import unix_events

    from autotune.cli import doctor
    from autotune.execution import child_process, oneshot

    child_process.Popen = Popen  # type: ignore[misc]
    modules: tuple[Any, ...] = (doctor, oneshot, unix_events)
    for module in modules:
        module.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Popen, "run": run})


def keep_environment() -> None:
    """Have the warm process start with the variables of now: the first test that needs it may have set some."""
    global _before_tests
    _before_tests = dict(os.environ)


def connect(connection: zygote.Connection, variables: dict[str, str]) -> None:
    """Use this warm process, which has imported under these environment variables."""
    global _connection, _connected_in, _variables
    _connection, _connected_in, _variables = connection, os.getpid(), variables


def _report(words: Any, how: str) -> None:
    path = os.environ.get(_REPORT_VARIABLE)
    if path:
        with open(path, "a") as report:
            report.write(f"{how}\t{os.environ.get('PYTEST_CURRENT_TEST', '?')}\t{' '.join(map(str, words))[:200]!r}\n")


def _request(call: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """What the warm process must know, and the file descriptors for it; ``NotWarmError`` where it cannot do it."""
    if sys.platform != "linux":
        raise NotWarmError("no Linux")
    if getattr(_is_off, "value", False):
        raise NotWarmError("asked for")
    words = [os.fspath(word) for word in call["args"]] if not isinstance(call["args"], str | bytes) else []
    if not words or words[0] != _PYTHON:
        raise NotWarmError("another program")
    # A fork listens to interrupts again by itself.
    listens = getattr(call["preexec_fn"], "__module__", None) == "autotune.execution.oneshot"
    plain: dict[str, Any] = {"close_fds": True, "shell": False, "uid": None, "gid": None, "gids": None, "umask": -1}
    plain |= {} if listens else {"preexec_fn": None}
    for name, value in plain.items():
        if call[name] != value:
            raise NotWarmError(name)
    environment = dict(os.environ if call["env"] is None else call["env"])
    _check_environment(environment)
    targets = {number: fd for number, end in enumerate(("p2cread", "c2pwrite", "errwrite")) if (fd := call[end]) != -1}
    targets = {0: 0, 1: 1, 2: 2} | targets | {fd: fd for fd in call["pass_fds"]}
    request = {
        "words": words[1:],
        "environment": environment,
        "folder": os.path.abspath(os.fspath(call["cwd"]) if call["cwd"] is not None else os.getcwd()),
        "new_session": bool(call["start_new_session"]),
        "targets": list(targets),
    }
    return request, list(targets.values())


def _check_environment(environment: dict[str, str]) -> None:
    if _HAS_GPU and environment.get("CUDA_VISIBLE_DEVICES", "0") not in _NO_GPU:
        raise NotWarmError("a GPU is visible")
    _start()
    for name in environment.keys() | _variables.keys():
        if environment.get(name) == _variables.get(name) or name in _FREE_VARIABLES or name == "CUDA_VISIBLE_DEVICES":
            continue
        if not name.startswith(_FREE_PREFIXES) or name in _NOT_FREE:
            raise NotWarmError(f"{name}={environment.get(name)}")


def _start() -> None:
    """Start the process that imports everything, unless that is done."""
    global _connection
    with _lock:
        if _connection is not None and _connected_in == os.getpid():
            return
        root = Path(__file__).resolve().parents[1]
        paths = [str(root), str(root / "tests")]
        found = os.environ if _before_tests is None else _before_tests
        variables = {name: value for name, value in found.items() if name not in _FREE_VARIABLES}
        variables |= {"CUDA_VISIBLE_DEVICES": "-1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        connect(zygote.start(_PYTHON, {**variables, "PYTHONPATH": os.pathsep.join(paths)}), variables)


def _fork(process: Popen, request: dict[str, Any], fds: list[int]) -> None:
    """Have a process forked, and set its id. It is this process's child then."""
    prctl = ctypes.CDLL(None).prctl
    # Its first parent ends at once, and orphans go to their nearest ancestor that wants them.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The process runs before its id is known here: a signal between the two would leave it to itself.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        answer = _connection.ask(request, fds)
        if "pid" in answer:
            process.pid = int(answer["pid"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if "refused" in answer:
        raise NotWarmError(answer["refused"])

"""Stop code that begins to train where nothing measures it: at its first backward pass or optimizer step.

Other processes that the user's code starts are checked before they start. The job ends at once if one is a launcher
such as torchrun, replaces the job's process, or is a Python with an environment that lacks this guard. Any other Python
may run: it imports ``started_python/sitecustomize.py``, which stops a training there as well.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from autotune.core.training_source import STOP_VARIABLE, WITHIN_VARIABLE, TrainingSource
from autotune.worker.user.code import OUTPUT_OPTIONS, REDIRECTED_VARIABLE, UserCodeError, advice_on_own_loop
from autotune.worker.wrapping import before, lines_above, module_of, on_import, users_line

_COMPILER = str(Path("torch", "_inductor", "compile_worker", "__main__.py"))
_LAUNCHERS = frozenset({"torchrun", "accelerate", "accelerate-launch", "deepspeed", "mpirun", "mpiexec", "srun"})
_LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic",
    "accelerate.commands",
    "deepspeed.launcher",
)
_STARTED_PYTHON = Path(__file__).parent / "started_python"

# peft's LoRA-GA and similar initialisations run backward passes to compute initial weights, without an optimizer.
_PREPARES_WEIGHTS = ("peft.",)


@dataclass(eq=False)
class Guard:
    """Stops the job where the user's code trains without being measured, until ``lift`` is called."""

    source: TrainingSource
    stop: Callable[[UserCodeError], None]
    """Ends the job; called with what cannot be measured, and what to do about it."""
    is_known: Callable[[], bool] = lambda: False
    """Returns whether a training has begun that is observed elsewhere, so that its steps are allowed."""
    _is_lifted: bool = field(default=False, init=False)
    _job_pid: int = field(default_factory=os.getpid, init=False)

    def install(self, stop_file: str) -> None:
        """Stop the job from now on where this process, or one that it starts, trains without being measured.

        A started process finds the guard on its ``PYTHONPATH``, and writes the reason to ``stop_file``.
        """
        os.environ[STOP_VARIABLE] = f"{self._job_pid}:{stop_file}"
        paths = [str(_STARTED_PYTHON), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        import torch

        def refuse_spawn(*_: Any, **__: Any) -> None:
            if not self._is_lifted:
                self._end(
                    f"{self.source.name} starts processes of its own to train in (torch.multiprocessing)",
                    "make it train in its own process: most scripts do so when they are told to use one device",
                )

        before_steps(torch, self._on_step)
        # torch.multiprocessing starts processes through this function.
        for name in ("torch.multiprocessing.spawn", "torch.multiprocessing"):
            if hasattr(sys.modules.get(name), "start_processes"):
                before(sys.modules[name], "start_processes", refuse_spawn)
        sys.addaudithook(self._on_event)

    def lift(self) -> None:
        """Allow training from now on, since it is measured."""
        self._is_lifted = True

    def _end(self, message: str, hint: str) -> None:
        """Stop the job, from this process or a forked one."""
        if os.getpid() == self._job_pid:
            self.stop(UserCodeError(message, hint))
        else:
            _end_job(message, hint)

    def _on_step(self) -> None:
        """Stop the job at a training step that nothing measures, unless a library initializes weights by it."""
        if not self._is_lifted and not self.is_known() and not _prepares_weights():
            self._end(*describe_training(self.source))

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Stop the job before it starts a process in which training could not be noticed; an audit hook of Python."""
        if event not in _STARTS or self._is_lifted:
            return
        words, environment = _STARTS[event](arguments)
        replaces_job = event == "os.exec" and os.getpid() == self._job_pid
        # torch.compile compiles in processes that have an environment of their own.
        is_compiler = any(word.endswith(_COMPILER) for word in words[1:2])
        is_unguarded = _is_python(words) and _is_unguarded(environment) and not is_compiler
        # A launcher, such as torchrun, starts processes to train in. Its name comes early in the command line.
        is_launcher = any(Path(word).name in _LAUNCHERS or word.startswith(_LAUNCHER_MODULES) for word in words[:12])
        if replaces_job or is_launcher or is_unguarded:
            verb = "becomes" if replaces_job else "starts"
            self._end(
                f"{self.source.name} {verb} another process, in which nothing can be measured: "
                f"{shlex.join(words)[:200]}",
                _advice_for(words),
            )


def guard_started_python() -> None:
    """Have this process, a Python that the user's code started, stop the job when it begins to train."""
    name = os.environ.get(WITHIN_VARIABLE, "the script")
    command = shlex.join(sys.orig_argv)[:200]

    def on_step() -> None:
        if not _prepares_weights():
            _end_job(f"{name} trains in another process that it starts: {command}", _advice_for(sys.orig_argv))

    on_import("torch.optim", lambda _: before_steps(sys.modules["torch"], on_step))


def _end_job(message: str, hint: str) -> NoReturn:
    """Write the reason to a file that the trial server reads, then end the job's process and this one."""
    job_pid, _, path = os.environ[STOP_VARIABLE].partition(":")
    # Written beside it and moved, so that nobody reads half of it.
    written = f"{path}.{os.getpid()}"
    Path(written).write_text(json.dumps({"message": message, "hint": hint}))
    os.replace(written, path)
    os.kill(int(job_pid), signal.SIGKILL)
    os._exit(1)


def before_steps(torch: Any, on_step: Callable[[], None]) -> None:
    """Call ``on_step`` before each backward pass and each optimizer step."""
    before(torch.autograd, "backward", lambda *_, **__: on_step())
    # torch.optim deletes its attribute for this submodule.
    sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(lambda *_: on_step())


def describe_training(source: TrainingSource) -> tuple[str, str]:
    """Return a message about the unmeasured training step that runs now, and advice, both from the call stack."""
    from transformers import Trainer

    lines = list(lines_above())
    place = users_line(lines)
    at = f" at {place}" if place else ""
    if source.kind == "loop":
        return (
            f"{source.name} trains without autotune.steps{at}",
            "go over autotune.steps(loader) in the training loop, or put with autotune.step(): around each pass",
        )
    for frame, _ in lines:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            kind = type(owner).__name__
            return (
                f"{kind} of {source.name} trains by a method of its own, which never calls Trainer.train",
                "only the steps within Trainer.train of a Trainer can be measured",
            )
    return f"{source.name} trains in a loop of its own{at}", advice_on_own_loop(source)


def _prepares_weights() -> bool:
    """Return whether a library that initializes weights by backward passes is running."""
    return any(module_of(frame).startswith(_PREPARES_WEIGHTS) for frame, _ in lines_above())


# A process that is about to start: the words of its command line, and its environment; ``None`` for this process's.
_Started = tuple[list[str], Mapping[Any, Any] | None]


def _command_of_popen(arguments: tuple[Any, ...]) -> _Started:
    """Return command and environment of a ``subprocess.Popen`` audit event."""
    executable, words, _, environment = arguments
    command = [_as_text(word) for word in ([words] if isinstance(words, str | bytes | os.PathLike) else words)]
    if executable is not None and command:
        command[0] = _as_text(executable)
    return _command_in_shell(command), environment


def _command_of_exec(arguments: tuple[Any, ...]) -> _Started:
    """Return command and environment of an ``os.exec``, ``os.posix_spawn`` or ``os.spawn`` audit event."""
    path, words, environment = arguments[-3:]
    return [_as_text(path), *(_as_text(word) for word in list(words)[1:])], environment


def _command_in_shell(words: list[str]) -> list[str]:
    """Return the words of the command that ``sh -c`` or ``bash -c`` is to run; other commands unchanged."""
    if len(words) > 2 and Path(words[0]).name in ("sh", "bash") and words[1] == "-c":
        try:
            return shlex.split(words[2])
        except ValueError:
            return words[2].split()
    return words


_STARTS: dict[str, Callable[[tuple[Any, ...]], _Started]] = {
    "subprocess.Popen": _command_of_popen,
    "os.exec": _command_of_exec,
    "os.posix_spawn": _command_of_exec,
    "os.spawn": _command_of_exec,
    "os.system": lambda arguments: (_command_in_shell(["sh", "-c", _as_text(arguments[0])]), None),
}


def _as_text(word: Any) -> str:
    return os.fsdecode(word) if isinstance(word, str | bytes | os.PathLike) else str(word)


def _is_python(words: Sequence[str]) -> bool:
    """Return whether a command runs a Python script or module."""
    if not words or not Path(words[0]).name.startswith(("python", "pypy")):
        return False
    return any(word == "-m" or word.endswith(".py") for word in words[1:])


def _is_unguarded(environment: Mapping[Any, Any] | None) -> bool:
    """Return whether a Python with this environment lacks the guard; ``None`` is this process's, which has it."""
    if environment is None:
        return False
    given = {_as_text(name): _as_text(value) for name, value in environment.items()}
    return STOP_VARIABLE not in given or str(_STARTED_PYTHON) not in given.get("PYTHONPATH", "")


def _advice_for(words: Sequence[str]) -> str:
    """Return the advice to search what the script starts: the command ``words``, without its launcher."""
    from autotune.core.errors import InvalidRequestError
    from autotune.core.launch_command import without_launchers

    try:
        command = list(without_launchers([str(word) for word in words]).words)
    except InvalidRequestError:
        command = next((list(words[at:]) for at, word in enumerate(words) if str(word).endswith(".py")), [])
    command = command[1:] if command and Path(command[0]).name.startswith("python") else command
    if not command or command[0] == "-c":
        return "give a command that trains in its own process: -- python train.py …"
    users_output = os.environ.get(REDIRECTED_VARIABLE)
    for at, word in enumerate(command if users_output is not None else ()):
        option, equals, _ = word.partition("=")
        if option in OUTPUT_OPTIONS and equals:
            command[at] = f"{option}={users_output}"
        elif option in OUTPUT_OPTIONS:
            command[at + 1 : at + 2] = [str(users_output)]
    return f"give what it starts: -- python {shlex.join(command)}"

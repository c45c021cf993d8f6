"""Find the Python file or module that a command line runs, without launchers such as ``torchrun``.

``torchrun --nproc-per-node 2 train.py`` becomes ``train.py``, which a trial of two ranks runs in two processes of its
own. A command that starts another number of processes than a trial has, or whose options are not known here, is
refused.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.errors import InvalidRequestError
from autotune.core.placeholders import placeholders_in

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*t?)?(\.exe)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z_0-9]*=")
# Options of the interpreter that change nothing which a trial depends on, and those that take a value.
_PYTHON_FLAGS = frozenset({"-u", "-B", "-O", "-OO", "-E", "-s", "-I", "-P", "-q", "-v", "-b", "-d"})
_PYTHON_OPTIONS = frozenset({"-W", "-X"})

# Commands that prepare an environment and start another process in it; shells; others that start another process.
_ENVIRONMENT_RUNNERS = ("uv", "poetry", "pipenv", "pdm", "hatch", "rye", "conda", "mamba", "micromamba")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh", "fish")
_WRAPPERS = (
    "nohup", "nice", "time", "taskset", "numactl", "stdbuf", "timeout", "sudo", "xargs", "mpirun", "mpiexec", "srun",
    "sbatch", "ray", "docker", "apptainer", "singularity",
)  # fmt: skip

# Modules that start what follows them in other processes, by the command of the same meaning.
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torchrun": "torchrun",
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "accelerate": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
    "trl": "trl",
    "trl.cli": "trl",
}

# What torchrun tells a single process, for scripts that open a process group whatever starts them. With port 0 the
# system chooses a free one.
ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # fmt: skip

# Options with a value that leave the training as it is, and flags, listed here since the launchers' own parsers need
# torch: torch 2.13 (torch.distributed.run.get_args_parser), accelerate 1.15 (commands.launch.launch_command_parser).
_TORCHRUN_OPTIONS = frozenset({
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "role", "tee",
    "monitor-interval", "start-method", "event-log-handler", "log-dir", "redirects", "local-ranks-filter", "node-rank",
    "master-addr", "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "r", "t",
    "virtual-local-rank", "duplicate-stdout-filters", "duplicate-stderr-filters",
})  # fmt: skip
_TORCHRUN_FLAGS = frozenset({"standalone", "use-env"})
_ACCELERATE_OPTIONS = frozenset({
    "num-processes", "num-machines", "num-cpu-threads-per-process", "mixed-precision", "machine-rank", "gpu-ids",
    "main-process-ip", "main-process-port", "dynamo-backend", "dynamo-mode", "config-file", "rdzv-backend", "rdzv-conf",
    "max-restarts", "monitor-interval", "log-dir", "role", "tee", "same-network",
})  # fmt: skip
_ACCELERATE_FLAGS = frozenset({"cpu", "quiet", "q", "debug", "enable-cpu-affinity"})

# Beginnings of accelerate's options that say how ranks share the model.
_SHARING = ("use-fsdp", "fsdp", "use-deepspeed", "deepspeed", "zero", "offload", "use-megatron-lm", "megatron-lm")
# Beginnings of accelerate's options that say that ranks share each sample.
_SHARING_SAMPLES = ("use-parallelism-config", "parallelism-config")
NOT_BY_SAMPLE = (
    "leave it out; --gpus 2 --strategy fsdp shards the weights, and a model by --model has --context-parallel"
)
"""What to do about ranks that share a sample."""
_ASK_FOR_FSDP = "ask for FSDP with --strategy ddp,fsdp and --gpus"
# Values of ``distributed_type`` in accelerate's configuration file with which each process has the whole model.
_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")


@dataclass(slots=True)
class CommandLine:
    """A user's command line, from which launchers such as ``torchrun`` are being taken off, with what they set."""

    command: str
    """The whole command line, for messages."""
    ranks: int
    """The number of processes of each trial, which a launcher has to agree with."""
    variables: tuple[tuple[str, str], ...]
    """Variables of the environment that launchers would have set and that scripts read."""
    is_ranked: bool = False
    """Whether ``torchrun`` starts one process, so that the script may expect the variables of ``ALONE``."""
    words: tuple[str, ...] = ()
    """The command without launchers: a file or ``-m`` and a module, then its own options."""

    def check_number(self, number: str, written: str, launched: Sequence[str]) -> None:
        """Raise ``InvalidRequestError`` where a launcher starts another ``number`` of processes than a trial has."""
        if number == str(self.ranks) or (self.ranks > 1 and number in _AS_MANY_AS_GPUS):
            return
        if self.ranks == 1:
            gpus = number if number.isdigit() else "2"
            if number in _AS_MANY_AS_GPUS:
                gpus = "all"
            raise self.several_processes_error(
                written, launched, f", or measure them together: --gpus {gpus} without --parallel"
            )
        is_several = number.isdecimal() and int(number) > 1
        raise self.error(
            f"starts another number of processes ({written}) than --gpus names GPUs, {self.ranks}",
            f"{f'use --gpus {number}' if is_several else 'leave --gpus out'}, or have the launcher start {self.ranks}",
        )

    def check_hosts(self, number: str, written: str, launched: Sequence[str]) -> None:
        """Raise ``InvalidRequestError`` where the launcher's ``number`` of hosts is not one."""
        if number not in ("1", "1:1"):
            raise self.error(
                f"starts processes on several hosts ({written}), and a trial runs on one",
                f"give the script itself, with --gpus for the GPUs of this host: -- {_python_command(launched)}",
            )

    def several_processes_error(self, written: str, launched: Sequence[str], instead: str = "") -> InvalidRequestError:
        """Return the error for a launcher of several processes where the trial has one."""
        return self.error(
            f"starts several processes ({written}), and a trial is one",
            f"give the script itself, which is then measured on one device: -- {_python_command(launched)}{instead}",
        )

    def not_measurable_error(self, what: str, launched: Sequence[str]) -> InvalidRequestError:
        """Return the error for a launcher whose processes autotune cannot measure."""
        return self.error(
            f"{what}, so that it cannot be measured from within",
            f"give the script itself and its own options: -- {_python_command(launched)}",
        )

    def error(self, why: str, hint: str) -> InvalidRequestError:
        """Return the error that refuses the command line, with the reason."""
        return InvalidRequestError(f"{self.command[:80]!r} {why}", hint)


# Words of torchrun for as many processes as there are GPUs.
_AS_MANY_AS_GPUS = ("gpu", "auto")


def without_launchers(words: Sequence[str], ranks: int = 1) -> CommandLine:
    """Take the launchers off a command line; return the script that it runs in each of ``ranks`` processes.

    Raises ``InvalidRequestError``, with a command that would work, for an unsupported or unknown launcher.
    """
    command = shlex.join(words)
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        for variable in ("PARALLELISM_CONFIG_CP_SIZE", "PARALLELISM_CONFIG_SP_SIZE", "PARALLELISM_CONFIG_TP_SIZE"):
            if os.environ.get(variable, "1") != "1":
                raise _sharing_samples_error(variable)
    filled, left = _split_filled_variables(words)
    launch = CommandLine(command, ranks, filled)
    # A launcher may start another one: python -m accelerate launch -m trl …
    for _ in range(len(words) + 1):
        left = _without_python(left, command)
        name = _command_of(left)
        if name is None:
            break
        left = _without_launcher(name, left[2:] if left[0] == "-m" else left[1:], launch)
    launch.words, launch.variables = tuple(left), tuple(sorted(launch.variables))
    return launch


def _split_filled_variables(words: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Split a command such as ``BATCH={batch} python train.py`` into leading variables with placeholders and the rest.

    A candidate's values replace placeholders. Without such variables, the words are returned as they are.
    """
    left = list(words[1:] if words and Path(words[0]).name == "env" else words)
    filled = list(itertools.takewhile(lambda word: _ASSIGNMENT.match(word) and placeholders_in(word), left))
    variables = dict(word.split("=", 1) for word in filled)
    return tuple(variables.items()), left[len(filled) :] if filled else list(words)


def find_command(name: str) -> str | None:
    """Return the file of a console command such as ``trl``, from ``PATH`` or from the folder of this Python.

    ``None`` where there is no readable file, and where ``name`` is a path. A command of another Python, whose packages
    trials do not have, is replaced by the same command of this Python; raises ``InvalidRequestError`` without one.
    """
    beside = os.path.join(os.path.dirname(sys.executable), name)
    # An environment that is not activated has its commands beside its Python alone.
    path = None if os.sep in name else shutil.which(name) or shutil.which(beside)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            first_line = file.readline(300).decode(errors="replace")
    except OSError:
        return None
    interpreter = first_line[2:].split()[:1] if first_line.startswith("#!") else []
    is_foreign = (
        bool(interpreter)
        and _PYTHON.fullmatch(Path(interpreter[0]).name) is not None
        and os.path.dirname(interpreter[0]) != os.path.dirname(sys.executable)
    )
    if is_foreign and not os.path.exists(beside):
        raise InvalidRequestError(
            f"{name} belongs to another Python, {interpreter[0]}, whose packages trials do not have",
            f"install autotune there, and run it with that Python: {interpreter[0]} -m autotune search … -- {name} …",
        )
    return beside if is_foreign else path


def _without_python(words: list[str], command: str) -> list[str]:
    """Return the words of a command line without the Python interpreter and its options.

    Raises ``InvalidRequestError`` for a variable of the environment, or ``env``, at the beginning.
    """
    if words and (_ASSIGNMENT.match(words[0]) or Path(words[0]).name == "env"):
        raise InvalidRequestError(
            f"{command[:80]!r} begins with a variable of the environment, which is not a script",
            "set it before autotune itself: NAME=value autotune search … -- python train.py …",
        )
    if words and _PYTHON.fullmatch(Path(words[0]).name):
        words = words[1:]
        while words and words[0] in _PYTHON_FLAGS | _PYTHON_OPTIONS:
            words = words[2:] if words[0] in _PYTHON_OPTIONS else words[1:]
    return words


def _command_of(words: Sequence[str]) -> str | None:
    """Return the launcher that a command line starts with; ``None`` where it starts with the script itself."""
    if not words:
        return None
    if words[0] == "-m":
        return _LAUNCHER_MODULES.get(words[1]) if len(words) > 1 else None
    name = Path(words[0]).name
    # A user's file may bear the name of a launcher.
    is_own_file = name.endswith(".py") or (name == words[0] and os.path.isfile(name))
    return name if name in _LAUNCHERS and not is_own_file else None


def _without_torchrun(words: list[str], launch: CommandLine) -> list[str]:
    """Return the command that ``torchrun`` launches, after checking its numbers of hosts and processes."""
    given, left = _split_launcher_options(words, _TORCHRUN_OPTIONS, _TORCHRUN_FLAGS, launch)
    if "nnodes" in given:
        launch.check_hosts(given["nnodes"], f"--nnodes {given['nnodes']}", left)
    if "nproc-per-node" in given:
        launch.check_number(given["nproc-per-node"], f"--nproc-per-node {given['nproc-per-node']}", left)
    launch.is_ranked = launch.ranks == 1
    return left


def _without_accelerate_launch(words: list[str], launch: CommandLine) -> list[str]:
    """Return the command that ``accelerate launch`` launches, after checking its options and configuration file."""
    flags = _ACCELERATE_FLAGS | {"multi-gpu"} if launch.ranks > 1 else _ACCELERATE_FLAGS
    given, left = _split_launcher_options(words, _ACCELERATE_OPTIONS, flags, launch)
    config, path = _accelerate_config(given.get("config-file"))
    # Each setting, and how the user wrote it. The command line goes before the configuration file.
    settings = {name: (given[name], f"--{name} {given[name]}") for name in given}
    for name, value in config.items():
        settings.setdefault(name.replace("_", "-"), (value, f"{name}: {value} in {path}"))
    if "num-machines" in settings:
        launch.check_hosts(*settings["num-machines"], left)
    if "num-processes" in settings:
        launch.check_number(*settings["num-processes"], left)
    # parallelism_config is a section: its own line has no value, or {} where the section is empty.
    if config.get("parallelism_config") == "":
        raise _sharing_samples_error(path, " (parallelism_config)")
    kind = config.get("distributed_type", "NO").strip("'\"")
    if launch.ranks > 1 and kind not in _REPLICATED:
        raise InvalidRequestError(
            f"{path} says distributed_type: {kind}, and how ranks share the model is searched",
            f"{_ASK_FOR_FSDP}; use a configuration with MULTI_GPU, or give the script itself: "
            f"-- {_python_command(left)}",
        )
    if launch.ranks == 1 and kind != "NO" and given.get("num-processes") != "1":
        raise launch.several_processes_error(f"distributed_type: {config['distributed_type']} in {path}", left)
    if precision := settings.get("mixed-precision", ("",))[0].strip("'\""):
        launch.variables = tuple({**dict(launch.variables), "ACCELERATE_MIXED_PRECISION": precision}.items())
    return left


def _accelerate_config(given: str | None) -> tuple[dict[str, str], str]:
    """Return the fields and the path of accelerate's configuration file: ``given``, or the standard one.

    Raises ``InvalidRequestError`` where ``given`` cannot be read; without a standard file there are no fields.
    """
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    path = os.path.expanduser(given or os.path.join(home, "accelerate", "default_config.yaml"))
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        if given is not None:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InvalidRequestError(
                f"accelerate's --config_file {given}: {why}", "name another, or leave it out"
            ) from error
        return {}, path
    # No YAML parser is installed with autotune; the fields that count are on the outermost level, one a line.
    pairs = (line.partition(":") for line in lines if line and not line.startswith((" ", "#", "-")))
    return {name.strip().strip("\"'"): value.strip().rstrip(",") for name, colon, value in pairs if colon}, path


@dataclass(frozen=True, slots=True)
class _Tool:
    """A library's own command, such as ``trl sft``, which starts a training module of the library by a launcher."""

    module: str
    """The module's dotted name, with ``{}`` in place of the first word after the command, such as ``sft``."""
    trains: tuple[str, ...] = ()
    """First words with which the command trains; empty where any word names a training."""
    variable: str | None = None
    """Environment variable with the number of processes; ``None`` where there is none."""

    def module_command(self, words: list[str], launch: CommandLine) -> list[str]:
        """Return ``-m``, the module that this command starts with these ``words`` after it, and the module's options.

        Raises ``InvalidRequestError`` where it trains nothing, or in another number of processes than the trial has.
        """
        if not words or words[0].startswith("-") or (self.trains and words[0] not in self.trains):
            example = self.module.format(self.trains[0] if self.trains else "sft")
            raise launch.error("names no training", f"give its module: -- python -m {example} …")
        left = ["-m", self.module.format(words[0].replace("-", "_"))]
        launching: list[tuple[str, str]] = []
        rest = iter(words[1:])
        for word in rest:
            name, equals, value = word.partition("=")
            if name in _STARTED_BY:
                launching.append((name, value if equals else next(rest, "")))
            elif name not in ("--accelerate", "--no-accelerate"):
                left.append(word)
        for name, value in launching:
            if name == "--accelerate_config":
                raise launch.several_processes_error(f"{name} {value}", left)
            if name != "--launcher":
                launch.check_number(value, f"{name} {value}", left)
        if self.variable is not None and (count := os.environ.get(self.variable)) is not None:
            launch.check_number(count, f"{self.variable}={count}", left)
        return left


# Options of these commands that say how the module is started.
_STARTED_BY = ("--num_processes", "--num-processes", "--accelerate_config", "--launcher")
# trl 1.16, ms-swift 3, axolotl (their cli.main), LLaMA-Factory 0.9.5 (llamafactory.launcher).
_TOOLS = {
    "trl": _Tool("trl.scripts.{}"),
    "swift": _Tool("swift.cli.{}", variable="NPROC_PER_NODE"),
    "axolotl": _Tool("axolotl.cli.train", ("train",)),
    "llamafactory-cli": _Tool("llamafactory.launcher", ("train",)),
    "lmf": _Tool("llamafactory.launcher", ("train",)),
}


def _words_from_python(words: Sequence[str]) -> list[str]:
    """Return the words from the first Python interpreter or Python script on, to suggest them as a command."""
    return list(
        itertools.dropwhile(lambda word: not (word.endswith(".py") or _PYTHON.fullmatch(Path(word).name)), words)
    )


# Every command that is taken off a command line, or refused.
_LAUNCHERS = frozenset({
    "torchrun", "accelerate", "accelerate-launch", "deepspeed", *_TOOLS, *_ENVIRONMENT_RUNNERS, *_SHELLS, *_WRAPPERS,
})  # fmt: skip


def _without_launcher(name: str, words: list[str], launch: CommandLine) -> list[str]:
    """Return the command that a launcher runs, from the words after the launcher's name.

    Raises ``InvalidRequestError`` for a launcher whose processes cannot be measured from within.
    """
    if name == "torchrun":
        return _without_torchrun(words, launch)
    if name == "accelerate-launch":
        return _without_accelerate_launch(words, launch)
    if name == "accelerate":
        if words[:1] != ["launch"]:
            raise launch.error("starts no training", "give the script and its own options: -- python train.py …")
        return _without_accelerate_launch(words[1:], launch)
    if name in _TOOLS:
        return _TOOLS[name].module_command(words, launch)
    if name in _SHELLS:
        raise launch.error(
            "is run by a shell, which starts other processes that cannot be measured from within",
            "give the line with python that it contains: -- python train.py …",
        )
    if name in _ENVIRONMENT_RUNNERS:
        rest = words[1:] if words[:1] == ["run"] else words
        shown = _python_command([] if rest and rest[0].startswith("-") else rest)
        raise launch.error(
            "starts another process, which cannot be measured from within",
            f"have {name} start autotune itself: {name} run autotune search … -- {shown}",
        )
    why = "starts a process for each GPU" if name == "deepspeed" else "starts another process"
    raise launch.not_measurable_error(why, _words_from_python(words))


def _split_launcher_options(
    words: list[str], options: frozenset[str], flags: frozenset[str], launch: CommandLine
) -> tuple[dict[str, str], list[str]]:
    """Split a launcher's words into its options with a value, by name, and the command that it launches.

    ``options`` are known options with a value, ``flags`` those without. Raises ``InvalidRequestError`` for any other.
    """
    given: dict[str, str] = {}
    left = list(words)
    is_module = False
    while left and left[0].startswith("-"):
        word, equals, value = left.pop(0).partition("=")
        name = word.lstrip("-").replace("_", "-")
        if name in ("m", "module"):
            is_module = True
        elif name in options and (equals or left):
            given[name] = value if equals else left.pop(0)
        elif name not in flags:
            rest = _words_from_python(left)
            if name.startswith(_SHARING):
                raise launch.error(
                    f"says with {word} how ranks share the model, which is searched",
                    f"{_ASK_FOR_FSDP}; leave {word} and the like out: -- {_python_command(rest)}",
                )
            if name.startswith(_SHARING_SAMPLES):
                raise _sharing_samples_error(f"{launch.command[:80]!r}", f" ({word})")
            raise launch.not_measurable_error(f"has the launcher's option {word}, which is not known here", rest)
    if not left:
        raise launch.error("names no script", "give one after the launcher's options")
    return given, ["-m", *left] if is_module else left


def _python_command(words: Sequence[str]) -> str:
    """Return the words as a shell command for a hint, with ``python`` before a script; an example without words."""
    if not words:
        return "python train.py …"
    is_script = words[0] == "-m" or words[0].endswith(".py")
    return shlex.join(["python", *words] if is_script else words)


def _sharing_samples_error(who: str, said: str = "") -> InvalidRequestError:
    """Return the error that ``who`` (a command or file) sets context or tensor parallelism, ``said`` as it says it."""
    return InvalidRequestError(f"{who} has several ranks share a sample{said}, which is not searched", NOT_BY_SAMPLE)

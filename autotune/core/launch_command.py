"""Find the Python file or module that a command line runs, without launchers such as ``torchrun``.

``torchrun --nproc-per-node 2 train.py`` becomes ``train.py``, which a trial of two ranks runs in two processes of its
own. A command that starts another number of processes than a trial has, or whose options are not known here, is
refused.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.errors import InvalidRequestError
from autotune.core.masking import mask_secrets
from autotune.core.placeholders import placeholders_in

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*t?)?(\.exe)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z_0-9]*=")
# Options of the interpreter that change nothing which a trial depends on, and those that take a value.
_PYTHON_FLAGS = frozenset({"-u", "-B", "-O", "-OO", "-E", "-s", "-I", "-P", "-q", "-v", "-b", "-d"})
_PYTHON_OPTIONS = frozenset({"-W", "-X"})

# Commands that prepare an environment and start another process in it.
_ENVIRONMENT_RUNNERS = frozenset({"uv", "poetry", "pipenv", "pdm", "hatch", "rye", "conda", "mamba", "micromamba"})
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "fish"})
_WRAPPERS = frozenset({"nohup", "nice", "time", "taskset", "numactl", "stdbuf", "timeout", "sudo", "xargs"})
_CLUSTERS = frozenset({"mpirun", "mpiexec", "srun", "sbatch", "ray", "docker", "apptainer", "singularity"})

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

# torch 2.13, torch.distributed.run.get_args_parser: the options that take a value, and those that take none.
_TORCHRUN_OPTIONS = frozenset(
    {
        "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
        "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
        "local-ranks-filter", "node-rank", "master-addr", "master-port", "local-addr", "logs-specs", "numa-binding",
        "signals-to-handle", "virtual-local-rank", "duplicate-stdout-filters", "duplicate-stderr-filters", "r", "t",
    }
)  # fmt: skip
_TORCHRUN_FLAGS = frozenset({"standalone", "use-env"})
# accelerate 1.15, accelerate.commands.launch.launch_command_parser: those that leave it one process on one machine.
_ACCELERATE_OPTIONS = frozenset(
    {
        "num-processes", "num-machines", "num-cpu-threads-per-process", "mixed-precision", "machine-rank",
        "main-process-ip", "main-process-port", "gpu-ids", "dynamo-backend", "dynamo-mode", "config-file",
        "rdzv-backend", "rdzv-conf", "max-restarts", "monitor-interval", "log-dir", "role", "tee", "same-network",
    }
)  # fmt: skip
_ACCELERATE_FLAGS = frozenset({"cpu", "quiet", "q", "debug", "enable-cpu-affinity"})

# Beginnings of its options that say how ranks share the model.
_SHARING = ("use-fsdp", "fsdp", "use-deepspeed", "deepspeed", "zero", "offload", "use-megatron-lm", "megatron-lm")
# Those that say that ranks share each sample.
_SHARING_SAMPLES = ("use-parallelism-config", "parallelism-config")
NOT_BY_SAMPLE = (
    "leave it out; --gpus 2 --strategy fsdp shards the weights, and a model by --model has --context-parallel"
)
"""What to do about ranks that share a sample."""
_ASK_FOR_FSDP = "ask for FSDP with --strategy ddp,fsdp and --gpus"
# What accelerate's own configuration file may say where each process has all of the model (accelerate config).
_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")


@dataclass(frozen=True, slots=True)
class Launched:
    """A command line without its launchers."""

    words: tuple[str, ...]
    """A file or ``-m`` and a module, then its own options."""
    variables: tuple[tuple[str, str], ...] = ()
    """Variables of the environment that the launcher would have set and that scripts read."""
    rank_variables: tuple[tuple[str, str], ...] = ()
    """Those that tell a single process of ``torchrun`` which one it is."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """What is known while launchers are taken off."""

    command: str
    ranks: int
    """The processes that each trial has."""
    variables: dict[str, str]
    rank_variables: dict[str, str]

    def check_number(self, number: str, said: str, left: Sequence[str]) -> None:
        """Raise ``InvalidRequestError`` for a number of processes that a trial does not have."""
        if number == str(self.ranks) or (self.ranks > 1 and number in _AS_MANY_AS_GPUS):
            return
        if self.ranks == 1:
            gpus = "all" if number in _AS_MANY_AS_GPUS else number if number.isdigit() else "2"
            raise _several(self.command, said, left, f", or measure them together: --gpus {gpus} without --parallel")
        raise InvalidRequestError(
            f"{self.command[:80]!r} starts another number of processes ({said}) than --gpus names GPUs, {self.ranks}",
            f"use --gpus {number}, or have the launcher start {self.ranks}"
            if number.isdigit() and number not in "01"
            else f"leave --gpus out, or have the launcher start {self.ranks}",
        )


# Words of torchrun for as many processes as there are GPUs.
_AS_MANY_AS_GPUS = ("gpu", "auto")


def without_launchers(words: Sequence[str], ranks: int = 1) -> Launched:
    """Return what a command line runs in each of ``ranks`` processes.

    Raises ``InvalidRequestError``, with the command that would work, where it runs anything else or that is unknown.
    """
    command = shlex.join(words)
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        for variable in ("PARALLELISM_CONFIG_CP_SIZE", "PARALLELISM_CONFIG_SP_SIZE", "PARALLELISM_CONFIG_TP_SIZE"):
            if os.environ.get(variable, "1") != "1":
                raise _sharing_samples(variable)
    filled, left = _split_filled_variables(words)
    launch = _Launch(command, ranks, filled, {})
    for _ in range(len(words) + 1):
        left = _without_python(left, command)
        name = _command_of(left)
        if name is None:
            break
        left = _TAKE_OFF[name](left[2:] if left[0] == "-m" else left[1:], launch)
    each = (tuple(sorted(variables.items())) for variables in (launch.variables, launch.rank_variables))
    return Launched(tuple(left), *each)


def _split_filled_variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables with placeholders that a command begins with, as in ``BATCH={batch} python train.py``."""
    left = list(words[1:] if words and Path(words[0]).name == "env" else words)
    filled = {}
    while left and _ASSIGNMENT.match(left[0]) and placeholders_in(left[0]):
        name, _, value = left.pop(0).partition("=")
        filled[name] = value
    return (filled, left) if filled else ({}, list(words))


def find_command(name: str) -> str | None:
    """Return the file of a console command, as a shell would find it; ``None`` where there is none.

    Raises ``InvalidRequestError`` for a command that belongs to another Python, whose packages trials do not have.
    """
    beside = os.path.join(os.path.dirname(sys.executable), name)
    # An environment that is not activated has its commands beside its Python alone.
    path = None if os.sep in name else shutil.which(name) or shutil.which(beside)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            first = file.readline(300).decode(errors="replace")
    except OSError:
        return None
    interpreter = first[2:].split()[:1] if first.startswith("#!") else []
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
    """Return the words without an interpreter and its options; raises where they cannot be a command of one process."""
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
    """Return the launcher that the words begin with; ``None`` where they begin with the script itself."""
    if not words:
        return None
    if words[0] == "-m":
        return _LAUNCHER_MODULES.get(words[1]) if len(words) > 1 else None
    name = Path(words[0]).name
    # A file of the user's that bears a launcher's name is a file of the user's.
    is_own_file = name.endswith(".py") or (name == words[0] and os.path.isfile(name))
    return name if name in _TAKE_OFF and not is_own_file else None


def _take_off_torchrun(words: list[str], launch: _Launch) -> list[str]:
    given, left = _split(words, _TORCHRUN_OPTIONS, _TORCHRUN_FLAGS, launch.command)
    if given.get("nnodes", "1") not in ("1", "1:1"):
        raise _several_hosts(launch.command, f"--nnodes {given['nnodes']}", left)
    if "nproc-per-node" in given:
        launch.check_number(given["nproc-per-node"], f"--nproc-per-node {given['nproc-per-node']}", left)
    if launch.ranks == 1:
        launch.rank_variables.update(ALONE)
    return left


def _take_off_accelerate(words: list[str], launch: _Launch) -> list[str]:
    if words[:1] != ["launch"]:
        raise InvalidRequestError(
            f"{launch.command[:80]!r} starts no training", "give the script and its own options: -- python train.py …"
        )
    return _take_off_accelerate_launch(words[1:], launch)


def _take_off_accelerate_launch(words: list[str], launch: _Launch) -> list[str]:
    flags = _ACCELERATE_FLAGS | {"multi-gpu"} if launch.ranks > 1 else _ACCELERATE_FLAGS
    given, left = _split(words, _ACCELERATE_OPTIONS, flags, launch.command)
    config, path = _accelerate_config(given.get("config-file"))
    if given.get("num-machines", "1") != "1":
        raise _several_hosts(launch.command, f"--num-machines {given['num-machines']}", left)
    if "num-processes" in given:
        launch.check_number(given["num-processes"], f"--num-processes {given['num-processes']}", left)
    elif "num_processes" in config:
        launch.check_number(config["num_processes"], f"num_processes: {config['num_processes']} in {path}", left)
    if "num-machines" not in given and config.get("num_machines", "1") != "1":
        raise _several_hosts(launch.command, f"num_machines: {config['num_machines']} in {path}", left)
    # A section, whose lines are indented; without any it is {}.
    if config.get("parallelism_config") == "":
        raise _sharing_samples(path, " (parallelism_config)")
    kind = config.get("distributed_type", "NO").strip("'\"")
    if launch.ranks > 1 and kind not in _REPLICATED:
        raise InvalidRequestError(
            f"{path} says distributed_type: {kind}, and how ranks share the model is searched",
            f"{_ASK_FOR_FSDP}; use a configuration with MULTI_GPU, or give the script itself: -- "
            + shlex.join(_as_python(left)),
        )
    if launch.ranks == 1 and kind != "NO" and given.get("num-processes") != "1":
        raise _several(launch.command, f"distributed_type: {config['distributed_type']} in {path}", left)
    precision = given.get("mixed-precision", config.get("mixed_precision", "").strip("'\""))
    if precision:
        launch.variables["ACCELERATE_MIXED_PRECISION"] = precision
    return left


def _accelerate_config(given: str | None) -> tuple[dict[str, str], str]:
    """Read the flat part of accelerate's configuration file, the default one where none is given."""
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
    pairs = (line.partition(":") for line in lines if line and not line.startswith((" ", "#", "-")))
    return {name.strip().strip("\"'"): value.strip().rstrip(",") for name, colon, value in pairs if colon}, path


def _take_off_trl(words: list[str], launch: _Launch) -> list[str]:
    # trl 1.16, trl.cli: each command runs the module of its name among trl.scripts through accelerate's launcher.
    if not words or words[0].startswith("-"):
        raise InvalidRequestError(
            f"{launch.command[:80]!r} names no training", "give its module: -- python -m trl.scripts.sft …"
        )
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name not in ("--num_processes", "--accelerate_config"):
            continue
        left = ["-m", f"trl.scripts.{words[0]}", *words[1:place], *words[place + ("=" not in word) + 1 :]]
        value = value or "".join(words[place + 1 : place + 2])
        if name == "--accelerate_config":
            raise _several(launch.command, word, left)
        launch.check_number(value, f"{name} {value}", left)
        return left
    return ["-m", f"trl.scripts.{words[0]}", *words[1:]]


def _take_off_swift(words: list[str], launch: _Launch) -> list[str]:
    # ms-swift 3, swift.cli.main: each command starts Python again with the file of its name, under torchrun where
    # NPROC_PER_NODE asks for that.
    if not words or words[0].startswith("-"):
        raise InvalidRequestError(f"{launch.command[:80]!r} names no training", "give one: -- swift sft …")
    if (count := os.environ.get("NPROC_PER_NODE")) is not None:
        launch.check_number(count, f"NPROC_PER_NODE={count}", ["-m", f"swift.cli.{words[0]}", *words[1:]])
    return ["-m", f"swift.cli.{words[0].replace('-', '_')}", *words[1:]]


def _take_off_axolotl(words: list[str], launch: _Launch) -> list[str]:
    # axolotl.cli.main: its train starts axolotl.cli.train by accelerate launch or torchrun.
    if words[:1] != ["train"]:
        raise InvalidRequestError(f"{launch.command[:80]!r} starts no training", "give: -- axolotl train config.yaml")
    left: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        name, equals, value = word.partition("=")
        if name in ("--launcher", "--num-processes", "--num_processes"):
            value = value if equals else next(rest, "")
            if name != "--launcher":
                launch.check_number(value, f"{name} {value}", ["-m", "axolotl.cli.train", *left])
        elif name not in ("--accelerate", "--no-accelerate"):
            left.append(word)
    return ["-m", "axolotl.cli.train", *left]


def _take_off_llamafactory(words: list[str], launch: _Launch) -> list[str]:
    # LLaMA-Factory 0.9.5, llamafactory.launcher: its train starts the module itself under torchrun where there are
    # several GPUs or FORCE_TORCHRUN asks for that.
    if words[:1] != ["train"]:
        raise InvalidRequestError(
            f"{launch.command[:80]!r} starts no training", "give: -- llamafactory-cli train config.yaml"
        )
    return ["-m", "llamafactory.launcher", *words[1:]]


def _refuse_deepspeed(words: list[str], launch: _Launch) -> list[str]:
    rest = list(itertools.dropwhile(lambda word: not word.endswith(".py"), words))
    raise _unknown(launch.command, "starts a process for each GPU", rest)


def _refuse_environment(words: list[str], launch: _Launch) -> list[str]:
    name = Path(launch.command.split()[0]).name
    rest = words[1:] if words[:1] == ["run"] else words
    shown = shlex.join(_as_python(rest)) if rest and not rest[0].startswith("-") else "python train.py …"
    raise InvalidRequestError(
        f"{launch.command[:80]!r} starts another process, which cannot be measured from within",
        f"have {name} start autotune itself: {name} run autotune search … -- {shown}",
    )


def _refuse_shell(words: list[str], launch: _Launch) -> list[str]:
    raise InvalidRequestError(
        f"{launch.command[:80]!r} is run by a shell, which starts other processes that cannot be measured from within",
        f"give the line with python that it contains: -- {line_with_python(*words[:2])}",
    )


# A command of a shell up to what ends it or is done with its output, outside of quotes.
_UP_TO_END = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|(?!\s(?:\d?[<>]|[|&;#])|[;&](?:\s|$)).)*""")
_NO_SCRIPT = re.compile(r"\S*python\S* (?:-m (?:pip|venv)\b|-c |-(?: |$))")


def line_with_python(file: str = "", command: str = "", *_: str) -> str:
    """Return what starts Python in a shell script, or in a command after ``-c``; an example where nothing does."""
    text = command
    if file != "-c":
        with contextlib.suppress(OSError):
            text = Path(file).read_text(errors="replace")
    for line in text.replace("\\\n", " ").splitlines():
        # Without what is done with its output, and the options of the script of the shell.
        said = _UP_TO_END.match(line)[0].strip().removeprefix("exec ")  # type: ignore[index]
        words = mask_secrets(said.replace('"$@"', "").split())
        command = next((word for word in words if not _ASSIGNMENT.match(word)), "")
        is_python = _PYTHON.fullmatch(Path(command).name) and not _NO_SCRIPT.search(said)
        if is_python or (command in _TAKE_OFF and command not in _SHELLS):
            return " ".join(words)
    return "python train.py …"


def _refuse_wrapper(words: list[str], launch: _Launch) -> list[str]:
    rest = list(itertools.dropwhile(lambda word: not _PYTHON.fullmatch(Path(word).name), words))
    raise _unknown(launch.command, "starts another process", rest)


_TakeOff = Callable[[list[str], _Launch], list[str]]
_TAKE_OFF: dict[str, _TakeOff] = {
    "torchrun": _take_off_torchrun,
    "accelerate": _take_off_accelerate,
    "accelerate-launch": _take_off_accelerate_launch,
    "trl": _take_off_trl,
    "swift": _take_off_swift,
    "axolotl": _take_off_axolotl,
    "llamafactory-cli": _take_off_llamafactory,
    "lmf": _take_off_llamafactory,
    "deepspeed": _refuse_deepspeed,
    **dict.fromkeys(_ENVIRONMENT_RUNNERS, _refuse_environment),
    **dict.fromkeys(_SHELLS, _refuse_shell),
    **dict.fromkeys(_WRAPPERS | _CLUSTERS, _refuse_wrapper),
}


def _split(
    words: list[str], options: frozenset[str], flags: frozenset[str], command: str
) -> tuple[dict[str, str], list[str]]:
    """Return a launcher's own options, and what it launches: a file or ``-m`` and a module, with their options.

    Raises ``InvalidRequestError`` for an option that is not known.
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
            rest = list(itertools.dropwhile(lambda word: not word.endswith(".py"), left))
            if name.startswith(_SHARING):
                raise InvalidRequestError(
                    f"{command[:80]!r} says with {word} how ranks share the model, which is searched",
                    f"{_ASK_FOR_FSDP}; leave {word} and the like out: -- {_shown(rest)}",
                )
            if name.startswith(_SHARING_SAMPLES):
                raise _sharing_samples(f"{command[:80]!r}", f" ({word})")
            raise _unknown(command, f"has the launcher's option {word}, which is not known here", rest)
    if not left:
        raise InvalidRequestError(f"{command[:80]!r} names no script", "give one after the launcher's options")
    return given, ["-m", *left] if is_module else left


def _as_python(words: Sequence[str]) -> list[str]:
    """Return the words with ``python`` before them, where they have no interpreter and are no console command."""
    if not words:
        return ["python", "train.py", "…"]
    is_script = words[0] == "-m" or words[0].endswith(".py")
    return ["python", *words] if is_script else list(words)


def _several(command: str, what: str, left: Sequence[str], instead: str = "") -> InvalidRequestError:
    return InvalidRequestError(
        f"{command[:80]!r} starts several processes ({what}), and a trial is one",
        f"give the script itself, which is then measured on one device: -- {shlex.join(_as_python(left))}{instead}",
    )


def _several_hosts(command: str, what: str, left: Sequence[str]) -> InvalidRequestError:
    return InvalidRequestError(
        f"{command[:80]!r} starts processes on several hosts ({what}), and a trial runs on one",
        f"give the script itself, with --gpus for the GPUs of this host: -- {shlex.join(_as_python(left))}",
    )


def _sharing_samples(who: str, said: str = "") -> InvalidRequestError:
    return InvalidRequestError(f"{who} has several ranks share a sample{said}, which is not searched", NOT_BY_SAMPLE)


def _unknown(command: str, what: str, left: Sequence[str]) -> InvalidRequestError:
    return InvalidRequestError(
        f"{command[:80]!r} {what}, so that it cannot be measured from within",
        f"give the script itself and its own options: -- {_shown(left)}",
    )


def _shown(left: Sequence[str]) -> str:
    return shlex.join(_as_python(left)) if left else "python train.py …"

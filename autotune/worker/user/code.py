"""Run the user's own code in a trial's process, as their shell would have run it, with options of its script set."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.core.training_source import WITHIN_VARIABLE, TrainingSource
from autotune.core.units import lines_with_words
from autotune.worker.process import flush_output
from autotune.worker.user.protection import begin_run, refused_write
from autotune.worker.wrapping import after, around, on_import, users_line

_LOOP_PAGE = "docs/how-to/own-loop.md"
_PLACEHOLDERS_PAGE = "docs/how-to/placeholders.md"
# A hint names the options whose names match; without one for the batch, at most so many of all. Choices.
_BATCH = re.compile(r"batch|accum", re.IGNORECASE)
_MOST_NAMED = 12
_EVALUATION = re.compile(r"eval|valid|test", re.IGNORECASE)


_WORD_IN_FLAG = {"batch": re.compile("batch"), "accumulation": re.compile("accum")}


def set_options(values: Mapping[str, int]) -> None:
    """Replace values in the namespaces that every ``argparse`` parser of this process returns from now on.

    The keys of ``values`` are flags or destinations of options. An option that a parser lacks, or whose value is
    ``None``, stays as it is.
    """

    def replace(returned: tuple[Any, Any], parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        namespace, _rest = returned
        for action in parser._actions:
            for name in {action.dest, *action.option_strings} & values.keys():
                if getattr(namespace, action.dest, None) is not None:
                    setattr(namespace, action.dest, values[name])

    after(argparse.ArgumentParser, "parse_known_args", replace)


class SeenOptions:
    """The long options of all ``argparse`` parsers of this process, and their values, defaults included."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """The destination (``dest``) of each option."""
        self.values: dict[str, Any] = {}
        # The base class that defines add_argument: groups of options inherit from it, too.
        kind: Any = next(each for each in argparse.ArgumentParser.__mro__ if "add_argument" in vars(each))

        def record(action: argparse.Action, _: Any, /, *names: Any, **__: Any) -> None:
            self.names |= {name: action.dest for name in names if isinstance(name, str) and name.startswith("--")}

        after(kind, "add_argument", record)
        after(argparse.ArgumentParser, "parse_known_args", lambda parsed, *_, **__: self.values.update(vars(parsed[0])))

    def flags(self, usual_names: Mapping[str, Sequence[str]], seen: Mapping[str, int | None]) -> dict[str, str]:
        """Return the script's flag for each setting that has one, such as ``--batch-size`` for ``batch``.

        This is the last of the setting's ``usual_names`` that the script has, with dashes or underscores. ``seen`` has
        the values of settings in a run. The only flag with this value and the setting's word in its name comes first;
        of several such flags, those with ``train`` count.
        """
        by_dashed_name = {name.replace("_", "-"): name for name in self.names}
        found = {}
        for setting, names in usual_names.items():
            for name in names:
                if (dashed := name.replace("_", "-")) in by_dashed_name:
                    found[setting] = by_dashed_name[dashed]
        for setting, value in seen.items():
            word = _WORD_IN_FLAG[setting]
            named = [flag for flag in self.names if word.search(flag) and not _EVALUATION.search(flag)]
            with_value = [flag for flag in named if self.values.get(self.names[flag]) == value]
            flags = [flag for flag in with_value if "train" in flag] or with_value
            if len(flags) == 1:
                found[setting] = flags[0]
        return found


@functools.cache
def watch_options() -> SeenOptions:
    """Return the options of the parsers in this process, which are recorded from the first call on."""
    return SeenOptions()


def advice_on_own_loop(source: TrainingSource) -> str:
    """Return advice for a script whose own loop cannot be measured: how to use placeholders or a loop function."""
    within = os.path.relpath(source.file, source.cwd)
    file = source.file if within.startswith(os.pardir) else within
    names = [name for name in watch_options().names if name != "--help" and not _EVALUATION.search(name)]
    of_batch = [name for name in names if "batch" in name]
    # Where no option names the batch, any option may decide how many samples the dataset puts in a batch.
    flags = [name for name in names if _BATCH.search(name)] if of_batch else names[:_MOST_NAMED]
    start = ["torchrun" if source.is_ranked else "python", *(("-m", source.module) if source.module else (file,))]
    command = shlex.join([*start, *source.argv, of_batch[0] if of_batch else "OPTION", "{batch}"])
    named = f"its options are {', '.join(flags)}; " if flags else ""
    return (
        "put {batch} where its command line, a variable or a configuration file says the samples of a forward pass, "
        f"such as -- {command} ({named}see {_PLACEHOLDERS_PAGE}); or make a function of the loop that goes over "
        f"autotune.steps(loader), and give --loop {file}:train (see {_LOOP_PAGE})"
    )


OUTPUT_OPTIONS = ("--output_dir", "--output-dir")
"""Options that name the folder which scripts write to, as HfArgumentParser spells them."""
LAUNCHED_PRECISION = "ACCELERATE_MIXED_PRECISION"
"""Set by ``accelerate launch --mixed_precision``; ``TrainingArguments`` read it."""
REDIRECTED_VARIABLE = "AUTOTUNE_OUTPUT"
"""Set to the output folder of the user's command line, where the script runs with another folder in its place."""
# Turns off services to which scripts report directly, not by the Trainer's callbacks.
_SILENCED = {"WANDB_MODE": "disabled", "COMET_MODE": "DISABLED", "SWANLAB_MODE": "disabled"}


class UserCodeError(Exception):
    """The user's code cannot be run or measured; the message says why, ``hint`` what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def enter(source: TrainingSource) -> None:
    """Protect the user's files; set environment, working folder and paths as their code expects, without running it."""
    begin_run()
    os.environ.update({**_SILENCED, **dict(source.variables), WITHIN_VARIABLE: source.name})
    # A mode that a script gives to wandb.init would take precedence over the variable WANDB_MODE.
    disabled = {"mode": "disabled"}
    on_import(
        "wandb", lambda wandb: around(wandb, "init", lambda init, *args, **own: init(*args, **{**own, **disabled}))
    )
    os.chdir(source.cwd)
    # A function, too, may parse the command line, and must find no options.
    sys.argv = [source.file]
    # As python does: the script's folder comes first, or the working folder for a module.
    sys.path.insert(0, source.cwd if source.module else str(Path(source.file).parent))


def run_script(source: TrainingSource, output_dir: str) -> None:
    """Run a script to its end as ``__main__``, with ``output_dir`` for the output folder of its command line."""
    words = list(source.argv)
    for at, word in enumerate(words):
        option, equals, users_folder = word.partition("=")
        if option not in OUTPUT_OPTIONS:
            continue
        if equals:
            words[at] = f"{option}={output_dir}"
        elif at + 1 < len(words):
            users_folder, words[at + 1] = words[at + 1], output_dir
        os.environ[REDIRECTED_VARIABLE] = users_folder
    run_as_main(source, words)


def run_as_main(source: TrainingSource, argv: Sequence[str]) -> None:
    """Run a script or module to its end as ``__main__``, with these command-line arguments."""
    sys.argv = [source.file, *argv]
    if source.module:
        runpy.run_module(source.module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(source.file, run_name="__main__")


def load_function(source: TrainingSource) -> Callable[[Any], Any]:
    """Import the user's file, and return its function.

    Raises ``UserCodeError`` where the file is no Python file or has no such function.
    """
    name = Path(source.file).stem
    # An imported module of the same name must stay importable.
    if name in sys.modules or not name.isidentifier():
        name = f"autotune_trainer_{source.digest}"
    spec = importlib.util.spec_from_file_location(name, source.file)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{source.file} is no Python file", "name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    # Data loaders and pickles look classes up by their module's name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    function = getattr(module, source.function or "", None)
    if not callable(function):
        raise UserCodeError(
            f"{Path(source.file).name} has no function {source.function}",
            f"define {source.function}(config) there, or name another: --loop FILE:FUNCTION"
            if source.kind == "loop"
            else f"define {source.function}(overrides: dict) -> Trainer there, or name another with --trainer",
        )
    return function  # type: ignore[no-any-return]


# Lines at the end of a log in which the error is looked for: some libraries print advice after it. A choice.
_LAST_LINES = 8
_ERROR = re.compile(r"\b(error|unknown|invalid|unrecognized|could not|cannot|can't|no such|not found)\b", re.IGNORECASE)


def exit_error(source: TrainingSource, error: SystemExit, log_start: int = 0) -> UserCodeError:
    """Return the error for a ``SystemExit``, with its message or the last error line since byte ``log_start``."""
    reason = error.code if isinstance(error.code, str) else _last_error_line(log_start)
    # As python does: 0 without a code, 1 for a message.
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    what = f"left with exit code {code}" if code else "ended without training"
    return UserCodeError(f"{source.name} {what}" + (f": {reason[:300]}" if reason else ""))


def log_size() -> int:
    """Flush this process's output, and return the size of its log (stderr) in bytes; 0 where that is unknown."""
    flush_output()
    try:
        return os.fstat(2).st_size
    except OSError:
        return 0


def _last_error_line(start: int) -> str:
    """Return the last error line, or else the last line, of this process's log from byte ``start`` on.

    An error line is one of the last ``_LAST_LINES`` lines that looks like an error. Empty for an empty log.
    """
    flush_output()
    try:
        with Path("/proc/self/fd/2").open("rb") as log:
            log.seek(start)
            lines = lines_with_words(log.read().decode(errors="replace"))
    except OSError:
        return ""
    error_lines = [line for line in lines[-_LAST_LINES:] if _ERROR.search(line)]
    return (error_lines or lines or [""])[-1]


def foreseen(error: BaseException, source: TrainingSource) -> BaseException:
    """Return a ``UserCodeError`` with advice for an error of known cause, else the error with a shorter traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != source.file:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
    if (refused := refused_write(error)) is not None:
        path, why = refused
        place = users_line(reversed(list(traceback.walk_tb(error.__traceback__))))
        return UserCodeError(
            f"{source.name} cannot write to {path}{f' ({place})' if place else ''}: {why}",
            "have it write to a temporary folder, or to one that an option --output_dir names; --unprotected searches "
            "it with nothing between it and your files",
        )
    if isinstance(error, EOFError) and "reading a line" in str(error):
        return UserCodeError(
            f"{source.name} asks for input, and nobody answers in a trial", "give it the answer by an option or a file"
        )
    if isinstance(error, SystemExit):
        return UserCodeError(
            str(exit_error(source, error)), "run it by itself with the same options to see whether it trains"
        )
    return error

"""Run ``autotune``: find the command, import only what it needs, and print errors as one line."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import Any

import click

from autotune import __version__
from autotune.cli.output import as_printed, wrapped
from autotune.core import errors
from autotune.core.errors import AutotuneError

# The first word of a training's command line; no value of an option looks so.
_STARTS_SCRIPT = re.compile(r"(^|/)(python[\d.]*|torchrun|accelerate|deepspeed)$|\.py$")
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended, by convention: 128 + SIGINT."""

_COMMANDS = {
    "search": "autotune.cli.search",
    "resume": "autotune.cli.search",
    "predict": "autotune.cli.predict",
    "advise": "autotune.cli.predict",
    "show": "autotune.cli.studies",
    "report": "autotune.cli.studies",
    "studies": "autotune.cli.studies",
    "export": "autotune.cli.studies",
    "run": "autotune.cli.verify",
    "verify": "autotune.cli.verify",
    "dashboard": "autotune.cli.studies",
    "devices": "autotune.cli.devices",
    "doctor": "autotune.cli.doctor",
    "models": "autotune.cli.devices",
    "db": "autotune.cli.studies",
    "serve": "autotune.cli.serve",
    "mcp": "autotune.cli.mcp",
    "queue": "autotune.cli.serve",
    "follow": "autotune.cli.serve",
    "cancel": "autotune.cli.serve",
    "token": "autotune.cli.serve",
}


def exit_codes() -> dict[int, str]:
    """Return every exit code of the command line with its meaning, in ascending order."""
    meanings = {0: "All went well.", INTERRUPTED: "Ctrl-C ended the command; what was measured is recorded."}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, AutotuneError):
            meanings[kind.exit_code] = (kind.__doc__ or "").partition("\n")[0]
    return dict(sorted(meanings.items()))


class _LazyGroup(click.Group):
    """The group of all commands, which imports the module of a command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command, and return the command; ``None`` for an unknown name."""
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = getattr(importlib.import_module(module), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the first word. Raises ``UsageError`` with similar names for a mistyped one."""
        # A command of earlier versions.
        if args[0] == "agent":
            raise click.UsageError("there are no agents any more: autotune serve runs its searches itself", ctx)
        if args[0] not in _COMMANDS and not ctx.resilient_parsing:
            meant = errors.did_you_mean(args[0], _COMMANDS)
            if meant:
                raise click.UsageError(f"no such command {args[0]!r}; {meant}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. It ends quietly where the reader of its output has ended."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _forget_output()
            return 0

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in exit_codes().items()])


def say_error(message: str, hint: str = "") -> None:
    """Print an error on stderr: the problem in one line, the hint in another."""
    lines = [f"autotune: error: {_one_line(message)}"]
    if hint:
        lines.append(f"  {_one_line(hint)}")
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    for line in lines:
        click.echo(wrapped(line, get_terminal_size().columns) if is_terminal else line, err=True)


def _one_line(text: str) -> str:
    return as_printed(" ".join(text.split()))


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="autotune")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Find the fastest way to train a transformer on your GPU at a fixed effective batch size.

    Real training steps in isolated processes; the answer is TrainingArguments that run as measured.

    \b
      autotune search --model bert-large-uncased --effective-batch 64
      autotune search --help
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script; always ends with ``SystemExit``."""
    # Nearly all objects live to the end. Garbage collection took a quarter of the time of showing ten thousand trials.
    gc.set_threshold(100_000, 20, 100)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal whose encoding lacks × shows a question mark in its place.
            stream.reconfigure(errors="replace")
    with _ended_by_signals():
        sys.exit(_exit_code(arguments))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the command like Ctrl-C, so that no process and no temporary file is left.

    Signals that are ignored, as under ``nohup``, stay ignored.
    """
    # Only the main thread may take signals.
    is_main = threading.current_thread() is threading.main_thread()
    asked = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    numbers = [number for number in asked if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _exit_code(arguments: Sequence[str] | None) -> int:
    """Run the command and return its exit code. Print errors that the user can act on."""
    try:
        # Without standalone mode, click returns the code of ``ctx.exit``, and raises errors.
        returned = cli.main(arguments, prog_name="autotune", standalone_mode=False)
        return returned if isinstance(returned, int) else 0
    except AutotuneError as error:
        say_error(error.message, error.hint)
        return error.exit_code
    except click.ClickException as error:
        words = sys.argv[1:] if arguments is None else arguments
        command = f"autotune {words[0]}" if words and words[0] in _COMMANDS else "autotune"
        if isinstance(error, click.UsageError) and error.ctx:
            command = error.ctx.command_path
        message = _no_such_option(error) or error.format_message().rstrip(".")
        hint = _forgotten_dashes(error, words)
        say_error(message[:1].lower() + message[1:], hint or f"{command} --help says what can be given")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("autotune: interrupted", err=True)
        _forget_interrupt()
        return INTERRUPTED
    except OSError as error:
        # Errors of input files are ``AutotuneError`` by now: this one is of writing.
        say_error(f"{error.filename or 'the output'}: {error.strerror or error}", "make room there, or write elsewhere")
        _forget_output()
        return AutotuneError.exit_code


def _no_such_option(error: click.ClickException) -> str | None:
    """Return a message on an unknown option, with the commands that have it; ``None`` for another error."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    from autotune.core.options import OPTIONS

    commands = dict.fromkeys(
        command
        for option in OPTIONS
        for command in option.commands
        if option.parameter == error.option_name and command in _COMMANDS
    )
    if not commands:
        return f"no such option {error.option_name}{_similar_options(error)}"
    *first, last = commands
    have = f"{', '.join(first)} and {last} have" if first else f"{last} has"
    return f"{error.ctx.command_path} has no option {error.option_name}; autotune {have} it"


def _forgotten_dashes(error: click.ClickException, words: Sequence[str]) -> str | None:
    """Return a hint where an unknown option belongs to a script and ``--`` is missing before it; else ``None``."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None or "--" in words:
        return None
    takes_script = any(isinstance(param, click.Argument) and param.nargs == -1 for param in error.ctx.command.params)
    places = [place for place, word in enumerate(words) if _STARTS_SCRIPT.search(word) and not word.startswith("-")]
    if not takes_script or not places:
        return None
    first = places[0]
    given = shlex.join([*words[:first], "--", *words[first:]])
    return f"put -- before the script: autotune {given}"


def _similar_options(error: click.NoSuchOption) -> str:
    """Return ``; did you mean --effective-batch?``: options with a common word, else with a similar spelling."""
    assert error.ctx is not None
    names = [name for option in error.ctx.command.params for name in option.opts if name.startswith("--")]
    # "size" says nothing of what is meant: --batch-size is not --image-size.
    words = set(error.option_name.strip("-").split("-")) - {"size"}
    near = [name for name in names if words & set(name.strip("-").split("-"))] or list(error.possibilities or ())
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def _forget_interrupt() -> None:
    """Make the interpreter exit with our code after a Ctrl-C within ``exec``.

    CPython remembers a ``KeyboardInterrupt`` that leaves ``exec`` of a text, as dataclasses and SQLAlchemy run while
    they are imported, and with ``python -m`` then ends by the signal, whoever handled it (``run_eval_code_obj`` in
    Python/pythonrun.c and ``Py_RunMain`` in Modules/main.c, 3.11 to 3.14). Each ``exec`` starts by forgetting it.
    """
    exec("")


def _forget_output() -> None:
    """Redirect an unwritable stdout to nowhere: Python would otherwise try to write its buffer again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

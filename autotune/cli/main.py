"""``autotune``: the group of commands, errors as one line, nothing heavy imported before it is needed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from autotune import __version__
from autotune.errors import AutotuneError

# The conventional exit code of a process that Ctrl-C ended: 128 + SIGINT.
INTERRUPTED = 130

_COMMANDS = {
    "search": "autotune.cli.search",
    "show": "autotune.cli.studies",
    "studies": "autotune.cli.studies",
    "export": "autotune.cli.export",
    "dashboard": "autotune.cli.dashboard",
    "devices": "autotune.cli.devices",
    "models": "autotune.cli.models",
    "db": "autotune.cli.db",
}


class _LazyGroup(click.Group):
    """Imports a command's module when it is asked for, and turns errors into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = getattr(importlib.import_module(module), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AutotuneError as error:
            say_error(error)
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            # The reader of our output has left: not our error, and nobody to tell.
            sys.stderr.close()
            ctx.exit(1)


def say_error(error: AutotuneError) -> None:
    """What was wrong and what to do next, on stderr."""
    click.echo(f"autotune: error: {_one_line(error.message)}", err=True)
    if error.hint:
        click.echo(f"  {_one_line(error.hint)}", err=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="autotune")
def cli() -> None:
    """Find the fastest way to train a transformer on your GPU at a fixed effective batch size.

    Real training steps in isolated processes; the answer is TrainingArguments that run as measured.

    \b
      autotune search --model bert-large-uncased --effective-batch 64
    """


def main() -> None:
    """The console script."""
    try:
        cli.main(prog_name="autotune")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

"""Make click's options from the table of options, group them under headings in help, and complete their values.

click writes the completion script for a shell: ``eval "$(_AUTOTUNE_COMPLETE=bash_source autotune)"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from autotune.core.arguments import checked_levers
from autotune.core.errors import AutotuneError, InvalidRequestError
from autotune.core.option_kinds import FLAG, GIVEN_LEVERS, SCRIPT, Kind
from autotune.core.options import BY_NAME, OPTIONS, USUAL, Option, names_of_levers, options_of, values_of

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _models(_: click.Context) -> Iterable[tuple[str, str]]:
    """Yield each name of the built-in models, with a description."""
    from autotune.models.catalog import entries

    for entry in entries():
        # The part before a slash may be left out.
        for name in dict.fromkeys((entry.name.rpartition("/")[2], *entry.aliases, entry.name)):
            yield name, entry.about


def _gpus(_: click.Context) -> Iterable[tuple[str, str]]:
    from autotune.devices.gpus import CHIPS

    return ((name, "") for name in CHIPS)


def _devices(_: click.Context) -> Iterable[tuple[str, str]]:
    from autotune.devices.listing import list_devices

    return ((device.label, device.name) for device in list_devices())


def _studies(ctx: click.Context) -> Iterable[tuple[str, str]]:
    """Return name and model of the studies in the given database; nothing where it needs an upgrade."""
    from autotune.store.opening import current_revision, open_store

    storage = ctx.params["storage"]
    now, newest = current_revision(storage)
    if now != newest:
        return []
    with open_store(storage, create=False) as store:
        return [(each.study.name, each.workload["model"]) for each in store.studies()]


def _levers(ctx: click.Context) -> Iterable[tuple[str, str]]:
    return ((name, BY_NAME[name].help) for name in names_of_levers(ctx.command.name or ""))


def _completer(list_names: Callable[[click.Context], Iterable[tuple[str, str]]]) -> Completer:
    """Return a click completer for the names, each with its description, that ``list_names`` returns."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            return [CompletionItem(name, help=about) for name, about in list_names(ctx) if name.startswith(incomplete)]
        except AutotuneError:
            # A shell has no place for an error; the command itself will report it.
            return []

    return complete


COMPLETERS: Mapping[str, Completer] = {
    "model": _completer(_models),
    "gpu": _completer(_gpus),
    "device": _completer(_devices),
    "study": _completer(_studies),
    "lever": _completer(_levers),
}
"""Completers by the names of the options and arguments whose values they complete."""

study_argument = click.argument("study", shell_complete=COMPLETERS["study"])
"""The argument of the commands that take a study of the database."""


class _Parsed(click.ParamType[Any]):
    """A click type that parses text as an option's kind does, and turns that function's errors into click's."""

    def __init__(self, kind: Kind) -> None:
        self.name = kind.name
        self._read = kind.read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # A default may be parsed already.
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except InvalidRequestError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def table_options(command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a function the click options that ``core/options.py`` has for this command."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options_of(command)):
            function = _click_option(option, command)(function)
        return function

    return decorate


class _LeverFlag(click.Option):
    """The hidden flag of one lever (a setting to search), which help shows as a value of ``--lever``."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        option = BY_NAME[str(self.name)]
        return f"{option.name}={values_of(option).replace(', ', '|').replace('a number', 'N')}", str(self.help)


def _click_option(option: Option, command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the click decorator for an option of the table, as this command has it."""
    if option.kind is SCRIPT:
        return click.argument(option.name, nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT ...]")
    names, kind = (option.own_flag, option.name), option.kind
    help_text = option.help_in.get(command, option.help)
    if kind is GIVEN_LEVERS:
        complete = COMPLETERS[option.name]
        return click.option(*names, multiple=True, help=help_text, metavar=option.metavar, shell_complete=complete)
    if kind is FLAG:
        return click.option(*names, is_flag=True, flag_value=not option.default, default=option.default, help=help_text)
    values: click.ParamType[Any] = _Parsed(kind)
    if kind.name == "choice":
        values = click.Choice(kind.choices)
    elif kind.parse is str and kind.json is str:
        values = click.STRING
    return click.option(
        *names,
        type=values,
        help=help_text,
        cls=_LeverFlag if option.is_lever else click.Option,
        hidden=option.is_lever,
        metavar=option.metavar,
        default=option.default_text,
        show_default=option.default_text is not None,
        envvar=option.envvar,
        shell_complete=COMPLETERS.get(option.name),
    )


def _show_all(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Print the help with all options and exit, where ``--help-all`` is given."""
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


_ALL = "autotune.help_all"


class SectionedCommand(click.Command):
    """A command whose help shows its usual options under headings, and all of them with ``--help-all``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show every option and exit.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. Each ``--lever NAME=VALUE`` becomes the lever's own option, as if given by itself."""
        left_over = super().parse_args(ctx, args)
        for word in ctx.params.get("lever", ()):
            name, has_value, value = word.partition("=")
            found = checked_levers(options_given(ctx), {name: value if has_value else "on"}, self.name or "")
            ctx.params |= found
            for lever in found:
                ctx.set_parameter_source(lever, ParameterSource.COMMANDLINE)
        return left_over

    @property
    def sections(self) -> dict[str, tuple[str, ...]]:
        """Parameter names by heading, in the order of the table."""
        mine = {param.name for param in self.params if isinstance(param, click.Option)}
        shown = [option for option in OPTIONS if option.name in mine]
        headings = dict.fromkeys(option.section for option in shown)
        return {heading: tuple(o.name for o in shown if o.section == heading) for heading in headings}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings: the usual ones, or with ``--help-all`` every one."""
        others = {str(param.name): param.get_help_record(ctx) for param in self.get_params(ctx)}
        sections = self.sections
        for heading, names in sections.items():
            shown = {name: record for name in names if (record := others.pop(name)) is not None}
            if not ctx.meta.get(_ALL):
                # The short words of ``USUAL`` are for a search; some options mean something else in other commands.
                is_search, usual = self.name == "search", [name for name in shown if name in USUAL]
                shown = {name: (shown[name][0], USUAL[name]) if is_search else shown[name] for name in usual}
            records = list(shown.values())
            if heading == list(sections)[-1]:
                # Last, the options without a section, such as --help.
                records += [record for record in others.values() if record is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=28)


def service_of(ctx: click.Context) -> str | None:
    """Return the URL of the service to use; ``None`` without one, or if ``--storage`` names a local database."""
    is_local = ctx.get_parameter_source("storage") is ParameterSource.COMMANDLINE
    return None if is_local else ctx.params["server"]


def options_given(ctx: click.Context) -> dict[str, Any]:
    """Return the options on the command line by name, including levers."""
    return {
        name: value for name, value in ctx.params.items()
        if name != "lever" and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }  # fmt: skip

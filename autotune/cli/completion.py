"""Complete the values of options and arguments in a shell: models, GPUs, devices, studies, levers.

click makes the rest: ``eval "$(_AUTOTUNE_COMPLETE=bash_source autotune)"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import click
from click.shell_completion import CompletionItem

from autotune.core.errors import AutotuneError

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _models(_: click.Context) -> Iterable[tuple[str, str]]:
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
    """Return the studies of the named database; empty for a database that needs an upgrade."""
    from autotune.store.opening import current_revision, open_store

    storage = ctx.params["storage"]
    now, newest = current_revision(storage)
    if now != newest:
        return []
    with open_store(storage, create=False) as store:
        return [(each.study.name, each.workload["model"]) for each in store.studies()]


def _levers(ctx: click.Context) -> Iterable[tuple[str, str]]:
    from autotune.core.options import BY_NAME, names_of_levers

    return ((name, BY_NAME[name].help) for name in names_of_levers(ctx.command.name or ""))


def _completer(found: Callable[[click.Context], Iterable[tuple[str, str]]]) -> Completer:
    """Return a click completer of names with descriptions."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            return [CompletionItem(name, help=about) for name, about in found(ctx) if name.startswith(incomplete)]
        except AutotuneError:
            # A shell has no place for it; the command itself will say so.
            return []

    return complete


COMPLETERS: Mapping[str, Completer] = {
    "model": _completer(_models),
    "gpu": _completer(_gpus),
    "device": _completer(_devices),
    "study": _completer(_studies),
    "lever": _completer(_levers),
}
"""By the names of the options whose values they complete."""

study_argument = click.argument("study", shell_complete=COMPLETERS["study"])
"""The argument of the commands that take a study of the database."""

"""``autotune resume``."""

from __future__ import annotations

import click

from autotune.cli.options import COUNT, SECONDS, json_option, storage_option, wait_option


@click.command(short_help="Go on with a search that was ended or killed.")
@click.argument("study")
@click.option(
    "--trials", type=COUNT, help="Run at most so many trials, the recorded ones among them [default: as before]."
)
@click.option("--time-budget", type=SECONDS, help="Start no trial after this long in all [default: as before].")
@click.option("--trial-timeout", type=SECONDS, help="Time limit of one trial [default: as before].")
@click.option("--device", metavar="NAME|UUID", help="Another device of the same name [default: the one it ran on].")
@storage_option
@wait_option
@json_option
@click.pass_context
def resume(
    ctx: click.Context,
    /,
    study: str,
    trials: int | None,
    time_budget: float | None,
    trial_timeout: float | None,
    device: str | None,
    storage: str,
    wait: bool,
    as_json: bool,
) -> None:
    """Go on with a search where it was ended, with the options that it began with.

    No trial that ended is repeated; one that was under way is. Of a finished study the result is shown,
    unless the budget is larger now.

    \b
      autotune resume STUDY
      autotune resume STUDY --trials 50
    """
    from autotune.cli.search import search_and_print
    from autotune.store import open_store
    from autotune.tuning.resumption import Budget, recorded_request

    with open_store(storage, create=False) as store:
        request = recorded_request(store, study, device, Budget(trials, time_budget, trial_timeout))
    request.check()
    search_and_print(ctx, request, storage, wait=wait, as_json=as_json)

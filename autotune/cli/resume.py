"""Run ``autotune resume``: continue a search."""

from __future__ import annotations

import click

from autotune.cli.completion import study_argument
from autotune.cli.options import service_of, table_options


@click.command(short_help="Continue a search that was ended or killed.")
@study_argument
@table_options("resume")
@click.pass_context
def resume(
    ctx: click.Context,
    /,
    study: str,
    trials: int | None,
    time_budget: float | None,
    trial_timeout: float | None,
    device: str | None,
    gpus: str | None,
    parallel: bool,
    executor: str | None,
    server: str | None,
    storage: str,
    wait: bool,
    as_json: bool,
) -> None:
    """Continue a search where it ended, with the options that it began with.

    No trial that ended is repeated; one that was under way is. Of a finished study the result is shown,
    unless the budget is larger now.

    \b
      autotune resume STUDY
      autotune resume STUDY --trials 50
      autotune resume STUDY --gpus 4 --parallel
    """
    from autotune.cli.search import print_searched, search_and_print
    from autotune.store.opening import open_store
    from autotune.tuning.options import named_devices
    from autotune.tuning.studies import Budget, recorded_options, recorded_request

    limits = {"trials": trials, "time_budget": time_budget, "trial_timeout": trial_timeout}
    if (service := service_of(ctx)) is not None:
        from autotune.cli.remote import resume_remotely

        resume_remotely(service, study, limits, as_json=as_json)
        return
    places = {"device": device, "gpus": gpus, "parallel": parallel}
    if executor is not None:
        from autotune.cli.remote import search_on_cluster

        with open_store(storage, create=False) as store:
            options = places if any(places.values()) else recorded_options(store, study)
        ended = search_on_cluster(executor, {**options, **limits}, study, storage, wait=wait, resumes=True)
        print_searched(ctx, *ended, storage, as_json=as_json)
        return
    with open_store(storage, create=False) as store:
        devices = named_devices(places) if gpus or parallel else ()
        budget = Budget(trials, time_budget, trial_timeout)
        request = recorded_request(store, study, device, budget, devices, parallel=parallel)
    search_and_print(ctx, request, storage, wait=wait, as_json=as_json)

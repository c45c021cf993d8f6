"""Run ``autotune resume``: continue a search."""

from __future__ import annotations

import contextlib

import click

from autotune.cli.options import table_options
from autotune.core.errors import InvalidRequestError


@click.command(short_help="Go on with a search that was ended or killed.")
@click.argument("study")
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
    from autotune.cli.search import say, search_and_print
    from autotune.store import open_store
    from autotune.tuning.options import named_devices
    from autotune.tuning.studies import Budget, recorded_options, recorded_request

    named = named_devices({"device": device, "gpus": gpus, "parallel": parallel}) if gpus or parallel else ()
    if executor is not None and named:
        raise InvalidRequestError("--gpus: an executor chooses the GPUs of its node itself", "leave one of them out")
    with contextlib.ExitStack() as stack:
        nodes = None
        if executor is not None:
            from autotune.tuning.nodes.remote import open_nodes

            with open_store(storage, create=False) as store:
                options = recorded_options(store, study)
            if device is not None:
                options = {"device": device}
            nodes = stack.enter_context(open_nodes(executor, options, wait=wait, note=say))
        with open_store(storage, create=False) as store:
            devices = nodes.devices if nodes is not None else named
            budget = Budget(trials, time_budget, trial_timeout)
            request = recorded_request(store, study, device, budget, devices, parallel=parallel)
        request.check()
        search_and_print(ctx, request, storage, wait=wait, as_json=as_json, nodes=nodes)

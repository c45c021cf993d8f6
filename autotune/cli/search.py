"""Run ``autotune search`` and ``autotune resume``: make a request from the options, search, and print the result."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autotune.cli.options import SectionedCommand, options_given, service_of, study_argument, table_options
from autotune.cli.output import print_json, print_lines, terminal_columns
from autotune.core.errors import InvalidRequestError
from autotune.store.records import StopReason

if TYPE_CHECKING:
    from autotune.results.report import Report
    from autotune.store.records import StudyRecord
    from autotune.tuning.request import SearchRequest


@click.command(cls=SectionedCommand, short_help="Search for the fastest configuration.")
@table_options("search")
@click.pass_context
def search(
    ctx: click.Context,
    /,
    as_json: bool,
    storage: str,
    wait: bool,
    server: str | None,
    executor: str | None,
    priority: int,
    dry_run: bool,
    **options: Any,
) -> None:
    """Search for the fastest configuration by running real training steps.

    \b
      autotune search --model bert-large-uncased --effective-batch 64
      autotune search --trainer train.py:build --lever torch_compile=layers
      autotune search --effective-batch 64 -- python run_glue.py --do_train
    """
    if dry_run and (server is not None or executor is not None):
        raise InvalidRequestError(
            "--dry-run looks at this machine, and --server and --executor search on another", "leave one of them out"
        )
    if server is not None:
        if executor is not None:
            raise InvalidRequestError("--server and --executor are two places to search on", "give one of them")
        from autotune.cli.remote import search_remotely

        search_remotely(server, options_given(ctx), as_json=as_json)
        return
    if (code := options.pop("code")) is not None:
        raise InvalidRequestError(
            f"--code {code[:64]} is a name that a service lists", "give --server URL, or --trainer, --loop or a script"
        )
    verifies = options.pop("verify")
    given = {name: value for name, value in options_given(ctx).items() if name in options}
    if executor is not None:
        from autotune.cli.remote import search_on_cluster

        if verifies:
            raise InvalidRequestError(
                "--verify trains on this machine, and --executor searches on another",
                "leave --verify out, and run autotune verify on a machine like those of the cluster",
            )
        ended = search_on_cluster(executor, given, given.get("study"), storage, wait=wait, resumes=False)
        print_searched(ctx, *ended, storage, as_json=as_json)
        return
    from autotune.tuning.options import open_search

    request = open_search(given)
    if dry_run:
        _print_dry_run(request, storage, as_json=as_json)
        return
    if verifies:
        from autotune.verify.target import check_can_be_verified

        check_can_be_verified(request.workload.document(), any_order=request.any_order)
    search_and_print(ctx, request, storage, wait=wait, verifies=verifies, as_json=as_json)


def _print_dry_run(request: SearchRequest, storage: str, *, as_json: bool) -> None:
    """Print the plan of a search without running it."""
    from autotune.cli.view import waiting
    from autotune.results.predicted import read_gpu_document
    from autotune.results.prediction_text import prediction_lines
    from autotune.tuning.run import dry_run_document

    with waiting(f"looking at {request.workload.model}"):
        document = dry_run_document(request, storage)
    if as_json:
        print_json(document)
        return
    batches = ", ".join(f"{batch} × {accumulation}" for batch, accumulation in document["batches"])
    trials, seconds = document["trials"], document["time_budget_seconds"]
    budget = [*([f"{trials} trials"] if trials else []), *([f"{seconds:g} s"] if seconds else [])]
    print_lines(
        [
            f"study           {document['study']}, or that name with a number where it is taken",
            f"device          {document['device']}",
            f"batches         {batches or 'any that fits'}",
            "configurations  to begin with; settings of the fastest follow from what it measures",
            *(f"                {arm}" for arm in document["configurations"]),
            f"at most         {' or '.join(budget) or 'until nothing is left that may be faster'}",
            *(f"writes          {path}" for path in document["writes"]),
        ]
    )
    if document["predicted"] is None:
        print_lines(["predicted       nothing, on a CPU: trials find out what fits"])
        return
    predicted = read_gpu_document(document["predicted"])
    print_lines(prediction_lines([predicted], all_batches=False, anatomy=False, columns=terminal_columns()))


def search_and_print(
    ctx: click.Context, request: SearchRequest, storage: str, *, wait: bool, as_json: bool, verifies: bool = False
) -> None:
    """Run a new or resumed search and print its result; exit with the code of an interruption if there was one."""
    from autotune.cli.doctor import say_what_is_wrong
    from autotune.cli.view import View, open_view
    from autotune.tuning.run import run_search

    gpus = [each.uuid for each in (request.device, *request.others, *request.beside) if each.kind == "cuda"]
    # A search on the CPU that was not asked for may be due to a fault of the GPUs: then all of them are checked.
    say_what_is_wrong(storage, gpus if gpus or ctx.params.get("device") == "cpu" else None)
    with open_view(View) as view:
        study, report = run_search(request, storage, view, wait=view.waits if wait else None)
    print_searched(ctx, study, report, storage, as_json=as_json, verifies=verifies)


def print_searched(
    ctx: click.Context, study: StudyRecord, report: Report, storage: str, *, as_json: bool, verifies: bool = False
) -> None:
    """Print an ended search's result. Exit with 130 if interrupted; raise ``TooNoisyError`` if noise hides the best."""
    is_named = ctx.get_parameter_source("storage") is ParameterSource.COMMANDLINE
    # Commands that are suggested next need no --storage where it is not needed here.
    shown_storage = storage if is_named else None
    if verifies and study.state != "interrupted" and report.too_noisy is None:
        _print_verified(report, storage, as_json=as_json, shown_storage=shown_storage)
        return
    print_result(report, as_json=as_json, storage=shown_storage)
    if study.state == "interrupted":
        from autotune.cli.main import INTERRUPTED

        ctx.exit(INTERRUPTED)
    report.check_is_told()


def _print_verified(report: Report, storage: str, *, as_json: bool, shown_storage: str | None) -> None:
    """Print a search's result, and a verification of it. Raises an error where a stock ``Trainer`` is slower."""
    from autotune.cli.verify import run_stock_trainer
    from autotune.core.schema import encode
    from autotune.results.json_document import report_document
    from autotune.verify.target import placement_of, target_of
    from autotune.verify.throughput import verification_document, verification_lines

    if not as_json:
        print_result(report, as_json=False, storage=shown_storage)
        click.echo()
    verification = run_stock_trainer(target_of(report, placement_of(report)), None, storage)
    if as_json:
        print_json({**report_document(report), "verification": encode(verification_document(verification))})
    else:
        print_lines(verification_lines(verification))
    verification.check()


def print_result(report: Report, *, as_json: bool, storage: str | None) -> None:
    """Print the result on stdout, with suggested next commands, which name ``storage`` where given."""
    from autotune.results.export import make_export
    from autotune.results.json_document import report_document
    from autotune.results.text import summary_lines
    from autotune.results.wording import state_of
    from autotune.store.location import shown_location

    if as_json:
        print_json(report_document(report))
        return
    print_lines(summary_lines(report))
    where = f" --storage {shlex.quote(shown_location(storage))}" if storage is not None else ""
    name = shlex.quote(report.study.name)
    click.echo("\nNext:")
    if report.best is not None and report.too_noisy is None:
        form = make_export(report).usual_form
        file = "settings.json" if report.is_loop else "training_arguments.json"
        click.echo(f"  autotune export {name}{where} {f'> {file}' if form == 'json' else f'--format {form}'}")
        if report.workload["task"] == "own":
            click.echo(f"  autotune run {name}{where}")
    if state_of(report.study) != "finished":
        click.echo(f"  autotune resume {name}{where}{_larger_budget(report)}")
    click.echo(f"  autotune show {name}{where}")
    click.echo(f"  autotune report {name}{where} --html report.html")
    click.echo(f"  autotune dashboard{where}")


def _larger_budget(report: Report) -> str:
    """Return the option for twice the budget where the search ended since its own was spent; else an empty string."""
    match report.study.stop_reason:
        case StopReason.TRIALS:
            return f" --trials {2 * len(report.trials)}"
        case StopReason.TIME:
            spent = sum(trial.seconds or 0.0 for trial in report.trials)
            return f" --time-budget {math.ceil(2 * spent)}s"
        case _:
            return ""


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
    from autotune.store.opening import open_store
    from autotune.tuning.options import named_devices
    from autotune.tuning.studies import device_options, recorded_request

    limits = {"trials": trials, "time_budget": time_budget, "trial_timeout": trial_timeout}
    if (service := service_of(ctx)) is not None:
        from autotune.cli.remote import resume_remotely

        resume_remotely(service, study, limits, as_json=as_json)
        return
    places = {"device": device, "gpus": gpus, "parallel": parallel}
    if executor is not None:
        from autotune.cli.remote import search_on_cluster

        with open_store(storage, create=False) as store:
            options = places if any(places.values()) else device_options(store, study)
        ended = search_on_cluster(executor, {**options, **limits}, study, storage, wait=wait, resumes=True)
        print_searched(ctx, *ended, storage, as_json=as_json)
        return
    with open_store(storage, create=False) as store:
        devices = named_devices(places) if gpus or parallel else ()
        request = recorded_request(store, study, device, limits, devices, parallel=parallel)
    search_and_print(ctx, request, storage, wait=wait, as_json=as_json)

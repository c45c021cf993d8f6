"""Run ``autotune show`` and ``autotune studies``: print one study, or list all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from autotune.cli.options import service_of, table_options
from autotune.cli.output import print_json
from autotune.cli.table import print_table
from autotune.core.outcome import Completed
from autotune.results.cells import batch_cell, peak_cell, speed_cell, took_cell

if TYPE_CHECKING:
    from autotune.results.report import Report


@click.command()
@click.argument("study")
@table_options("show")
@click.pass_context
def show(ctx: click.Context, /, study: str, storage: str, server: str | None, as_json: bool) -> None:
    """Show a study: its winner and every trial."""
    if (service := service_of(ctx)) is not None:
        from autotune.cli.remote import show_remotely

        show_remotely(service, study, as_json=as_json)
        return
    from autotune.results.json_document import report_document
    from autotune.results.report import load_report
    from autotune.store.opening import open_store

    with open_store(storage, create=False) as store:
        report = load_report(store, study)
    if as_json:
        print_json(report_document(report))
    else:
        print_report(report)


def print_report(report: Report) -> None:
    """Print the winner and a line for each trial."""
    from autotune.results.text import summary_lines
    from autotune.results.wording import describe_data, verdict

    workload, environment, request = report.workload, report.environment, report.study.request
    packages = environment["packages"]
    batch = f"effective batch {request['effective_batch']}" if request["effective_batch"] else "any batch"
    click.echo(f"Study {report.study.name}, {report.study.started_at:%Y-%m-%d %H:%M} UTC")
    task = "" if workload["task"] == "own" else f"{workload['task']}, "
    click.echo(f"  {workload['model']}, {task}{workload['dtype']} weights")
    click.echo(f"  {describe_data(workload)}; {batch}")
    click.echo(
        f"  {environment['device_name']}, torch {packages['torch']}, transformers {packages['transformers']}"
        + (f", driver {environment['driver']}" if environment["driver"] else "")
    )
    click.echo("\n".join(summary_lines(report)) + "\n")
    head = ("#", "batch × acc", "configuration", "samples/s", "peak", "took", "verdict")
    rows = [
        (
            str(trial.number),
            batch_cell(trial.candidate),
            trial.candidate.arm.describe(),
            speed_cell(trial.outcome) if isinstance(trial.outcome, Completed) else "",
            peak_cell(trial.outcome),
            took_cell(trial),
            verdict(report, trial),
        )
        for trial in report.trials
    ]
    print_table(head, rows, right=("#", "batch × acc", "samples/s", "peak", "took"))


@click.command()
@table_options("studies")
def studies(storage: str, as_json: bool) -> None:
    """List the studies, newest first."""
    from autotune.core.units import format_rate
    from autotune.results.report import winners_speeds
    from autotune.results.wording import state_of
    from autotune.store.location import shown_location
    from autotune.store.opening import open_store

    with open_store(storage, create=False) as store:
        found = store.studies()
        speeds = {} if as_json else winners_speeds(store, found)
    if as_json:
        print_json(
            [
                {
                    "study": summary.study.name,
                    "state": summary.study.state,
                    "model": summary.workload["model"],
                    "device": summary.environment["device_name"],
                    "trials": summary.trials,
                    "completed": summary.completed,
                    "out_of_memory": summary.out_of_memory,
                    "failed": summary.failed,
                    "best": summary.best.candidate.parameters() if summary.best else None,
                    "started_at": summary.study.started_at.isoformat(),
                    "seconds": summary.study.seconds,
                }
                for summary in found
            ]
        )
        return
    rows = []
    for summary in found:
        speed = speeds.get(summary.study.id)
        rows.append(
            (
                summary.study.name,
                state_of(summary.study),
                summary.environment["device_name"],
                str(summary.trials),
                summary.best.candidate.describe() if summary.best else "",
                format_rate(speed.samples_per_second) if speed else "",
                f"{summary.study.started_at:%Y-%m-%d %H:%M}",
            )
        )
    if not rows:
        click.echo(f"There is no study in {shown_location(storage)} yet; autotune search makes one.", err=True)
        return
    head = ("study", "state", "device", "trials", "best", "samples/s", "started (UTC)")
    print_table(head, rows, right=("trials", "samples/s"))

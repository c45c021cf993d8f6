"""``autotune show`` and ``autotune studies``."""

from __future__ import annotations

import click

from autotune.cli.options import json_option, print_json, storage_option
from autotune.cli.table import print_table


@click.command()
@click.argument("study")
@storage_option
@json_option
def show(study: str, storage: str, as_json: bool) -> None:
    """Show a study: its winner and every trial."""
    from autotune.report import load_report, measurement, report_document, summary_lines, verdict
    from autotune.store import open_store
    from autotune.units import format_bytes, format_seconds

    with open_store(storage, create=False) as store:
        report = load_report(store, study)
    if as_json:
        print_json(report_document(report))
        return
    workload, environment = report.workload, report.environment
    packages = environment["packages"]
    click.echo(f"Study {report.study.name}: {workload['model']}, {workload['task']}, {workload['dtype']} weights")
    click.echo(
        f"  on {environment['device_name']}, torch {packages['torch']}, transformers {packages['transformers']}, "
        f"{report.study.started_at:%Y-%m-%d %H:%M} UTC"
    )
    click.echo("\n".join(summary_lines(report)) + "\n")
    rows = []
    for trial in report.trials:
        measured = measurement(trial)
        candidate = trial.candidate
        rows.append(
            (
                str(trial.number),
                f"{candidate.per_device_train_batch_size} × {candidate.gradient_accumulation_steps}",
                candidate.arm.describe(),
                f"{measured.samples_per_second:.1f} ± {measured.relative_spread:.1%}" if measured else "",
                format_bytes(measured.peak_reserved_bytes) if measured else "",
                format_seconds(trial.seconds) if trial.seconds is not None else "",
                verdict(report, trial),
            )
        )
    print_table(("", "batch × acc", "configuration", "samples/s", "peak", "took", "verdict"), rows)


@click.command()
@storage_option
@json_option
def studies(storage: str, as_json: bool) -> None:
    """List the studies, newest first."""
    from autotune.report import measurement
    from autotune.store import open_store

    with open_store(storage, create=False) as store:
        found = store.studies()
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
        measured = measurement(summary.best)
        rows.append(
            (
                summary.study.name,
                summary.study.state,
                summary.environment["device_name"],
                str(summary.trials),
                summary.best.candidate.describe() if summary.best else "",
                f"{measured.samples_per_second:.1f}" if measured else "",
                f"{summary.study.started_at:%Y-%m-%d %H:%M}",
            )
        )
    print_table(("study", "state", "device", "trials", "best", "samples/s", "started (UTC)"), rows)

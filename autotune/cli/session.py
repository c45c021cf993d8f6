"""Run a search with its progress on stderr, and print its result on stdout."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

import click

from autotune.cli.output import print_json, print_lines
from autotune.core.stop import StopReason

if TYPE_CHECKING:
    from autotune.results.report import Report


def print_result(report: Report, *, as_json: bool, storage: str | None) -> None:
    """Print the result on stdout, with the commands that come next; ``storage`` is added to them where given."""
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
    """Return the option of a budget twice as large, where a search spent its own; a budget counts what was spent."""
    match report.study.stop_reason:
        case StopReason.TRIALS:
            return f" --trials {2 * len(report.trials)}"
        case StopReason.TIME:
            spent = sum(trial.seconds or 0.0 for trial in report.trials)
            return f" --time-budget {math.ceil(2 * spent)}s"
        case _:
            return ""

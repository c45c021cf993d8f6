"""Run ``autotune show``, ``report``, ``studies``, ``export``, and ``dashboard`` and ``db`` over their database."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.options import service_of, study_argument, table_options
from autotune.cli.output import FilePath, as_printed, print_json, print_lines, terminal_columns, write_text
from autotune.results.forms import ALL_FORMS, AnyForm


@click.command()
@study_argument
@table_options("show")
@click.pass_context
def show(ctx: click.Context, /, study: str, storage: str, server: str | None, as_json: bool) -> None:
    """Show a study: its winner and every trial."""
    if (service := service_of(ctx)) is not None:
        from autotune.cli.remote import print_report
        from autotune.service.client import Client

        print_report(Client(service), study, as_json=as_json)
        return
    from autotune.results.json_document import report_document
    from autotune.results.report import load_report
    from autotune.results.text import report_lines
    from autotune.results.training import watched_line
    from autotune.store.opening import open_store
    from autotune.tuning.run import runs_file

    with open_store(storage, create=False) as store:
        report = load_report(store, study)
    if as_json:
        print_json(report_document(report))
    else:
        seen = watched_line(str(runs_file(storage, report.study.name)))
        print_lines([*report_lines(report), *([] if seen is None else [seen])])


@click.command()
@study_argument
@click.option("--html", "page", metavar="FILE", type=FilePath(dir_okay=False, path_type=Path, allow_dash=True),
              help="Write one HTML page with charts; - is stdout.")  # fmt: skip
@table_options("report")
@click.pass_context
def report(ctx: click.Context, /, study: str, page: Path | None, storage: str, server: str | None) -> None:
    """Report a study as a page with charts, or as text.

    The page needs no other file and no network. Without --html, the text is that of autotune show.

    \b
      autotune report STUDY --html report.html
    """
    from autotune.results.html import html_page
    from autotune.results.report import load_report
    from autotune.results.text import report_lines
    from autotune.store.opening import open_store
    from autotune.tuning.predictions import stored_prediction

    if (service := service_of(ctx)) is not None:
        from autotune.cli.remote import print_report
        from autotune.service.client import Client, path_of

        if page is None:
            print_report(Client(service), study, as_json=False)
        else:
            _write_page(page, Client(service).request("GET", f"{path_of(study)}/report", query={"format": "html"}))
        return
    with open_store(storage, create=False) as store:
        loaded = load_report(store, study)
        if page is None:
            print_lines(report_lines(loaded))
            return
        best = loaded.best
        # The predicted memory and step of the winner, where they are stored.
        predicted = stored_prediction(loaded, best.candidate, store.answers) if best is not None else (None, None)
    _write_page(page, html_page(loaded, *predicted))


def _write_page(page: Path, text: str) -> None:
    """Write a page to a file, or to stdout for ``-``."""
    if str(page) == "-":
        click.echo(text, nl=False)
    else:
        write_text(page, text)
        click.echo(f"{page} written; open it in a browser", err=True)


@click.command()
@table_options("studies")
def studies(storage: str, as_json: bool) -> None:
    """List the studies, newest first."""
    from autotune.core.units import format_rate
    from autotune.results.cells import narrow_table_lines
    from autotune.results.report import winners_speeds
    from autotune.results.wording import state_of
    from autotune.store.location import shown_location
    from autotune.store.opening import open_store

    with open_store(storage, create=False) as store:
        summaries = store.studies()
        speeds = {} if as_json else winners_speeds(store, summaries)
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
                for summary in summaries
            ]
        )
        return
    rows = []
    for summary in summaries:
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
    spare = ("device", "trials", "started (UTC)")
    print_lines(narrow_table_lines(head, rows, terminal_columns(), spare, 0, right=("trials", "samples/s")))


@click.command(short_help="Export the best trial as settings.")
@study_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(ALL_FORMS),
    default="json",
    show_default=True,
)
@click.option("--output", "-o", type=FilePath(dir_okay=False, path_type=Path), help="Write to a file, not stdout.")
@click.option("--anyway", is_flag=True, help="Use the leader even if noise hides the fastest candidate.")
@table_options("export")
@click.pass_context
def export(
    ctx: click.Context,
    /,
    study: str,
    form: AnyForm,
    output: Path | None,
    anyway: bool,
    storage: str,
    server: str | None,
) -> None:
    """Export the best trial as TrainingArguments, as another trainer's configuration, or for a model card.

    \b
      autotune export STUDY > training_arguments.json
      autotune export STUDY --format cli
      autotune export STUDY --format torchrun
      autotune export STUDY --format axolotl > axolotl.yaml
      env $(autotune export STUDY --format env) python train.py $(autotune export STUDY --format cli)
    """
    from autotune.results.recipes import exported_text
    from autotune.results.report import load_report
    from autotune.store.opening import open_store

    if (service := service_of(ctx)) is not None:
        from autotune.service.client import Client, path_of

        text, headers = Client(service).fetch(f"{path_of(study)}/export", {"format": form, "anyway": anyway})
        notes = [note for note in headers.get("autotune-note", "").split(" | ") if note]
    else:
        with open_store(storage, create=False) as store:
            report = load_report(store, study)
        if not anyway:
            report.check_is_told()
        text, notes = exported_text(report, form)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
    if form == "env" and not text.strip():
        click.echo("nothing is printed: the winner needs no environment variable", err=True)
    for line in notes:
        click.echo(as_printed(line), err=True)


@click.group(short_help="Show or upgrade the database.", invoke_without_command=True)
@click.pass_context
def db(ctx: click.Context) -> None:
    """Show or upgrade the schema of the database."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@db.command()
@table_options("db")
def current(storage: str) -> None:
    """Print the schema's revision and the newest one."""
    from autotune.store.opening import current_revision

    revision, head = current_revision(storage)
    click.echo(f"{revision or 'none'} (newest: {head})")


@db.command()
@table_options("db")
def upgrade(storage: str) -> None:
    """Upgrade the schema to the newest revision; a missing file is created."""
    from autotune.store import opening

    before, after = opening.upgrade(storage)
    click.echo(f"{after}, as before" if before == after else f"{before or 'none'} -> {after}")


@click.command(short_help="Serve the Optuna dashboard on this machine.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@table_options("dashboard")
def dashboard(port: int, storage: str) -> None:
    """Serve the Optuna dashboard over the studies, read-only, on 127.0.0.1."""
    from autotune.results.dashboard import serve

    def say(url: str) -> None:
        click.echo("the dashboard, read-only (its buttons change nothing); Ctrl-C ends it", err=True)
        click.echo("its best trial is one process; autotune show tells the mean over all that measured it", err=True)
        # Alone on its line, so that a terminal links nothing else.
        click.echo(url, err=True)

    serve(storage, port=port, ready=say)

"""Run ``autotune run``: train for real with the winner of a study, with nothing of the user's code edited."""

from __future__ import annotations

import json
import os
import shlex
import sys

import click

from autotune.cli.options import study_argument, table_options
from autotune.core.errors import InvalidRequestError
from autotune.core.real_training import VARIABLE, RealTraining


@click.command(short_help="Train with the winner of a study.")
@study_argument
@click.option("--anyway", is_flag=True, help="Use the leader even if noise hides the fastest candidate.")
@click.option(
    "--recover",
    is_flag=True,
    help="Where a Trainer runs out of memory, go on from its last checkpoint with half the batch, three times.",
)
@table_options("run")
def run(study: str, script: tuple[str, ...], anyway: bool, recover: bool, storage: str) -> None:
    """Start your own training script, unedited, with the winner of a study.

    Prints each setting that it applies. Without SCRIPT, the script of the search is started in the folder where the
    search ran. Signals reach the training, and its exit code is returned.

    \b
      autotune run STUDY -- python train.py --epochs 3 --output_dir out
      autotune run STUDY -- python train.py --batch-size {batch} --accum {accumulation}
    """
    from autotune.execution.child_process import without_secrets
    from autotune.results.report import load_report
    from autotune.results.training import make_start
    from autotune.store.opening import open_store
    from autotune.tuning.run import runs_file

    with open_store(storage, create=False) as store:
        report = load_report(store, study)
    if not anyway:
        report.check_is_told()
    if recover and report.source is not None and report.source.framework != "trainer":
        raise InvalidRequestError(
            f"--recover starts trainings with transformers.Trainer again, and {report.source.name} trains otherwise",
            "leave it out",
        )
    start = make_start(report, script, str(runs_file(storage, study)))
    for line in start.notes:
        click.echo(line, err=True)
    for name, value in start.variables.items():
        click.echo(f"set     {name}={shlex.quote(value)}", err=True)
    for name, argument in start.settings.items():
        click.echo(f"set     {name}={argument!r}", err=True)
    click.echo(f"starts  {start.shown}", err=True)
    os.chdir(start.cwd)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    variables = {**without_secrets(os.environ), **start.variables}
    if recover:
        from autotune.core.schema import decode
        from autotune.execution.recovery import run_recovering

        training = decode(json.loads(start.handed[VARIABLE]), RealTraining)
        raise SystemExit(
            run_recovering(start.words, variables, training, lambda text: click.echo(f"autotune: {text}", err=True))
        )
    os.execvpe(start.words[0], start.words, {**variables, **start.handed})

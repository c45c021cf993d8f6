"""Run ``autotune verify`` and ``run``: train with what a study promises, to compare it or for real."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import COMPLETERS, study_argument, table_options
from autotune.cli.output import print_json, print_lines
from autotune.core.errors import InvalidRequestError
from autotune.core.real_training import VARIABLE, RealTraining
from autotune.core.schema import encode
from autotune.core.units import format_seconds

if TYPE_CHECKING:
    from autotune.store.repository import Store
    from autotune.verify.target import Target
    from autotune.verify.throughput import Verification


@click.command(short_help="Compare a stock Trainer's speed with the search's.")
@click.argument("study_or_file", metavar="STUDY|FILE", shell_complete=COMPLETERS["study"])
@click.option(
    "--same-loss",
    is_flag=True,
    help="Compare instead the first step with the baseline's: loss and gradients, same samples, no dropout.",
)
@click.option("--study", metavar="NAME", help="The study that FILE is an export of [default: the one that fits].")
@table_options("verify")
def verify(
    study_or_file: str,
    steps: int | None,
    same_loss: bool,
    study: str | None,
    storage: str,
    server: str | None,
    as_json: bool,
) -> None:
    """Train with a stock Trainer as exported, and compare with what was promised.

    \b
      autotune verify STUDY
      autotune verify training_arguments.json --steps 200
      autotune verify STUDY --same-loss

    A fresh process without autotune's instruments runs the steps, with one evaluation and one checkpoint
    between them (in a temporary folder); their memory is reported apart, their time is left out.

    With --same-loss, loss and gradients of a single step of the winner are compared with those of the baseline.
    """
    if server is not None:
        from autotune.cli.remote import verify_remotely

        if same_loss:
            raise InvalidRequestError("--same-loss cannot be used with --server", "leave one of them out")
        verify_remotely(server, study or study_or_file, steps, as_json=as_json)
        return
    from autotune.store.opening import open_store
    from autotune.verify.throughput import verification_document, verification_lines

    with open_store(storage, create=False) as store:
        target = _target(store, study_or_file, study)
    if same_loss:
        compare_and_print(target, storage, as_json=as_json)
        return
    verification = run_stock_trainer(target, steps, storage)
    if as_json:
        print_json(encode(verification_document(verification)))
    else:
        print_lines(verification_lines(verification))
    verification.check()


def _target(store: Store, study_or_file: str, study: str | None) -> Target:
    """Return what is to be trained: a study's winner, or an exported file with the winner that it was exported from.

    ``study_or_file`` is a study's name or a file; ``study`` (``--study``) names the file's study, else it is looked up.
    Raises ``InvalidRequestError`` where both name a study, and for a missing file.
    """
    from autotune.results.report import load_report
    from autotune.verify.target import find_exported, placement_of, read_arguments, target_of

    path = Path(study_or_file)
    if not path.is_file():
        if path.suffix == ".json" and store.study(study_or_file) is None:
            raise InvalidRequestError(f"there is no file {study_or_file}", "make it with autotune export STUDY > FILE")
        if study is not None and study != study_or_file:
            raise InvalidRequestError(f"--study {study} does not go with the study {study_or_file}", "name one of them")
        report = load_report(store, study_or_file)
        return target_of(report, placement_of(report))
    arguments = read_arguments(path)
    report = load_report(store, study) if study is not None else find_exported(store, arguments)
    return target_of(report, placement_of(report), arguments)


def run_stock_trainer(target: Target, steps_asked: int | None, storage: str) -> Verification:
    """Train a winner with a stock ``Trainer``, showing the elapsed time; return the comparison with its promise."""
    from autotune.cli.view import waiting
    from autotune.tuning.run import log_folder
    from autotune.verify.throughput import steps_of, verify

    steps = steps_of(target, steps_asked)
    name, seconds = target.report.study.name, format_seconds(steps * target.promised.step_seconds)
    log_path = log_folder(storage, name) / "verify.log"
    with waiting(f"training {steps} steps, which take {seconds} at the promised speed") as view:
        view.print_line(
            f"training {target.report.workload['model']} of the study {name} for {steps} steps: "
            f"{target.best.candidate.describe()} on {target.placement.label} in a process of its own, "
            "without instruments …"
        )
        return verify(target, steps, log_path, note=view.now)


def compare_and_print(target: Target, storage: str, *, as_json: bool) -> None:
    """Train one step of the winner and of the baseline, and print whether losses and gradients agree, or raise."""
    from autotune.cli.view import waiting
    from autotune.tuning.run import log_folder
    from autotune.verify.loss import check_can_compare, compare_losses

    check_can_compare(target)
    name = target.report.study.name
    with waiting("training the baseline, then the winner") as view:
        view.print_line(
            f"training {target.report.workload['model']} of the study {name} for one step of the winner and of the "
            "baseline, without dropout …"
        )
        comparison = compare_losses(target, log_folder(storage, name) / "same-loss")
    if as_json:
        print_json(encode(comparison))
    elif comparison.same:
        click.echo(comparison.finding)
    comparison.check()


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
        from autotune.execution.oneshot import run_recovering

        training = decode(json.loads(start.handed[VARIABLE]), RealTraining)
        raise SystemExit(
            run_recovering(start.words, variables, training, lambda text: click.echo(f"autotune: {text}", err=True))
        )
    os.execvpe(start.words[0], start.words, {**variables, **start.handed})

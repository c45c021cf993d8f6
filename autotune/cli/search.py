"""``autotune search``."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import BYTES, HEADROOM, SECONDS, json_option, print_json, storage_option, words
from autotune.errors import InvalidRequestError

if TYPE_CHECKING:
    from autotune.model_source import ModelSource
    from autotune.request import SearchRequest
    from autotune.search import Interruption
    from autotune.store import Store, StudyRecord

_TASKS = (
    "sequence-classification",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
    "image-classification",
    "speech-seq2seq",
)


@click.command()
@click.option("--model", required=True, help="Catalog name (autotune models), folder with a config.json, or hub name.")
@click.option(
    "--effective-batch",
    type=int,
    help="Per-device batch × accumulation × world size, kept exactly. Without it accumulation is 1 and the batch free.",
)
@click.option("--task", type=click.Choice(_TASKS), help="What is trained; told from the architecture if left out.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens a sample [default: 512 or the model's maximum].")
@click.option(
    "--padding",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Mean fraction of each text sample that is padding, with a real attention_mask.",
)
@click.option("--memory-limit", type=BYTES, help="Search as if the device had no more, e.g. 24GiB [default: all free].")
@click.option("--headroom", type=HEADROOM, help="Kept free below the limit, e.g. 5% or 1GiB [default: 3%].")
@click.option(
    "--precision", type=words(("fp32", "tf32", "fp16", "bf16")), help="E.g. bf16,tf32 [default: all there are]."
)
@click.option("--gradient-checkpointing", type=click.Choice(("auto", "on", "off")), default="auto", show_default=True)
@click.option(
    "--attn", type=words(), help="Attention implementations, e.g. sdpa,eager [default: sdpa where it exists]."
)
@click.option("--optim", type=words(), default="adamw_torch_fused", show_default=True, help="TrainingArguments.optim.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32", show_default=True,
              help="What the weights are stored in; precision is the autocast over it.")  # fmt: skip
@click.option("--batch-multiple", type=int, help="Per-device batches are multiples of this, strictly [default: 8].")
@click.option("--world-size", type=int, default=1, show_default=True, help="Do the arithmetic of so many devices.")
@click.option("--objective", type=click.Choice(("throughput", "max-batch")), default="throughput", show_default=True)
@click.option("--trials", type=int, help="Run at most so many trials.")
@click.option("--time-budget", type=SECONDS, help="Start no trial after this long, e.g. 5m.")
@click.option("--trial-timeout", type=SECONDS, default="3m", show_default=True, help="Time limit of one trial.")
@click.option("--device", help="cuda:0, cpu or a GPU's UUID [default: the first GPU, else the CPU].")
@click.option("--sampler", type=click.Choice(("autotune", "grid", "tpe", "random")), default="autotune",
              show_default=True, help="Ours, or one of Optuna's own.")  # fmt: skip
@click.option("--study", help="Name of the study; an existing one is continued [default: made up].")
@storage_option
@click.option("--seed", type=int, default=42, show_default=True)
@click.option("--pretrained", is_flag=True, help="Load real weights; speed and memory do not depend on them.")
@click.option("--no-baseline", is_flag=True, help="Do not measure the TrainingArguments defaults for comparison.")
@json_option
def search(as_json: bool, storage: str, **options: Any) -> None:
    """Search for the fastest configuration by running real training steps.

    \b
      autotune search --model bert-large-uncased --effective-batch 64
      autotune search --model gpt2 --effective-batch 64 --memory-limit 24GiB
      autotune search --model bert-large-uncased --objective max-batch
    """
    request = _request(options)
    request.check()
    from autotune.store import open_store

    with open_store(storage) as store:
        study = _run(request, store, storage)
        _print_result(store, study, as_json, storage)
    if study.state == "interrupted":
        from autotune.cli.main import INTERRUPTED

        raise click.exceptions.Exit(INTERRUPTED)


def _request(options: dict[str, Any]) -> SearchRequest:
    """The options as a request; every error that needs no process to be seen is raised here or by its ``check``."""
    from autotune.device import Headroom, find_device
    from autotune.model_source import resolve_model
    from autotune.request import SearchRequest
    from autotune.workload import Workload, choose_seq_len, infer_task

    source = resolve_model(options["model"])
    task = options["task"] or infer_task(source.config)
    workload = Workload(
        model=source.name,
        config=source.config,
        task=task,
        seq_len=choose_seq_len(source.config, task, options["seq_len"]),
        padding=options["padding"],
        dtype=options["dtype"],
        weights=_weights(source) if options["pretrained"] else None,
    )
    return SearchRequest(
        workload=workload,
        device=find_device(options["device"]),
        effective_batch=options["effective_batch"],
        world_size=options["world_size"],
        batch_multiple=options["batch_multiple"],
        objective=options["objective"],
        precisions=options["precision"],
        gradient_checkpointing=options["gradient_checkpointing"],
        attn_implementations=options["attn"],
        optims=options["optim"] if isinstance(options["optim"], tuple) else (options["optim"],),
        memory_limit_bytes=options["memory_limit"],
        headroom=options["headroom"] or Headroom(),
        trials=options["trials"],
        time_budget_seconds=options["time_budget"],
        sampler=options["sampler"],
        seed=options["seed"],
        trial_timeout_seconds=options["trial_timeout"],
        measure_baseline=not options["no_baseline"],
        study=options["study"],
    )


def _weights(source: ModelSource) -> str:
    """Where the model's weights are; an error where there are none to load."""
    found = source.repository or source.path
    if found is None:
        raise InvalidRequestError(f"--pretrained: {source.name!r} has no weights anywhere", "leave --pretrained out")
    return found


def _study_name(request: SearchRequest, store: Store) -> str:
    """A short name that is free: the model, the effective batch, a number from the second on."""
    model = request.workload.model.rstrip("/").rsplit("/", 1)[-1]
    stem = (
        "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in model).strip(".- ")[:60] or "model"
    )
    stem += f"-{request.effective_batch}" if request.effective_batch else f"-{request.objective}"
    number, name = 1, stem
    while store.study(name) is not None:
        number += 1
        name = f"{stem}-{number}"
    return name


def _log_folder(store: Store, study: str) -> Path:
    """Beside the database, else (for a server's) in the working directory's ``studies``."""
    folder = store.path.parent if store.path is not None else Path("studies")
    return folder.absolute() / "logs" / study


def _run(request: SearchRequest, store: Store, storage: str) -> StudyRecord:
    from autotune.cli.view import open_view
    from autotune.preparation import prepare
    from autotune.runner import LocalRunner
    from autotune.search import Interruption, Search

    request = request.named(request.study or _study_name(request, store))
    assert request.study is not None
    folder = _log_folder(store, request.study)
    interruption = Interruption()
    with open_view() as view, _first_interrupt(interruption, view.note):
        view.note(f"starting a process for trials on {request.device.label} ({request.device.name}) …")
        with LocalRunner(request.device, request.workload, folder) as runner:
            prepared = prepare(request, runner.inspect())
            return Search(prepared, runner, store, view, folder, interruption).run()


@contextlib.contextmanager
def _first_interrupt(interruption: Interruption, say: Any) -> Iterator[None]:
    """The first Ctrl-C ends the search after the running trial, the second at once."""

    def on_signal(number: int, frame: object) -> None:
        if interruption.asked:
            raise KeyboardInterrupt
        interruption.asked = True
        say("ending after the running trial; press Ctrl-C again to end at once")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _print_result(store: Store, study: StudyRecord, as_json: bool, storage: str) -> None:
    from autotune.report import load_report, report_document, summary_lines

    report = load_report(store, study.name)
    if as_json:
        print_json(report_document(report))
        return
    click.echo("\n".join(summary_lines(report)))
    if report.best is None:
        return
    where = "" if storage == "studies/autotune.db" or os.environ.get("AUTOTUNE_STORAGE") else f" --storage {storage}"
    click.echo("\nNext:")
    click.echo(f"  autotune export {study.name}{where} > training_arguments.json")
    click.echo(f"  autotune show {study.name}{where}")
    click.echo(f"  autotune dashboard{where}")

"""``autotune predict``: what fits, for people with no GPU at hand."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autotune.cli.options import SectionedCommand, print_json, table_options
from autotune.cli.table import print_table
from autotune.core.errors import InvalidRequestError, did_you_mean
from autotune.core.options import request_fields

if TYPE_CHECKING:
    from autotune.core.workload import Workload
    from autotune.devices.gpus import Chip
    from autotune.estimate.memory import MemoryModel, Question
    from autotune.space.space import Space
    from autotune.tuning.answers import AnswersBeside
    from autotune.tuning.prepare import Prepared
    from autotune.tuning.request import SearchRequest

# Measured against recorded peaks; see studies/landscapes and tests/test_predicted_memory.py.
ACCURACY = (
    "of 295 peaks on an H200 the allocated bytes were predicted within 0.4 % at worst, the reserved bytes within 3 % "
    "in 96 of 100 and within 8 % at worst"
)
_ORDER = ("weights", "gradients", "optimizer", "activations", "inputs", "workspaces")


@click.command(cls=SectionedCommand, short_help="Predict which batches fit on a GPU that is not at hand.")
@table_options("predict")
@click.pass_context
def predict(
    ctx: click.Context,
    /,
    as_json: bool,
    all_batches: bool,
    anatomy: bool,
    gpus: tuple[str, ...] | None,
    storage: str,
    **options: Any,
) -> None:
    """Predict which batches fit on a GPU that is not at hand, without running anything on one.

    Prints the largest batch that fits for each configuration; --all and --json have every batch. What was predicted
    is kept beside the studies, so that the same is answered at once the next time.

    \b
      autotune predict --model bert-large-uncased --effective-batch 64 --gpu rtx-3090
      autotune predict --model gpt2-medium --seq-len 1024 --memory-limit 24GiB --anatomy
    """
    if options["model"] is None:
        raise click.MissingParameter(ctx=ctx, param_hint="--model", param_type="option")
    targets = _chips(gpus, options["memory_limit"])
    from autotune.tuning.answers import AnswersBeside

    with AnswersBeside(storage) as answers:
        documents = _predicted(targets, options, answers)
    if answers.problem is not None and ctx.get_parameter_source("storage") is not ParameterSource.DEFAULT:
        click.echo(f"autotune: what was predicted is not kept: {answers.problem.message}", err=True)
    if as_json:
        print_json({"predicted": True, "accuracy": ACCURACY, "gpus": documents, "arms": documents[0]["arms"]})
        return
    for document in documents:
        _print(document, all_batches, anatomy)
    click.echo(f"Predicted, not measured: {ACCURACY}.", err=True)


def _chips(names: tuple[str, ...] | None, limit_bytes: int | None) -> list[tuple[Chip, int]]:
    """The chips to predict for, each with the memory that may be used of it."""
    from autotune.core.units import format_bytes
    from autotune.devices.gpus import CHIPS, Chip

    if not names:
        if limit_bytes is None:
            raise InvalidRequestError(
                "nothing says how much memory there is", "give --memory-limit 24GiB or --gpu rtx-3090"
            )
        return [(Chip(name="a GPU like the H200", memory_bytes=limit_bytes), limit_bytes)]
    found = []
    for name in names:
        chip = CHIPS.get(name.lower())
        if chip is None or chip.memory_bytes is None:
            every = f"known are {', '.join(CHIPS)}; or --memory-limit"
            hint = " ".join(filter(None, [did_you_mean(name.lower(), CHIPS), every]))
            raise InvalidRequestError(f"--gpu {name!r} is not known", hint)
        if limit_bytes is not None and limit_bytes > chip.memory_bytes:
            raise InvalidRequestError(
                f"--memory-limit {format_bytes(limit_bytes)} is more than the {format_bytes(chip.memory_bytes)} "
                f"of {chip.name}",
                "leave it out, or lower it",
            )
        found.append((chip, limit_bytes or chip.memory_bytes))
    return found


def _predicted(
    targets: list[tuple[Chip, int]], options: dict[str, Any], answers: AnswersBeside
) -> list[dict[str, Any]]:
    """What is predicted for each chip, as a document; asked of one process for all, as far as it is not known."""
    from autotune.devices import find_device
    from autotune.devices.gpus import TYPICAL_CONTEXT_BYTES
    from autotune.estimate.memory_jobs import Forecast, Target
    from autotune.execution import TrialServer
    from autotune.space.dataloader import usable_cores
    from autotune.tuning.answers import KeptPredictions, inspection_key
    from autotune.tuning.options import build_workload
    from autotune.tuning.prepare import most_predictions, prepare

    workload = build_workload(options)
    requests = [_request(workload, chip, limit_bytes, options) for chip, limit_bytes in targets]
    for request in requests:
        request.check()
    cpu = find_device("cpu")
    key = inspection_key(cpu, workload)
    assert key is not None
    with (
        tempfile.TemporaryDirectory(prefix="autotune-predict-") as logs,
        TrialServer(cpu, workload, Path(logs), on_start=lambda: None) as runner,
    ):
        remembered = answers.find(key)
        facts = remembered or runner.inspect()
        every = [prepare(request, {**facts, "context_bytes": TYPICAL_CONTEXT_BYTES}) for request in requests]
        asked = [
            Target(chip, prepared.ceiling, _questions(prepared.space))
            for (chip, _), prepared in zip(targets, every, strict=True)
        ]
        forecast = Forecast(
            runner, asked, parallel=most_predictions(usable_cores()), kept=KeptPredictions(answers, workload)
        )
        forecast.complete()
        if remembered is None:
            # Last, since making a database takes a second in which others could be predicting.
            answers.keep(key, "inspection", facts)
    return [
        _document(chip, prepared, model)
        for (chip, _), prepared, model in zip(targets, every, forecast.models, strict=True)
    ]


def _request(workload: Workload, chip: Chip, limit_bytes: int, options: dict[str, Any]) -> SearchRequest:
    """A search on the chip, as if it were here."""
    from autotune.devices import Device
    from autotune.tuning.request import SearchRequest

    stand_in = Device("cuda", 0, chip.name, chip.name, limit_bytes, None, 0, limit_bytes, capability=chip.capability)
    asked = {**request_fields(options), "memory_limit_bytes": limit_bytes}
    return SearchRequest(workload=workload, device=stand_in, **asked)


def _questions(space: Space) -> list[Question]:
    from autotune.estimate.memory import questions

    pairs = [(batch, space.batches.accumulation(batch)) for batch in _batches(space)]
    multiple = space.batches.levels()[0] if space.batches.effective_batch is None else None
    return questions(space.arms, pairs, multiple)


def _document(chip: Chip, prepared: Prepared, model: MemoryModel) -> dict[str, Any]:
    """One chip's predictions."""
    from autotune.core.ceiling import PREDICTION_MARGIN

    space, ceiling = prepared.space, prepared.ceiling
    return {
        "gpu": chip.name,
        "workload": {k: v for k, v in prepared.request.workload.document().items() if k != "config"},
        "ceiling_bytes": ceiling.cap_bytes,
        "line_bytes": ceiling.line_bytes,
        "fits_below_bytes": int(ceiling.line_bytes * (1 - PREDICTION_MARGIN)),
        "arms": [_arm_document(arm, space, model) for arm in space.arms],
    }


def _batches(space: Space) -> list[int]:
    """Every batch of an effective batch; none by name where the batch is free: the largest is looked for."""
    if space.batches.effective_batch is None:
        return []
    return sorted(batch for level in space.batches.levels() for batch in space.batches.at_level(level))


def _arm_document(arm: Any, space: Space, model: MemoryModel) -> dict[str, Any]:
    from autotune.core.candidate import Candidate
    from autotune.estimate.memory import reserved_interval

    largest = model.largest_batch(arm)
    free = space.batches.effective_batch is None
    wanted = [(b, 1) for b in model.batches(arm)] if free else []
    wanted += [(b, space.batches.accumulation(b)) for b in _batches(space)]
    rows: list[dict[str, Any]] = []
    for batch, accumulation in wanted:
        prediction = model.prediction(Candidate(arm, batch, accumulation))
        if prediction is not None:
            rows.append(
                {
                    "per_device_train_batch_size": batch,
                    "gradient_accumulation_steps": accumulation,
                    "peak_allocated_bytes": prediction.peak_allocated_bytes,
                    "peak_reserved_bytes": prediction.peak_reserved_bytes,
                    "peak_reserved_interval_bytes": list(reserved_interval(prediction, arm)),
                    "fits": prediction.fits,
                    "anatomy_bytes": prediction.anatomy,
                }
            )
    parameters = {name: value for name, value in Candidate(arm, 1).parameters().items() if "batch" not in name}
    parameters.pop("gradient_accumulation_steps")
    if not free:
        largest = max((row["per_device_train_batch_size"] for row in rows if row["fits"]), default=0)
    return {**parameters, "largest_batch": largest, "batches": rows}


def _print(document: dict[str, Any], all_batches: bool, anatomy: bool) -> None:
    from autotune.core.units import format_bytes

    workload, line_bytes = document["workload"], document["line_bytes"]
    click.echo(
        f"{workload['model']} ({workload['task']}, {workload['seq_len']} tokens) on {document['gpu']}: "
        f"{format_bytes(document['ceiling_bytes'])} to reserve, {format_bytes(line_bytes)} with headroom (the line); "
        f"what is predicted up to {format_bytes(document['fits_below_bytes'])} is said to fit"
    )
    if all_batches:
        head = ["configuration", "batch × acc", "allocated", "reserved", "of the line", "fits"]
        rows = [cells for arm in document["arms"] for cells in _every_batch(arm, line_bytes, anatomy)]
    else:
        head = ["configuration", "largest batch × acc", "allocated", "reserved", "of the line"]
        rows = [_largest_batch(arm, line_bytes, anatomy) for arm in document["arms"]]
    print_table(head + (list(_ORDER) if anatomy else []), rows)
    if anatomy:
        click.echo("At the moment of the peak: without accumulation that is often before there are gradients.")
    click.echo("")


def _every_batch(arm: dict[str, Any], line_bytes: int, anatomy: bool) -> list[list[str]]:
    """The rows of one configuration, which is named in the first."""
    rows = []
    name = _describe(arm)
    for batch in arm["batches"]:
        fits = "yes" if batch["fits"] else "no"
        rows.append([name, _batch_cell(batch), *_peak_cells(batch, line_bytes), fits, *_parts(batch, anatomy)])
        name = ""
    return rows


def _largest_batch(arm: dict[str, Any], line_bytes: int, anatomy: bool) -> list[str]:
    """The row of the largest batch that fits; where none does, of the batch with the lowest peak."""
    fitting = [batch for batch in arm["batches"] if batch["fits"]]
    if fitting:
        shown = max(fitting, key=lambda batch: int(batch["per_device_train_batch_size"]))
        cell = _batch_cell(shown)
    elif arm["batches"]:
        shown = min(arm["batches"], key=lambda batch: int(batch["peak_reserved_bytes"]))
        cell = f"none; {_batch_cell(shown)} needs"
    else:
        return [_describe(arm), "not predicted", "", "", "", *([""] * len(_ORDER) if anatomy else [])]
    return [_describe(arm), cell, *_peak_cells(shown, line_bytes), *_parts(shown, anatomy)]


def _describe(arm: dict[str, Any]) -> str:
    from autotune.core.candidate import Arm

    return Arm(arm["precision"], arm["gradient_checkpointing"], arm["attn_implementation"], arm["optim"]).describe()


def _batch_cell(batch: dict[str, Any]) -> str:
    return f"{batch['per_device_train_batch_size']} × {batch['gradient_accumulation_steps']}"


def _peak_cells(batch: dict[str, Any], line_bytes: int) -> list[str]:
    from autotune.core.units import format_bytes

    allocated, reserved = batch["peak_allocated_bytes"], batch["peak_reserved_bytes"]
    return [format_bytes(allocated), format_bytes(reserved), f"{reserved / line_bytes:.0%}"]


def _parts(batch: dict[str, Any], anatomy: bool) -> list[str]:
    from autotune.core.units import format_bytes

    return [format_bytes(batch["anatomy_bytes"].get(part, 0)) for part in _ORDER] if anatomy else []

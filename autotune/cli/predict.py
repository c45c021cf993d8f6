"""Run ``autotune predict``: print what fits on a GPU and how fast it trains, without that GPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autotune.cli.options import SectionedCommand, table_options
from autotune.cli.output import print_json
from autotune.cli.predictions import batches_of, known_chips, predictions, told_unknown
from autotune.cli.table import print_table
from autotune.core.errors import InvalidRequestError
from autotune.core.schema import decode, encode

if TYPE_CHECKING:
    from autotune.core.candidate import Arm
    from autotune.core.errors import AutotuneError
    from autotune.devices.gpus import Chip
    from autotune.estimate.memory import MemoryModel
    from autotune.estimate.step_time import StepTimeModel
    from autotune.results.predicted import GpuPredictionDocument
    from autotune.tuning.prepare import Prepared

# Measured against recorded peaks; see studies/landscapes and tests/estimate/test_predicted_memory.py.
ACCURACY = (
    "of 295 peaks on an H200 the allocated bytes were predicted within 0.4 % at worst, the reserved bytes within 3 % "
    "in 96 of 100 and within 8 % at worst"
)
# python studies/kernel_times.py compare; python studies/step_times.py compare
SPEED_ACCURACY = (
    "of 57 GPU times of models that had no part in the fit, on an H200, half were predicted within 4 % and 90 of 100 "
    "within 9 %; 478 of 484 step times were in their interval; other GPUs are computed from their specified rates, and "
    "were not measured"
)
# python studies/rank_memory.py and studies/several_gpus.py
RANKS_NOTES = (
    "bytes are those of each GPU",
    "of 62 peaks of four models on two H200 (DDP, FSDP2) the allocated bytes were predicted within 0.2 % but for one, "
    "10 % too low",
    "reserved bytes under ZeRO were 5 % more than predicted",
    "what NCCL keeps for itself is not counted",
    "62 of 63 steps of four models with DDP and FSDP2 were in their interval, half of them predicted within 29 %, on "
    "hosts of different speed",
    "speed under ZeRO is not predicted",
)
FEW_BITS_ACCURACY = (
    "weights and moments are counted as bitsandbytes 0.50 stores them, to the byte; what it needs while it computes "
    "was read from its code, and not measured on a GPU"
)
RANKS_ACCURACY = "; ".join(RANKS_NOTES)
_ORDER = ("weights", "gradients", "optimizer", "activations", "inputs", "workspaces", "communication")


@click.command(cls=SectionedCommand, short_help="Predict what fits on a GPU, and its speed.")
@table_options("predict")
@click.pass_context
def predict(
    ctx: click.Context,
    /,
    as_json: bool,
    all_batches: bool,
    anatomy: bool,
    gpu: tuple[str, ...] | None,
    gpu_spec: str | None,
    storage: str,
    server: str | None,
    **options: Any,
) -> None:
    """Predict what fits on a GPU that is not at hand and how fast it trains, without running anything on one.

    Prints the fastest batch that fits for each configuration; --all and --json have every batch. What was predicted
    is kept beside the studies, so that the same is answered at once the next time.

    \b
      autotune predict --model bert-large-uncased --effective-batch 64 --gpu rtx-3090
      autotune predict --model gpt2-medium --seq-len 1024 --memory-limit 24GiB --anatomy
    """
    if options["model"] is None:
        raise click.MissingParameter(ctx=ctx, param_hint="--model", param_type="option")
    if server is not None:
        from autotune.cli.remote import predict_remotely

        named = {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        predicted = predict_remotely(server, {name: ctx.params[name] for name in named})
    else:
        predicted, problem = predicted_document(gpu, gpu_spec, storage, options)
        if problem is not None and ctx.get_parameter_source("storage") is not ParameterSource.DEFAULT:
            click.echo(f"autotune: what was predicted is not kept: {problem.message}", err=True)
    if as_json:
        print_json(predicted)
        return
    documents = predicted["gpus"]
    for document in documents:
        _print(document, all_batches, anatomy)
    if len(documents) > 1:
        _compare(documents)
    click.echo(f"Predicted, not measured: {ACCURACY}.", err=True)
    if options.get("quantize") is not None or any("8bit" in name for name in options.get("optim") or ()):
        click.echo(f"Few bits: {FEW_BITS_ACCURACY}.", err=True)
    if "ranks_accuracy" in predicted:
        click.echo("\n".join(["Several GPUs:", *(f"  {note}" for note in RANKS_NOTES)]), err=True)
    if any(document["best"] is not None for document in documents):
        click.echo(f"Speed: {SPEED_ACCURACY}.", err=True)


def predicted_document(
    gpu: tuple[str, ...] | None, gpu_spec: str | None, storage: str, options: dict[str, Any]
) -> tuple[dict[str, Any], AutotuneError | None]:
    """Return what ``--json`` prints, and why what was predicted could not be kept beside the studies, if so."""
    from autotune.results.predicted import PredictionDocument, RanksPredictionDocument
    from autotune.tuning.answer_cache import AnswersBeside

    targets = _chips(gpu, options["memory_limit"], gpu_spec)
    with AnswersBeside(storage) as answers:
        predicted = predictions(targets, [options] * len(targets), answers)
    documents = [
        _document(chip, prepared, model) for (chip, _), (prepared, model) in zip(targets, predicted, strict=True)
    ]
    told = PredictionDocument(True, ACCURACY, SPEED_ACCURACY, documents, documents[0].arms)
    if any(arm.ranks > 1 for document in documents for arm in document.arms):
        told = RanksPredictionDocument(**vars(told), ranks_accuracy=RANKS_ACCURACY)
    document: dict[str, Any] = encode(told)
    return document, answers.problem


def _chips(names: tuple[str, ...] | None, limit_bytes: int | None, spec: str | None) -> list[tuple[Chip, int]]:
    """Return the chips to predict for, each with its usable memory."""
    from autotune.core.units import format_bytes
    from autotune.devices.gpus import Chip, find_chip

    known = known_chips(spec)
    if not names:
        if limit_bytes is None:
            raise InvalidRequestError(
                "the memory of the GPU is not known", "give --memory-limit 24GiB or --gpu rtx-3090"
            )
        # Without rates: its speed is not known.
        return [(Chip(name="a GPU like the H200", memory_bytes=limit_bytes), limit_bytes)]
    found = []
    for name in names:
        chip = find_chip(name, known)
        assert chip.memory_bytes is not None
        if limit_bytes is not None and limit_bytes > chip.memory_bytes:
            raise InvalidRequestError(
                f"--memory-limit {format_bytes(limit_bytes)} is more than the {format_bytes(chip.memory_bytes)} "
                f"of {chip.name}",
                "leave it out, or lower it",
            )
        found.append((chip, limit_bytes or chip.memory_bytes))
    return found


def _document(chip: Chip, prepared: Prepared, model: MemoryModel) -> GpuPredictionDocument:
    """Return the predictions for one chip."""
    from autotune.core.ceiling import PREDICTION_MARGIN
    from autotune.estimate.step_time import StepTimeModel
    from autotune.results.predicted import GpuPredictionDocument, best_prediction_type

    ceiling = prepared.ceiling
    speeds = StepTimeModel(chip) if chip.rates is not None else None
    arms = [_arm_document(arm, prepared, model, speeds) for arm in prepared.space.arms]
    best = _best([encode(arm) for arm in arms])
    return GpuPredictionDocument(
        gpu=chip.name,
        workload={k: v for k, v in prepared.request.workload.document().items() if k != "config"},
        ceiling_bytes=ceiling.cap_bytes,
        line_bytes=ceiling.line_bytes,
        fits_below_bytes=ceiling.bounds.below_line_bytes(PREDICTION_MARGIN),
        best=None if best is None else decode(best, best_prediction_type()),
        arms=arms,
    )


def _arm_document(arm: Arm, prepared: Prepared, model: MemoryModel, speeds: StepTimeModel | None) -> Any:
    """Return the predictions for one configuration."""
    from autotune.core.candidate import Candidate
    from autotune.estimate.memory import reserved_interval
    from autotune.results.predicted import BatchDocument, TimedBatchDocument, arm_prediction_type, speed_document

    space, workload = prepared.space, prepared.request.workload
    largest = model.largest_batch(arm)
    operations = model.operations(arm)
    free = space.batches.effective_batch is None
    wanted = [(b, 1) for b in model.batches(arm)] if free else []
    wanted += [(b, space.batches.accumulation(b)) for b in batches_of(space)]
    rows: list[BatchDocument] = []
    for batch, accumulation in wanted:
        candidate = Candidate(arm, batch, accumulation)
        prediction = model.prediction(candidate)
        # Without accumulation it is the same to reduce gradients in each micro-step and in the last one.
        is_twin = arm.sync_each_batch and not candidate.accumulates
        if prediction is not None and not is_twin:
            row = BatchDocument(
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=accumulation,
                peak_allocated_bytes=prediction.peak_allocated_bytes,
                peak_reserved_bytes=prediction.peak_reserved_bytes,
                peak_reserved_interval_bytes=reserved_interval(prediction, arm),
                fits=prediction.fits,
                anatomy_bytes=prediction.anatomy,
                bucket_copy_bytes=prediction.bucket_copy_bytes,
            )
            if speeds is not None and operations is not None and speeds.knows(arm):
                speed = speed_document(speeds.predict(operations, candidate), workload)
                row = TimedBatchDocument(**vars(row), **vars(speed))
            rows.append(row)
    if not free:
        largest = max((row.per_device_train_batch_size for row in rows if row.fits), default=0)
    return arm_prediction_type()(**dataclasses.asdict(arm), largest_batch=largest, batches=rows)


def _best(arms: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the fastest configuration that fits, with its batch.

    ``None`` without a predicted speed, or if none fits.
    """
    known = [
        (arm, batch) for arm in arms for batch in arm["batches"] if batch["fits"] and "samples_per_second" in batch
    ]
    if not known:
        return None
    arm, batch = max(known, key=lambda pair: float(pair[1]["samples_per_second"]))
    parameters = {name: value for name, value in arm.items() if name not in ("batches", "largest_batch")}
    return {**parameters, **batch}


def _print(document: dict[str, Any], all_batches: bool, anatomy: bool) -> None:
    from autotune.core.units import format_bytes

    workload, line_bytes = document["workload"], document["line_bytes"]
    ranks = document["arms"][0]["ranks"]
    on = f"{ranks} × {document['gpu']}; memory of each" if ranks > 1 else document["gpu"]
    click.echo(
        f"{workload['model']} ({workload['task']}, {workload['seq_len']} tokens) on {on}; "
        f"a process may reserve {format_bytes(document['ceiling_bytes'])}, or {format_bytes(line_bytes)} if the "
        f"headroom stays free (the line); peaks predicted up to {format_bytes(document['fits_below_bytes'])} "
        "count as fitting"
    )
    best = document.get("best")
    speed = _SPEED_HEAD if best is not None else []
    shown = [arm for arm in document["arms"] if not _has_plain_twin(arm, document["arms"])]
    if all_batches:
        head = ["configuration", "batch × acc", "allocated", "reserved", "of the line", "fits"]
        rows = [cells for arm in document["arms"] for cells in _every_batch(arm, line_bytes, anatomy, speed)]
    else:
        head = ["configuration", f"{'fastest' if speed else 'largest'} batch × acc"]
        head += ["allocated", "reserved", "of the line"]
        rows = [_chosen_batch(arm, line_bytes, anatomy, speed) for arm in shown]
    print_table(head + speed + (list(_ORDER) if anatomy else []), rows)
    if anatomy:
        click.echo(
            "The parts are those at the moment of the peak. Without accumulation that is often before gradients exist."
        )
    if best is not None:
        click.echo(_choice(best, document["arms"]))
        if best.get("unknown_operations"):
            click.echo(told_unknown(best["unknown_operations"], best["unknown_operations_share"]))
        if anatomy:
            _print_times(document["arms"] if all_batches else shown, all_batches)
    if ranks > 1:
        click.echo(_which_fit(document["arms"]))
        if note := _bucket_copy_note(document):
            click.echo(note)
    click.echo("")


def _has_plain_twin(arm: dict[str, Any], arms: list[dict[str, Any]]) -> bool:
    """Return whether all that fits with gradients reduced in each micro-step fits without that, too."""
    if not arm["sync_each_batch"]:
        return False
    known = {name: value for name, value in arm.items() if name not in ("sync_each_batch", "largest_batch", "batches")}
    plain = next((a for a in arms if not a["sync_each_batch"] and known.items() <= a.items()), None)
    fitting = [
        {(b["per_device_train_batch_size"], b["gradient_accumulation_steps"]) for b in a["batches"] if b["fits"]}
        for a in (arm, plain or arm)
    ]
    return plain is not None and fitting[0] <= fitting[1]


def _which_fit(arms: list[dict[str, Any]]) -> str:
    """Return which strategies fit, each with its largest batch."""
    largest: dict[str, int] = {}
    for arm in arms:
        largest[arm["strategy"]] = max(largest.get(arm["strategy"], 0), arm["largest_batch"] or 0)
    told = [f"{name} up to {batch} a GPU" if batch else f"{name} does not" for name, batch in largest.items()]
    return f"What fits: {', '.join(told)}."


def _bucket_copy_note(document: dict[str, Any]) -> str:
    """Say which candidates have no room for a second copy of DDP's buckets alone; empty where there are none."""
    from autotune.core.units import format_bytes

    refused = [
        (f"{_describe(arm)} at {_batch_cell(batch)}", batch["bucket_copy_bytes"])
        for arm in document["arms"]
        for batch in arm["batches"]
        if batch.get("bucket_copy_bytes")
        and not batch["fits"]
        and batch["peak_reserved_bytes"] <= document["fits_below_bytes"]
    ]
    if not refused:
        return ""
    names = ", ".join(name for name, _ in refused)
    copy = format_bytes(max(size_bytes for _, size_bytes in refused))
    return f"In one step DDP may hold the {copy} of its gradient buckets twice. There is no room for that with {names}."


_SPEED_HEAD = ["samples/s", "MFU", "limited by"]
_NEARLY = 0.03
"""Candidates within this relative distance of the best may be as fast."""


def _choice(best: dict[str, Any], arms: list[dict[str, Any]]) -> str:
    """Return which configuration to choose, its speed, and those that are nearly as fast."""
    from autotune.core.units import format_rate

    low, high = best["samples_per_second_interval"]
    tokens = best["tokens_per_second"]
    told = f"Choose {_describe(best)} at {_batch_cell(best)}: {format_rate(best['samples_per_second'])} samples/s"
    told += f" ({format_rate(low)} to {format_rate(high)})"
    told += f", {format_rate(tokens)} tokens/s" if tokens else ""
    near = [
        f"{_describe(arm)} at {_batch_cell(batch)}"
        for arm in arms
        for batch in arm["batches"]
        if batch["fits"]
        and batch.get("samples_per_second", 0) > best["samples_per_second"] * (1 - _NEARLY)
        and (_describe(arm), _batch_cell(batch)) != (_describe(best), _batch_cell(best))
    ]
    told = f"{told}." + (f" Within {_NEARLY:.0%}: {'; '.join(near)}." if near else "")
    return told + _not_compared(arms)


def _not_compared(arms: list[dict[str, Any]]) -> str:
    """Return which strategies fit without a predicted speed, so that they were no choice; an empty text for none."""
    names = [
        arm["strategy"]
        for arm in arms
        if arm["strategy"] is not None
        and any(batch["fits"] for batch in arm["batches"])
        and not any("samples_per_second" in batch for batch in arm["batches"])
    ]
    if not names:
        return ""
    unique = list(dict.fromkeys(names))
    verb = "fits" if len(unique) == 1 else "fit"
    return f" {', '.join(unique)} {verb}, too: not compared, since their speed is not predicted."


_LEAST_SHARE = 0.01
"""Kinds of work that are nowhere a larger share of the GPU time are shown together."""


def _print_times(arms: list[dict[str, Any]], all_batches: bool) -> None:
    """Print what an optimizer step takes, and the GPU time of each kind of work in it, largest first."""
    steps = [
        (_describe(arm), batch)
        for arm in arms
        for batch in (arm["batches"] if all_batches else filter(None, [_fastest_batch(arm)]))
        if "gpu_seconds_by_kind" in batch
    ]
    totals: dict[str, float] = {}
    shares: dict[str, float] = {}
    for _, batch in steps:
        for kind, seconds in batch["gpu_seconds_by_kind"].items():
            totals[kind] = totals.get(kind, 0.0) + seconds
            shares[kind] = max(shares.get(kind, 0.0), seconds / batch["gpu_seconds"])
    kinds = sorted((kind for kind in totals if shares[kind] > _LEAST_SHARE), key=lambda kind: -totals[kind])
    rows = []
    for name, batch in steps:
        by_kind = batch["gpu_seconds_by_kind"]
        cells = [by_kind.get(kind, 0.0) for kind in kinds]
        times = [batch["step_seconds"], batch["gpu_seconds"], *cells, batch["gpu_seconds"] - sum(cells)]
        rows.append([name, _batch_cell(batch), *(f"{1000 * seconds:,.1f}" for seconds in times)])
    click.echo("Milliseconds of an optimizer step, of the GPU in it, and of each kind of work on the GPU:")
    head = ["configuration", "batch × acc", "step", "GPU", *(kind.replace("_", " ") for kind in kinds), "other"]
    print_table(head, rows, right=head[2:])


def _compare(documents: list[dict[str, Any]]) -> None:
    """Print a line for each GPU with its best configuration."""
    from autotune.core.units import format_rate

    rows = []
    for document in documents:
        best = document["best"]
        if best is None:
            rows.append([document["gpu"], "", "", "", ""])
        else:
            low, high = best["samples_per_second_interval"]
            interval = f"{format_rate(low)} to {format_rate(high)}"
            speed = [format_rate(best["samples_per_second"]), interval, best["limited_by"]]
            rows.append([document["gpu"], f"{_batch_cell(best)}  {_describe(best)}", *speed])
    print_table(["GPU", "choose", "samples/s", "interval", "limited by"], rows)
    click.echo("")


def _every_batch(arm: dict[str, Any], line_bytes: int, anatomy: bool, speed: list[str]) -> list[list[str]]:
    """Return the rows of one configuration, which is named in the first."""
    rows = []
    name = _describe(arm)
    for batch in arm["batches"]:
        fits = "yes" if batch["fits"] else "no"
        peak = [*_peak_cells(batch, line_bytes), fits, *_speed_cells(batch, speed)]
        rows.append([name, _batch_cell(batch), *peak, *_parts(batch, anatomy)])
        name = ""
    return rows


def _chosen_batch(arm: dict[str, Any], line_bytes: int, anatomy: bool, speed: list[str]) -> list[str]:
    """Return the row of the fastest batch that fits, or of the largest where speed is not predicted.

    Where none fits, it is the batch with the lowest peak.
    """
    fastest = _fastest_batch(arm)
    if fastest is not None:
        shown = fastest
        cell = _batch_cell(shown)
    elif arm["batches"]:
        shown = min(arm["batches"], key=lambda batch: int(batch["peak_reserved_bytes"]))
        cell = f"none; {_batch_cell(shown)} needs"
    else:
        empty = len(speed) + (len(_ORDER) if anatomy else 0)
        return [_describe(arm), "not predicted", "", "", "", *([""] * empty)]
    speeds = _speed_cells(shown, speed) if fastest is not None else [""] * len(speed)
    return [_describe(arm), cell, *_peak_cells(shown, line_bytes), *speeds, *_parts(shown, anatomy)]


def _fastest_batch(arm: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fastest batch that fits, or the largest where speed is not predicted; ``None`` where none fits."""
    fitting = [batch for batch in arm["batches"] if batch["fits"]]
    order = [(batch.get("samples_per_second", 0.0), int(batch["per_device_train_batch_size"])) for batch in fitting]
    return fitting[order.index(max(order))] if fitting else None


def _speed_cells(batch: dict[str, Any], speed: list[str]) -> list[str]:
    from autotune.core.units import format_rate

    if not speed or "samples_per_second" not in batch:
        return [""] * len(speed)
    return [format_rate(batch["samples_per_second"]), f"{batch['model_flops_utilization']:.0%}", batch["limited_by"]]


def _describe(arm: dict[str, Any]) -> str:
    from autotune.core.candidate import Arm

    names = ("precision", "gradient_checkpointing", "attn_implementation", "optim", "strategy", "ranks")
    return Arm(**{name: arm[name] for name in (*names, "sync_each_batch")}).describe()


def _batch_cell(batch: dict[str, Any]) -> str:
    return f"{batch['per_device_train_batch_size']} × {batch['gradient_accumulation_steps']}"


def _peak_cells(batch: dict[str, Any], line_bytes: int) -> list[str]:
    from autotune.core.units import format_bytes

    allocated, reserved = batch["peak_allocated_bytes"], batch["peak_reserved_bytes"]
    return [format_bytes(allocated), format_bytes(reserved), f"{reserved / line_bytes:.0%}"]


def _parts(batch: dict[str, Any], anatomy: bool) -> list[str]:
    from autotune.core.units import format_bytes

    return [format_bytes(batch["anatomy_bytes"].get(part, 0)) for part in _ORDER] if anatomy else []

"""``autotune predict``: what fits, for people with no GPU at hand."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import BYTES, HEADROOM, json_option, print_json, words
from autotune.cli.table import print_table
from autotune.errors import InvalidRequestError

if TYPE_CHECKING:
    from autotune.device import Ceiling
    from autotune.device.chips import Chip
    from autotune.memory import MemoryModel
    from autotune.space import Space

# Measured against recorded peaks; see studies/landscapes and tests/test_predicted_memory.py.
ACCURACY = (
    "on 12 models on an H200 the peak of allocated bytes was predicted within 0.02 % in the median, "
    "within 1.4 % on eleven of them and 4.9 % on one"
)
_ORDER = ("weights", "gradients", "optimizer", "activations", "inputs", "workspaces")


@click.command()
@click.option("--model", required=True, help="Catalog name (autotune models), folder with a config.json, or hub name.")
@click.option("--effective-batch", type=int, help="Per-device batch × accumulation × world size.")
@click.option("--memory-limit", type=BYTES, help="Memory of the GPU, e.g. 24GiB.")
@click.option("--gpu", "gpus", type=words(), help="GPUs by name, e.g. rtx-3090,v100-16gb,a100-80gb.")
@click.option("--task", help="What is trained; told from the architecture if left out.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens a sample [default: 512 or the model's maximum].")
@click.option("--headroom", type=HEADROOM, help="Kept free below the limit, e.g. 5% or 1GiB [default: 3%].")
@click.option("--precision", type=words(("fp32", "tf32", "fp16", "bf16")), help="E.g. bf16,tf32 [default: all].")
@click.option("--gradient-checkpointing", type=click.Choice(("auto", "on", "off")), default="auto", show_default=True)
@click.option("--attn", type=words(), help="Attention implementations, e.g. sdpa,eager [default: sdpa].")
@click.option("--optim", type=words(), default="adamw_torch_fused", show_default=True, help="TrainingArguments.optim.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32", show_default=True)
@click.option("--batch-multiple", type=int, help="Per-device batches are multiples of this, strictly [default: 8].")
@click.option("--world-size", type=int, default=1, show_default=True, help="Do the arithmetic of so many devices.")
@click.option("--anatomy", is_flag=True, help="Show what each peak consists of.")
@json_option
def predict(as_json: bool, anatomy: bool, gpus: tuple[str, ...] | None, **options: Any) -> None:
    """Predict which batches fit on a GPU that is not at hand, without running anything on one.

    \b
      autotune predict --model bert-large-uncased --effective-batch 64 --gpu rtx-3090
      autotune predict --model gpt2-medium --seq-len 1024 --memory-limit 24GiB --anatomy
    """
    documents = [_predicted(chip, options) for chip in _chips(gpus, options["memory_limit"])]
    if as_json:
        print_json({"predicted": True, "accuracy": ACCURACY, "gpus": documents, "arms": documents[0]["arms"]})
        return
    for document in documents:
        _print(document, anatomy)
    click.echo(f"Predicted, not measured: {ACCURACY}.", err=True)


def _chips(names: tuple[str, ...] | None, limit_bytes: int | None) -> list[tuple[Chip, int]]:
    """The chips to predict for, each with the memory that may be used of it."""
    from autotune.device.chips import CHIPS, Chip
    from autotune.units import format_bytes

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
            raise InvalidRequestError(
                f"--gpu {name!r} is not known", f"known are {', '.join(CHIPS)}; or --memory-limit"
            )
        if limit_bytes is not None and limit_bytes > chip.memory_bytes:
            raise InvalidRequestError(
                f"--memory-limit {format_bytes(limit_bytes)} is more than the {format_bytes(chip.memory_bytes)} "
                f"of {chip.name}",
                "leave it out, or lower it",
            )
        found.append((chip, limit_bytes or chip.memory_bytes))
    return found


def _predicted(target: tuple[Chip, int], options: dict[str, Any]) -> dict[str, Any]:
    """One chip's predictions, as a document."""
    from autotune.device import Device, Headroom, find_device
    from autotune.device.chips import TYPICAL_CONTEXT_BYTES
    from autotune.forecast import Forecast
    from autotune.memory import questions
    from autotune.options import build_workload
    from autotune.preparation import prepare
    from autotune.request import SearchRequest
    from autotune.runner import LocalRunner

    chip, limit_bytes = target
    stand_in = Device("cuda", 0, chip.name, chip.name, limit_bytes, None, 0, limit_bytes, capability=chip.capability)
    request = SearchRequest(
        workload=build_workload(options),
        device=stand_in,
        effective_batch=options["effective_batch"],
        world_size=options["world_size"],
        batch_multiple=options["batch_multiple"],
        precisions=options["precision"],
        gradient_checkpointing=options["gradient_checkpointing"],
        attn_implementations=options["attn"],
        optims=options["optim"] if isinstance(options["optim"], tuple) else (options["optim"],),
        memory_limit_bytes=limit_bytes,
        headroom=options["headroom"] or Headroom(),
    )
    request.check()
    with (
        tempfile.TemporaryDirectory(prefix="autotune-predict-") as logs,
        LocalRunner(find_device("cpu"), request.workload, Path(logs)) as runner,
    ):
        prepared = prepare(request, {**runner.inspect(), "context_bytes": TYPICAL_CONTEXT_BYTES})
        space, ceiling = prepared.space, prepared.ceiling
        pairs = [(batch, space.batches.accumulation(batch)) for batch in _batches(space)]
        multiple = space.batches.levels()[0] if space.batches.effective_batch is None else None
        asked = questions(space.arms, pairs, multiple)
        forecast = Forecast(runner, asked, chip, ceiling, parallel=os.cpu_count() or 1)
        forecast.complete()
    return {
        "gpu": chip.name,
        "workload": {k: v for k, v in request.workload.document().items() if k != "config"},
        "ceiling_bytes": ceiling.cap_bytes,
        "line_bytes": ceiling.line_bytes,
        "arms": [_arm_document(arm, space, forecast.model, ceiling) for arm in space.arms],
    }


def _batches(space: Space) -> list[int]:
    """Every batch of an effective batch; none by name where the batch is free: the largest is looked for."""
    if space.batches.effective_batch is None:
        return []
    return sorted(batch for level in space.batches.levels() for batch in space.batches.at_level(level))


def _arm_document(arm: Any, space: Space, model: MemoryModel, ceiling: Ceiling) -> dict[str, Any]:
    from autotune.trial import Candidate

    largest = model.largest_batch(arm)
    free = space.batches.effective_batch is None
    wanted = [(b, 1) for b in model.batches(arm, accumulates=False)] if free else []
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
                    "fits": prediction.fits,
                    "anatomy_bytes": prediction.anatomy,
                }
            )
    parameters = {name: value for name, value in Candidate(arm, 1).parameters().items() if "batch" not in name}
    parameters.pop("gradient_accumulation_steps")
    if not free:
        largest = max((row["per_device_train_batch_size"] for row in rows if row["fits"]), default=0)
    return {**parameters, "largest_batch": largest, "batches": rows}


def _print(document: dict[str, Any], anatomy: bool) -> None:
    from autotune.units import format_bytes

    workload = document["workload"]
    click.echo(
        f"{workload['model']} ({workload['task']}, {workload['seq_len']} tokens) on {document['gpu']}: "
        f"{format_bytes(document['ceiling_bytes'])} to reserve, {format_bytes(document['line_bytes'])} with headroom"
    )
    head = ["configuration", "batch × acc", "allocated", "reserved", "fits"]
    rows = []
    for arm in document["arms"]:
        from autotune.trial import Arm

        name = Arm(arm["precision"], arm["gradient_checkpointing"], arm["attn_implementation"], arm["optim"]).describe()
        for row in arm["batches"]:
            cells = [
                name,
                f"{row['per_device_train_batch_size']} × {row['gradient_accumulation_steps']}",
                format_bytes(row["peak_allocated_bytes"]),
                format_bytes(row["peak_reserved_bytes"]),
                "yes" if row["fits"] else "no",
            ]
            cells += [format_bytes(row["anatomy_bytes"].get(part, 0)) for part in _ORDER] if anatomy else []
            rows.append(cells)
            name = ""
    print_table(head + (list(_ORDER) if anatomy else []), rows)
    click.echo("")

"""``autotune search``: its options, and the request that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autotune.cli.options import (
    BYTES,
    COUNT,
    HEADROOM,
    SECONDS,
    SEED,
    SHARE,
    SectionedCommand,
    json_option,
    storage_option,
    wait_option,
    words,
)

if TYPE_CHECKING:
    from autotune.request import SearchRequest

_TASKS = (
    "sequence-classification",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
    "image-classification",
    "speech-seq2seq",
)


class _SearchCommand(SectionedCommand):
    sections = {  # noqa: RUF012
        "What is trained": ("model", "effective_batch", "task", "seq_len", "padding", "dtype", "pretrained"),
        "On what": ("device", "memory_limit", "headroom", "world_size"),
        "What is tried": ("precision", "gradient_checkpointing", "attn", "optim", "batch_multiple"),
        "How it is searched": (
            "objective",
            "trials",
            "time_budget",
            "trial_timeout",
            "no_baseline",
            "sampler",
            "seed",
        ),
        "Where it goes": ("study", "storage", "wait", "as_json"),
    }


@click.command(cls=_SearchCommand, short_help="Search for the fastest configuration.")
@click.option(
    "--model",
    metavar="NAME|FOLDER",
    required=True,
    help="Catalog name (autotune models), folder with a config.json, or hub name.",
)
@click.option(
    "--effective-batch",
    type=COUNT,
    help="Per-device batch × accumulation × world size, kept exactly. Without it accumulation is 1 and the batch free.",
)
@click.option(
    "--task",
    type=click.Choice(_TASKS),
    metavar="TASK",
    help=f"One of {', '.join(_TASKS)} [default: as the architecture says].",
)
@click.option("--seq-len", type=COUNT, help="Tokens a sample [default: 512 or the model's maximum].")
@click.option(
    "--padding",
    type=SHARE,
    help="Mean share of each text sample that is padding, with a real attention_mask [default: 0].",
)
@click.option("--memory-limit", type=BYTES, help="Search as if the device had no more, e.g. 24GiB [default: all free].")
@click.option("--headroom", type=HEADROOM, help="Kept free below the limit, e.g. 5% or 1GiB [default: 3%].")
@click.option(
    "--precision",
    type=words(("fp32", "tf32", "fp16", "bf16")),
    help="E.g. bf16,tf32 [default: all that the device has].",
)
@click.option(
    "--gradient-checkpointing",
    type=click.Choice(("auto", "on", "off")),
    default="auto",
    show_default=True,
    help="Both ways, always, never.",
)
@click.option(
    "--attn", type=words(), help="Attention implementations, e.g. sdpa,eager [default: sdpa if there is one]."
)
@click.option(
    "--optim", type=words(), default="adamw_torch_fused", show_default=True, help="Values of TrainingArguments.optim."
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16", "float16")),
    default="float32",
    show_default=True,
    help="What the weights are stored in; precision is the autocast over it.",
)
@click.option("--batch-multiple", type=COUNT, help="Per-device batches are multiples of it [default: 8, then 4, 2, 1].")
@click.option("--world-size", type=COUNT, default="1", show_default=True, help="Do the arithmetic of so many devices.")
@click.option(
    "--objective",
    type=click.Choice(("throughput", "max-batch")),
    default="throughput",
    show_default=True,
    help="The most samples a second, or the largest batch that fits.",
)
@click.option("--trials", type=COUNT, help="Run at most so many trials.")
@click.option("--time-budget", type=SECONDS, help="Start no trial after this long, e.g. 5m.")
@click.option("--trial-timeout", type=SECONDS, default="3m", show_default=True, help="Time limit of one trial.")
@click.option(
    "--device",
    metavar="NAME|UUID",
    help="cuda:0, cpu or a GPU's UUID [default: the first GPU, else the CPU].",
)
@click.option(
    "--sampler",
    type=click.Choice(("autotune", "grid", "tpe", "random")),
    default="autotune",
    show_default=True,
    help="What proposes candidates: autotune's own, or one of Optuna's.",
)
@click.option("--study", metavar="NAME", help="Name of the study; an existing one is continued [default: made up].")
@storage_option
@wait_option
@click.option(
    "--seed",
    type=SEED,
    default="42",
    show_default=True,
    help="Of the sampler, the weights and the data.",
)
@click.option("--pretrained", is_flag=True, help="Load real weights; speed and memory do not depend on them.")
@click.option("--no-baseline", is_flag=True, help="Do not measure the TrainingArguments defaults for comparison.")
@json_option
@click.pass_context
def search(ctx: click.Context, /, as_json: bool, storage: str, wait: bool, **options: Any) -> None:
    """Search for the fastest configuration by running real training steps.

    \b
      autotune search --model bert-large-uncased --effective-batch 64
      autotune search --model gpt2 --effective-batch 64 --memory-limit 24GiB
      autotune search --model bert-large-uncased --objective max-batch
    """
    request = _request(options)
    request.check()
    search_and_print(ctx, request, storage, wait=wait, as_json=as_json)


def search_and_print(ctx: click.Context, request: SearchRequest, storage: str, *, wait: bool, as_json: bool) -> None:
    """Run a search that is new or goes on, print its result, and say with the exit code whether it was interrupted."""
    from autotune.cli.session import print_result, run_search

    study, report = run_search(request, storage, wait=wait)
    is_named = ctx.get_parameter_source("storage") is ParameterSource.COMMANDLINE
    print_result(report, as_json=as_json, storage=storage if is_named else None)
    if study.state == "interrupted":
        from autotune.cli.main import INTERRUPTED

        ctx.exit(INTERRUPTED)


def _request(options: dict[str, Any]) -> SearchRequest:
    """The options as a request; every error that needs no process to be seen is raised here or by its ``check``."""
    from autotune.cli.workload import build_workload
    from autotune.device import Headroom, find_device
    from autotune.request import SearchRequest

    workload = build_workload(options)
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
        optims=options["optim"],
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

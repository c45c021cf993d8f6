"""``autotune search``: its options, and the request that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autotune.cli.data import data_options
from autotune.cli.options import (
    BYTES,
    COUNT,
    SECONDS,
    SEED,
    SHARE,
    SectionedCommand,
    json_option,
    storage_option,
    wait_option,
)
from autotune.cli.workload_options import workload_options
from autotune.core.dataset_spec import DATA_OPTIONS

if TYPE_CHECKING:
    from autotune.tuning.request import SearchRequest


class _SearchCommand(SectionedCommand):
    sections = {  # noqa: RUF012
        "What is trained": (
            "model",
            "trainer",
            "effective_batch",
            "task",
            "seq_len",
            "padding",
            "dtype",
            "pretrained",
            "peft",
            "lora_rank",
            "quantize",
        ),
        "Your data": DATA_OPTIONS,
        "On what": ("device", "memory_limit", "headroom", "world_size"),
        "What is tried": (
            "precision",
            "gradient_checkpointing",
            "attn",
            "optim",
            "expandable_segments",
            "torch_compile",
            "liger",
            "cpu_affinity",
            "batch_multiple",
        ),
        "How it is searched": (
            "objective",
            "trials",
            "time_budget",
            "trial_timeout",
            "no_baseline",
            "verify",
            "fresh",
            "tolerance",
            "sampler",
            "seed",
        ),
        "Where it goes": ("study", "storage", "wait", "as_json"),
    }


@click.command(cls=_SearchCommand, short_help="Search for the fastest configuration.")
@workload_options(
    *("model", "effective_batch", "task", "seq_len", "padding", "dtype", "peft", "lora_rank", "headroom", "world_size"),
    *("precision", "gradient_checkpointing", "attn", "optim", "batch_multiple"),
    effective_batch="A Trainer or script of your own keeps its own.",
    optim="Your own code keeps its own.",
)
@click.option(
    "--trainer",
    metavar="FILE:FUNCTION",
    help="In place of a model: train.py:build, where build(overrides: dict) returns your own Trainer.",
)
@data_options
@click.option("--memory-limit", type=BYTES, help="Search as if the device had no more, e.g. 24GiB [default: all free].")
@click.option(
    "--expandable-segments",
    type=click.Choice(("auto", "on", "off")),
    help="CUDA's allocator: where memory limits the best, always, never "
    "[default: off, or on where PYTORCH_ALLOC_CONF says so].",
)
@click.option(
    "--torch-compile",
    type=click.Choice(("auto", "on", "off")),
    default="off",
    show_default=True,
    help="The best candidate at the end, everything, nothing.",
)
@click.option(
    "--liger",
    type=click.Choice(("auto", "on", "off")),
    default="off",
    show_default=True,
    help="Liger's kernels: both ways, always, never.",
)
@click.option(
    "--cpu-affinity",
    type=click.Choice(("auto", "on", "off")),
    default="auto",
    show_default=True,
    help="All threads on one CPU core: the best candidate where it waits for the host, everything, nothing.",
)
@click.option(
    "--quantize", type=click.Choice(("4bit", "8bit")), help="Store the frozen weights so, through bitsandbytes."
)
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
@click.option("--verify", is_flag=True, help="At the end, have a stock Trainer show that the result is true.")
@click.option(
    "--tolerance",
    type=SHARE,
    default="0.01",
    show_default=True,
    help="A gain in samples/s that is not worth a trial; between two that were measured in turn, none at all.",
)
@click.option("--fresh", is_flag=True, help="Measure everything anew, reuse nothing that earlier searches measured.")
@json_option
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT ...]")
@click.pass_context
def search(ctx: click.Context, /, as_json: bool, storage: str, wait: bool, **options: Any) -> None:
    """Search for the fastest configuration by running real training steps.

    \b
      autotune search --model bert-large-uncased --effective-batch 64
      autotune search --model gpt2 --effective-batch 64 --memory-limit 24GiB
      autotune search --model bert-large-uncased --objective max-batch
      autotune search --trainer train.py:build --effective-batch 64
      autotune search --effective-batch 64 -- python run_glue.py --do_train --output_dir out
    """
    from autotune.tuning.options import build_request

    verifies = options.pop("verify")
    given = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    request = build_request(options, given)
    request.check()
    if verifies:
        from autotune.verify.target import check_can_be_verified

        check_can_be_verified(request.workload.document())
    search_and_print(ctx, request, storage, wait=wait, verifies=verifies, as_json=as_json)


def search_and_print(
    ctx: click.Context,
    request: SearchRequest,
    storage: str,
    *,
    wait: bool,
    as_json: bool,
    verifies: bool = False,
) -> None:
    """Run a search that is new or goes on, print its result, and say with the exit code whether it was interrupted."""
    from autotune.cli.session import print_result, run_search

    study, report = run_search(request, storage, wait=wait)
    is_named = ctx.get_parameter_source("storage") is ParameterSource.COMMANDLINE
    shown_storage = storage if is_named else None
    if study.state == "interrupted":
        from autotune.cli.main import INTERRUPTED

        print_result(report, as_json=as_json, storage=shown_storage)
        ctx.exit(INTERRUPTED)
    if verifies:
        from autotune.cli.verify import print_verified

        print_verified(report, storage, as_json=as_json, shown_storage=shown_storage)
    else:
        print_result(report, as_json=as_json, storage=shown_storage)

"""The options about the user's own data, what they mean together, and reading it before a search."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import COUNT, words
from autotune.errors import InvalidRequestError

if TYPE_CHECKING:
    from autotune.data import DataSpec
    from autotune.model_source import ModelSource
    from autotune.request import SearchRequest
    from autotune.runner import LocalRunner
    from autotune.workload import Task

DATA_OPTIONS = (
    "dataset",
    "split",
    "text_column",
    "label_column",
    "image_column",
    "tokenizer",
    "pad_to_max_length",
    "pad_to_multiple_of",
    "group_by_length",
)
"""Their names, in the order in which help shows them."""

_OPTIONS = (
    click.option(
        "--dataset",
        metavar="FILE|FOLDER|NAME",
        help="Your samples: jsonl, csv, parquet, a folder of images or from save_to_disk, NAME[:CONFIG] on the hub "
        "[default: samples are made up].",
    ),
    click.option("--split", metavar="NAME", help="Of the dataset [default: train]."),
    click.option(
        "--text-column",
        type=words(),
        help="Column of the text, two for pairs [default: text, sentence or the only one].",
    ),
    click.option(
        "--label-column",
        metavar="NAME",
        help="Column of classes or numbers; of target texts for seq2seq [default: label, labels or target].",
    ),
    click.option("--image-column", metavar="NAME", help="Column of the images [default: image or img]."),
    click.option(
        "--tokenizer", metavar="FOLDER|NAME", help="Where the tokenizer is [default: where the model's files are]."
    ),
    click.option(
        "--pad-to-max-length",
        is_flag=True,
        help="Pad to --seq-len [default: to the longest of a batch, as DataCollatorWithPadding does].",
    ),
    click.option("--pad-to-multiple-of", type=COUNT, help="Pad on to a multiple of this."),
    click.option(
        "--group-by-length", is_flag=True, help="Batches of like lengths: train_sampling_strategy=group_by_length."
    ),
)


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the options about data."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def build_data(options: dict[str, Any], source: ModelSource, task: Task) -> DataSpec | None:
    """The data that the options name; ``None`` where samples are made up. Nothing is read yet."""
    from autotune.data import DataSpec, locate, tokenizer_content

    name = options.get("dataset")
    if name is None:
        for option in DATA_OPTIONS:
            if options.get(option):
                raise InvalidRequestError(
                    f"--{option.replace('_', '-')} is about data, and none is given", "give --dataset"
                )
        return None
    _check_meaning(options, task)
    split = options["split"] or "train"
    path, kind, content = locate(name, split)
    tokenizer = None
    if task != "image-classification":
        tokenizer = options["tokenizer"] or source.path or source.repository or source.name
    return DataSpec(
        source=path,
        kind=kind,
        content=content,
        tokenizer_content=tokenizer_content(tokenizer) if tokenizer else None,
        split=split,
        text_columns=options["text_column"],
        label_column=options["label_column"],
        image_column=options["image_column"],
        tokenizer=tokenizer,
        padding="max_length" if options["pad_to_max_length"] else "longest",
        pad_to_multiple_of=options["pad_to_multiple_of"],
        group_by_length=options["group_by_length"],
    )


def _check_meaning(options: dict[str, Any], task: Task) -> None:
    """Raise for what does not go with data, or not with this task."""
    name = options["dataset"]
    if task == "speech-seq2seq":
        raise InvalidRequestError(f"--dataset {name}: speech is measured with samples that are made up", "leave it out")
    if options.get("padding"):
        raise InvalidRequestError(
            f"--padding {options['padding']:g} is for samples that are made up; --dataset has lengths of its own",
            "leave --padding out",
        )
    image_only, text_only = ("image_column",), ("text_column", "tokenizer", "pad_to_max_length", "pad_to_multiple_of",
                                                "group_by_length")  # fmt: skip
    foreign = text_only if task == "image-classification" else image_only
    for option in foreign:
        if options.get(option):
            raise InvalidRequestError(f"--{option.replace('_', '-')} means nothing to {task}", "leave it out")
    columns = options["text_column"] or ()
    if len(columns) > (2 if task == "sequence-classification" else 1):
        raise InvalidRequestError(f"--text-column {','.join(columns)} is too many for {task}", "a pair is the most")


def read_data(request: SearchRequest, runner: LocalRunner, logs: Path, note: Callable[[str], None]) -> SearchRequest:
    """The request with what its data has shown, read in a process for trials; the same where it has no data.

    Raises ``InvalidRequestError`` where the data is no good or too little.
    """
    from autotune.data import describe_lengths

    data = request.workload.data
    if data is None:
        return request
    note(f"reading {data.label} …")
    workload = request.workload
    vocabulary = workload.config.get("vocab_size")
    asked = [data.identity(), workload.seq_len, workload.task, vocabulary]
    key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    # Beside the studies' logs, where other searches on the same data find it; no study has a name with a dot first.
    folder = logs / ".data" / key
    workload = runner.read_data(folder)
    request = dataclasses.replace(request, workload=workload)
    facts = workload.data.facts if workload.data else None
    assert facts is not None
    needed = request.effective_batch or request.batches.levels()[-1]
    if facts.samples < needed:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()
        option = "--effective-batch" if request.effective_batch else "--batch-multiple"
        raise InvalidRequestError(
            f"--dataset {data.label} has {facts.samples} samples, less than one step of {option} {needed}",
            f"use {option} {facts.samples} or less, or more data",
        )
    if facts.lengths is not None:
        note(describe_lengths(facts.lengths))
    return request

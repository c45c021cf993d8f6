"""The options about the user's own data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from autotune.cli.options import COUNT, words

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

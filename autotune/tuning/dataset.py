"""Prepare the user's own dataset before a search, and check that it is large enough for a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.core.dataset_spec import DataFacts, describe_lengths, describe_packing
from autotune.core.errors import InvalidRequestError
from autotune.execution import TrialServer
from autotune.models.tasks import max_seq_len
from autotune.tuning.request import SearchRequest


def read_data(
    request: SearchRequest, servers: Sequence[TrialServer], logs: Path, note: Callable[[str], None]
) -> SearchRequest:
    """Return the request with the facts of its dataset, which a worker process reads; unchanged without a dataset.

    The first server reads it; the trials of all servers map what it has written.
    Raises ``InvalidRequestError`` where the dataset is not valid, too small, or padded beyond what the model allows.
    """
    data = request.workload.data
    if data is None:
        return request
    note(f"reading {data.label} …")
    workload = request.workload
    folder = workload.data_folder(logs)
    was_there = folder.exists()
    first, *others = servers
    workload = first.read_data(folder)
    request = dataclasses.replace(request, workload=workload)
    facts = workload.data.facts if workload.data else None
    assert facts is not None
    try:
        _check_read(request, facts)
    except InvalidRequestError:
        if not was_there:
            first.discard_data()
        raise
    for server in others:
        server.read_data(folder)
    if facts.packed is not None:
        note(describe_lengths(facts.packed.lengths))
        note(describe_packing(facts))
    elif facts.lengths is not None:
        note(describe_lengths(facts.lengths))
    return request


def _check_read(request: SearchRequest, facts: DataFacts) -> None:
    """Raise ``InvalidRequestError`` where the dataset is too small for one step, or padded beyond the model's limit."""
    workload = request.workload
    data = workload.data
    assert data is not None
    needed = request.effective_batch or request.batches.levels()[-1]
    if facts.samples < needed:
        option = request.batches.option if request.effective_batch else "--batch-multiple {}".format
        counted = "samples" if facts.packed is None else "rows"
        raise InvalidRequestError(
            f"--dataset {data.label} has {facts.samples} {counted}, less than one step of {option(needed)}",
            f"use {option(facts.samples)} or less, or more data",
        )
    limit = max_seq_len(workload.config)
    if facts.lengths is None or limit is None:
        return
    longest = max(facts.lengths.in_batches[1], facts.lengths.longest_target or 0)
    padded = data.padded(longest, workload.seq_len)
    if padded > limit:
        raise InvalidRequestError(
            f"--pad-to-multiple-of {data.pad_to_multiple_of} pads samples to {padded} tokens, more than the {limit} "
            f"positions of {workload.model}",
            f"use one that divides {limit}, or leave --pad-to-multiple-of out",
        )

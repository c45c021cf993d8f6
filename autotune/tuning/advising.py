"""Compare GPUs to rent for a training job: what ``autotune advise`` says, as JSON and as text."""

from __future__ import annotations

import functools
from typing import Any

from autotune.core.candidate import Arm, Document
from autotune.core.chip import Chip
from autotune.core.prediction import Operations
from autotune.core.schema import encode
from autotune.devices.gpus import ALIASES, find_chip
from autotune.devices.prices import read_prices
from autotune.estimate.grades import Grades
from autotune.estimate.memory import MemoryModel
from autotune.results.advice_text import advice_lines, grade_lines
from autotune.results.predicted import advice_document
from autotune.results.prediction_text import experts_line
from autotune.space.space import Batches
from autotune.tuning.answer_cache import AnswerCache
from autotune.tuning.measured import measured_pools
from autotune.tuning.offers import Job, best_offer, model_of, models_of
from autotune.tuning.options import build_workload, with_effective_batch
from autotune.tuning.predictions import known_chips


def advised(
    gpu: tuple[str, ...] | None,
    gpu_counts: tuple[int, ...],
    gpu_spec: str | None,
    price: tuple[str, ...] | None,
    prices: str | None,
    samples: float,
    storage: str,
    options: dict[str, Any],
    columns: int | None,
) -> Document:
    """Return ``advice`` (what ``--json`` prints), the ``lines`` of its text, and ``notes`` on how it is known.

    The table of the text has so many ``columns``.
    """
    tokens = options.get("effective_tokens")
    if tokens is not None:
        workload = build_workload({**options, "world_size": 1})
        options = {**with_effective_batch(options, workload), "effective_tokens": None}
    for count in gpu_counts:
        # Raises where the effective batch cannot be shared.
        Batches(options["effective_batch"], count, sample_tokens=workload.seq_len if tokens is not None else None)
    known = known_chips(gpu_spec)
    chips = list(known.values()) if gpu in (None, ("all",)) else [find_chip(name, known) for name in gpu or ()]
    aliases = {alias: name for alias, name in ALIASES.items() if name in known}
    paid = read_prices(price or (), prices, {**{name: name for name in known}, **aliases})
    with AnswerCache(storage) as answers:
        for saves_memory in (False, True):
            prepared, models = models_of(chips, options, answers, gpu_counts, saves_memory=saves_memory)
            workload = prepared.request.workload
            grades = Grades(measured_pools(storage, workload), functools.partial(_operations, models))
            job = Job(prepared, models, grades, samples)
            offers = [best_offer(chip, count, job, paid.of.get(chip.name)) for chip in chips for count in gpu_counts]
            refused = [offer for offer in offers if offer.graded is None and offer.gpus == 1 and offer.chip.rates]
            if not refused or not prepared.space.saving_arms:
                # What saves memory is for GPUs on which nothing fits without.
                break
    unquantized = prepared.unquantized_bytes
    notes = [f"Not quantized: {experts_line(unquantized, workload.dtype)}."] if unquantized else []
    return {
        "advice": encode(advice_document(offers, workload, samples, paid)),
        "lines": advice_lines(offers, workload, options["effective_batch"], samples, paid, columns),
        "notes": [*notes, *grade_lines(offers, workload.quantize, options.get("optim") or ())],
    }


def _operations(models: dict[bool, MemoryModel], arm: Arm, chip: Chip) -> Operations | None:
    """Return what a step consists of on a GPU; ``None`` where that is not predicted."""
    model = model_of(arm, chip, models)
    return model.operations(arm) if model is not None else None

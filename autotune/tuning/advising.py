"""Compare GPUs to rent for a training job, from predictions alone: what ``autotune advise`` says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autotune.core.candidate import PRECISIONS, Arm, Candidate, Document
from autotune.core.ceiling import PREDICTION_MARGIN, Ceiling
from autotune.core.device import Chip, precisions_of
from autotune.core.errors import InvalidRequestError, StorageError
from autotune.core.prediction import Operations
from autotune.core.schema import encode
from autotune.core.units import format_bytes
from autotune.core.workload import Workload
from autotune.devices.gpus import ALIASES, CHIPS, TYPICAL_CONTEXT_BYTES, chip_of_device, find_chip, read_prices
from autotune.estimate.advice import Grades, Offer
from autotune.estimate.memory import MemoryModel
from autotune.estimate.pooling import Pool, Tried
from autotune.estimate.step_time import StepTime, StepTimeModel
from autotune.results.predicted import advice_document
from autotune.results.prediction_text import advice_lines, experts_line, grade_lines
from autotune.space.arms import why_unpredictable
from autotune.space.levers import HALF
from autotune.space.space import Batches
from autotune.store.repository import measured_trials
from autotune.tuning.answer_cache import AnswerCache
from autotune.tuning.options import build_workload, in_usual_dtype, with_effective_batch
from autotune.tuning.predictions import batches_of, known_chips, of_ranks, predictions
from autotune.tuning.prepare import Prepared

_LOCK_TIMEOUT_SECONDS = 5.0


def measured_pools(storage: str, workload: Workload) -> dict[str, Pool]:
    """Return the recorded completed trials of a workload, pooled for each kind of GPU, by the name of its chip.

    Disturbed and shortened trials count like others: their own spread is part of the interval. Empty where the database
    is unreadable.
    """
    try:
        found = measured_trials(storage, workload.fingerprint(), _LOCK_TIMEOUT_SECONDS)
    except StorageError:
        return {}
    tried: dict[str, list[Tried]] = {}
    for trial in found:
        chip = chip_of_device(trial.device_name)
        if chip is not None and chip.rates is not None:
            tried.setdefault(chip.name, []).append(Tried(trial.id, trial.candidate, trial.outcome))
    return {name: Pool(trials) for name, trials in tried.items()}


_PLENTY_BYTES = 2**42
"""Memory of a GPU that stands for all of its kind (``_models_of``), so that no candidate is left out for want of it."""


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
    """Compare GPUs for a training; return ``advice`` (what ``--json`` prints), its text's ``lines``, and ``notes``.

    ``gpu`` names GPUs (``None`` or ``all``: all known), each in all ``gpu_counts``; ``gpu_spec`` is a file with further
    ones. ``price`` and the file ``prices`` say what they cost. The training has so many ``samples`` and these other
    ``options``. ``storage`` has measured trials and cached predictions. The table is at most ``columns`` wide.
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
            prepared, models = _models_of(chips, options, answers, gpu_counts, saves_memory=saves_memory)
            workload = prepared.request.workload

            def operations_of(arm: Arm, chip: Chip, models: dict[bool, MemoryModel] = models) -> Operations | None:
                model = _model_of(arm, chip, models)
                return model.operations(arm) if model is not None else None

            grades = Grades(measured_pools(storage, workload), operations_of)
            job = _Job(prepared, models, grades, samples)
            offers = [_best_offer(chip, count, job, paid.of.get(chip.name)) for chip in chips for count in gpu_counts]
            refused = [offer for offer in offers if offer.graded is None and offer.gpus == 1 and offer.chip.rates]
            if not refused or not prepared.space.saving_arms:
                # Arms that save memory are for GPUs on which nothing else fits.
                break
    unquantized = prepared.unquantized_bytes
    notes = [f"Not quantized: {experts_line(unquantized, workload.dtype)}."] if unquantized else []
    return {
        "advice": encode(advice_document(offers, workload, samples, paid)),
        "lines": advice_lines(offers, workload, options["effective_batch"], samples, paid, columns),
        "notes": [*notes, *grade_lines(offers, workload.quantize, options.get("optim") or ())],
    }


@dataclass(frozen=True)
class _Job:
    """The training to find a GPU for, with predictions and measurements of its memory and speed."""

    prepared: Prepared
    models: dict[bool, MemoryModel]
    """Predictions for GPUs with flash attention (``True``) and without."""
    grades: Grades
    """Measurements, which say how reliable a prediction of speed is."""
    samples: float
    """Number of samples to train on."""


def _models_of(
    chips: list[Chip], options: dict[str, Any], answers: AnswerCache, counts: tuple[int, ...], *, saves_memory: bool
) -> tuple[Prepared, dict[bool, MemoryModel]]:
    """Predict memory and operations of a training on ``counts`` of GPUs; return the prepared search and predictions.

    There is a prediction for GPUs with flash attention (``True``) and one for those without, which lack bf16 too. One
    GPU stands for each kind: cuBLAS workspaces, at most 48 MiB apart, and the scratch of reductions are those of an
    H200. With ``saves_memory``, memory-saving arms are predicted as well.
    """
    kinds = sorted({chip.has_flash_attention for chip in chips}, reverse=True)
    stand_ins = {True: CHIPS["h200"], False: CHIPS["v100-32gb"]}
    wanted = options["precision"]
    # GPUs that have no wanted precision are told so later, by ``_why_nothing``.
    able = [chip for chip in chips if set(wanted or PRECISIONS) & set(precisions_of(chip.capability))]
    if not able:
        names = ", ".join(chip.name for chip in chips)
        raise InvalidRequestError(
            f"--precision {','.join(wanted)}: {names} {'has' if len(chips) == 1 else 'have'} no such precision",
            "name others, or other GPUs",
        )
    if wanted is not None:
        kinds = [kind for kind in kinds if set(wanted) & set(stand_ins[kind].precisions)]
    only = {kind: _supported_precisions(wanted, stand_ins[kind].precisions) for kind in kinds}
    # GPUs are compared in the same training, whose weights need a dtype that all of them compute in.
    common = {precision for precision in PRECISIONS if all(precision in precisions_of(c.capability) for c in able)}
    options = {**options, "memory_limit": None, "world_size": 1}
    workload = in_usual_dtype(build_workload(options), options["dtype"], common)
    if options["dtype"] is None:
        _check_one_dtype(wanted or (), workload.dtype, able)
    options["dtype"] = workload.dtype
    if len(kinds) == 2 and workload.dtype == "float32":
        # In float32 no attention is flash attention, so that both predictions would be the same.
        only[False] = _supported_precisions(only[False], ("fp16",)) if wanted else ("fp16",)
    targets = [(replace(stand_ins[kind], memory_bytes=_PLENTY_BYTES), _PLENTY_BYTES) for kind in kinds]
    requests = [{**options, "precision": only[kind]} for kind in kinds]
    models = predictions(targets, requests, answers, counts, saves_memory=saves_memory)
    return models[0][0], {kind: model for kind, (_, model) in zip(kinds, models, strict=True)}


def _check_one_dtype(wanted: tuple[str, ...], dtype: str, chips: list[Chip]) -> None:
    """Raise ``InvalidRequestError`` for a precision that is incompatible with the weight dtype of the comparison."""
    for precision in wanted:
        without = [chip.name for chip in chips if precision not in precisions_of(chip.capability)]
        if without and dtype != "float32" and HALF.get(precision, dtype) != dtype:
            raise InvalidRequestError(
                f"--precision {precision} does not go with {dtype} weights, in which GPUs are compared since "
                f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no {precision}",
                f"leave {precision} out, compare GPUs that have it, or give --dtype float32",
            )


def _supported_precisions(wanted: tuple[str, ...] | None, precisions: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the wanted precisions that a GPU supports; all of them where it supports none, which is refused later."""
    if wanted is None:
        return None
    return tuple(precision for precision in wanted if precision in precisions) or wanted


def _best_offer(chip: Chip, count: int, job: _Job, price: float | None) -> Offer:
    """Return the offer of ``count`` GPUs: with the fastest measured, else predicted step, or with why there is none."""

    def refused(why: str) -> Offer:
        return Offer(chip, None, why, job.samples, price, count)

    if chip.rates is None or chip.memory_bytes is None:
        return refused("its rates are not published")
    if count > 1 and chip.rates.link is None:
        return refused("several in one host are not predicted")
    ceiling = Ceiling(None, chip.memory_bytes, TYPICAL_CONTEXT_BYTES, job.prepared.request.headroom)
    steps, least_bytes = _fitting_steps(chip, count, job, ceiling)
    if steps:
        graded = [job.grades.graded(chip, step) for step in steps]
        # What was measured here is better known than a prediction that promises a little more.
        best = [each for each in graded if each.grade == "measured"] or graded
        return Offer(chip, min(best, key=lambda each: each.step.seconds), None, job.samples, price, count)
    if least_bytes is None:
        return refused(f"nothing is predicted for it{_why_nothing(chip, job)}")
    return refused(f"the smallest candidate needs {format_bytes(least_bytes)} of {format_bytes(ceiling.line_bytes)}")


def _why_nothing(chip: Chip, job: _Job) -> str:
    """Return the first known reason why a GPU has no prediction, after a colon; empty where none is known."""
    precisions = dict.fromkeys(arm.precision for arm in job.prepared.space.arms)
    if not set(precisions) & set(chip.precisions):
        return f": it has no {' or '.join(precisions)}"
    for arm in job.prepared.space.arms:
        model = _model_of(arm, chip, job.models)
        why = why_unpredictable(arm, job.prepared.request.workload) or (model.why_missing(arm) if model else None)
        if why is not None:
            return f": {why}"
    return ""


def _fitting_steps(chip: Chip, count: int, job: _Job, ceiling: Ceiling) -> tuple[list[StepTime], int | None]:
    """Return the predicted steps of all candidates that fit on ``count`` GPUs, and the least memory of any candidate.

    That is ``None`` where nothing is predicted.
    """
    speeds, space = StepTimeModel(chip), of_ranks(job.prepared.space, count)
    steps: list[StepTime] = []
    least_bytes: int | None = None
    for arm in (*space.arms, *(job.prepared.space.saving_arms if count == 1 else ())):
        if arm not in space.arms and steps:
            # Arms that save memory are for where nothing else fits.
            break
        model = _model_of(arm, chip, job.models)
        operations = model.operations(arm) if model is not None else None
        if model is None or operations is None or arm.precision not in chip.precisions:
            continue
        for batch in batches_of(space):
            candidate = Candidate(arm, batch, space.batches.accumulation(batch))
            predicted = model.prediction(candidate)
            if predicted is None:
                continue
            # DDP holds every gradient a second time, in its buckets. A search keeps it from a third copy where that
            # would matter, see autotune.tuning.strategies.
            needed_bytes = predicted.peak_reserved_bytes + (operations.gradient_bytes if count > 1 else 0)
            least_bytes = min(needed_bytes, least_bytes or needed_bytes)
            if ceiling.bounds.fits(needed_bytes, margin=PREDICTION_MARGIN):
                shared = replace(arm, strategy="ddp", ranks=count) if count > 1 else arm
                steps.append(speeds.predict(operations, replace(candidate, arm=shared)))
    return steps, least_bytes


def _model_of(arm: Arm, chip: Chip, models: dict[bool, MemoryModel]) -> MemoryModel | None:
    """Return the memory model that holds for an arm on a GPU; ``None`` where none was predicted.

    In float32 the model of either kind of GPU holds, since flash attention needs 16 bits.
    """
    own = models.get(chip.has_flash_attention)
    # The precision ``fp32`` computes in 16 bits where the weights have them, and then is predicted for each kind.
    if arm.precision in ("fp16", "bf16") or (own is not None and own.operations(arm) is not None):
        return own
    return models.get(True) or models.get(False)

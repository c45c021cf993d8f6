"""Define the documents of predicted memory, speed and cost that ``predict`` and ``advise`` print as text and JSON."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from autotune.core.candidate import Arm, Document
from autotune.core.schema import decode, make_record, record_fields
from autotune.core.workload import Workload
from autotune.devices.gpus import CHECKED_AGAINST, Prices
from autotune.estimate.advice import Offer, pareto_front, rank, sort_offers
from autotune.estimate.step_time import Limiter, StepTime

T = TypeVar("T")


@dataclass(frozen=True)
class SpeedDocument:
    """The predicted speed of a candidate."""

    step_seconds: float
    gpu_seconds: float
    samples_per_second: float
    samples_per_second_interval: tuple[float, float]
    tokens_per_second: float | None
    """``None`` for images, speech and the user's own code."""
    model_flops_utilization: float
    limited_by: Limiter
    gpu_seconds_by_kind: dict[str, float]
    """GPU time of a step by kind of operation."""
    unknown_operations: dict[str, int]
    """How often a micro-step and the update run each operation of which only the memory traffic is predicted."""
    unknown_operations_share: float
    """Share of the GPU time that is this memory traffic. Other time of these operations is not predicted."""
    scaling_efficiency: float | None
    """Of several GPUs: their throughput over that of equally many GPUs that train alone."""


def speed_document(predicted: StepTime, workload: Workload) -> SpeedDocument:
    """Return the predicted speed of a candidate as JSON-ready data."""
    tokens_per_sample = workload.seq_len * (1 - workload.padding)
    return SpeedDocument(
        step_seconds=predicted.seconds,
        gpu_seconds=predicted.gpu_seconds,
        samples_per_second=predicted.samples_per_second,
        samples_per_second_interval=predicted.interval_samples_per_second,
        tokens_per_second=predicted.samples_per_second * tokens_per_sample if workload.is_text else None,
        model_flops_utilization=predicted.utilisation,
        limited_by=predicted.limited_by,
        gpu_seconds_by_kind=predicted.gpu_seconds_by_kind,
        unknown_operations=predicted.unknown_operations,
        unknown_operations_share=predicted.unknown_share,
        scaling_efficiency=predicted.scaling_efficiency,
    )


@dataclass(frozen=True)
class BatchDocument:
    """The predicted memory of a configuration at a batch."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_reserved_interval_bytes: tuple[int, int]
    fits: bool
    anatomy_bytes: dict[str, int]
    """What the peak consists of."""


@dataclass(frozen=True)
class TimedBatchDocument(SpeedDocument, BatchDocument):
    """A batch whose speed is predicted, too."""


@dataclass(frozen=True)
class ArmPrediction(Arm):
    """A configuration (the fields of ``Arm``: everything but the batch) with the predictions of its batches."""

    largest_batch: int | None = None
    batches: tuple[BatchDocument, ...] = ()
    why_not: str | None = None
    """Why nothing is predicted, where that is known."""

    @property
    def arm(self) -> Arm:
        """The configuration alone."""
        return Arm(**{field.name: getattr(self, field.name) for field in fields(Arm)})

    @property
    def fitting(self) -> list[BatchDocument]:
        """The batches that fit."""
        return [batch for batch in self.batches if batch.fits]

    @property
    def fastest(self) -> BatchDocument | None:
        """The fastest batch that fits, or the largest without predicted speeds; ``None`` where none fits."""
        return max(self.fitting, key=lambda batch: (speed_of(batch), batch.per_device_train_batch_size), default=None)


def speed_of(batch: BatchDocument) -> float:
    """Return the predicted samples a second of a batch; 0 without a prediction."""
    return batch.samples_per_second if isinstance(batch, TimedBatchDocument) else 0.0


def best_of(arms: Sequence[ArmPrediction]) -> tuple[ArmPrediction, TimedBatchDocument] | None:
    """Return the fastest configuration with its batch that fits; ``None`` where none has a predicted speed."""
    timed = [(arm, batch) for arm in arms for batch in arm.fitting if isinstance(batch, TimedBatchDocument)]
    return max(timed, key=lambda pair: pair[1].samples_per_second, default=None)


@functools.cache
def arm_prediction_type() -> type[Any]:
    """Return the msgspec type of a configuration with all its batches: an ``ArmPrediction`` without defaults."""
    added = [("largest_batch", int | None), ("batches", list[Any]), ("why_not", str | None, None)]
    return make_record("ArmPrediction", [*record_fields(Arm), *added])


@functools.cache
def best_prediction_type() -> type[Any]:
    """Return the msgspec type of a configuration at its fastest batch."""
    return make_record("BestPrediction", [*record_fields(Arm), *record_fields(TimedBatchDocument)])


@dataclass(frozen=True)
class GpuPredictionDocument:
    """What is predicted for one kind of GPU."""

    gpu: str
    workload: dict[str, Any]
    """Without its config."""
    ceiling_bytes: int
    line_bytes: int
    """The ceiling less the headroom."""
    fits_below_bytes: int
    """A predicted peak up to this is said to fit."""
    unquantized_bytes: int
    """Bytes of weights that ``--quantize`` leaves as they are: the experts of a mixture-of-experts model."""
    best: Any
    """The fastest configuration and batch that fit; ``None`` without a predicted speed, or if none fits."""
    arms: list[Any]

    @property
    def ranks(self) -> int:
        """Number of GPUs that train together."""
        return int(self.arms[0].ranks)

    @property
    def trained(self) -> Workload:
        """The workload, with an empty config."""
        return _decode_leniently({**self.workload, "config": {}}, Workload)


def read_gpu_document(document: Document) -> GpuPredictionDocument:
    """Return one of the ``gpus`` of a prediction from its JSON. Raises ``ValueError`` for a malformed entry.

    A service of another version may have made it: unknown fields are ignored.
    """
    arms = []
    for arm_document in document["arms"]:
        batches = [
            _decode_leniently(batch, TimedBatchDocument if "samples_per_second" in batch else BatchDocument)
            for batch in arm_document["batches"]
        ]
        arms.append(replace(_decode_leniently({**arm_document, "batches": []}, ArmPrediction), batches=tuple(batches)))
    # Earlier versions had no ``best`` and no ``unquantized_bytes``.
    complete = {"best": None, "unquantized_bytes": 0, **document, "arms": []}
    return replace(_decode_leniently(complete, GpuPredictionDocument), arms=arms)


def _decode_leniently(document: Document, kind: type[T]) -> T:
    """Decode a document but ignore unknown fields, which a newer service may send."""
    names = dict(record_fields(kind))
    return decode({name: value for name, value in document.items() if name in names}, kind)


@dataclass(frozen=True)
class PredictionDocument:
    """The document of ``autotune predict --json``."""

    predicted: bool
    accuracy: str
    speed_accuracy: str
    gpus: list[GpuPredictionDocument]
    arms: list[Any]
    """The ``arms`` of the first GPU."""


@dataclass(frozen=True)
class RanksPredictionDocument(PredictionDocument):
    """The document of ``autotune predict --json`` where several GPUs train together."""

    ranks_accuracy: str


@dataclass(frozen=True)
class OfferDocument:
    """What one GPU, or several equal ones together, would need for the training job: hours, cost, energy."""

    gpu: str
    gpus: int
    fits: bool
    why_not: str | None
    grade: str | None
    """``measured``, ``scaled`` or ``predicted``."""
    rank: int | None
    """By cost; GPUs of one rank may cost the same, since their intervals overlap."""
    is_on_pareto_front: bool
    """Whether no other offer is faster for as little, or cheaper and as fast. Equal offers may both be on it."""
    hours: float | None
    hours_interval: tuple[float, float] | None
    price_per_hour: float | None
    """Of all GPUs together."""
    cost: float | None
    cost_interval: tuple[float, float] | None
    samples_per_currency_unit: float | None
    joules_per_sample: float | None
    most_joules_per_sample: float | None
    rates_source: str | None
    rates_checked_against: str | None


@dataclass(frozen=True)
class FittingOfferDocument(SpeedDocument, OfferDocument):
    """An offer on which a candidate of known speed fits, with the fastest candidate and its speed."""

    candidate: Any


@dataclass(frozen=True)
class PricesDocument:
    """Where prices come from."""

    unit: str
    source: str


@dataclass(frozen=True)
class AdviceDocument:
    """The document of ``autotune advise --json``: which GPUs to rent."""

    predicted: bool
    workload: dict[str, Any]
    """Without its config."""
    samples: float
    prices: PricesDocument
    gpus: list[Any]
    """In the order in which they are to be chosen."""


def advice_document(offers: list[Offer], workload: Workload, samples: float, prices: Prices) -> AdviceDocument:
    """Return the compared offers as ``advise --json`` prints them, in the order to choose."""
    front = pareto_front(offers)
    return AdviceDocument(
        predicted=True,
        workload={name: value for name, value in workload.document().items() if name != "config"},
        samples=samples,
        prices=PricesDocument(prices.unit, prices.source),
        gpus=[_offer_document(offer, workload, rank(offer, offers), offer in front) for offer in sort_offers(offers)],
    )


def _offer_document(offer: Offer, workload: Workload, cost_rank: int | None, is_on_front: bool) -> OfferDocument:
    """Return the JSON of an offer, whose rank by cost is ``cost_rank``; with a speed where a candidate fits."""
    rates = offer.chip.rates
    row = OfferDocument(
        gpu=offer.chip.name,
        gpus=offer.gpus,
        fits=offer.best is not None,
        why_not=offer.why_not,
        grade=offer.graded.grade if offer.graded is not None else None,
        rank=cost_rank,
        is_on_pareto_front=is_on_front,
        hours=offer.hours,
        hours_interval=offer.interval_hours,
        price_per_hour=offer.price_per_hour,
        cost=offer.cost,
        cost_interval=offer.interval_cost,
        samples_per_currency_unit=offer.samples / offer.cost if offer.cost else None,
        joules_per_sample=offer.graded.joules_per_sample if offer.graded is not None else None,
        most_joules_per_sample=offer.most_joules_per_sample,
        rates_source=rates.source if rates is not None else None,
        rates_checked_against=CHECKED_AGAINST.get(offer.chip.name) if rates is not None else None,
    )
    if offer.best is None:
        return row
    speed = speed_document(offer.best, workload)
    return FittingOfferDocument(**vars(row), **vars(speed), candidate=offer.best.candidate.parameters())

"""Say in text what is predicted for GPUs: what fits, how fast it trains, what to choose, what to rent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.units import format_bytes, format_rate
from autotune.core.workload import Workload
from autotune.devices.gpus import Prices
from autotune.estimate.advice import Offer, pareto_front, rank, sort_offers
from autotune.results.cells import batch_cell, narrow_table_lines, table_lines
from autotune.results.predicted import (
    ArmPrediction,
    BatchDocument,
    GpuPredictionDocument,
    TimedBatchDocument,
    best_of,
    speed_of,
)

# python studies/peak_memory.py, those of one GPU; and the same with tests/landscapes/*.jsonl.
ACCURACY = (
    "of 297 peaks on an H200 the allocated bytes were predicted within 0.3 % but for one, 2.2 % too low; the reserved "
    "bytes within 3 % for 281, and within 8.1 % but for one, 18 % too high"
)
# python studies/kernel_times.py compare; python studies/step_times.py compare
SPEED_ACCURACY = (
    "of 57 GPU times of models that had no part in the fit, on an H200, half were predicted within 4 % and 90 of 100 "
    "within 9 %; 478 of 484 step times were in their interval; other GPUs are computed from their specified rates, and "
    "were not measured"
)
# python studies/peak_memory.py and studies/several_gpus.py
_RANKS_NOTES = (
    "bytes are those of each GPU",
    "of 62 peaks of four models on two H200 (DDP, FSDP2) the allocated bytes were predicted within 0.2 % but for one, "
    "10 % too low",
    "reserved bytes under ZeRO were 2 to 4 % more than predicted",
    "what NCCL keeps for itself is not counted",
    "62 of 63 steps of four models with DDP and FSDP2 were in their interval, half of them predicted within 29 %, on "
    "hosts of different speed",
    "speed under ZeRO is not predicted",
)
# studies/runs/h200_language_models.jsonl beside autotune predict: all trials of weights in 4 bits that were neither
# compiled nor in expandable segments, of four candidates.
_FEW_BITS_ACCURACY = (
    "weights and moments are counted as bitsandbytes 0.50 stores them, to the byte; of four peaks of QLoRA (4 bits, "
    "14B and 32B, H200) the allocated bytes were predicted within 0.2 % and the reserved ones within 1.4 %, others "
    "were not measured"
)
FEW_BITS_SPEED = (
    "weights in few bits train more slowly than predicted: 16 trials of QLoRA (14B and 32B, H200) took 1.08 to 1.86 "
    "times as long, two of them longer than their interval says; measure it with autotune search"
)
# docs/how-to/language-models.md, two samples offloaded beside one that was not.
_OFFLOADED = (
    "Offloaded: the time of the copies to the host and back is not counted in the speed; Llama-3.2-1B at 32,768 tokens "
    "ran at 0.95 of its speed on an H200."
)
RANKS_ACCURACY = "; ".join(_RANKS_NOTES)
_PARTS = ("weights", "gradients", "optimizer", "activations", "inputs", "workspaces", "communication")
_SPEED_HEAD = ["samples/s", "MFU", "limited by"]
_SPARE = ("limited by", "MFU")
"""Columns that a narrow terminal does without, the widest first."""
_NEARLY = 0.03
"""Candidates within this relative distance of the best may be as fast."""
_LEAST_SHARE = 0.01
"""Kinds of work that are nowhere a larger share of the GPU time are shown together."""
_MOST_NAMED = 4
_GRADES = {
    "measured": "in a study in --storage on that GPU",
    "scaled": "predicted from specified rates, times what a measurement in --storage says of the prediction",
    "predicted": "from specified rates, not measured",
}


def prediction_lines(
    gpus: Sequence[GpuPredictionDocument], *, all_batches: bool, anatomy: bool, columns: int | None = None
) -> list[str]:
    """Return tables of the predictions for each GPU, with ``anatomy`` also the parts of each peak, and a comparison."""
    lines = []
    for gpu in gpus:
        lines += [*gpu_lines(gpu, all_batches=all_batches, anatomy=anatomy, columns=columns), ""]
    return lines + ([*_comparison_lines(gpus, columns), ""] if len(gpus) > 1 else [])


def accuracy_lines(gpus: Sequence[GpuPredictionDocument], optims: Sequence[str] = ()) -> list[str]:
    """Return sentences on the measured accuracy of such predictions; ``optims`` are the requested optimizers."""
    lines = [f"Predicted, not measured: {ACCURACY}."]
    has_speed = any(best_of(gpu.arms) is not None for gpu in gpus)
    lines += few_bits_lines(gpus[0].trained.quantize, optims, has_speed=has_speed)
    if any(gpu.ranks > 1 for gpu in gpus):
        lines += ["Several GPUs:", *(f"  {note}" for note in _RANKS_NOTES)]
    if has_speed:
        lines.append(f"Speed: {SPEED_ACCURACY}.")
    return lines


def few_bits_lines(quantize: str | None, optims: Sequence[str], *, has_speed: bool) -> list[str]:
    """Return sentences on the accuracy for quantized weights and 8-bit optimizers; empty where neither is used."""
    if quantize is None and not any("8bit" in name for name in optims):
        return []
    speed = [f"Few bits, speed: {FEW_BITS_SPEED}."] if quantize is not None and has_speed else []
    return [f"Few bits: {_FEW_BITS_ACCURACY}.", *speed]


def experts_line(unquantized_bytes: int, dtype: str) -> str:
    """Return a sentence on the size of the weights that ``--quantize`` leaves unquantized."""
    return (
        f"{format_bytes(unquantized_bytes)} of weights stay in {dtype}: the experts of the model are no linear layers, "
        "which are what --quantize quantizes"
    )


def gpu_lines(gpu: GpuPredictionDocument, *, all_batches: bool, anatomy: bool, columns: int | None = None) -> list[str]:
    """Return the predictions for one kind of GPU as lines; for the parameters see ``prediction_lines``."""
    workload, best = gpu.trained, best_of(gpu.arms)
    on = f"{gpu.ranks} × {gpu.gpu}; memory of each" if gpu.ranks > 1 else gpu.gpu
    lines = [
        f"{workload.model} ({workload.task}, {workload.seq_len} tokens) on {on}; {workload.describe_numerics()}; "
        f"a process may reserve {format_bytes(gpu.ceiling_bytes)}, or {format_bytes(gpu.line_bytes)} if the "
        f"headroom stays free (the line); peaks predicted up to {format_bytes(gpu.fits_below_bytes)} "
        "count as fitting"
    ]
    if gpu.unquantized_bytes:
        lines.append(f"Not quantized: {experts_line(gpu.unquantized_bytes, workload.dtype)}.")
    shown = [arm for arm in gpu.arms if not _is_no_better_than_twin(arm, gpu.arms)]
    head = ["configuration", "batch×acc", "reserved"]
    rows = [_chosen_batch(arm, gpu.line_bytes) for arm in shown]
    if all_batches:
        head.append("fits")
        rows = [
            {**_cells(batch, gpu.line_bytes), "configuration": "" if place else arm.describe()}
            for arm in gpu.arms
            for place, batch in enumerate(arm.batches)
        ]
    if all_batches or anatomy:
        head.insert(2, "allocated")
    if best is not None:
        head += _SPEED_HEAD
    if anatomy:
        head += _PARTS
    # With the anatomy the table is wider than any terminal.
    cells = [[row.get(title, "") for title in head] for row in rows]
    lines += narrow_table_lines(head, cells, None if anatomy else columns, _SPARE)
    lines += [f"Not predicted: {why}." for why in dict.fromkeys(arm.why_not for arm in shown) if why]
    if anatomy:
        lines.append(
            "The parts are those at the moment of the peak. Without accumulation that is often before gradients exist."
        )
    if best is not None:
        lines.append(choice_line(*best, gpu.arms))
        if any(arm.offload_activations for arm in gpu.arms):
            lines.append(_OFFLOADED)
        if best[1].unknown_operations:
            lines.append(unknown_line(best[1].unknown_operations, best[1].unknown_operations_share))
        if anatomy:
            lines += time_lines(gpu.arms if all_batches else shown, all_batches=all_batches)
    if gpu.ranks > 1:
        lines.append(_which_fit(gpu.arms))
    return lines


def _is_no_better_than_twin(arm: ArmPrediction, arms: Sequence[ArmPrediction]) -> bool:
    """Return whether an arm with ``sync_each_batch``, which saves memory, fits only where it fits without that, too."""
    if not arm.sync_each_batch:
        return False
    plain = replace(arm.arm, sync_each_batch=False)
    twin = next((other for other in arms if other.arm == plain), None)
    return twin is not None and {*map(batch_cell, arm.fitting)} <= {*map(batch_cell, twin.fitting)}


def _which_fit(arms: Sequence[ArmPrediction]) -> str:
    """Return a sentence on the strategies of several GPUs (such as DDP) that fit, each with its largest batch."""
    each = []
    for strategy in dict.fromkeys(arm.strategy for arm in arms):
        own = [arm for arm in arms if arm.strategy == strategy]
        if largest := max(arm.largest_batch or 0 for arm in own):
            each.append(f"{strategy} up to {largest} a GPU")
        else:
            each.append(f"{strategy} {'does not' if any(arm.batches for arm in own) else 'is not predicted'}")
    return f"What fits: {', '.join(each)}."


def choice_line(best: ArmPrediction, speed: TimedBatchDocument, arms: Sequence[ArmPrediction]) -> str:
    """Return sentences on the configuration to choose, its predicted speed, and the configurations nearly as fast."""
    chosen = f"{best.describe()} at {batch_cell(speed)}"
    low, high = speed.samples_per_second_interval
    line = f"Choose {chosen}: {format_rate(speed.samples_per_second)} samples/s"
    line += f" ({format_rate(low)} to {format_rate(high)})"
    line += f", {format_rate(speed.tokens_per_second)} tokens/s" if speed.tokens_per_second else ""
    if speed.scaling_efficiency is not None:
        line += f", {speed.scaling_efficiency:.0%} of what so many GPUs would train alone"
    near = [
        name
        for arm in arms
        for batch in arm.fitting
        for name in [f"{arm.describe()} at {batch_cell(batch)}"]
        if speed_of(batch) > speed.samples_per_second * (1 - _NEARLY) and name != chosen
    ]
    line = f"{line}." + (f" Within {_NEARLY:.0%}: {'; '.join(near)}." if near else "")
    return line + _not_compared(arms)


def _not_compared(arms: Sequence[ArmPrediction]) -> str:
    """Return a sentence on strategies that fit but have no predicted speed; an empty string without any."""
    names = dict.fromkeys(
        arm.strategy for arm in arms if arm.strategy is not None and arm.fitting and not any(map(speed_of, arm.batches))
    )
    if not names:
        return ""
    verb = "fits" if len(names) == 1 else "fit"
    return f" {', '.join(names)} {verb}, too: not compared, since their speed is not predicted."


def unknown_line(calls: dict[str, int], share: float) -> str:
    """Return a sentence on operations of unknown duration, for which only memory traffic is predicted."""
    most = sorted(calls, key=lambda name: -calls[name])
    names = ", ".join(f"{name} ({calls[name]} ×)" for name in most[:_MOST_NAMED])
    more = f" and {len(most) - _MOST_NAMED} more" if len(most) > _MOST_NAMED else ""
    return (
        f"Too fast, perhaps: how long {names}{more} take is not known. Their memory traffic is counted, {share:.1%} of "
        "the GPU time, and nothing else of them."
    )


def time_lines(arms: Sequence[ArmPrediction], *, all_batches: bool) -> list[str]:
    """Return a table of predicted times: of an optimizer step, and of the kinds of GPU work in it, largest first."""
    steps = [
        (arm, batch)
        for arm in arms
        for batch in (arm.batches if all_batches else [arm.fastest])
        if isinstance(batch, TimedBatchDocument)
    ]
    totals: dict[str, float] = {}
    largest_shares: dict[str, float] = {}
    for _, speed in steps:
        for kind, seconds in speed.gpu_seconds_by_kind.items():
            totals[kind] = totals.get(kind, 0.0) + seconds
            largest_shares[kind] = max(largest_shares.get(kind, 0.0), seconds / speed.gpu_seconds)
    kinds = sorted((kind for kind in totals if largest_shares[kind] > _LEAST_SHARE), key=lambda kind: -totals[kind])
    rows = []
    for arm, speed in steps:
        cells = [speed.gpu_seconds_by_kind.get(kind, 0.0) for kind in kinds]
        times = [speed.step_seconds, speed.gpu_seconds, *cells, speed.gpu_seconds - sum(cells)]
        rows.append([arm.describe(), batch_cell(speed), *(f"{1000 * time:,.1f}" for time in times)])
    head = ["configuration", "batch × acc", "step", "GPU", *(kind.replace("_", " ") for kind in kinds), "other"]
    return [
        "Milliseconds of an optimizer step, of the GPU in it, and of each kind of work on the GPU:",
        *table_lines(head, rows, right=head[2:]),
    ]


def _comparison_lines(gpus: Sequence[GpuPredictionDocument], columns: int | None) -> list[str]:
    """Return a table with the fastest configuration and batch of each GPU, empty where no speed is predicted."""
    rows = []
    for gpu in gpus:
        best = best_of(gpu.arms)
        if best is None:
            rows.append([gpu.gpu, "", "", "", ""])
            continue
        arm, batch = best
        low, high = batch.samples_per_second_interval
        speed = [format_rate(batch.samples_per_second), f"{format_rate(low)} to {format_rate(high)}", batch.limited_by]
        rows.append([gpu.gpu, f"{batch_cell(batch)}  {arm.describe()}", *speed])
    head = ["GPU", "choose", "samples/s", "interval", "limited by"]
    return narrow_table_lines(head, rows, columns, _SPARE, wrapped_column=1)


def _chosen_batch(arm: ArmPrediction, line_bytes: int) -> dict[str, str]:
    """Return the cells of an arm's row, by column: those of the fastest batch that fits, or the largest if not timed.

    Where none fits, they are those of the batch with the lowest peak, as what the arm would need at least.
    """
    if arm.fastest is not None:
        cells = _cells(arm.fastest, line_bytes)
    elif arm.batches:
        least = min(arm.batches, key=lambda batch: batch.peak_reserved_bytes)
        needs = f"none; {batch_cell(least)} needs"
        # What does not fit has no speed.
        cells = {**_cells(least, line_bytes), "batch×acc": needs, **dict.fromkeys(_SPEED_HEAD, "")}
    else:
        cells = {"batch×acc": "not predicted"}
    return {**cells, "configuration": arm.describe()}


def _cells(batch: BatchDocument, line_bytes: int) -> dict[str, str]:
    """Return a batch's cells by column; reserved memory also as a share of the line (the most that fits)."""
    cells = {
        "batch×acc": batch_cell(batch),
        "allocated": format_bytes(batch.peak_allocated_bytes),
        "reserved": f"{format_bytes(batch.peak_reserved_bytes):>8} {batch.peak_reserved_bytes / line_bytes:>4.0%}",
        "fits": "yes" if batch.fits else "no",
        **{part: format_bytes(batch.anatomy_bytes.get(part, 0)) for part in _PARTS},
    }
    if isinstance(batch, TimedBatchDocument):
        values = format_rate(batch.samples_per_second), f"{batch.model_flops_utilization:.0%}", batch.limited_by
        cells |= dict(zip(_SPEED_HEAD, values, strict=True))
    return cells


def advice_lines(
    offers: list[Offer],
    workload: Workload,
    effective_batch: int,
    samples: float,
    prices: Prices,
    columns: int | None = None,
) -> list[str]:
    """Return the GPUs in the order to choose, as a table at most ``columns`` wide."""
    lines = [
        f"{workload.model} ({workload.task}, {workload.seq_len} tokens); {workload.describe_numerics()}; "
        f"effective batch {effective_batch}, {samples:,.0f} samples; prices in {prices.unit} an hour ({prices.source})"
    ]
    front, ordered = pareto_front(offers), sort_offers(offers)
    has_prices = any(offer.cost is not None for offer in offers)
    grades = {offer.graded.grade for offer in offers if offer.graded is not None}
    head = ["GPU", "best", "samples/s", "hours", *(["cost"] if has_prices else [])]
    # Each row without its cost, and the cost with and without its interval.
    rows: list[tuple[list[str], tuple[str, str]]] = []
    refused: list[tuple[str, str]] = []
    for offer in ordered:
        name = f"{'* ' if offer in front else '  ' if has_prices else ''}{_name(offer)}"
        if offer.best is None or offer.hours is None or offer.graded is None:
            refused.append((name, offer.why_not or ""))
            continue
        speed = _with_ends(offer.best.samples_per_second, offer.best.interval_samples_per_second)
        known = "" if len(grades) == 1 else f" ({offer.graded.grade})"
        # The name already has the number of GPUs.
        candidate = replace(offer.best.candidate, arm=replace(offer.best.candidate.arm, strategy=None, ranks=1))
        costs = "", ""
        if offer.cost is not None and offer.interval_cost is not None:
            costs = _with_ends(offer.cost, offer.interval_cost), format_rate(offer.cost)
        rows.append(([name, f"{candidate.describe()}{known}", speed, format_rate(offer.hours)], costs))
    # A cost's interval follows from that of the speed, so a table too wide for the terminal leaves it out.
    wide, narrow = (
        narrow_table_lines(
            head, [[*row, costs[place]][: len(head)] for row, costs in rows], columns, (), wrapped_column=1
        )
        for place in (0, 1)
    )
    lines += wide if columns is None or max(map(len, wide)) <= columns else narrow
    # Why a GPU is refused stands below the table, since the sentence would make its second column too wide.
    width = max((len(name) for name in [*(row[0] for row, _ in rows), *dict(refused)]), default=0)
    lines += [f"{name:<{width}}  {why}" for name, why in refused]
    lines.append(_order_line(ordered) + (" * none is faster for as little, or cheaper and as fast." if front else ""))
    steps = [offer.best for offer in offers if offer.best is not None and offer.best.unknown_operations]
    if steps:
        most = max(steps, key=lambda step: step.unknown_share)
        lines.append(unknown_line(most.unknown_operations, most.unknown_share))
    return lines


def _with_ends(value: float, interval: tuple[float, float]) -> str:
    """Return a value with its interval: ``67.3 (42.0–108.6)``."""
    low, high = map(format_rate, interval)
    return f"{format_rate(value)} ({low}–{high})"


def _order_line(ordered: list[Offer]) -> str:
    """Return a sentence on the sort order, and one on which offers may be the best since their intervals overlap."""
    best = "cheapest" if any(offer.cost is not None for offer in ordered) else "fastest"
    ranks = [rank(offer, ordered) for offer in ordered]
    first = [_name(offer) for offer, number in zip(ordered, ranks, strict=True) if number == 1]
    others = [_name(offer) for offer, number in zip(ordered, ranks, strict=True) if number != 1]
    line = f"{best.capitalize()} first, by what is predicted"
    if len(first) < 2:
        return f"{line}."
    # Whichever list of names is shorter.
    which = "all"
    if others:
        which = f"all but {', '.join(others)}" if len(others) < len(first) else ", ".join(first)
    return f"{line}. The intervals overlap: {which} may be the {best}."


def _name(offer: Offer) -> str:
    """Return the name of an offer: its GPU, with their number where it is several."""
    return offer.chip.name if offer.gpus == 1 else f"{offer.gpus} × {offer.chip.name}"


def grade_lines(offers: list[Offer], quantize: str | None = None, optims: Sequence[str] = ()) -> list[str]:
    """Return how each grade of speed among the offers is known, and the accuracy of few-bit weights and optimizers."""
    grades = dict.fromkeys(offer.graded.grade for offer in offers if offer.graded is not None)
    few_bits = few_bits_lines(quantize, optims, has_speed=bool(grades.keys() - {"measured"}))
    return [*(f"{grade}: {_GRADES[grade]}." for grade in grades), *few_bits]

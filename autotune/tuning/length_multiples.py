"""Choose the multiples that batches are padded to and rows are filled to, from the lengths of the samples alone."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.inspection import ModelFacts
from autotune.core.lengths import Batching, SampleLengths, choose_multiple, shapes_of
from autotune.devices.gpus import chip_of_device
from autotune.estimate.step_time import peak_flops
from autotune.space.levers import LENGTH_MULTIPLE, ROW_MULTIPLE
from autotune.space.space import Batches
from autotune.tuning.request import SearchRequest

# Of a GPU's rated arithmetic in bf16 that padding costs. bert-base took 3.6 us a token and Qwen2.5-0.5B 20 us, six
# operations for each weight: 0.18 and 0.15 (H100, texts of different lengths, 25 November 2026).
_USED_SHARE = 0.17
# A CUDA graph is captured for each, of which the fastest levers make use. A choice. Without graphs a shape takes 0.2 s:
# bert-base (batches of 32) took 0.16 s, Qwen2.5-0.5B (of 8) 0.17 to 0.25 s longer at the first visit of a length than
# at the second (H100, torch 2.11.0, transformers 5.17.0, 25 November 2026).
_CAPTURE_SECONDS = 1.0
# Each takes memory of the driver's, and so long in each trial. A choice.
_MOST_SHAPES = 16
# Of any batch, where none is said. A choice.
_USUAL_BATCH = 16


def length_multiples(request: SearchRequest, model: ModelFacts, batches: Batches) -> tuple[int, int]:
    """Return the multiples of padded batches and of rows that cost least in an epoch in CUDA graphs."""
    lengths, chip = request.workload.sample_lengths, chip_of_device(request.device.name)
    if lengths is None or not lengths.vary or chip is None or chip.rates is None:
        return LENGTH_MULTIPLE, ROW_MULTIPLE
    own = model.own_candidate
    usual = own.per_device_train_batch_size if own is not None else _USUAL_BATCH
    # What makes lengths few saves memory, so that it is tried at large batches.
    batch = max(usual, min(batches.effective_batch or usual, 32))
    token_seconds = 6 * model.parameters / (_USED_SHARE * peak_flops(chip.rates, "bf16"))
    padded = lengths.batching(batch)
    rows = replace(padded, padding="rows", multiple=1)
    chosen = [choose_multiple(lengths, how, token_seconds, shape_seconds=_CAPTURE_SECONDS) for how in (padded, rows)]
    return _few(lengths, padded, chosen[0] or LENGTH_MULTIPLE), _few(lengths, rows, chosen[1] or ROW_MULTIPLE)


def _few(lengths: SampleLengths, batching: Batching, multiple: int) -> int:
    """Return a multiple of which there are few enough, however little padding a smaller one has in a long run."""
    while len(shapes_of(lengths, replace(batching, multiple=multiple)).seen) > _MOST_SHAPES:
        multiple *= 2
    return multiple

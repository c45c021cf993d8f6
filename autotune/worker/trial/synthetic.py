"""Make synthetic samples with the shapes of a task. Values are random; nothing is learned from them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from autotune.core.workload import Workload
from autotune.models.tasks import is_merging, tokens_of_image
from autotune.training.batches import IGNORED

# Number of distinct samples. More would take memory and change nothing.
_POOL = 64
MASKED_FRACTION = 0.15  # BERT, section 3.1: 15 % of the tokens are predicted
_OF_PATCHES = ("pixel_values", "image_grid_thw")
_LOWEST_TOKEN = 10  # below lie the special tokens of most vocabularies (padding would shift RoBERTa's positions)

Sample = dict[str, torch.Tensor]


def stack_texts(samples: list[Sample]) -> Sample:
    """Return a batch of samples: image patches and image sizes are concatenated, everything else is stacked."""
    joined = {name: torch.cat if name in _OF_PATCHES else torch.stack for name in samples[0]}
    return {name: join([sample[name] for sample in samples]) for name, join in joined.items()}


class SyntheticDataset(Dataset[Sample]):
    """A dataset of ``length`` samples that repeats a small pool."""

    def __init__(self, pool: list[Sample], length: int) -> None:
        self._pool = pool
        self.collator = stack_texts if "image_grid_thw" in pool[0] else None
        """The function that makes batches of the samples; ``None`` where the Trainer's own does."""
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self._pool[index % len(self._pool)]


def real_tokens(seq_len: int, padding: float, count: int, generator: torch.Generator) -> list[int]:
    """Draw the numbers of real tokens of ``count`` samples, whose mean fraction of padding is ``padding``.

    The numbers are spread evenly over the widest range with that mean: one number is drawn in each of ``count`` equal
    parts. The mean of a few dozen independent draws would be off by several per cent.
    """
    low = max(0.0, 1 - 2 * padding)
    high = min(1.0, 2 * (1 - padding))
    places = (torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)) / count
    # A causal model predicts nothing from a single token, and the mean loss of no predictions is NaN.
    least = min(2, seq_len)
    return [max(least, min(seq_len, round(seq_len * (low + (high - low) * place)))) for place in places.tolist()]


def _text_sample(workload: Workload, vocabulary: int, num_labels: int, real: int, generator: torch.Generator) -> Sample:
    """Return a sample of ``seq_len`` random tokens below ``vocabulary`` and labels; all after ``real`` are padding."""
    tokens = torch.randint(min(_LOWEST_TOKEN, vocabulary - 1), vocabulary, (workload.seq_len,), generator=generator)
    sample: Sample = {"input_ids": tokens}
    if workload.padding > 0:
        sample["attention_mask"] = (torch.arange(workload.seq_len) < real).long()
    if workload.task == "sequence-classification":
        sample["labels"] = torch.randint(0, num_labels, (), generator=generator)
        return sample
    labels = tokens.clone()
    if workload.task == "masked-lm":
        predicted = torch.rand(workload.seq_len, generator=generator) < MASKED_FRACTION
        predicted[0] = True  # The mean loss of no predictions is NaN.
        labels[~predicted] = IGNORED
    labels[real:] = IGNORED
    sample["labels"] = labels
    return sample


def _with_images(workload: Workload, config: Any, sample: Sample, generator: torch.Generator) -> Sample:
    """Return the text ``sample`` with the workload's images: their tokens at its beginning, unlabelled, and pixels."""
    assert workload.image_side is not None
    side, count = workload.image_side, tokens_of_image(workload.config, workload.image_side)
    tokens, labels = sample["input_ids"], sample["labels"]
    # Image tokens that were drawn at random would be taken for an image.
    tokens[tokens == config.image_token_id] = _LOWEST_TOKEN
    for start in range(0, workload.images * (count + 1), count + 1):
        tokens[start] = getattr(config, "vision_start_token_id", None) or _LOWEST_TOKEN
        tokens[start + 1 : start + 1 + count] = config.image_token_id
        labels[start : start + 1 + count] = IGNORED
    vision = config.vision_config
    if not is_merging(workload.model_type):
        pixels = torch.rand((workload.images, getattr(vision, "num_channels", 3), side, side), generator=generator)
        return {**sample, "pixel_values": pixels}
    patches = side // vision.patch_size
    # Each patch has its channels for every frame of a film that it covers (``temporal_patch_size``).
    patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        **sample,
        "mm_token_type_ids": (tokens == config.image_token_id).int(),
        "pixel_values": torch.rand((workload.images * patches**2, patch_values), generator=generator),
        "image_grid_thw": torch.tensor([[1, patches, patches]] * workload.images),
    }


def _sample(workload: Workload, model: Any, real: int, generator: torch.Generator) -> Sample:
    """Return one sample for the workload's task; a sample of text has ``real`` tokens that are not padding."""
    config = model.config
    if workload.task == "image-classification":
        label = torch.randint(0, config.num_labels, (), generator=generator)
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.rand((config.num_channels, height, width), generator=generator)
        return {"pixel_values": pixels, "labels": label}
    embeddings = model.get_input_embeddings()
    # Where adapters are on the embeddings, peft's layer around them does not say how many there are.
    vocabulary = getattr(embeddings, "base_layer", embeddings).num_embeddings
    if workload.task == "speech-seq2seq":
        # Whisper's encoder takes log-mel frames at twice its positions: its first convolutions have stride 2.
        frames = 2 * config.max_source_positions
        features = torch.rand((config.num_mel_bins, frames), generator=generator)
        labels = torch.randint(0, config.vocab_size, (workload.seq_len,), generator=generator)
        return {"input_features": features, "labels": labels}
    if workload.task == "image-text-to-text":
        # Images are not padding, and two tokens of text follow them: one predicts the other.
        of_images = workload.images * (tokens_of_image(workload.config, workload.image_side or 0) + 1)
        sample = _text_sample(workload, vocabulary, 2, max(real, of_images + 2), generator)
        return _with_images(workload, config, sample, generator)
    return _text_sample(workload, vocabulary, getattr(config, "num_labels", 2), real, generator)


def synthetic_dataset(workload: Workload, model: Any, length: int, seed: int) -> SyntheticDataset:
    """Return a dataset of ``length`` random samples for ``model``, with the workload's padding.

    Their shapes: text (seq_len,), images (channels, height, width), speech (mel bins, frames).
    """
    generator = torch.Generator().manual_seed(seed)
    count = min(_POOL, length)
    lengths = [workload.seq_len] * count
    if workload.padding > 0:
        lengths = real_tokens(workload.seq_len, workload.padding, count, generator)
    pool = [_sample(workload, model, real, generator) for real in lengths]
    return SyntheticDataset(pool, length)


def zero_batch(workload: Workload, model: Any, size: int) -> Sample:
    """Return a batch of ``size`` samples: zeros with the shapes and dtypes of real batches, to trace a step."""
    sample = synthetic_dataset(workload, model, 1, 0)[0]
    lengths = workload.data.facts.lengths if workload.data and workload.data.facts else None
    if lengths is not None and lengths.longest_target is not None:
        sample["labels"] = sample["labels"][: lengths.longest_target]
    return {name: torch.zeros((size, *value.shape), dtype=value.dtype) for name, value in sample.items()}


def synthetic_ingredients(workload: Workload, model: Any, length: int, seed: int) -> dict[str, Any]:
    """Return a synthetic dataset and its collator as ``Trainer`` arguments."""
    dataset = synthetic_dataset(workload, model, length, seed)
    return {"train_dataset": dataset, "data_collator": dataset.collator}

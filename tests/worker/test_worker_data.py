"""Test the shapes, masks and labels of synthetic samples for each task."""

import dataclasses

import pytest
import torch
from tiny import ONE_OF_EACH_TASK, tiny_workload

from autotune.core.workload import TASKS, Task, Workload
from autotune.worker.trial.build import build_model
from autotune.worker.trial.synthetic import Sample, real_tokens, synthetic_dataset


def samples_of(workload: Workload, count: int = 64, seed: int = 1) -> list[Sample]:
    model = build_model(workload, "eager", torch.device("meta"))
    dataset = synthetic_dataset(workload, model, count, seed)
    return [dataset[index] for index in range(len(dataset))]


@pytest.mark.parametrize("padding", [0.0, 0.3])
@pytest.mark.parametrize("task", TASKS)
def test_a_batch_goes_through_the_model_and_has_a_loss(task: Task, padding: float) -> None:
    workload = tiny_workload(ONE_OF_EACH_TASK[task], task=task, padding=padding)
    model = build_model(workload, "eager", torch.device("cpu"))
    dataset = synthetic_dataset(workload, model, 2, seed=1)
    collate = dataset.collator or torch.utils.data.default_collate
    batch = collate([dataset[0], dataset[1]])
    loss = model(**batch).loss
    assert torch.isfinite(loss)
    loss.backward()


@pytest.mark.parametrize("padding", [0.1, 0.3, 0.5, 0.75, 0.9])
def test_the_mask_hides_the_fraction_that_was_asked(padding: float) -> None:
    samples = samples_of(tiny_workload("bert-tiny", seq_len=128, padding=padding))
    masks = torch.stack([sample["attention_mask"] for sample in samples])
    assert masks.shape == (64, 128)
    assert 1 - masks.float().mean().item() == pytest.approx(padding, abs=0.01)
    # Real tokens come first, in every sample.
    assert bool((masks.diff(dim=1) <= 0).all())
    lengths = masks.sum(dim=1)
    assert len(set(lengths.tolist())) > 8, "lengths vary, as those of real samples do"
    # Any order would do for the mean; a sorted one would make the first batches the short ones.
    assert lengths.tolist() != sorted(lengths.tolist())


def test_full_length_has_no_mask() -> None:
    assert "attention_mask" not in samples_of(tiny_workload("bert-tiny"))[0]


def test_even_the_shortest_sample_has_something_to_predict() -> None:
    generator = torch.Generator().manual_seed(1)
    assert min(real_tokens(8, 0.95, 64, generator)) == 2
    assert real_tokens(1, 0.95, 3, generator) == [1, 1, 1]


@pytest.mark.parametrize("task", ["masked-lm", "causal-lm", "seq2seq-lm"])
def test_padding_is_never_predicted(task: Task) -> None:
    workload = tiny_workload(ONE_OF_EACH_TASK[task], task=task, seq_len=64, padding=0.5)
    for sample in samples_of(workload):
        assert bool((sample["labels"][sample["attention_mask"] == 0] == -100).all())
        assert bool((sample["labels"] != -100).any())


def test_masked_tokens_are_about_an_eighth() -> None:
    workload = tiny_workload("bert-tiny", task="masked-lm", seq_len=128)
    labels = torch.stack([sample["labels"] for sample in samples_of(workload)])
    assert 0.12 < (labels != -100).float().mean().item() < 0.19


def test_seeds_decide_and_the_pool_repeats() -> None:
    workload = tiny_workload("bert-tiny")
    first, again, other = (samples_of(workload, count=130, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first[3]["input_ids"], again[3]["input_ids"])
    assert not torch.equal(first[3]["input_ids"], other[3]["input_ids"])
    assert len(first) == 130
    assert first[64] is first[0]


def test_labels_stay_within_what_the_config_knows() -> None:
    workload = tiny_workload("vit-tiny", config={"num_labels": 3})
    assert {int(sample["labels"]) for sample in samples_of(workload)} == {0, 1, 2}
    oblong = dataclasses.replace(workload, config={**workload.config, "image_size": [32, 16]})
    assert samples_of(oblong)[0]["pixel_values"].shape == (3, 32, 16)

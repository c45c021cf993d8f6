"""Models of images and text: their samples, and trials of them."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from server_client import ServerClient
from tiny import QUICK, tiny_workload
from transformers import AutoConfig

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import InvalidRequestError
from autotune.core.workload import Workload
from autotune.models import catalog
from autotune.models.tasks import check_images_fit, choose_image_side, tokens_of_image
from autotune.tuning.options import build_workload
from autotune.worker.trial.build import build_model
from autotune.worker.trial.synthetic import synthetic_dataset

TINY = ("qwen2.5-vl-tiny", "smolvlm-tiny")


def config_of(name: str) -> dict[str, Any]:
    entry = catalog.find(name)
    return entry.config


@pytest.mark.parametrize(
    ("model", "side", "tokens"),
    [("Qwen2.5-VL-3B-Instruct", 448, 256), ("Qwen2.5-VL-3B-Instruct", 28, 1), ("SmolVLM-256M-Instruct", 512, 64)],
)
def test_tokens_of_an_image(model: str, side: int, tokens: int) -> None:
    assert tokens_of_image(config_of(model), side) == tokens


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("padding", [0.0, 0.3])
def test_a_batch_trains_what_sees_and_what_reads(model: str, images: int, padding: float) -> None:
    workload = dataclasses.replace(tiny_workload(model, seq_len=48), images=images, padding=padding)
    built = build_model(workload, "sdpa", torch.device("cpu"))
    data = synthetic_dataset(workload, built, 3, 1)
    samples = [data[index] for index in range(3)]
    batch = data.collator(samples) if data.collator else torch.utils.data.default_collate(samples)
    loss = built(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1000), rel=0.05)
    without = [name for name, p in built.named_parameters() if p.grad is None]
    assert not without
    # Nothing is predicted of an image.
    assert not (batch["labels"] == built.config.image_token_id).any()


@pytest.mark.parametrize("model", TINY)
def test_a_trial_of_images_and_text(trial_server: ServerClient, model: str) -> None:
    workload: Workload = tiny_workload(model, seq_len=32)
    measured = trial_server.trial(
        workload, Candidate(Arm(gradient_checkpointing=True), 4, 2), QUICK
    ).completed.measurement
    assert measured.samples_per_second == pytest.approx(8 / measured.step_seconds)


def test_options_make_the_workload() -> None:
    options = {"model": "qwen2.5-vl-tiny", "task": None, "seq_len": None, "dtype": None, "world_size": 1}
    workload = build_workload({**options, "images": 2, "image_size": 112})
    assert (workload.task, workload.images, workload.image_side) == ("image-text-to-text", 2, 112)
    assert Workload.from_document(workload.recorded_document()) == workload
    assert build_workload(options).fingerprint() != workload.fingerprint()
    assert "images" not in tiny_workload("bert-tiny").recorded_document()
    with pytest.raises(InvalidRequestError, match="--images does not apply to causal-lm"):
        build_workload({**options, "model": "llama-tiny", "images": 1})


@pytest.mark.parametrize("model_type", ["idefics3", "smolvlm"])
def test_what_a_config_leaves_out_is_what_transformers_takes(model_type: str) -> None:
    full = AutoConfig.for_model(model_type).to_dict()
    short: dict[str, Any] = {"model_type": model_type, "vision_config": {}}
    side = choose_image_side(short, None)
    assert side == choose_image_side(full, None)
    assert tokens_of_image(short, side) == tokens_of_image(full, side)


def test_images_that_a_model_cannot_take_are_refused() -> None:
    qwen, smol = config_of("qwen2.5-vl-tiny"), config_of("smolvlm-tiny")
    with pytest.raises(InvalidRequestError, match=r"--image-size 100: qwen2_5_vl takes .* multiples of 28") as caught:
        choose_image_side(qwen, 100)
    assert "give 84 or 112" in caught.value.hint
    with pytest.raises(InvalidRequestError, match="--image-size 100: smolvlm takes images of 64 pixels"):
        choose_image_side(smol, 100)
    with pytest.raises(InvalidRequestError, match="the images of models of type 'llava' are not known") as caught:
        choose_image_side({"model_type": "llava", "vision_config": {}}, None)
    assert "--task" in caught.value.hint
    with pytest.raises(InvalidRequestError, match="--images 3 of 448 pixels take 771 tokens, and a sample has 512"):
        check_images_fit(qwen, 3, 448, 512)
    check_images_fit(qwen, 1, 448, 512)

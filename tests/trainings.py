"""Trainings whose meaning changes with a split, a lever or a setting, and trainings where it does not.

Each is a tiny model with its data and two ways to train it on the same eight samples. ``python tests/trainings.py``
prints them as the table of ``docs/explanation/same-training.md``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSemanticSegmentation,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from autotune.core.look import Difference, FirstStep, difference
from autotune.training import SettingUnavailableError
from autotune.worker.trial.look import first_step

WORDS, SAMPLES, TOKENS, WIDTH = 96, 8, 12, 32


@dataclasses.dataclass(frozen=True)
class How:
    """One way to train: per-device batch, accumulation, fields of ``TrainingArguments``, what ``apply`` sets."""

    batch: int = 4
    accumulation: int = 2
    arguments: tuple[tuple[str, Any], ...] = ()
    applied: tuple[tuple[str, Any], ...] | None = ()
    """``None``: ``apply`` is not called, as for settings of the user's own."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A training, and two ways to do it."""

    name: str
    change: str
    """What differs between the two ways, in words."""
    model: Callable[[], Any]
    data: Callable[[], list[dict[str, Any]]]
    other: How
    finds: str = "same"
    """``same``, ``refused`` where the setting is, or the kind of the difference that the look finds."""
    asked: How = How()
    trainer: type[Trainer] = Trainer
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """Further arguments of the Trainer."""
    is_quick: bool = False
    """Whether it is one of the sample that ``make test`` runs."""

    def made(self, how: How, folder: Path, **others: Any) -> Trainer:
        """Return the ``Trainer`` of one way, without what is applied; ``others`` are fields as well."""
        torch.manual_seed(0)
        arguments = TrainingArguments(
            str(folder), per_device_train_batch_size=how.batch, gradient_accumulation_steps=how.accumulation,
            report_to="none", disable_tqdm=True, remove_unused_columns=False,
            **{"use_cpu": True, "save_strategy": "no", **dict(how.arguments), **others},
        )  # fmt: skip
        return self.trainer(
            model=self.model(), args=arguments, train_dataset=self.data(), data_collator=self.collate,
            **dict(self.options),
        )  # fmt: skip

    def step(self, how: How, folder: Path) -> FirstStep:
        """Return the first step of one way."""
        trainer = self.made(how, folder)
        return first_step(trainer, how.batch * how.accumulation, None if how.applied is None else dict(how.applied))

    def found(self, folder: Path) -> Difference | str | None:
        """Return what a look finds; ``refused`` where the other way cannot be had."""
        asked = self.step(self.asked, folder)
        try:
            return difference(asked, self.step(self.other, folder))
        except SettingUnavailableError:
            return "refused"


def with_(**applied: Any) -> How:
    """The same split with settings of ``apply``."""
    return How(applied=tuple(applied.items()))


def set_to(**arguments: Any) -> How:
    """The same split with fields of ``TrainingArguments``."""
    return How(arguments=tuple(arguments.items()))


ONE, SPLIT = How(8, 1), How(2, 4)
REENTRANT = set_to(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True})
RECOMPUTED = set_to(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False})


# Data


def _draw(*shape: int, low: int = 5, high: int = WORDS) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def texts() -> list[dict[str, Any]]:
    """Texts of one length, each token with a label."""
    return [{"input_ids": row, "labels": row} for row in _draw(SAMPLES, TOKENS)]


def ragged() -> list[dict[str, Any]]:
    """Texts of 3 to 12 tokens, padded on the right."""
    rows = []
    for at, row in enumerate(_draw(SAMPLES, TOKENS)):
        real = torch.arange(TOKENS) < 3 + (5 * at) % 10
        rows.append({"input_ids": row * real, "attention_mask": real.long(), "labels": torch.where(real, row, -100)})
    return rows


def ragged_on_the_left() -> list[dict[str, Any]]:
    """The same, padded on the left."""
    return [{name: value.flip(0) for name, value in row.items()} for row in ragged()]


def masked() -> list[dict[str, Any]]:
    """Texts with labels for as many tokens each."""
    return [{**row, "labels": torch.where(torch.arange(TOKENS) % 4 == 1, row["labels"], -100)} for row in texts()]


def classes() -> list[dict[str, Any]]:
    """Texts with a class each."""
    return [{"input_ids": row["input_ids"], "labels": torch.tensor(at % 2)} for at, row in enumerate(texts())]


def tags() -> list[dict[str, Any]]:
    """Texts with a class for each token."""
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"] % 2} for row in texts()]


def images(side: int = 32) -> list[dict[str, Any]]:
    """Images with a class each."""
    pixels = torch.randn(SAMPLES, 3, side, side, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": each, "labels": torch.tensor(at % 2)} for at, each in enumerate(pixels)]


def segments() -> list[dict[str, Any]]:
    """Images with a class for each of 8 × 8 places."""
    return [{**row, "labels": _draw(32, 32, low=0, high=2)} for row in images()]


def captions() -> list[dict[str, Any]]:
    """Images with their texts."""
    pairs = zip(images(), texts(), strict=True)
    return [{"pixel_values": image["pixel_values"], "input_ids": text["input_ids"]} for image, text in pairs]


def collate_captions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch whose loss compares its pairs."""
    return {**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}, "return_loss": True}


def points() -> list[dict[str, Any]]:
    """Pairs of points that lie close, and a class each."""
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(SAMPLES, 16, generator=generator)
    other = one + 0.1 * torch.randn(SAMPLES, 16, generator=generator)
    pairs = enumerate(zip(one, other, strict=True))
    return [{"query": a, "document": b, "labels": torch.tensor(int(at % 3 == 0))} for at, (a, b) in pairs]


def speech() -> list[dict[str, Any]]:
    """Waves with their texts."""
    waves = torch.randn(SAMPLES, 800, generator=torch.Generator().manual_seed(1))
    return [{"input_values": wave, "labels": row} for wave, row in zip(waves, _draw(SAMPLES, 3), strict=True)]


def features() -> list[dict[str, Any]]:
    """Log-mel features with their texts."""
    frames = torch.randn(SAMPLES, 8, 20, generator=torch.Generator().manual_seed(1))
    return [{"input_features": each, "labels": row} for each, row in zip(frames, _draw(SAMPLES, 6), strict=True)]


# Models


_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": WORDS, "pad_token_id": 0,
}  # fmt: skip


def of(auto: Any, kind: str, *, attention: str = "eager", **changes: Any) -> Callable[[], Any]:
    """Return what builds a tiny model of a kind."""
    return lambda: auto.from_config(AutoConfig.for_model(kind, **(_SIZES | changes)), attn_implementation=attention)


def causal(kind: str, **changes: Any) -> Callable[[], Any]:
    """Return what builds a causal language model."""
    return of(AutoModelForCausalLM, kind, **changes)


_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_BART = {
    "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_start_token_id": 0, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
}  # fmt: skip
_WHISPER = _BART | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
_MOE = {
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
_ROUTED = _MOE | {"output_router_logits": True}
_VIT = {"image_size": 32, "patch_size": 8, "num_labels": 2}
_WAV = {
    "conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (5, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
}  # fmt: skip
_CLIP = {
    "text_config": _SIZES | {"max_position_embeddings": 32, "eos_token_id": 1}, "vision_config": _SIZES | _VIT,
    "projection_dim": 16,
}  # fmt: skip


def adapted(build: Callable[[], Any]) -> Callable[[], Any]:
    """Return what builds a model with LoRA adapters."""

    def make() -> Any:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    return make


def frozen_below(build: Callable[[], Any]) -> Callable[[], Any]:
    """Return what builds a model whose input embeddings are frozen."""

    def make() -> Any:
        model = build()
        model.get_input_embeddings().requires_grad_(False)
        return model

    return make


class Encoder(torch.nn.Module):
    """Two layers with a head, on points."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        middle: torch.nn.Module = torch.nn.BatchNorm1d(24) if norm else torch.nn.GELU()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 24), middle, torch.nn.Linear(24, 8))
        self.head = torch.nn.Linear(8, 2)

    def forward(self, query: torch.Tensor, document: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of its subclass."""
        one, other = self.layers(query), self.layers(document)
        return {"loss": self.loss(one, other, labels) + 0 * self.head.weight.sum() + 0 * self.head.bias.sum()}

    def loss(self, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Classify: a mean over samples."""
        return functional.cross_entropy(self.head(one), labels)


def losing(function: Callable[..., torch.Tensor]) -> Callable[[], Any]:
    """Return what builds the encoder with a loss of its own."""

    class Own(Encoder):
        def loss(self, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return function(self, one, other, labels)

    return Own


def _negatives(_: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(one @ other.T, torch.arange(len(one)))


def _batch_hard(_: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    gaps = torch.cdist(one, other)
    same = labels[:, None] == labels
    return (gaps.masked_fill(~same, 0.0).amax(1) - gaps.masked_fill(same, 9.0).amin(1) + 1).relu().mean()


def _decorrelated(_: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (one.T @ other / len(one) - torch.eye(8)).square().sum()


def _dice(self: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chance = self.head(one).softmax(1)[:, 1]
    return 1 - 2 * (chance * labels).sum() / (chance.sum() + labels.sum() + 1)


def _balanced(self: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(labels, minlength=2) + 1.0
    return functional.cross_entropy(self.head(one), labels, weight=1 / counts)


def _mixed(self: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = self.head(0.7 * one + 0.3 * one.flip(0))
    return 0.7 * functional.cross_entropy(logits, labels) + 0.3 * functional.cross_entropy(logits, labels.flip(0))


def _of_positives(self: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(self.head(one), labels, reduction="sum") / labels.sum().clamp(min=1)


def _added_up(self: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(self.head(one), labels, reduction="sum")


def _margins(_: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cosine_embedding_loss(one, other, 2.0 * labels - 1)


def _distances(_: Any, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(one, other.detach())


class Warming(Encoder):
    """Its loss grows with each forward pass, as a weight that is warmed up in the model does."""

    calls = 0

    def loss(self, one: torch.Tensor, other: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss times the number of passes so far."""
        self.calls += 1
        return self.calls * super().loss(one, other, labels)


class Tagger(torch.nn.Module):
    """Tags tokens behind frozen embeddings, with a layer that may be recomputed by reentrant checkpointing."""

    supports_gradient_checkpointing = True
    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 16).requires_grad_(False)
        self.layer, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, WORDS)

    def activation_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Recompute the layer in the backward pass."""
        self.recomputes = True

    gradient_checkpointing_enable = activation_checkpointing_enable

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None) -> dict[str, Any]:
        """Return a mean over the tokens of a batch."""
        hidden = self.embed(input_ids)
        hidden = checkpoint(self.layer, hidden, use_reentrant=True) if self.recomputes else self.layer(hidden)
        return {"loss": functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


# Trainers


class Cached(Trainer):  # type: ignore[misc]
    """Computes a loss over a whole batch, whose parts it passes through the model one after the other."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of a batch."""
        parts = list(zip(inputs["query"].split(2), inputs["document"].split(2), strict=True))
        with torch.no_grad():
            sides = zip(*[(model.layers(a), model.layers(b)) for a, b in parts], strict=True)
        queries, documents = (torch.cat(side).requires_grad_() for side in sides)
        loss = functional.cross_entropy(queries @ documents.T, torch.arange(len(queries)))
        loss.backward()
        towards = zip(parts, queries.grad.split(2), documents.grad.split(2), strict=True)
        for (one, other), of_one, of_other in towards:
            part = (model.layers(one) * of_one).sum() + (model.layers(other) * of_other).sum()
            self.accelerator.backward(part / self.args.gradient_accumulation_steps)
        return loss.detach() / self.args.gradient_accumulation_steps


class Undivided(Trainer):  # type: ignore[misc]
    """Forgets to divide by the accumulation."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


class ReadsLogits(Trainer):  # type: ignore[misc]
    """Adds a term of the logits to the loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss with the term."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 1e-2 * outputs.logits.float().logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


class OfSamples(Trainer):  # type: ignore[misc]
    """Takes the mean over the tokens of each sample, then over samples."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return a mean over samples."""
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        labels = functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        each = functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
        loss = (each.sum(1) / (labels >= 0).sum(1)).mean()
        return (loss, outputs) if return_outputs else loss


def mean_of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return a mean over a micro-batch, as a ``compute_loss_func`` that ignores the number of items does."""
    return functional.cross_entropy(outputs["logits"].view(-1, outputs["logits"].shape[-1]), labels.view(-1))


def _differing() -> Iterator[Training]:
    split = "8 × 1 → 2 × 4"
    for kind, changes in (
        ("bert", {}),
        ("roberta", {"max_position_embeddings": 40}),
        ("electra", {"embedding_size": 16}),
    ):
        yield Training(
            f"{kind}, masked tokens in other numbers", split, of(AutoModelForMaskedLM, kind, **changes), ragged, SPLIT,
            "gradient", ONE, is_quick=kind == "bert",
        )  # fmt: skip
    yield Training("t5, targets of other lengths", split, of(AutoModelForSeq2SeqLM, "t5", **T5), ragged, SPLIT,
                   "gradient", ONE)  # fmt: skip
    for kind in ("mixtral", "olmoe", "qwen2_moe", "granitemoe"):
        yield Training(f"{kind} with its router's loss", split, causal(kind, **_ROUTED), texts, SPLIT, "gradient", ONE,
                       is_quick=kind == "mixtral")  # fmt: skip
    yield Training("resnet (batch norm)", split,
                   of(AutoModelForImageClassification, "resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
                      num_labels=2), images, SPLIT, "gradient", ONE)  # fmt: skip
    yield Training("segformer (batch norm in its head)", split,
                   of(AutoModelForSemanticSegmentation, "segformer", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
                      num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=8, num_labels=2, drop_path_rate=0.0),
                   segments, SPLIT, "gradient", ONE)  # fmt: skip
    yield Training("a layer of batch norm", split, lambda: Encoder(norm=True), points, SPLIT, "gradient", ONE)
    for kind in ("clip", "siglip"):
        yield Training(f"{kind}, whose loss compares pairs", split, of(AutoModel, kind, **_CLIP), captions, SPLIT,
                       "gradient", ONE, collate=collate_captions)  # fmt: skip
    for name, function in (
        ("in-batch negatives", _negatives), ("batch-hard mining", _batch_hard), ("a dice loss", _dice),
        ("a correlation over the batch", _decorrelated), ("weights of the classes of a batch", _balanced),
        ("mixup within a batch", _mixed),
    ):  # fmt: skip
        yield Training(name, split, losing(function), points, SPLIT, "gradient", ONE, is_quick=function is _negatives)
    yield Training("a loss divided by the positive samples of a batch", split, losing(_of_positives), points, SPLIT,
                   "scale", ONE)  # fmt: skip
    yield Training("a loss that is added up", split, losing(_added_up), points, SPLIT, "scale", ONE)
    yield Training("a cached contrastive loss", split, Encoder, points, SPLIT, "gradient", ONE, trainer=Cached)
    yield Training("a training_step that does not divide", split, Encoder, points, SPLIT, "scale", ONE, Undivided)
    yield Training("a weight that is warmed up in the model", split, Warming, points, SPLIT, "gradient", ONE)
    yield Training("a mean over the tokens of a batch", split, Tagger, ragged, SPLIT, "gradient", ONE)
    yield Training("a compute_loss_func that does not divide", split, of(AutoModelForSequenceClassification, "bert"),
                   classes, SPLIT, "scale", ONE, options=(("compute_loss_func", mean_of_logits),))  # fmt: skip
    yield Training("bert by a Trainer that does not divide", "8 × 1 → 2 × 4 without apply",
                   of(AutoModelForSequenceClassification, "bert"), classes, How(2, 4, applied=None), "scale", ONE,
                   is_quick=True)  # fmt: skip
    yield Training(
        "wav2vec2, CTC added up",
        split,
        of(AutoModelForCTC, "wav2vec2", **_WAV, ctc_loss_reduction="sum"),
        speech,
        SPLIT,
        "scale",
        ONE,
    )
    yield Training("frozen embeddings, reentrant recomputation", "reentrant checkpointing", Tagger, texts,
                   RECOMPUTED, "untrained", is_quick=True)  # fmt: skip
    for kind, sizes in (
        ("recurrent_gemma", {"num_hidden_layers": 3, "lru_width": WIDTH}), ("gemma2", {"head_dim": 8}),
    ):  # fmt: skip
        yield Training(f"{kind}, which caps its logits", "fused loss", causal(kind, **sizes), texts,
                       with_(fused_loss=True), "refused", is_quick=kind == "gemma2")  # fmt: skip
    yield Training("llama, a compute_loss that reads logits", "fused loss", causal("llama", num_key_value_heads=2),
                   texts, with_(fused_loss=True), "refused", trainer=ReadsLogits)  # fmt: skip
    for kind, sizes in (("llama", {"num_key_value_heads": 2}), ("gpt2", _GPT2)):
        yield Training(f"{kind}, padded on the left", "padding-free", causal(kind, **sizes), ragged_on_the_left,
                       with_(padding_free=True), "refused")  # fmt: skip
    yield Training("mamba, whose state passes from sample to sample", "padding-free", causal("mamba", state_size=4),
                   ragged, with_(padding_free=True), "refused")  # fmt: skip


def _same() -> Iterator[Training]:
    split = "8 × 1 → 2 × 4"
    grouped = {"num_key_value_heads": 2}
    for kind, sizes in (
        ("llama", grouped), ("qwen2", grouped), ("qwen3", grouped | {"head_dim": 8}), ("mistral", grouped),
        ("gemma", grouped | {"head_dim": 8}), ("olmo2", grouped), ("phi3", grouped), ("gpt2", _GPT2), ("gpt_neox", {}),
        ("bloom", {"n_head": 4}), ("mixtral", _MOE),
    ):  # fmt: skip
        yield Training(f"{kind}, samples of other lengths", split, causal(kind, **sizes), ragged, SPLIT, asked=ONE,
                       is_quick=kind == "llama")  # fmt: skip
    for kind, sizes in (("bert", {}), ("deberta-v2", {}), ("albert", {"embedding_size": 16})):
        yield Training(f"{kind}, a class for each text", split, of(AutoModelForSequenceClassification, kind, **sizes),
                       classes, SPLIT, asked=ONE, is_quick=kind == "bert")  # fmt: skip
    yield Training("distilbert, a class for each token", split,
                   of(AutoModelForTokenClassification, "distilbert", dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=48),
                   tags, SPLIT, asked=ONE)  # fmt: skip
    yield Training("bert, as many masked tokens in each text", split, of(AutoModelForMaskedLM, "bert"), masked, SPLIT,
                   asked=ONE)  # fmt: skip
    yield Training("vit", split, of(AutoModelForImageClassification, "vit", **_VIT), images, SPLIT, asked=ONE,
                   is_quick=True)  # fmt: skip
    yield Training("convnext (layer norm)", split,
                   of(AutoModelForImageClassification, "convnext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
                      patch_size=4, num_labels=2), images, SPLIT, asked=ONE)  # fmt: skip
    yield Training("t5, targets of one length", split, of(AutoModelForSeq2SeqLM, "t5", **T5), texts, SPLIT, asked=ONE)
    yield Training("bart, targets of one length", split, of(AutoModelForSeq2SeqLM, "bart", **_BART), texts, SPLIT,
                   asked=ONE)  # fmt: skip
    yield Training("whisper", split, of(AutoModelForSpeechSeq2Seq, "whisper", **_WHISPER), features, SPLIT, asked=ONE)
    yield Training("llama with LoRA", split, adapted(causal("llama", **grouped)), ragged, SPLIT, asked=ONE)
    yield Training("a mean over samples, by a compute_loss", split, causal("llama", **grouped), ragged, SPLIT,
                   asked=ONE, trainer=OfSamples)  # fmt: skip
    for name, function in (("a margin for each pair", _margins), ("distances to a target", _distances)):
        yield Training(name, split, losing(function), points, SPLIT, asked=ONE)
    yield Training("llama with frozen embeddings", "checkpointing", frozen_below(causal("llama", **grouped)), texts,
                   RECOMPUTED)  # fmt: skip
    yield Training("llama with frozen embeddings", "reentrant checkpointing", frozen_below(causal("llama", **grouped)),
                   texts, REENTRANT)  # fmt: skip
    yield Training("granite, which scales its logits", "fused loss", causal("granite", **grouped, logits_scaling=8.0),
                   ragged, with_(fused_loss=True))  # fmt: skip
    for kind, sizes in (("mistral", grouped | {"sliding_window": 4}), ("gpt2", _GPT2)):
        yield Training(f"{kind}, padded on the right", "padding-free", causal(kind, **sizes), ragged,
                       with_(padding_free=True))  # fmt: skip
    yield Training("roberta", "sparse prediction", of(AutoModelForMaskedLM, "roberta", max_position_embeddings=40),
                   ragged, with_(sparse_prediction=True))  # fmt: skip
    yield Training("mixtral", "experts one after the other", causal("mixtral", **_MOE), texts,
                   with_(experts_implementation="eager"))  # fmt: skip
    yield Training("bert", "no mask", of(AutoModelForSequenceClassification, "bert"), classes, with_(unpadded=True))


DIFFERING, SAME = tuple(_differing()), tuple(_same())


def table_lines() -> list[str]:
    """Return the table of the documentation."""
    lines = ["| training | changed | found |", "|---|---|---|"]
    words = {"gradient": "other gradients", "scale": "gradients times a factor", "untrained": "fewer tensors trained"}
    for training in (*DIFFERING, *SAME):
        lines.append(f"| {training.name} | {training.change} | {words.get(training.finds, training.finds)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table_lines()))

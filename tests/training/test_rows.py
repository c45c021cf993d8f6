"""Train on rows of whole samples: the same loss for every token as with padding, or a refusal."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from own_data import write_tokenizer
from test_training import VOCABULARY, calm_classifier, encoder_decoder, language_model, train, trainer_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
)

from autotune.training import SettingUnavailableError, apply, pack
from autotune.training.batches import PaddedToMultiple, stock_settings
from autotune.training.rows import InOneRow, best_fit

LONGEST = 24


def texts(count: int = 24, *, prompted: bool = True) -> list[dict[str, Any]]:
    """Return samples of 3 to 24 tokens; if ``prompted``, labels of the first third do not count."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, LONGEST + 1, (count,), generator=generator).tolist()
    ids = [torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    starts = [len(row) // 3 if prompted else 0 for row in ids]
    return [{"input_ids": row, "labels": [-100] * start + row[start:]} for row, start in zip(ids, starts, strict=True)]


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    fills = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.tensor([sample[name] + [fill] * (longest - len(sample[name])) for sample in samples])
        for name, fill in fills.items()
    }
    mask = [[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples]
    return batch | {"attention_mask": torch.tensor(mask)}


def of_type(kind: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=sizes.get("attn_implementation", "sdpa"))


def with_attention(name: str) -> Any:
    model = language_model()
    model.set_attn_implementation(name)
    return model


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
MODELS = {
    "llama, sdpa": lambda: with_attention("sdpa"),
    "llama, eager": lambda: with_attention("eager"),
    "gpt2": lambda: of_type(
        "gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    ),
    "a window of 8 tokens": lambda: of_type("mistral", **SMALL, num_key_value_heads=2, sliding_window=8),
}


def trainer_on(model: Any, data: Any, folder: Path, collate: Any, **settings: Any) -> Any:
    trainer = trainer_of(model, data, folder, train_sampling_strategy="sequential", **settings)
    trainer.data_collator = collate
    return trainer


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("accumulation", "prompted"), [(1, True), (2, False)])
def test_the_loss_is_that_of_padded_batches(build: Any, accumulation: int, prompted: bool, tmp_path: Path) -> None:
    """Also where the first token of a sample has a label, which some versions of transformers count."""
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": 3}
    data = texts(prompted=prompted)
    stock = train(trainer_on(build(), data, tmp_path, padded, **settings))
    trainer = apply(trainer_on(build(), data, tmp_path, padded, **settings), padding_free=True)
    seen: list[Any] = []
    trainer.model.register_forward_pre_hook(lambda _, __, given: seen.append(given), with_kwargs=True)
    losses, weights = train(trainer)
    assert losses == pytest.approx(stock[0], rel=1e-5)
    assert torch.allclose(weights, stock[1], atol=2e-5)
    # The work is done with less: no token is padding.
    assert sum(given["input_ids"].numel() for given in seen) == sum(
        len(sample["input_ids"]) for sample in texts()[: 12 * accumulation]
    )


ROWS = {"padding_free": True, "length_multiple": 32}
TOGETHER: dict[str, dict[str, Any]] = {
    "few lengths": {"length_multiple": 16},
    "few lengths, fused": {"length_multiple": 16, "fused_loss": True},
    "few lengths, compiled": {"length_multiple": 16, "regional_compilation": True},
    "rows": {"padding_free": True},
    "filled rows, fused": {**ROWS, "fused_loss": True},
    "filled rows, compiled": {**ROWS, "regional_compilation": True},
}


# A sample: each lever, and each accumulation with rows and with few lengths.
_QUICK = {("few lengths", 1), ("few lengths, fused", 4), ("rows", 4), ("filled rows, fused", 1)}


@pytest.mark.parametrize(
    ("levers", "accumulation"),
    [
        pytest.param(levers, n, id=f"{name}, {n}", marks=() if (name, n) in _QUICK else pytest.mark.whole)
        for name, levers in TOGETHER.items()
        for n in (1, 4)
    ],
)
def test_training_evaluating_and_resuming_are_the_same(
    levers: dict[str, Any], accumulation: int, tmp_path: Path
) -> None:
    """For each lever for samples of different lengths, alone and with others."""
    settings = {
        "gradient_accumulation_steps": accumulation, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "steps", "save_steps": 4,
    }  # fmt: skip
    is_compiled = "regional_compilation" in levers
    if is_compiled and accumulation == 1:
        pytest.skip("compiling takes seconds, and the other accumulation has all of it")

    def trainer(name: str, **more: Any) -> Any:
        data = texts(24 * accumulation)
        return trainer_on(language_model(), data, tmp_path / name, padded, eval_dataset=texts(9), **settings, **more)

    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if is_compiled else {}
    stock, changed = trainer("stock"), apply(trainer("changed", **compiled), **levers)
    seen: list[tuple[bool, tuple[int, ...]]] = []
    changed.model.register_forward_pre_hook(
        lambda model, _, given: seen.append((model.training, tuple(given["input_ids"].shape))), with_kwargs=True
    )
    losses, weights = train(stock)
    again, same_weights = train(changed)
    assert again == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(same_weights, weights, atol=3e-5)
    trained = {shape for is_training, shape in seen if is_training}
    if (multiple := levers.get("length_multiple")) is not None:
        assert all(tokens % multiple == 0 for _, tokens in trained)
        assert len(trained) <= 3
    assert {rows for rows, _ in trained} == {1 if "padding_free" in levers else 4}
    # Evaluations have the batches that they had.
    evaluated_on = [padded(texts(9)[at : at + 8])["input_ids"].shape for at in (0, 8)]
    assert {shape for is_training, shape in seen if not is_training} == {tuple(shape) for shape in evaluated_on}
    evaluated = [[e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for t in (stock, changed)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    resumed = apply(trainer("resumed", **compiled), **levers)
    resumed.train(resume_from_checkpoint=str(tmp_path / "changed" / "checkpoint-4"))
    of_resumed = torch.cat([p.detach().flatten() for p in resumed.model.parameters()])
    assert torch.allclose(of_resumed, weights, atol=3e-5)


@pytest.mark.parametrize("kind", ["padding", "seq2seq", "tokens"])
def test_a_collator_of_transformers_can_pad_to_multiples_itself(kind: str, tmp_path: Path) -> None:
    """Training with its ``pad_to_multiple_of`` and without autotune has the same batches and losses."""
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "tokenizer"))
    model, data = language_model, texts()
    if kind == "seq2seq":
        collator: Any = DataCollatorForSeq2Seq(tokenizer)
        model = encoder_decoder
    elif kind == "tokens":
        collator = DataCollatorForTokenClassification(tokenizer)
    else:
        collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
        model = calm_classifier
        data = [{"input_ids": row["input_ids"], "labels": at % 2} for at, row in enumerate(data)]

    def trained(*, changes: bool) -> tuple[Trainer, Any]:
        seen: list[Any] = []
        trainer = trainer_on(model(), data, tmp_path, collator)
        trainer.model.register_forward_pre_hook(lambda _, __, given: seen.append(given), with_kwargs=True)
        if changes:
            apply(trainer, length_multiple=16)
        return trainer, (train(trainer), [{name: value.tolist() for name, value in batch.items()} for batch in seen])

    changed, expected = trained(changes=True)
    assert stock_settings(changed) == {"pad_to_multiple_of": 16}
    collator.pad_to_multiple_of = 16
    _, ((losses, weights), batches) = trained(changes=False)
    assert batches == expected[1]
    assert losses == expected[0][0]
    assert torch.equal(weights, expected[0][1])


def test_no_other_collator_is_left_to_pad_to_multiples(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "tokenizer"))
    own = type("Own", (DataCollatorWithPadding,), {})
    for collator, longest in ((padded, None), (own(tokenizer), None), (DataCollatorWithPadding(tokenizer), 24)):
        model = language_model(**({"max_position_embeddings": longest} if longest else {}))
        trainer = apply(trainer_on(model, texts(), tmp_path, collator), length_multiple=16)
        assert stock_settings(trainer) == {}


def test_a_model_that_was_trained_in_rows_does_all_else_as_before(tmp_path: Path) -> None:
    """It is evaluated, generates and is trained again, by another Trainer and by hand, and so is a copy of it."""
    model, batch = language_model(), padded(texts(4))
    settings = {"max_steps": 2}
    train(apply(trainer_on(model, texts(), tmp_path, padded, **settings), **ROWS, fused_loss=True))
    stock = language_model()
    stock.load_state_dict(model.state_dict())
    for each in (model, copy.deepcopy(model)):
        for is_training in (True, False):
            assert torch.equal(each.train(is_training)(**batch).logits, stock.train(is_training)(**batch).logits)
        prompt = {name: value[:, :3] for name, value in batch.items() if name != "labels"}
        made = [m.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (each, stock)]
        assert torch.equal(*made)
    again = train(trainer_on(stock, texts(), tmp_path, padded, **settings))
    losses, weights = train(apply(trainer_on(model, texts(), tmp_path, padded, **settings), **ROWS))
    assert losses == pytest.approx(again[0], rel=1e-5)
    assert torch.allclose(weights, again[1], atol=2e-5)


def test_rows_have_few_shapes() -> None:
    change = InOneRow(multiple=128, longest=40)
    rows = [change(padded(texts(24)[at : at + 4])) for at in range(0, 24, 4)]
    assert {tuple(row["input_ids"].shape) for row in rows} == {(1, 128)}
    assert {len(row["cu_seq_lens_q"]) for row in rows} == {4 + 4 + 1}
    for row in rows:
        lengths = row["cu_seq_lens_q"].diff()
        assert lengths.sum() == 128
        assert lengths.max() <= 40
        starts = row["cu_seq_lens_q"][:-1][lengths > 0]
        assert (row["position_ids"][0] == 0).nonzero().flatten().tolist() == starts.tolist()
        assert (row["labels"][0][starts] == -100).all()


def test_no_batch_is_padded_beyond_the_positions_of_a_model() -> None:
    batch = padded(texts())
    assert PaddedToMultiple(64, longest=40)(batch)["input_ids"].shape[1] == 40
    targets = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": torch.ones(24, 5)}
    of_targets = PaddedToMultiple(16, has_decoder=True)({**targets, "labels": targets["labels"].long()})
    assert of_targets["labels"].shape[1] == 16
    assert (of_targets["labels"][:, 5:] == -100).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda batch: {"input_ids": batch["input_ids"]}, "no input_ids with an attention_mask"),
        (lambda batch: {name: value.flip(1) for name, value in batch.items()}, "padded on the left"),
        (lambda batch: {**batch, "position_ids": batch["input_ids"]}, "a batch has position_ids"),
    ],
    ids=["no mask", "left", "positions"],
)
def test_padding_that_would_not_be_masked_is_refused(change: Any, words: str) -> None:
    with pytest.raises(SettingUnavailableError, match=words):
        PaddedToMultiple(64)(change(padded(texts())))


def test_packed_rows_have_the_losses_of_their_samples(tmp_path: Path) -> None:
    samples = texts()
    rows = pack(samples, LONGEST)
    assert sorted(index for row in rows.rows for index in row) == list(range(len(samples)))
    assert all(len(row["input_ids"]) <= LONGEST for row in rows)
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    assert len(rows) <= -(-tokens // LONGEST) + 1
    of_samples = train(
        trainer_on(language_model(), samples, tmp_path, padded, max_steps=1, per_device_train_batch_size=len(samples))
    )
    packed = trainer_on(
        language_model(), rows, tmp_path, rows.collate, max_steps=1, per_device_train_batch_size=len(rows)
    )
    losses, weights = train(apply(packed, padding_free=True))
    assert losses == pytest.approx(of_samples[0], rel=1e-5)
    assert torch.allclose(weights, of_samples[1], atol=2e-5)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: of_type("mamba", hidden_size=32, num_hidden_layers=2, attn_implementation="eager"), "Mamba"),
        (lambda: of_type("bloom", hidden_size=32, n_layer=2, n_head=4, attn_implementation="eager"), "Bloom"),
        (lambda: of_type("qwen3_next", **SMALL, num_key_value_heads=2, layer_types=["linear_attention"] * 2,
                         linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
                         linear_value_head_dim=8, num_experts=0), "Qwen3Next"),
    ],
    ids=["a state", "no positions", "linear attention"],
)  # fmt: skip
def test_a_model_that_mixes_samples_is_refused(build: Any, words: str, tmp_path: Path) -> None:
    trainer = trainer_on(build(), texts(), tmp_path, padded)
    with pytest.raises(SettingUnavailableError, match=words) as caught:
        apply(trainer, padding_free=True)
    assert "\n" not in str(caught.value)


def test_what_keeps_samples_from_being_told_apart_is_refused(tmp_path: Path) -> None:
    trainer = trainer_on(language_model(), texts(), tmp_path, padded, use_cache=True)
    with pytest.raises(SettingUnavailableError, match="with use_cache=True a model does not look"):
        apply(trainer, padding_free=True)
    trainer = apply(trainer_on(language_model(), texts(), tmp_path, padded), padding_free=True)
    with pytest.raises(SettingUnavailableError, match="in one row already"):
        apply(trainer, padding_free=True)


def test_padding_is_not_packed() -> None:
    samples = texts(6)
    batch = padded(samples)
    rows = [{name: value[at] for name, value in batch.items()} for at in range(len(samples))]
    packed, expected = pack(rows, LONGEST), pack(samples, LONGEST)
    assert list(packed) == list(expected)


def test_batches_of_something_else_are_refused() -> None:
    tokens = torch.ones(2, 3, dtype=torch.long)
    for batch, words in (
        ({"input_ids": tokens}, "no input_ids and labels"),
        ({"input_ids": tokens, "labels": tokens, "position_ids": tokens}, "position_ids that do not begin at 0"),
        ({"input_ids": tokens, "labels": tokens, "attention_mask": 0 * tokens}, "no token that counts"),
        ({"input_ids": tokens, "labels": tokens, "attention_mask": tokens.triu()}, "padded on the left"),
        (
            {"input_ids": tokens, "labels": tokens, "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])},
            "labels for its padding",
        ),
        ({"input_ids": tokens, "labels": tokens, "pixel_values": torch.ones(2, 3, 4, 4)}, "a batch has pixel_values"),
    ):
        with pytest.raises(SettingUnavailableError, match=words):
            InOneRow()(batch)


def test_samples_go_where_they_leave_the_least_free() -> None:
    assert best_fit([5, 9, 1, 4, 6], 10) == [[1, 2], [4, 3], [0]]
    with pytest.raises(ValueError, match=re.escape("a sample has 11 tokens, more than a row of 10")):
        best_fit([3, 11], 10)

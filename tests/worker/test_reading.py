"""Test preparing real datasets, and trials on them, each in its own process."""

import dataclasses
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from data_reading import Read, spec
from own_data import (
    BESIDE_WORDS,
    samples,
    texts,
    write_csv,
    write_images,
    write_jsonl,
    write_parquet,
    write_saved,
    write_tokenizer,
)
from server_client import ServerClient
from tiny import QUICK, attention_of_task, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, OutOfMemory
from autotune.core.prediction import PredictionAnswer, PredictionWork
from autotune.core.schema import decode
from autotune.core.units import MIB
from autotune.core.workload import Task, Workload
from autotune.devices.gpus import CHIPS
from autotune.space.levers import BY_NAME, Training, why_not
from autotune.worker.dataset.prepared import PreparedDataset

needs_pillow = pytest.mark.skipif(find_spec("PIL") is None, reason="Pillow is not installed")

WORDS = [5, 30, 8, 12, 3, 20, 9, 7] * 8
LONGEST = 30 + BESIDE_WORDS


def check_fed(outcome: Completed, longest: int | None) -> None:
    """What holds for every trial that was fed with real data."""
    measured = outcome.measurement
    assert measured.worst_batch_tokens == longest
    assert MIB < measured.worst_batch_peak_reserved_bytes <= measured.peak_reserved_bytes
    # Of the steps as they were timed; the step's time is that of the epoch's mean batch.
    assert 0 < measured.data_seconds < max(measured.step_seconds_each)
    assert measured.train_loss is not None
    assert math.isfinite(measured.train_loss)
    assert list(outcome.phase_seconds) == ["device", "data", "model", "trainer", "train"]


@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_parquet, write_saved])
def test_every_kind_of_text_file_is_read_and_trained_on(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path, write: Callable[..., Path]
) -> None:
    suffix = {write_jsonl: ".jsonl", write_csv: ".csv", write_parquet: ".parquet"}.get(write, "")
    path = write(tmp_path / f"data{suffix}", samples(WORDS, ("x", "y", "z")))
    found = read("bert-tiny", spec(path, tokenizer))
    assert (found.facts.samples, found.facts.num_labels) == (64, 3)
    lengths = found.facts.lengths
    assert (lengths.shortest, lengths.longest, lengths.median) == (3 + BESIDE_WORDS, LONGEST, 10)
    assert lengths.mean == pytest.approx(sum(WORDS) / len(WORDS) + BESIDE_WORDS)
    assert lengths.truncated == 0.0
    assert sum(lengths.histogram) == 64
    check_fed(found.trial(Candidate(Arm(), 4, 2)).completed, LONGEST)


@pytest.mark.parametrize(
    "name", ["g*.jsonl", "g[1].jsonl", "a::b.jsonl", "{x}%s[b]red[bold].jsonl", "two\nlines.jsonl"]
)
def test_a_name_is_no_pattern(read: Callable[..., Read], tokenizer: str, tmp_path: Path, name: str) -> None:
    """Nor a chain of URLs: of these files the one that is named is read."""
    write_jsonl(tmp_path / "g1.jsonl", samples([5] * 7))
    write_jsonl(tmp_path / name, samples([5] * 40))
    assert read("bert-tiny", spec(tmp_path / name, tokenizer)).facts.samples == 40


@pytest.mark.parametrize(
    ("model", "task", "changes", "longest"),
    [
        pytest.param("bert-tiny", "sequence-classification", {"padding": "max_length"}, 64, marks=pytest.mark.whole),
        ("bert-tiny", "masked-lm", {"pad_to_multiple_of": 8}, 32),
        ("gpt2-tiny", "causal-lm", {"group_by_length": True}, LONGEST),
        pytest.param("gpt2-tiny", "causal-lm", {"padding": "max_length"}, 64, marks=pytest.mark.whole),
        pytest.param("t5-tiny", "seq2seq-lm", {"label_column": "text"}, LONGEST, marks=pytest.mark.whole),
        ("t5-tiny", "seq2seq-lm", {"label_column": "text", "padding": "max_length"}, 64),
    ],
)
def test_every_task_of_text_trains(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path, model: str, task: Task,
    changes: dict[str, Any], longest: int,
) -> None:  # fmt: skip
    path = write_jsonl(tmp_path / "data.jsonl", samples(WORDS))
    found = read(model, spec(path, tokenizer, text_columns=("text",), **changes), task=task)
    effort = dataclasses.replace(QUICK, max_steps=4, min_steps=4)
    arm = Arm(attn_implementation=attention_of_task(task))
    outcome = found.trial(Candidate(arm, 4, 4), effort).completed
    check_fed(outcome, longest)
    assert outcome.measurement.micro_steps_run == 3
    assert len(outcome.measurement.warmup_step_seconds) == 3
    if task == "seq2seq-lm":
        assert found.facts.lengths.longest_target == LONGEST


@needs_pillow
def test_images_are_decoded_while_training(read: Callable[..., Read], tmp_path: Path) -> None:
    found = read("vit-tiny", spec(write_images(tmp_path / "images", 24, 40), None))
    assert (found.facts.samples, found.facts.num_labels, found.facts.lengths) == (24, 3, None)
    check_fed(found.trial(Candidate(Arm(), 4, 2)).completed, None)


@needs_pillow
def test_loading_processes_load_ahead_and_the_settings_reach_the_trainer(
    read: Callable[..., Read], tmp_path: Path
) -> None:
    found = read("vit-tiny", spec(write_images(tmp_path / "images", 24, 40), None))
    answer = found.trial(Candidate(Arm(dataloader_num_workers=2, dataloader_prefetch_factor=3), 4, 2))
    check_fed(answer.completed, None)
    # Six batches may lie ready after the first step: three more steps are not believed.
    assert len(answer.completed.measurement.warmup_step_seconds) == QUICK.warmup_steps + 3


@needs_pillow
def test_images_inside_a_saved_dataset_are_read_too(read: Callable[..., Read], tmp_path: Path) -> None:
    from datasets import load_dataset

    folder = write_images(tmp_path / "images", 12, 40)
    load_dataset("imagefolder", data_dir=str(folder), cache_dir=str(tmp_path / "cache")).save_to_disk(
        str(tmp_path / "saved")
    )
    found = read("vit-tiny", spec(tmp_path / "saved", None))
    check_fed(found.trial(Candidate(Arm(), 4)).completed, None)


def test_texts_are_cut_at_the_sequence_length(read: Callable[..., Read], tokenizer: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", samples(WORDS))
    found = read("bert-tiny", spec(path, tokenizer), seq_len=16)
    lengths = found.facts.lengths
    assert lengths.longest == 16
    assert lengths.truncated == pytest.approx(2 / 8), "30 and 20 words of eight"
    check_fed(found.trial(Candidate(Arm(), 4)).completed, 16)


def test_pairs_numbers_and_tokens_made_before(read: Callable[..., Read], tokenizer: str, tmp_path: Path) -> None:
    pairs = [{"a": text, "b": text, "label": index / 7} for index, text in enumerate(texts([4, 6, 9, 2]))]
    path = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    found = read("bert-tiny", spec(path, tokenizer, text_columns=("a", "b")))
    assert found.facts.num_labels == 1
    assert found.facts.lengths.longest == 2 * 9 + 3
    check_fed(found.trial(Candidate(Arm(), 2)).completed, 21)


def test_tokens_that_were_made_before_are_taken(read: Callable[..., Read], tokenizer: str, tmp_path: Path) -> None:
    rows = [{"input_ids": [6] * (3 + index), "attention_mask": [1] * (3 + index), "label": index % 2}
            for index in range(20)]  # fmt: skip
    found = read("bert-tiny", spec(write_saved(tmp_path / "saved", rows), tokenizer), seq_len=16)
    assert (found.facts.lengths.shortest, found.facts.lengths.longest) == (3, 16)
    check_fed(found.trial(Candidate(Arm(), 2)).completed, 16)


def test_one_long_sample_among_many_short_decides_memory(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path
) -> None:
    """A trial that sees it only by chance would promise a batch that fails hours later."""
    short = read("bert-tiny", spec(write_jsonl(tmp_path / "a.jsonl", samples([6] * 200)), tokenizer), seq_len=512)
    candidate = Candidate(Arm(), 8)
    little = short.trial(candidate).completed.measurement.peak_reserved_bytes
    (tmp_path / "read").rename(tmp_path / "short")
    one_long = spec(write_jsonl(tmp_path / "b.jsonl", samples([6] * 199 + [500])), tokenizer)
    found = read("bert-tiny", one_long, seq_len=512)
    outcome = found.trial(candidate).completed
    check_fed(outcome, 502)
    assert outcome.measurement.peak_reserved_bytes > 4 * little
    assert outcome.measurement.worst_batch_step_seconds > 2 * min(outcome.measurement.step_seconds_each)
    capped = found.trial(candidate, cap_bytes=2 * little).outcome
    assert isinstance(capped, OutOfMemory)


BAD: list[tuple[str, dict[str, Any], str]] = [
    (
        "no text column",
        {"text_columns": ("body",)},
        "no column 'body' | it has text, label; name one with --text-column",
    ),
    (
        "no label column",
        {"label_column": "stars"},
        "no column 'stars' | it has text, label; name one with --label-column",
    ),
    ("text of no text", {"text_columns": ("label",)}, "'label' holds no text"),
    ("no tokenizer", {"tokenizer": "/nowhere"}, "there is no tokenizer in /nowhere"),
    ("no split", {"split": "validation"}, "no split 'validation' | it has test, train"),
]


@pytest.mark.parametrize(("changes", "words"), [(changes, words) for _, changes, words in BAD], ids=[b[0] for b in BAD])
def test_bad_columns_and_tokenizers_are_refused(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    rows = [{"text": text, "label": index % 2} for index, text in enumerate(texts(WORDS))]
    data = spec(write_saved(tmp_path / "saved", rows), tokenizer)
    assert words in read("bert-tiny", dataclasses.replace(data, **changes)).refusal


def test_bad_contents_are_refused(read: Callable[..., Read], tokenizer: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a", "label": 0}\n{"text": \n')
    assert "broken.jsonl cannot be read" in read("bert-tiny", spec(broken, tokenizer)).refusal
    nothing = tmp_path / "nothing.csv"
    nothing.write_text("text,label\n")
    assert "has no samples" in read("bert-tiny", spec(nothing, tokenizer)).refusal
    none = write_jsonl(tmp_path / "none.jsonl", [{"text": "a"}, {"text": "b"}])
    assert "no column is called label" in read("bert-tiny", spec(none, tokenizer)).refusal
    each = write_jsonl(tmp_path / "each.jsonl", [{"text": "a b", "label": number} for number in range(21)])
    assert "each of the 21 samples has a different class" in read("bert-tiny", spec(each, tokenizer)).refusal
    two = write_jsonl(tmp_path / "two.jsonl", [{"a": "x", "b": "y", "label": 1}])
    assert "it has a, b, label; name one with --text-column" in read("bert-tiny", spec(two, tokenizer)).refusal


def test_a_tokenizer_of_another_model_is_refused(read: Callable[..., Read], tokenizer: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", samples(WORDS))
    found = read("bert-tiny", spec(path, tokenizer), config={"vocab_size": 8})
    assert "but bert-tiny has only 8 tokens" in found.refusal


def test_a_tokenizer_without_padding_pads_with_its_end(read: Callable[..., Read], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", samples(WORDS))
    ended = write_tokenizer(tmp_path / "ended", special=("<eos>", "<unk>"), eos="<eos>")
    check_fed(read("gpt2-tiny", spec(path, str(ended))).trial(Candidate(Arm(), 4)).completed, 30)
    (tmp_path / "read").rename(tmp_path / "first")
    endless = write_tokenizer(tmp_path / "endless", special=("<x>", "<unk>"))
    assert "neither a padding token" in read("gpt2-tiny", spec(path, str(endless))).refusal


def test_what_is_predicted_is_the_worst_batch(
    trial_server: ServerClient, read: Callable[..., Read], tokenizer: str, tmp_path: Path
) -> None:
    """As much as samples that are made up at the longest length with a mask, whatever the sequence length."""
    path = write_jsonl(tmp_path / "data.jsonl", samples([6] * 40 + [94]))
    own = read("bert-tiny", spec(path, tokenizer), seq_len=512).workload

    def peak_bytes(workload: Workload) -> int:
        work = PredictionWork(Arm(), CHIPS["h200"], 8 * 1024 * MIB, 8 * 1024 * MIB, ((16, 1),), None)
        answer = decode(trial_server.run(workload, work).result, PredictionAnswer)
        return answer.batches[0].peak_allocated_bytes

    found = peak_bytes(own)
    assert found == peak_bytes(tiny_workload("bert-tiny", seq_len=96, padding=0.3))
    assert found < 0.55 * peak_bytes(tiny_workload("bert-tiny", seq_len=512, padding=0.3))


@pytest.mark.parametrize(("error", "answers"), [(None, True), (OSError("no route"), False), ("http", True)])
def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Any, answers: bool
) -> None:
    """``from_pretrained`` would try for most of a minute."""
    from huggingface_hub.errors import RepositoryNotFoundError

    from autotune.worker.dataset import tokenizer

    asked = []

    def ask(*_: Any, **__: Any) -> None:
        asked.append(1)
        if error == "http":
            # Made without the response, whose type depends on the client of the installed hub library.
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        if error is not None:
            raise error

    monkeypatch.setattr(tokenizer, "get_hf_file_metadata", ask)
    assert tokenizer._is_at_hand("someone/model") is answers
    assert tokenizer._is_at_hand(str(tmp_path))
    assert asked == [1]


def test_packed_samples_are_read_and_trained_on_in_rows(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path
) -> None:
    data = spec(write_jsonl(tmp_path / "data.jsonl", samples(WORDS)), tokenizer, packing=True)
    found = read("llama-tiny", data, seq_len=64)
    tokens = sum(WORDS) + len(WORDS) * BESIDE_WORDS
    packed, rows = found.facts.packed, found.facts
    assert (packed.samples, packed.lengths.longest) == (len(WORDS), LONGEST)
    assert rows.samples == -(-tokens // 64)
    assert rows.lengths.mean * rows.samples == pytest.approx(tokens)
    held = PreparedDataset(found.workload, str(tmp_path / "read")).dataset
    full = sorted(len(held[row]["input_ids"]) for row in range(len(held)))
    check_fed(found.trial(Candidate(Arm(padding_free=True), 4)).completed, sum(full[-4:]))


@pytest.mark.parametrize(
    ("model", "arm", "tokens"),
    [
        ("bert-tiny", Arm(length_multiple=24), 48),
        ("bert-tiny", Arm(length_multiple=1000), 512),
        ("llama-tiny", Arm(padding_free=True), 4 * LONGEST),
        ("llama-tiny", Arm(padding_free=True, length_multiple=50), 150),
    ],
)
def test_the_tokens_of_the_worst_batch_are_those_that_it_has(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path, model: str, arm: Arm, tokens: int
) -> None:
    """No batch of bert-tiny is padded beyond its 512 positions."""
    data = spec(write_jsonl(tmp_path / "data.jsonl", samples(WORDS)), tokenizer)
    check_fed(read(model, data).trial(Candidate(arm, 4)).completed, tokens)


def padded_rows(left: bool = False) -> list[dict[str, Any]]:
    """Tokens that are padded to 16, of which 4 to 15 are real; nothing is predicted for the first two of those."""
    rows = []
    for index in range(48):
        count = 4 + index % 12
        real, rest = [6 + index % 3] * count, 16 - count
        each = (real, [1] * count, [-100, -100, *real[2:]])
        filled = [[0] * rest, [0] * rest, [-100] * rest]
        columns = [f + e if left else e + f for e, f in zip(each, filled, strict=True)]
        rows.append(dict(zip(("input_ids", "attention_mask", "labels"), columns, strict=True)))
    return rows


def test_padding_that_the_data_hold_is_no_token(read: Callable[..., Read], tokenizer: str, tmp_path: Path) -> None:
    found = read("llama-tiny", spec(write_saved(tmp_path / "saved", padded_rows()), tokenizer))
    lengths = found.facts.lengths
    assert (lengths.shortest, lengths.longest, lengths.stored) == (4, 15, (16, 16))
    assert lengths.padding == pytest.approx(1 - 9.5 / 16)
    held = PreparedDataset(found.workload, str(tmp_path / "read"))
    given = held.ingredients(None)
    batch = given["data_collator"]([held.dataset[0], held.dataset[1]])
    assert (batch["attention_mask"].sum(1).tolist(), batch["labels"][0, :4].tolist()) == ([4, 5], [-100, -100, 6, 6])
    unmasked = Training.of(found.workload, "cpu", 1)
    assert why_not(BY_NAME["unpadded"], unmasked) is not None
    check_fed(found.trial(Candidate(Arm(), 4)).completed, 16)


@pytest.mark.parametrize("left", [False, True])
def test_rows_are_packed_of_real_tokens_alone(
    read: Callable[..., Read], tokenizer: str, tmp_path: Path, left: bool
) -> None:
    data = spec(write_saved(tmp_path / "saved", padded_rows(left)), tokenizer, packing=True)
    found = read("llama-tiny", data, seq_len=32)
    assert found.facts.lengths.mean * found.facts.samples == 48 * 9.5
    rows = PreparedDataset(found.workload, str(tmp_path / "read")).dataset
    assert 0 not in {token for row in range(len(rows)) for token in rows[row]["input_ids"]}
    assert sum(row["labels"].count(-100) for row in map(rows.__getitem__, range(len(rows)))) == 2 * 48


def test_samples_without_text_are_counted(read: Callable[..., Read], tokenizer: str, tmp_path: Path) -> None:
    rows = [*samples(WORDS), {"text": None, "label": "no"}, {"text": " ", "label": "no"}]
    assert read("bert-tiny", spec(write_jsonl(tmp_path / "data.jsonl", rows), tokenizer)).facts.without_text == 2

"""Test datasets of images and text: what is read, the batches that a processor makes of it, trials, refusals."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_reading import Read, spec
from own_data import PLACE, texts, write_jsonl, write_parquet, write_pictures, write_processor, write_tokenizer
from tiny import QUICK, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.dataset_spec import DataFacts, DataSpec
from autotune.core.errors import InvalidRequestError
from autotune.core.messages import Problem
from autotune.core.workload import Workload
from autotune.models.dataset_files import check_unchanged, locate, tokenizer_content
from autotune.tuning.options import build_workload
from autotune.worker.dataset import tokenizer
from autotune.worker.dataset.prepared import BatchShape, PreparedDataset, make_schedule
from autotune.worker.dataset.reading import read_data
from autotune.worker.trial.build import build_model

pytest.importorskip("PIL", reason="Pillow is not installed")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Qwen2VLImageProcessorPil"):
    pytest.skip("without torchvision this transformers has no image processors", allow_module_level=True)

TINY = tuple(PLACE)
QWEN = "qwen2.5-vl-tiny"
SIZES = [(60, 60), (100, 130), (100, 60)]
SEQ_LEN = 160


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder for each tiny model."""
    return {model: str(write_processor(tmp_path_factory.mktemp("processor"), model)) for model in TINY}


def rows_of(folder: Path, model: str, count: int = 12) -> list[dict[str, Any]]:
    """Samples of one image or two, of several sizes, and texts of several lengths."""
    names = write_pictures(folder, [SIZES[number % 3] for number in range(2 * count)])
    words = texts([4 + 3 * (number % 5) for number in range(count)])
    rows = []
    for number, text in enumerate(words):
        images = names[2 * number : 2 * number + 1 + number % 2]
        rows.append({"images": images, "text": " ".join([PLACE[model]] * len(images) + [text])})
    return rows


def prepared(data: DataSpec, model: str, folder: Path, seq_len: int = SEQ_LEN) -> PreparedDataset:
    """The dataset as trials open it."""
    workload = dataclasses.replace(tiny_workload(model, seq_len=seq_len, images=0, image_side=None), data=data)
    facts = read_data(workload, str(folder))
    assert isinstance(facts, DataFacts), facts
    return PreparedDataset(workload.with_facts(facts), str(folder))


@pytest.mark.parametrize("model", TINY)
def test_a_batch_is_what_the_processor_makes_and_trains_what_sees_and_what_reads(
    processors: dict[str, str], tmp_path: Path, model: str
) -> None:
    rows = rows_of(tmp_path, model)
    from PIL import Image

    # As phones store what was taken upright.
    lying = Image.Exif()
    lying[0x0112] = 6
    Image.open(tmp_path / rows[1]["images"][0]).save(tmp_path / rows[1]["images"][0], exif=lying)
    data = prepared(spec(write_jsonl(tmp_path / "a.jsonl", rows), processors[model]), model, tmp_path / "read")
    built = build_model(tiny_workload(model), "sdpa", torch.device("cpu"))
    parts = data.ingredients(built, evaluated=2)
    samples = [parts["train_dataset"][index] for index in range(len(rows))]
    batch = parts["data_collator"](samples)
    lengths = np.load(tmp_path / "read" / "lengths.npy")
    assert batch["attention_mask"].sum(dim=1).tolist() == lengths.tolist(), "lengths are those of real batches"
    token = built.config.image_token_id
    is_image = batch["input_ids"] == token
    assert is_image.any(dim=1).all()
    learned = batch["labels"] != -100
    assert torch.equal(learned, (batch["attention_mask"] == 1) & ~is_image)
    if model == QWEN:
        assert len(batch["image_grid_thw"]) == sum(len(row["images"]) for row in rows)
        assert is_image.sum().item() * 4 == len(batch["pixel_values"])
    else:
        assert batch["pixel_values"].shape[2:] == (3, 64, 64)
        assert batch["pixel_attention_mask"].shape[:2] == batch["pixel_values"].shape[:2]
    loss = built(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1000), rel=0.05)
    assert not [name for name, parameter in built.named_parameters() if parameter.grad is None]
    assert data.arguments == {"remove_unused_columns": False}


@pytest.mark.parametrize("model", TINY)
def test_trials_decode_the_images_while_they_train(
    read: Callable[..., Read], processors: dict[str, str], tmp_path: Path, model: str
) -> None:
    data = spec(write_jsonl(tmp_path / "a.jsonl", rows_of(tmp_path, model)), processors[model])
    found = read(model, data, seq_len=SEQ_LEN, images=0, image_side=None)
    assert found.facts.samples == 12
    assert not [path for path in (tmp_path / "read").rglob("*.arrow") if path.stat().st_size > 20_000], "no pixels"
    measured = found.trial(Candidate(Arm(dataloader_num_workers=1), 4, 2), QUICK).completed.measurement
    assert measured.worst_batch_tokens == found.facts.lengths.longest
    assert measured.data_seconds > 0


def messages_of(row: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    """A sample as a chat: the parts of each message, or its text alone."""
    text = row["text"].split("> ")[-1]
    if not whole:
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "beta"}]
        return {"images": row["images"], "messages": chat}
    parts = [{"type": "image"}] * len(row["images"]) + [{"type": "text", "text": text, "image": None}]
    answer = [{"type": "text", "text": "beta"}]
    return {
        "images": row["images"],
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}],
    }


@pytest.mark.parametrize("whole", [True, False])
def test_messages_are_written_with_the_chat_template(processors: dict[str, str], tmp_path: Path, whole: bool) -> None:
    rows = rows_of(tmp_path, QWEN, 4)
    path = write_jsonl(tmp_path / "a.jsonl", [messages_of(row, whole=whole) for row in rows])
    data = prepared(spec(path, processors[QWEN]), QWEN, tmp_path / "read")
    for row, sample in zip(rows, data.dataset, strict=True):
        assert sample["text"].split() == ["user", *row["text"].split(), "assistant", "beta"]


def test_images_inside_a_dataset_are_read_too(processors: dict[str, str], tmp_path: Path) -> None:
    from datasets import Dataset, Image, Sequence

    rows = rows_of(tmp_path, QWEN, 4)
    plain = prepared(spec(write_jsonl(tmp_path / "a.jsonl", rows), processors[QWEN]), QWEN, tmp_path / "read")
    model = build_model(tiny_workload(QWEN), "sdpa", torch.device("cpu"))

    def pixels(data: PreparedDataset) -> torch.Tensor:
        parts = data.ingredients(model)
        return parts["data_collator"]([parts["train_dataset"][index] for index in range(4)])["pixel_values"]

    expected = pixels(plain)
    within = [{**row, "images": [str(tmp_path / name) for name in row["images"]]} for row in rows]
    of_images = Dataset.from_list(within).cast_column("images", Sequence(Image()))
    of_images.to_parquet(str(tmp_path / "b.parquet"))
    of_images.save_to_disk(str(tmp_path / "saved"))
    stored = [
        {**row, "images": [{"bytes": (tmp_path / name).read_bytes(), "path": None} for name in row["images"]]}
        for row in rows
    ]
    # Without what datasets notes beside its columns.
    write_parquet(tmp_path / "c.parquet", stored)
    for name in ("b.parquet", "saved", "c.parquet"):
        read = prepared(spec(tmp_path / name, processors[QWEN]), QWEN, tmp_path / f"read {name}")
        assert torch.equal(pixels(read), expected), name


def test_a_folder_of_images_with_texts(processors: dict[str, str], tmp_path: Path) -> None:
    rows = rows_of(tmp_path, QWEN, 4)
    folder = tmp_path / "folder"
    folder.mkdir()
    for row in rows:
        shutil.copy(tmp_path / row["images"][0], folder)
    named = [
        {"file_name": Path(row["images"][0]).name, "caption": f"{PLACE[QWEN]} {row['text'].split('> ')[-1]}"}
        for row in rows
    ]
    write_jsonl(folder / "metadata.jsonl", named)
    data = prepared(spec(folder, processors[QWEN], text_columns=("caption",)), QWEN, tmp_path / "read")
    assert sorted(data.dataset["text"]) == sorted(row["caption"] for row in named)


@pytest.mark.parametrize("padding", [{"padding": "max_length"}, {"pad_to_multiple_of": 64}])
def test_batches_are_padded_as_asked(processors: dict[str, str], tmp_path: Path, padding: dict[str, Any]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows_of(tmp_path, QWEN, 4))
    data = prepared(spec(path, processors[QWEN], **padding), QWEN, tmp_path / "read", seq_len=128)
    parts = data.ingredients(build_model(tiny_workload(QWEN), "sdpa", torch.device("cpu")))
    batch = parts["data_collator"]([parts["train_dataset"][index] for index in range(4)])
    assert batch["input_ids"].shape[1] == (128 if "padding" in padding else 64)


def test_the_largest_batches_have_the_longest_sample_and_the_most_images() -> None:
    random = np.random.default_rng(1)
    images = random.integers(1, 9, 500) * 20
    lengths = images + random.integers(5, 30, 500)
    images[7], lengths[7] = 20, 400
    shape = BatchShape(8, 1, 1, 3, 0, 4)
    schedule = make_schedule(500, lengths, None, DataSpec("/x", "json", ""), 512, shape, 0, images)
    full, mixed = list(schedule.order[:8]), list(schedule.order[16:24])
    assert full[0] == mixed[0] == 7
    assert images[full[1:]].tolist() == [160] * 7
    assert max(lengths[mixed[1:]]) < 50


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any], str]] = {
    "no image column": (
        lambda row: {"text": row["text"]}, {}, "no column is called images or image or img, so the image is unknown",
    ),
    "another column": (lambda row: row, {"image_column": "x"}, "has no column 'x' | it has images, text"),
    "no text": (lambda row: {"images": row["images"], "n": 1}, {}, "so the text is unknown | it has images, n"),
    "two texts": (
        lambda row: {"images": row["images"], "prompt": row["text"], "completion": "beta"}, {},
        "so the text is unknown | it has images, prompt, completion",
    ),
    "numbers as text": (
        lambda row: {**row, "text": 1}, {"text_columns": ("text",)}, "'text' holds neither text nor messages",
    ),
    "numbers as images": (lambda row: {**row, "images": [1]}, {}, "'images' holds no images"),
    "no images": (lambda row: {**row, "images": row["images"][1:]}, {}, "2 of 4 samples have no image in 'images'"),
    "too few places": (
        lambda row: {**row, "text": f"{PLACE[QWEN]} beta"}, {},
        "2 of 4 samples have not one <|vision_start|><|image_pad|><|vision_end|> in 'text' for each image; "
        "the first is sample 2",
    ),
    "no beginnings": (
        lambda row: {**row, "text": row["text"].replace("<|vision_start|>", "")}, {},
        "4 of 4 samples have not one <|vision_start|><|image_pad|><|vision_end|> in 'text' for each image",
    ),
    "no such file": (
        lambda row: {**row, "images": ["none.png"]}, {}, "an image of sample 1 cannot be read: FileNotFoundError",
    ),
    "no chat": (
        lambda row: {"images": row["images"], "messages": [{"content": "beta"}]}, {},
        "'messages' cannot be written with the chat template",
    ),
}  # fmt: skip


def refusal(data: DataSpec, folder: Path, seq_len: int = SEQ_LEN, **changes: Any) -> str:
    made = tiny_workload(QWEN, seq_len=seq_len, images=0, image_side=None, **changes)
    workload = dataclasses.replace(made, data=data)
    problem = read_data(workload, str(folder / "read"))
    assert isinstance(problem, Problem)
    return f"{problem.message} | {problem.hint}"


@pytest.mark.parametrize(("changed", "options", "words"), WRONG.values(), ids=WRONG)
def test_wrong_samples_are_refused(
    processors: dict[str, str], tmp_path: Path,
    changed: Callable[[dict[str, Any]], dict[str, Any]], options: dict[str, Any], words: str,
) -> None:  # fmt: skip
    path = write_jsonl(tmp_path / "a.jsonl", [changed(row) for row in rows_of(tmp_path, QWEN, 4)])
    refused = refusal(spec(path, processors[QWEN], **options), tmp_path)
    assert "--dataset a.jsonl" in refused
    assert words in refused


def test_samples_that_are_too_long_are_counted(processors: dict[str, str], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows_of(tmp_path, QWEN, 4))
    refused = refusal(spec(path, processors[QWEN]), tmp_path, seq_len=20)
    assert "3 of 4 samples have more than --seq-len 20 tokens, and images are not cut | give --seq-len 3" in refused


def test_a_processor_that_does_not_serve_is_refused(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, QWEN, 4)
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert "there is no processor in " in refusal(spec(path, str(tmp_path / "pictures")), tmp_path)
    refused = refusal(spec(path, str(write_tokenizer(tmp_path / "tokenizer"))), tmp_path)
    assert "there is no processor of images and text in" in refused
    assert "but a PreTrainedTokenizerFast" in refused or "but a TokenizersBackend" in refused
    mute = str(write_processor(tmp_path / "mute", QWEN, chats=False))
    chats = write_jsonl(tmp_path / "b.jsonl", [messages_of(row, whole=True) for row in rows])
    assert "give a processor with a chat template with --tokenizer" in refusal(spec(chats, mute), tmp_path)
    # The text of a model with other tokens.
    small = tiny_workload(QWEN)
    of_few = {"text_config": {**small.config["text_config"], "vocab_size": 8}}
    for config, words in ((of_few, "has only 8 tokens"), ({"image_token_id": 7}, "reads token 7 as images")):
        assert words in refusal(spec(path, mute), tmp_path, config=config)


def test_a_processor_that_films_need_a_package_for_names_it(
    processors: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ImportError("\nQwen2VLVideoProcessor requires the Torchvision library")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", load)
    monkeypatch.setattr(tokenizer, "find_spec", lambda _: None)
    path = write_jsonl(tmp_path / "a.jsonl", rows_of(tmp_path, QWEN, 4))
    refused = refusal(spec(path, processors[QWEN]), tmp_path)
    assert (
        "needs a package: ImportError: Qwen2VLVideoProcessor requires the Torchvision library | pip install torch"
        in refused
    )


# What the options make of it


def options_of(folder: Path, processor: str, **changes: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = dict.fromkeys(
        ("task", "dtype", "split", "text_column", "label_column", "image_column", "pad_to_multiple_of")
    )
    off = dict.fromkeys(("pad_to_max_length", "group_by_length", "packing"), False)
    path = write_jsonl(folder / "a.jsonl", [{"images": ["a.png"], "text": "beta"}])
    given = {"model": QWEN, "seq_len": 64, "world_size": 1, "dataset": str(path), "tokenizer": processor}
    return {**defaults, **off, **given, **changes}


def test_options_make_the_workload(processors: dict[str, str], tmp_path: Path) -> None:
    workload = build_workload(options_of(tmp_path, processors[QWEN], image_column="pictures"))
    assert (workload.images, workload.image_side, workload.data.image_column) == (0, None, "pictures")
    assert Workload.from_document(json.loads(json.dumps(workload.recorded_document()))) == workload


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": 2}, "--images 2 is for synthetic samples"),
        ({"image_size": 56}, "--image-size 56 is for synthetic samples"),
        ({"padding": 0.1}, "--padding 0.1 is for synthetic samples"),
        ({"packing": True}, "--packing: samples of image-text-to-text are not packed"),
        ({"group_by_length": True}, "--group-by-length does not apply to image-text-to-text"),
        ({"label_column": "x"}, "--label-column does not apply to image-text-to-text"),
        ({"text_column": ("a", "b")}, "--text-column a,b is too many for image-text-to-text"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    processors: dict[str, str], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        build_workload(options_of(tmp_path, processors[QWEN], **changes))


def test_a_processor_that_changes_is_noticed(tmp_path: Path) -> None:
    folder = write_processor(tmp_path / "processor", QWEN)
    source, kind, content = locate(str(write_jsonl(tmp_path / "a.jsonl", [{"a": 1}])), None)
    before = tokenizer_content(str(folder), of_processor=True)
    data = DataSpec(source, kind, content, tokenizer_content=before, tokenizer=str(folder))
    check_unchanged(data, of_processor=True)
    config = next(folder.glob("*processor_config.json"))
    config.write_text(config.read_text().replace("12544", "6272"))
    with pytest.raises(InvalidRequestError, match="has changed since the search"):
        check_unchanged(data, of_processor=True)

"""Test a search on a dataset of images and text, from the command line to the stock run on the same data."""

import json
from pathlib import Path

import pytest
from command_line import run_process
from own_data import PLACE, texts, write_jsonl, write_pictures, write_processor
from test_cli_errors import check_error

pytest.importorskip("PIL", reason="Pillow is not installed")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Idefics3ImageProcessorPil"):
    pytest.skip("without torchvision this transformers has no image processors", allow_module_level=True)

MODEL = "smolvlm-tiny"
SEARCH = (
    "search", "--model", MODEL, "--dataset", "train.jsonl", "--tokenizer", "processor", "--seq-len", "96",
    "--effective-batch", "4", "--device", "cpu", "--storage", "s.db", "--study", "own", "--json",
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with pictures, what is said of them, and a processor."""
    names = write_pictures(tmp_path, [(60, 60), (100, 60), (80, 100)] * 4)
    said = texts([4, 9, 6, 12] * 3)
    rows = [{"picture": name, "caption": f"{PLACE[MODEL]} {text}"} for name, text in zip(names, said, strict=True)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_processor(tmp_path / "processor", MODEL)
    return tmp_path


def test_a_search_and_a_stock_run_on_images_and_text(place: Path) -> None:
    columns = ("--image-column", "picture", "--text-column", "caption")
    few = ("--precision", "fp32", "--gradient-checkpointing", "off", "--trials", "2")
    ran = run_process(*SEARCH, *columns, *few, folder=place)
    document = ran.document
    assert "data    train.jsonl, 12 samples, " in ran.stderr
    workload, best = document["workload"], document["best"]
    assert workload["data"]["facts"]["lengths"]["longest"] == best["worst_batch_tokens"] <= 96
    assert best["data_seconds"] > 0
    # A batch of made-up samples of full length would count 96 a sample.
    mean = workload["data"]["facts"]["lengths"]["mean"]
    assert best["tokens_per_second"] == pytest.approx(best["samples_per_second"] * mean, rel=0.01)
    exported = run_process("export", "own", "--storage", "s.db", folder=place)
    assert "remove_unused_columns" not in exported.document
    verified = run_process("verify", "own", "--steps", "10", "--storage", "s.db", "--json", folder=place)
    assert verified.code in (0, 11), verified.stderr
    assert json.loads(verified.stdout)["obtained"]["state"] == "completed"


def test_what_cannot_be_trained_on_is_refused_before_any_trial(place: Path) -> None:
    before = sorted(path.name for path in place.iterdir())
    named = ("--image-column", "picture", "--text-column", "caption")
    for options, words in (
        ((), ("no column is called images or image or img", "picture, caption", "--image-column")),
        ((*named, "--seq-len", "30"), ("samples have more than --seq-len 30 tokens", "give --seq-len ")),
        ((*named, "--tokenizer", "nowhere"), ("there is no processor in nowhere", "--tokenizer")),
        (
            (*named, "--lever", "padding_free=on"),
            ("--lever padding_free=on: samples of image-text-to-text are not put in one row",),
        ),
        ((*named, "--images", "2"), ("--images 2 is for synthetic samples", "leave --images out")),
    ):
        ran = run_process(*SEARCH, *options, folder=place)
        check_error(ran, 2, *words)
        assert sorted(path.name for path in place.iterdir()) == before, "nothing is left behind"

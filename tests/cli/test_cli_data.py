"""Test searches on the user's own dataset: output, errors, and that the winner survives an epoch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from command_line import ROOT, TINY_MODEL, Ran, Run, environment, run_process
from own_data import samples, texts, write_jsonl, write_tokenizer
from test_cli_errors import check_error

from autotune.core.units import MIB

SEQ_LEN = 128
LONG_WORDS = 120
BATCH = 32
SHORT = [4, 6, 9, 12, 7, 5]
SEARCH = ("search", "--model", TINY_MODEL, "--seq-len", str(SEQ_LEN), "--device", "cpu", "--json", "--storage", "s.db")
# A batch of 32 takes 166 MiB with the long sample in it, one of 16 takes 103 MiB.
LIMIT_BYTES = 130 * MIB
# The defaults, a batch too large, and one that fits.
OWN = (
    *SEARCH, "--tokenizer", "tokenizer", "--effective-batch", str(BATCH), "--study", "own", "--precision", "fp32",
    "--gradient-checkpointing", "off", "--memory-limit", f"{LIMIT_BYTES}B", "--trials", "3",
)  # fmt: skip


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.whole)], ids=["warm", "cold"])
def cold(request: pytest.FixtureRequest) -> bool:
    """Whether the search starts cold."""
    return bool(request.param)


@pytest.fixture(scope="module")
def place(cold: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this start's own, with data of many short samples and one long, and a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "train.jsonl", samples([*SHORT * 50, LONG_WORDS, *SHORT * 50], (0, 1)))
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def searched(place: Path, cold: bool) -> Ran:
    """A search that has to leave room for the one long sample."""
    ran = run_process(*OWN, "--dataset", "train.jsonl", folder=place, cold=cold)
    assert ran.code == 0, ran.stderr
    return ran


def test_the_lengths_are_shown_and_recorded(searched: Ran) -> None:
    shown = next(line for line in searched.stderr.splitlines() if "of a batch of 8 is padding" in line)
    assert "min 6, median 9" in shown
    assert f"max {LONG_WORDS + 2}" in shown
    assert "data    train.jsonl, 601 samples, 6 to 122 tokens (median 9), padded to the longest of a batch" in (
        searched.stderr
    )
    facts = searched.document["workload"]["data"]["facts"]
    assert facts["samples"] == 601
    assert facts["lengths"]["longest"] == LONG_WORDS + 2


def test_the_worst_batch_decides_what_fits(searched: Ran) -> None:
    document = searched.document
    best, trials = document["best"], document["trials"]
    assert best["worst_batch_tokens"] == LONG_WORDS + 2
    assert best["worst_batch_peak_reserved_bytes"] <= best["peak_reserved_bytes"] <= document["ceiling_bytes"]
    # Both the least that was timed: a mean tells what else the machine did.
    assert best["worst_batch_step_seconds"] > min(best["step_seconds_each"])
    assert best["per_device_train_batch_size"] < BATCH
    assert {trial["state"] for trial in trials} == {"completed", "out_of_memory"}
    # Samples a second of the epoch's mean batch, not of its median or worst.
    assert best["samples_per_second"] == pytest.approx(BATCH / best["step_seconds"])
    assert best["tokens_per_second"] == pytest.approx(best["samples_per_second"] * 9.35, rel=0.05)


def test_the_winner_survives_an_epoch_in_shuffled_order(searched: Ran, place: Path) -> None:
    """A stock ``Trainer`` with the exported arguments, under the same limit of memory."""
    document = searched.document
    exported = run_process("export", "own", "--storage", "s.db", folder=place)
    assert exported.code == 0, exported.stderr
    (place / "arguments.json").write_text(exported.stdout)

    def train(cap_bytes: int) -> subprocess.CompletedProcess[str]:
        words = ["train.jsonl", "tokenizer", "arguments.json", str(cap_bytes), str(SEQ_LEN), TINY_MODEL]
        return warm.run(
            [sys.executable, str(ROOT / "tests" / "train_epoch.py"), *words],
            cwd=place, env=environment(), capture_output=True, text=True, timeout=250,
        )  # fmt: skip

    ended = train(document["ceiling_bytes"])
    assert ended.returncode == 0, ended.stderr[-2000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["steps"] == -(-601 // BATCH)
    assert seen["peak_bytes"] < document["ceiling_bytes"]
    # The limit is one: less than the long sample's batch needs ends the same epoch.
    assert "allocate memory" in train(document["best"]["worst_batch_peak_reserved_bytes"] // 2).stderr


def test_a_stock_run_on_the_data_is_compared_with_the_promise(searched: Ran, place: Path) -> None:
    """Its batches come as they will. An epoch of 601 samples ends with a step of 25, which counts for no more."""
    data = place / "logs" / ".data"
    before = [(path.name, path.stat().st_mtime_ns) for path in data.iterdir()]
    assert len(before) == 1
    verify = ("verify", "own", "--steps", "20", "--storage", "s.db", "--json")
    ran = run_process(*verify, folder=place)
    assert ran.code in (0, 11), ran.stderr
    document = json.loads(ran.stdout)
    obtained, best = document["obtained"], searched.document["best"]
    assert obtained["state"] == "completed"
    assert obtained["measured_steps"] == 15
    # The warm-up is steps 1 to 5; the 19th is an epoch's last.
    assert obtained["measured_samples"] == 14 * BATCH + 601 % BATCH
    # None, where the warm-up has met all that the winner's batches have.
    assert 0 <= obtained["new_lengths"] < 15 * best["gradient_accumulation_steps"]
    assert document["peak_judged"] == "allocated"
    # A CPU has nothing to build for them.
    ratio = obtained["samples_per_second"] / document["promised"]["samples_per_second"]
    assert document["samples_per_second_ratio"] == pytest.approx(ratio)
    assert [(path.name, path.stat().st_mtime_ns) for path in data.iterdir()] == before, "read once"


@pytest.mark.whole
def test_what_was_read_is_read_again_where_it_is_gone_unless_it_has_changed(searched: Ran, place: Path) -> None:
    verify = ("verify", "own", "--steps", "20", "--storage", "s.db", "--json")
    shutil.rmtree(place / "logs" / ".data")
    elsewhere = place / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    ran = run_process("verify", "own", "--steps", "20", "--storage", str(place / "s.db"), "--json", folder=elsewhere)
    assert ran.code in (0, 11), ran.stderr
    assert len(list((place / "logs" / ".data").iterdir())) == 1
    shutil.rmtree(place / "logs" / ".data")
    content = (place / "train.jsonl").read_text()
    (place / "train.jsonl").write_text(content.replace("\n", "\n" + content.splitlines()[0] + "\n", 1))
    changed = [run_process(*words, folder=place) for words in (verify, ("resume", "own", "--storage", "s.db"))]
    (place / "train.jsonl").write_text(content)
    for ran in changed:
        assert ran.code == 2
        assert "train.jsonl has changed since the search" in ran.stderr
    # Nor does what was not asked for lie where other searches would find it.
    assert not list((place / "logs").glob(".data/*"))


@pytest.mark.whole
def test_the_same_data_elsewhere_is_the_other_studys_own(searched: Ran, place: Path) -> None:
    """What was measured is shared; where its data lies each study says for itself, and goes on with that."""
    shutil.copy(place / "train.jsonl", place / "copy of it.jsonl")
    copied = ("--study", "copied", "--dataset", "copy of it.jsonl")
    first, second = (run_process(*OWN, *copied, folder=place) for _ in range(2))
    assert (first.code, second.code) == (0, 0), second.stderr
    assert "data    copy of it.jsonl" in first.stderr
    # On a busy machine it may have measured what it was to reuse, and spent its trials on that.
    goes_on = ("the study copied was finished", "continuing the study copied")
    assert any(words in second.stderr for words in goes_on), second.stderr
    shown = run_process("show", "copied", "--storage", "s.db", folder=place).stdout
    assert "copy of it.jsonl" in shown
    assert "train.jsonl" not in shown


def test_a_search_goes_on_with_the_same_data_and_refuses_other(searched: Ran, place: Path) -> None:
    same = run_process(*OWN, "--dataset", "train.jsonl", folder=place)
    assert "continuing the study own, 3 trials recorded" in same.stderr
    assert same.document["trials"] == searched.document["trials"]
    write_jsonl(place / "other.jsonl", samples([*SHORT * 40, 100]))
    other = run_process(*OWN, "--dataset", "other.jsonl", folder=place)
    assert other.code == 2
    assert f"data: {place / 'train.jsonl'}, now {place / 'other.jsonl'}" in other.stderr
    assert "--study" in other.stderr


def test_a_model_that_mixes_the_samples_of_a_row_ends_the_search_at_its_first_trial(folder: Path, run: Run) -> None:
    """A smaller batch mixes them as well. The state of a Mamba goes on from a sample to the next."""
    model = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 32, "state_size": 4}
    (folder / "mamba").mkdir()
    (folder / "mamba" / "config.json").write_text(json.dumps({**model, "num_hidden_layers": 2, "vocab_size": 100}))
    write_jsonl(folder / "train.jsonl", [{"text": text} for text in texts(SHORT * 10)])
    write_tokenizer(folder / "tokenizer")
    ran = run(
        "search", "--model", "mamba", "--dataset", "train.jsonl", "--tokenizer", "tokenizer", "--seq-len", "32",
        "--lever", "padding_free=on", "--effective-batch", "8", "--device", "cpu", "--no-baseline", "--storage", "s.db",
        "--memory-limit", "1GiB",
    )  # fmt: skip
    assert ran.code != 0
    assert "error: MambaForCausalLM mixes the samples of a row with eager attention" in ran.stderr
    assert "search again without that setting" in ran.stderr
    shown = run("show", "mamba-8", "--storage", "s.db")
    assert shown.stdout.count("unavailable") == 1, shown.stdout


REFUSED_AT_ONCE = [
    ("--dataset missing.jsonl", "missing.jsonl: there is no such file or folder"),
    ("--dataset empty.csv", "empty.csv: the file is empty"),
    ("--dataset a.jsonl --padding 0.2", "--padding 0.2"),
    ("--dataset a.jsonl --image-column x", "--image-column does not apply to sequence-classification"),
    ("--dataset a.jsonl --text-column a,b,c", "--text-column a,b,c"),
    ("--text-column a", "--text-column applies to a dataset"),
    ("--group-by-length", "--group-by-length applies to a dataset"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED_AT_ONCE)
def test_bad_options_are_refused_before_anything_starts(run: Run, folder: Path, options: str, words: str) -> None:
    write_jsonl(folder / "a.jsonl", samples([3]))
    (folder / "empty.csv").touch()
    check_error(run("search", "--model", "bert-tiny", "--device", "cpu", *options.split()), 2, words)
    assert sorted(path.name for path in folder.iterdir()) == ["a.jsonl", "empty.csv"]


def test_a_free_batch_is_no_larger_than_the_data(tmp_path: Path) -> None:
    """More would be promised than a step of the training can hold."""
    write_tokenizer(tmp_path / "tokenizer")
    write_jsonl(tmp_path / "few.jsonl", samples([3] * 20))
    data = ("--dataset", "few.jsonl", "--tokenizer", "tokenizer")
    own = (*data, "--precision", "fp32", "--gradient-checkpointing", "off")
    document = run_process(*SEARCH, *own, "--objective", "max-batch", folder=tmp_path).document
    assert {trial["per_device_train_batch_size"] for trial in document["trials"]} <= {8, 16}
    assert document["best"]["per_device_train_batch_size"] <= 16
    ended = run_process("show", document["study"], "--storage", "s.db", folder=tmp_path).stdout
    assert "the data has 20 samples, so no larger batch was tried" in ended
    refused = run_process(*SEARCH, *own, "--batch-multiple", "32", folder=tmp_path)
    assert refused.code == 2
    assert "20 samples, less than one step of --batch-multiple 32" in refused.stderr
    # The samples that were read before serve the other searches still.
    assert len(list((tmp_path / "logs" / ".data").iterdir())) == 1


def test_bad_data_is_refused_before_any_trial(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    write_jsonl(tmp_path / "few.jsonl", samples([3] * 6))
    write_jsonl(tmp_path / "pairs.jsonl", [{"a": text, "b": text, "stars": 1} for text in texts([3] * 20)])
    write_jsonl(tmp_path / "enough.jsonl", samples([3] * 20))
    before = sorted(path.name for path in tmp_path.iterdir())
    for options, words in (
        (
            "--dataset enough.jsonl --tokenizer tokenizer --pad-to-multiple-of 1000",
            ("--pad-to-multiple-of 1000 pads samples to 1000 tokens", f"512 positions of {TINY_MODEL}", "divides 512"),
        ),
        ("--dataset few.jsonl --tokenizer tokenizer", ("6 samples", "--effective-batch 16", "--effective-batch 6")),
        ("--dataset pairs.jsonl --tokenizer tokenizer --text-column a", ("a, b, stars", "--label-column")),
        ("--dataset few.jsonl --tokenizer nowhere", ("no tokenizer in nowhere", "--tokenizer")),
    ):
        check_error(run_process(*SEARCH, "--effective-batch", "16", *options.split(), folder=tmp_path), 2, *words)
        assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing is left behind"

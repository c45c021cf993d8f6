"""Test ``search --dry-run``: what it says, and that nothing is written."""

from pathlib import Path

from command_line import TINY_SEARCH, Run


def test_it_says_what_would_be_tried_and_writes_nothing(run: Run, folder: Path) -> None:
    document = run(
        *TINY_SEARCH, "--effective-batch", "16", "--trials", "3", "--precision", "fp32", "--dry-run", "--json"
    ).document
    assert document["batches"] == [[1, 16], [2, 8], [4, 4], [8, 2], [16, 1]]
    assert document["configurations"] == ["fp32", "fp32, checkpointing"]
    assert document["trials"] == 3
    assert document["writes"][0] == str(folder / "studies" / "autotune.db")
    assert document["writes"][1].endswith(document["study"])
    # For a CPU nothing is predicted.
    assert document["predicted"] is None
    assert list(folder.iterdir()) == []


def test_what_it_cannot_look_at_is_refused(run: Run, folder: Path) -> None:
    (folder / "train.py").write_text("raise SystemExit('was run')\n")
    own = run("search", "--effective-batch", "8", "--dry-run", "--", "python", "train.py")
    assert own.code == 2
    assert "--dry-run is for a model by name" in own.stderr
    elsewhere = run(*TINY_SEARCH, "--dry-run", "--server", "http://localhost:1")
    assert elsewhere.code == 2
    assert "--dry-run looks at this machine" in elsewhere.stderr

"""Test that the JSON reference names every field of ``--json``, and no others."""

import re

import pytest
from command_line import ROOT, Studied

from autotune.core.schema import decode
from autotune.results.json_document import StudyDocument, trial_type

PAGE = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")


def names_in_table(heading: str) -> set[str]:
    """Return the names in the first column of a section's table."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_fields_of_a_study(studied: Studied) -> None:
    """``verification`` is there with --verify alone."""
    assert names_in_table("A study") == studied.document.keys() | {"verification"}


def test_the_types_of_a_study(studied: Studied) -> None:
    document = {name: value for name, value in studied.document.items() if name != "verification"}
    assert decode(document, StudyDocument).study == studied.name
    for trial in document["trials"]:
        decode(trial, trial_type())
    with pytest.raises(ValueError, match="malformed Trial"):
        decode({**document["trials"][0], "seconds": "3"}, trial_type())


def test_the_fields_of_a_trial(studied: Studied) -> None:
    assert names_in_table("A trial") == studied.document["trials"][0].keys()

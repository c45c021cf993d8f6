"""Compare messages with those stored in ``tests/messages``, one file for each subject.

After a change of words, write the files anew and read what changed: ``REWRITE_MESSAGES=1 pytest -k messages``, then
``git diff tests/messages``. A rule of when something is said is shown by a case with it and one without.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER = Path(__file__).with_name("messages")


def check_messages(subject: str, cases: Mapping[str, Iterable[str]]) -> None:
    """Compare the lines of each case with the stored ones."""
    said = {name: [line.rstrip() for line in lines] for name, lines in cases.items()}
    path = FOLDER / f"{subject}.txt"
    if os.environ.get("REWRITE_MESSAGES"):
        parts = ["\n".join([f"## {name}", *lines]) for name, lines in said.items()]
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    stored = {}
    for part in path.read_text(encoding="utf-8").removeprefix("## ").removesuffix("\n").split("\n\n## "):
        name, *lines = part.split("\n")
        stored[name] = lines
    assert said.keys() == stored.keys()
    for name, lines in said.items():
        assert lines == stored[name], name

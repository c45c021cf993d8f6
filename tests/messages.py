"""Compare messages with those stored in ``tests/messages``, one file for each subject.

After a change of words, write the files anew and read what changed: ``REWRITE_MESSAGES=1 pytest -k messages``, then
``git diff tests/messages``. A rule of when something is said is shown by a case with it and one without.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from autotune.core.errors import AutotuneError

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


def refusal(call: Callable[[], object]) -> list[str]:
    """Return the kind of the error that a call ends with, its message and its hint."""
    try:
        call()
    except AutotuneError as error:
        return [type(error).__name__, error.message, error.hint]
    return ["nothing is refused"]


def check_refusals(subject: str, cases: Mapping[str, Callable[[], object]], folder: Path | None = None) -> None:
    """Compare with the stored ones the errors that the calls end with.

    ``folder`` is FOLDER there, and what Python says of a file that is not JSON is left out.
    """
    found = {}
    for name, call in cases.items():
        lines = [re.sub("(?<=is not JSON): .*", "", line) for line in refusal(call)]
        found[name] = lines if folder is None else [line.replace(str(folder), "FOLDER") for line in lines]
    assert [name for name, told in found.items() if len(told) == 1] == []
    check_messages(subject, found)

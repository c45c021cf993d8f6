"""What a command that is no terminal's prints, but for how long it has taken."""

import re


def without_waits(stderr: str) -> str:
    """Leave out the lines that say after 20 s without any other what runs: a busy machine gets to some."""
    return re.sub(r"^  (?:\d+h\d\dm|\d+m\d\ds|[\d.]+ m?s); .*\n", "", stderr, flags=re.MULTILINE)

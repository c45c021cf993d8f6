"""Compare the lines of each part of the project with its budget, the table "Weight" of CONTRIBUTING.md.

    python .ci/weight.py

Who needs more lines raises the budget in the same commit, and says why in its message. Exits with 1 where a part is
over its budget, or has none.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| `(?P<part>[\w./]+)` \| (?P<lines>[\d,]+) \|$", re.MULTILINE)


def main() -> None:
    """Print what is over its budget."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    budgets = {row["part"]: int(row["lines"].replace(",", "")) for row in ROW.finditer(text)}
    parts = dict.fromkeys(budgets, 0) | {"tests": 0, "studies": 0}
    for folder in ("autotune", "tests", "studies"):
        for file in (ROOT / folder).rglob("*.py"):
            place = file.relative_to(ROOT).parts
            part = "/".join(place[:2]) if folder == "autotune" and len(place) > 2 else folder
            parts[part] = parts.get(part, 0) + file.read_bytes().count(b"\n")
    over = [
        f"{part} has {lines} lines; its budget is {budget}"
        for part, lines in parts.items()
        if lines > (budget := budgets.get(part, 0))
    ]
    if over:
        hint = 'The budgets are the table "Weight" of CONTRIBUTING.md: remove lines, or raise one there.'
        sys.exit("\n".join([*over, hint]))


if __name__ == "__main__":
    main()

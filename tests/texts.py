"""Write a small file of labelled texts, for scripts that train on one."""

import random
from pathlib import Path

_WORDS = ("red", "green", "blue", "slow", "fast", "good", "bad", "cat", "dog")


def write_texts(path: Path, count: int = 200) -> None:
    """A csv file with the columns text and label; texts have 3 to 30 words."""
    drawn = random.Random(0)
    lines = ["text,label"]
    for _ in range(count):
        words = drawn.choices(_WORDS, k=drawn.randint(3, 30))
        lines.append(f"{' '.join(words)},{'pos' if 'good' in words else 'neg'}")
    path.write_text("\n".join(lines) + "\n")

"""Fill placeholders in a script's command line, such as ``--batch-size {batch}``, with the values of a candidate.

A placeholder may stand in any word of the command line, in a variable of the environment before it, and in a
configuration file that a word names.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.candidate import PRECISIONS, Candidate, Precision
from autotune.core.errors import InvalidRequestError

NAMES = ("batch", "accumulation", "precision", "checkpointing", "effective_batch", "effective_tokens")
_KEYS: dict[str, tuple[str, ...]] = {"precision": PRECISIONS, "checkpointing": ("on", "off")}
"""The values of those placeholders for which a script may have words of its own."""
_UNSET = {"precision": "fp32", "checkpointing": "off"}
"""The value that a script is taken to have without an option: in ``{checkpointing:on=--flag}`` the one not named."""

_PLACEHOLDER = re.compile(r"\{(" + "|".join(NAMES) + r")(?::([^{}]*))?\}")
# What a shell leaves of {precision:fp32=a,bf16=b}: precision:fp32=a and bf16=b, each a word.
_SPLIT = re.compile(r"(?:^|=)(" + "|".join(_KEYS) + r"):(?:" + "|".join((*PRECISIONS, "on", "off")) + r")=")

_CONFIG_ENDINGS = (".yaml", ".yml", ".json", ".toml", ".py", ".cfg", ".ini", ".conf", ".gin")
# Larger files are not searched for placeholders. A choice.
_MOST_CONFIG_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder in a command line, a variable or a file, as the user wrote it."""

    name: str
    detail: str | None
    """The text after its colon: words for values, or the tokens of a sample; ``None`` without a colon."""

    @property
    def words(self) -> dict[str, str]:
        """The script's own words by value: of ``fp32=float32,bf16=bfloat16`` a dictionary."""
        pairs = (pair.partition("=") for pair in (self.detail or "").split(",") if pair)
        return {key.strip(): value for key, _, value in pairs}

    @property
    def is_option(self) -> bool:
        """Whether the placeholder stands for whole options of the script: its words for values begin with a dash."""
        return any(value.startswith("-") for value in self.words.values())

    def allows(self, key: str) -> bool:
        """Return whether the script can be told a value, such as ``bf16`` or ``on``: by a word, or by no word."""
        may_be_unset = self.name == "checkpointing" or self.is_option
        return not self.words or key in self.words or (may_be_unset and key == _UNSET.get(self.name))

    def fill(self, candidate: Candidate, sample_tokens: int | None) -> str:
        """Return the text that replaces the placeholder for a candidate. ``sample_tokens``: see ``Template``."""
        batch, accumulation = candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps
        match self.name:
            case "batch":
                return str(batch)
            case "accumulation":
                return str(accumulation)
            case "effective_batch":
                return str(batch * accumulation)
            case "effective_tokens":
                tokens = int(self.detail) if self.detail else sample_tokens
                assert tokens is not None
                return str(batch * accumulation * tokens)
            case "precision":
                return self.words.get(candidate.arm.precision, "") if self.words else candidate.arm.precision
            case _:
                is_on = candidate.arm.gradient_checkpointing
                return self.words.get("on" if is_on else "off", "") if self.words else str(is_on).lower()

    def check(self) -> None:
        """Raise ``InvalidRequestError`` where the text after the placeholder's colon is malformed."""
        if self.detail is None:
            return
        written = f"{{{self.name}:{self.detail}}}"
        if self.name == "effective_tokens":
            if not self.detail.isdigit() or not int(self.detail):
                raise InvalidRequestError(
                    f"{written} does not say how many tokens a sample has", "write it as {effective_tokens:1024}"
                )
            return
        keys = _KEYS.get(self.name)
        if keys is None:
            raise InvalidRequestError(f"{written} is a number and takes no names", f"write it as {{{self.name}}}")
        example = "{precision:fp32=float32,bf16=bfloat16}" if self.name == "precision" else "{checkpointing:on=--flag}"
        for pair in self.detail.split(","):
            key, equals, _ = pair.partition("=")
            if key.strip() not in keys or not equals:
                raise InvalidRequestError(
                    f"{written}: {pair!r} is not one of {', '.join(keys)} with what the script calls it",
                    f"write it as '{example}'",
                )


def placeholders_in(text: str) -> list[Placeholder]:
    """List the placeholders of a text."""
    return [Placeholder(match[1], match[2]) for match in _PLACEHOLDER.finditer(text)]


def _takes_next(word: str) -> bool:
    """Return whether a word is an option without ``=``, so that the next word of the command line may be its value."""
    return word.startswith("-") and "=" not in word


@dataclass(frozen=True, slots=True)
class Template:
    """A command line with placeholders in it, and the configuration files with placeholders that it names."""

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    files: tuple[str, ...]
    """Absolute paths."""
    cwd: str
    """The folder in which the command line is run."""
    sample_tokens: int | None = None
    """Tokens of a sample, for ``{effective_tokens}``; ``None`` where they are not known."""

    @property
    def placeholders(self) -> list[Placeholder]:
        """All placeholders, in order."""
        texts = [*(value for _, value in self.variables), *self.words]
        placeholders = [placeholder for text in texts for placeholder in placeholders_in(text)]
        return placeholders + [placeholder for path in self.files for placeholder in _in_file(path)]

    @property
    def names(self) -> frozenset[str]:
        """The names of all placeholders."""
        return frozenset(placeholder.name for placeholder in self.placeholders)

    @property
    def precisions(self) -> tuple[Precision, ...] | None:
        """The precisions that all ``{precision:…}`` placeholders allow; ``None`` where none of them lists any."""
        limited = [each for each in self.placeholders if each.name == "precision" and each.words]
        if not limited:
            return None
        return tuple(name for name in PRECISIONS if all(each.allows(name) for each in limited))

    @property
    def asks_sample_tokens(self) -> bool:
        """Whether filling needs the number of tokens of a sample, which must be found out."""
        return any(each.name == "effective_tokens" and not each.detail for each in self.placeholders)

    def own_words(self) -> tuple[str, ...] | None:
        """Return the words without any argument that has a placeholder, so that the script uses its own defaults.

        ``None`` where these are unknown: with configuration files, and where a placeholder is a positional argument,
        whose place the next argument would take.
        """
        kept: list[str] = []
        for word in self.words:
            match = _PLACEHOLDER.fullmatch(word)
            if match is not None and not Placeholder(match[1], match[2]).is_option:
                # The value of the option before, which is dropped as well.
                if not kept or not _takes_next(kept[-1]):
                    return None
                kept.pop()
            elif match is None and not _PLACEHOLDER.search(word):
                kept.append(word)
            elif match is None and not word.startswith("-") and "=" not in word.partition("{")[0]:
                return None
        return None if self.files else tuple(kept)

    def fill(self, candidate: Candidate, folder: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return words and variables filled for a candidate, after writing filled configuration files to ``folder``."""
        copies = {}
        for number, path in enumerate(self.files):
            # A folder for each, since files may have equal names.
            copies[path] = os.path.join(folder, str(number), os.path.basename(path))
            os.makedirs(os.path.dirname(copies[path]), exist_ok=True)
            text = "".join(self._fill(line, candidate) if is_read else line for line, is_read in _lines_of(path))
            Path(copies[path]).write_text(text, encoding="utf-8")
        words = [_exchange(word, self.cwd, copies) for word in self.words]
        return self.fill_words(words, candidate), self.fill_variables(candidate)

    def fill_variables(self, candidate: Candidate) -> dict[str, str]:
        """Return the variables with the candidate's values in place."""
        return {name: self._fill(value, candidate) for name, value in self.variables}

    def fill_words(self, words: Sequence[str], candidate: Candidate) -> tuple[str, ...]:
        """Return the words of a command line with their placeholders filled.

        An argument whose placeholder is filled with nothing is dropped, with the option before it or its ``name=``.
        """
        filled: list[str] = []
        for word in words:
            text, match = self._fill(word, candidate), _PLACEHOLDER.fullmatch(word)
            if match is not None and Placeholder(match[1], match[2]).is_option:
                filled += shlex.split(text)
            elif match is not None and not text:
                if filled and _takes_next(filled[-1]):
                    filled.pop()
            elif text == word or match is not None or not text.endswith("="):
                filled.append(text)
        return tuple(filled)

    def _fill(self, text: str, candidate: Candidate) -> str:
        """Return a text with its placeholders filled."""
        tokens = self.sample_tokens
        return _PLACEHOLDER.sub(lambda match: Placeholder(match[1], match[2]).fill(candidate, tokens), text)


def read_template(
    words: Sequence[str], variables: Sequence[tuple[str, str]], cwd: str, sample_tokens: int | None = None
) -> Template:
    """Return the template of a script's options; raises ``InvalidRequestError`` where a placeholder is malformed."""
    for word in words:
        _check_is_whole(word, words)
    named = (path for word in words for path in _paths_in(word, cwd))
    files = tuple(dict.fromkeys(path for path in named if _in_file(path)))
    template = Template(tuple(words), tuple(variables), files, cwd, sample_tokens)
    for placeholder in template.placeholders:
        placeholder.check()
    if template.precisions == ():
        raise InvalidRequestError(
            "the {precision} placeholders have no precision in common", "name the same ones in each of them"
        )
    return template


def _check_is_whole(word: str, words: Sequence[str]) -> None:
    """Raise ``InvalidRequestError``, with the quoted placeholder, where a shell has split one at its commas."""
    match = _SPLIT.search(word)
    if match is None or "{" in word[: match.start(1)]:
        return
    # Of --dtype={precision:fp32=a,bf16=b} a shell makes --dtype=precision:fp32=a and --dtype=bf16=b.
    before = word[: match.start(1)]
    rest = [other.removeprefix(before) for other in words[words.index(word) + 1 :]]
    parts = [other for other in rest if re.match(rf"({'|'.join(_KEYS[match[1]])})=", other)]
    whole = f"{before}{{{','.join([word[match.start(1) :], *parts])}}}"
    raise InvalidRequestError(
        f"the shell has taken the braces of {word!r} for its own", f"put quotes around it: {shlex.quote(whole)}"
    )


def _paths_in(word: str, cwd: str) -> Iterable[str]:
    """Yield the path of the configuration file that a word names: ``conf.yaml`` or ``--config=conf.yaml``."""
    for text in (word, word.partition("=")[2]):
        if text.endswith(_CONFIG_ENDINGS):
            path = os.path.join(cwd, os.path.expanduser(text))
            if os.path.isfile(path) and os.path.getsize(path) <= _MOST_CONFIG_BYTES:
                yield os.path.realpath(path)


def _exchange(word: str, cwd: str, copies: dict[str, str]) -> str:
    """Return a word with the path of the filled copy (``copies``: by file) if it names such a configuration file."""
    for path in _paths_in(word, cwd):
        if path in copies:
            name, equals, value = word.partition("=")
            return f"{name}={copies[path]}" if equals and value.endswith(_CONFIG_ENDINGS) else copies[path]
    return word


def _in_file(path: str) -> list[Placeholder]:
    """Return the placeholders in a configuration file."""
    return [placeholder for line, is_read in _lines_of(path) if is_read for placeholder in placeholders_in(line)]


def _lines_of(path: str) -> list[tuple[str, bool]]:
    """Return a file's lines, each with whether its braces may be placeholders; none where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    with_f_strings = _lines_with_f_strings(text) if path.endswith(".py") else set()
    return [(line, number not in with_f_strings) for number, line in enumerate(text.splitlines(keepends=True), start=1)]


def _lines_with_f_strings(text: str) -> set[int]:
    """Return the numbers of lines with f-strings in Python code, where braces are no placeholders."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return set()
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers

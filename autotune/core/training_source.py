"""Find the user's own training code, a function or a script, without running it; mask secrets of its command line."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.machinery
import inspect
import itertools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.core.candidate import Document
from autotune.core.code_interface import CodeInterface, Framework
from autotune.core.errors import InvalidRequestError
from autotune.core.launch_command import ALONE, CommandLine, find_command, without_launchers
from autotune.core.placeholders import Template, read_template
from autotune.core.schema import decode

MASK = "***"
"""Stands for a value that is not recorded."""

# Matched against an option's name in lower case with underscores. Most other options with "token" in them are no
# secrets: --pad_token, --max_tokens, --tokenizer_name.
_SECRET_NAME = re.compile(
    r"^token$|(^|_)(hub|hf|huggingface|auth|access|api|bearer|refresh|session|secret|wandb|comet|github|gitlab)_?token$"
    r"|(^|_)(api|access|secret|private|auth|encryption)_?key$"
    r"|passw(or)?d|passphrase|(^|_)secret|credential"
)
# Hub access tokens, masked wherever they stand.
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")
# Values of such an option that are no secret: --use_auth_token True.
_TELLS_NOTHING = frozenset({"", "true", "false", "yes", "no", "none", "null", "0", "1"})


def mask_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """Return a script's command line with ``***`` in place of every value that looks like a secret."""
    masked: list[str] = []
    may_be_secret = False
    for word in words:
        name, equals, value = word.partition("=")
        if may_be_secret and not word.startswith("--"):
            masked.append(_mask(word))
        elif equals and _names_a_secret(name):
            masked.append(f"{name}={_mask(value)}")
        else:
            masked.append(_HUB_TOKEN.sub(MASK, word))
        # The value of --hub_token X is the next word.
        may_be_secret = not equals and word.startswith("-") and _names_a_secret(word)
    return tuple(masked)


def masked_options(words: Sequence[str]) -> list[str]:
    """Return the names of the options whose values ``mask_secrets`` has masked in a command line."""
    pairs = itertools.pairwise(("", *words))
    return [before if word == MASK else word.partition("=")[0] for before, word in pairs if MASK in word]


def _mask(value: str) -> str:
    """Return ``***`` for an option's value, or the value itself where it cannot be a secret, such as ``true``."""
    return value if value.lower() in _TELLS_NOTHING else MASK


def _names_a_secret(option: str) -> bool:
    """Return whether an option's name says that its value is a secret: ``--hub_token``, ``+trainer.hub_token``."""
    name = option.lstrip("-+~").lower().replace("-", "_").rpartition(".")[2]
    return _SECRET_NAME.search(name) is not None


WITHIN_VARIABLE = "AUTOTUNE_RUNS"
"""Environment variable of the processes that run the user's own code, with ``TrainingSource.name``."""
STOP_VARIABLE = "AUTOTUNE_STOP"
"""Another of these processes, with ``PID:FILE`` of the job: a process that ends the job writes why into the file."""


@dataclass(frozen=True, slots=True)
class TrainingSource:
    """The user's own training code: what a trial process needs to know to run it."""

    kind: Literal["build", "script", "loop"]
    file: str
    """The absolute path of the file whose code is run."""
    digest: str
    """Hash of the file's content: code that was changed is another training."""
    cwd: str
    """The folder in which it runs."""
    argv: tuple[str, ...] = ()
    """The words after a script's name on its command line."""
    module: str | None = None
    """The script's dotted name where it is run as ``python -m`` would."""
    function: str | None = None
    """The function of the file that builds the ``Trainer``, given a dictionary of ``TrainingArguments`` fields; or that
    trains in a loop of its own, given a ``LoopConfig``. ``None`` for a script."""
    variables: tuple[tuple[str, str], ...] = ()
    """Variables of the environment that a launcher would have set for the script."""
    is_ranked: bool = False
    """Whether the user starts it by ``torchrun``, and trials do without its variables (``launch_command.ALONE``)."""
    interface: CodeInterface = field(default_factory=CodeInterface)
    """How the code takes its settings, as its inspection has found. It is no part of the training's identity."""

    @property
    def name(self) -> str:
        """The source's name in messages: ``train.py:build``, ``run_glue.py``, ``package.module``."""
        if self.kind != "script":
            return f"{Path(self.file).name}:{self.function}"
        return self.module or Path(self.file).name

    @property
    def framework(self) -> Framework:
        """The framework that the code trains with."""
        return "loop" if self.kind == "loop" else self.interface.kind

    @property
    def template(self) -> Template:
        """The script's command line with placeholders for a candidate's values; a function's template has none."""
        return read_template(self.argv, self.variables, self.cwd, self.interface.sample_tokens)

    def masked(self) -> TrainingSource:
        """Return the source without secrets on its command line, for records and messages."""
        return dataclasses.replace(self, argv=mask_secrets(self.argv))

    def as_it_is_now(self) -> TrainingSource:
        """Return the source with its file's current hash. Raises ``InvalidRequestError`` where the file is gone."""
        if not Path(self.file).is_file():
            raise InvalidRequestError(f"{self.file} is gone", "put it back, or search anew under another --study")
        return dataclasses.replace(self, digest=_digest(Path(self.file), self.template.files))


def read_source(document: Document) -> TrainingSource:
    """Return the source of a document, also of an earlier version. Raises ``ValueError`` for a malformed document."""
    return decode(with_known_names(document), TrainingSource)


def with_known_names(document: Document) -> Document:
    """Return a source's document with the field names of earlier versions replaced by those of this one."""
    interface = dict(document.get("interface") or {})
    if "from" in interface:
        interface["made_from"] = interface.pop("from")
    if isinstance(steps := interface.get("steps"), dict):
        # Earlier versions counted an evaluation's calls there, which nothing reads any more.
        interface["steps"] = {name: value for name, value in steps.items() if "calls_without" not in name}
    return {**document, "interface": interface}


def find_trainer(text: str) -> TrainingSource:
    """Return the source for ``--trainer FILE:FUNCTION``; the default function is ``build``.

    Raises ``InvalidRequestError`` where there is no such file.
    """
    return _find_function(text, "build", "trainer", usual_name="build")


def find_loop(text: str) -> TrainingSource:
    """Return the source for ``--loop FILE:FUNCTION``; the default function is ``train``.

    Raises ``InvalidRequestError`` where there is no such file.
    """
    return _find_function(text, "loop", "loop", usual_name="train")


_WHAT_IT_DOES = {"trainer": "builds the Trainer", "loop": "trains"}
"""By option, what the function does that it names."""


def _find_function(text: str, kind: Literal["build", "loop"], option: str, *, usual_name: str) -> TrainingSource:
    """Return the source for ``FILE:FUNCTION``, or for ``FILE``, whose function then has the usual name."""
    name, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier():
        name, function = text, usual_name
    hint = f"name a Python file and the function that {_WHAT_IT_DOES[option]}: train.py:{usual_name}"
    file = _file(name, f"--{option} {text}", hint)
    return TrainingSource(kind, str(file), _digest(file), os.getcwd(), function=function)


def locate_function(function: Any, option: str = "trainer") -> str:
    """Return the ``FILE:FUNCTION`` of a function object that was given as ``option``, so that trials can import it.

    Raises ``InvalidRequestError`` for a function that cannot be imported: a nested function, a lambda, a function of a
    notebook or a prompt.
    """
    hint = f"write a function that {_WHAT_IT_DOES[option]} into a file, and give {option}='file.py:name'"
    inner = inspect.unwrap(function) if callable(function) else function
    if not inspect.isfunction(inner):
        raise InvalidRequestError(f"{option} of type {type(function).__name__} is not a function of a file", hint)
    file, name = inspect.getsourcefile(inner), inner.__qualname__
    # A cell of a notebook has the name of a file that does not exist.
    if file is None or not file.endswith(".py") or not os.path.isfile(file):
        raise InvalidRequestError(f"the function {name} is in no file that trials could import", hint)
    # A decorator may have replaced the function; a nested function is called outer.<locals>.inner.
    if inner.__globals__.get(name) is not function:
        raise InvalidRequestError(f"{Path(file).name} does not offer the function {name} under that name", hint)
    return f"{os.path.abspath(file)}:{name}"


def find_script(words: Sequence[str], ranks: int = 1) -> TrainingSource:
    """Return the source for the command line after ``--``: a file, a module after ``-m``, or a console command.

    The interpreter is left out, and so are launchers that would start ``ranks`` processes. Raises
    ``InvalidRequestError`` where the script is missing or cannot run within a trial.
    """
    launched = without_launchers(words, ranks)
    left = list(launched.words)
    if left[:1] == ["-m"] and len(left) > 1:
        module, *arguments = left[1:]
        file = _module_file(module)
        return _script(file, arguments, launched, module)
    if not left or left[0].startswith("-"):
        raise InvalidRequestError(
            f"{' '.join(words)[:80]!r} names no script", "give one after the --, such as: -- python train.py --do_train"
        )
    command = None if os.path.exists(os.path.expanduser(left[0])) else find_command(left[0])
    hint = "name a Python file, as in: -- python train.py --do_train"
    file = _file(command or left[0], f"the script {left[0]}", hint)
    _check_is_python(file, left[0], hint)
    return _script(file, left[1:], launched)


def _script(file: Path, arguments: Sequence[str], launched: CommandLine, module: str | None = None) -> TrainingSource:
    """Return the source of a script, from its file, its arguments and what its launchers set."""
    template = read_template(arguments, launched.variables, os.getcwd())
    # Only scripts with placeholders get the rank variables: a Trainer would wrap its model for a process group of one.
    ranks = tuple(sorted(ALONE.items())) if launched.is_ranked and template.names else ()
    return TrainingSource(
        "script",
        str(file),
        _digest(file, template.files),
        os.getcwd(),
        tuple(arguments),
        module,
        variables=(*launched.variables, *ranks),
        is_ranked=launched.is_ranked and not ranks,
    )


def _check_is_python(file: Path, name: str, hint: str) -> None:
    """Raise ``InvalidRequestError`` for a file that Python could not run, such as a notebook or a shell script."""
    if file.suffix == ".ipynb":
        raise InvalidRequestError(
            f"{name} is a notebook, not a script",
            f"make a script of it: jupyter nbconvert --to script {file.name}, then: -- python {file.stem}.py",
        )
    if _is_python(file):
        return
    with contextlib.suppress(OSError, UnicodeDecodeError), file.open() as lines:
        first = lines.readline(300)
        if first.startswith("#!") and first.split()[-1].endswith("sh"):
            raise InvalidRequestError(
                f"the script {name} is run by a shell, which starts other processes",
                "give the line with python that it contains: -- python train.py …",
            )
    raise InvalidRequestError(f"the script {name} is not Python", hint)


def _is_python(file: Path) -> bool:
    """Return whether Python can compile a file, whatever its name."""
    try:
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except SyntaxError:
        # A Python script with a syntax error reports that itself when it is run.
        return file.suffix == ".py"
    except (ValueError, OSError):
        return False
    return True


def _file(name: str, what: str, hint: str) -> Path:
    """Return the absolute path of a file; ``what`` names it in errors. Raises ``InvalidRequestError`` without it."""
    # Unlike Path's methods, these functions raise nothing for names that no file can have.
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path):
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
        raise InvalidRequestError(f"{what}: there is no file {name}{where}", hint)
    if not os.path.isfile(path):
        raise InvalidRequestError(f"{what}: {name} is not a file", hint)
    return path.resolve()


def _digest(file: Path, others: Sequence[str] = ()) -> str:
    """Return a hash of the content of the source file and of ``others``, its configuration files with placeholders."""
    try:
        content = b"".join(path.read_bytes() for path in (file, *map(Path, others)))
        return hashlib.sha256(content).hexdigest()[:16]
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}", "make it readable") from error


def _module_file(name: str) -> Path:
    """Return the file that ``python -m`` would run, without imports. Raises ``InvalidRequestError`` without one."""
    folders: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for part in name.split("."):
        is_name = part.isidentifier() and folders is not None
        spec = importlib.machinery.PathFinder.find_spec(part, folders) if is_name else None
        folders = list(spec.submodule_search_locations or ()) if spec else None
    if spec is not None and folders:
        spec = importlib.machinery.PathFinder.find_spec("__main__", folders)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise InvalidRequestError(
            f"there is no module {name} to be run with -m", f"it is looked for in {os.getcwd()} and where Python looks"
        )
    return Path(spec.origin).resolve()

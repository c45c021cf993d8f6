"""Read and check clients' requests, and the operator's list of code that requests may name.

No code comes over HTTP. The list is a TOML or JSON file on the machine that runs the code, and a request has only a
name from it. Paths in a request must be within the operator's folders.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.core.arguments import check_arguments, json_value
from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import AutotuneError, InvalidRequestError, did_you_mean
from autotune.core.options import BRINGS_CODE, BY_NAME, options_of
from autotune.core.training_source import find_loop, find_script, find_trainer
from autotune.devices.listing import find_device
from autotune.engine.work import Code, CodeKind, check_paths, search_request
from autotune.store.queue import Needs
from autotune.tuning.allowed import check_request
from autotune.tuning.request import check_study_name
from autotune.tuning.run import free_names
from autotune.verify.throughput import check_steps

_KINDS: tuple[CodeKind, ...] = ("trainer", "loop", "script")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
Listed = Mapping[str, Code]
"""The code that requests may name, by name."""


def read_listed_code(path: Path) -> dict[str, Code]:
    """Return the code that a file lists, by name. Raises ``InvalidRequestError`` for a malformed file."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InvalidRequestError(f"--allow {path}: {error.strerror or error}", "name a file that is there") from error
    except ValueError as error:
        raise InvalidRequestError(f"--allow {path}: {error}", "write it as TOML, or as JSON in a .json file") from error
    if not isinstance(document, dict):
        raise InvalidRequestError(f"--allow {path} holds no table of names", _EXAMPLE)
    return {name: _entry(path, name, entry) for name, entry in document.items()}


_EXAMPLE = 'write it as [my-name] and script = ["python", "train.py"], trainer = "train.py:build" or loop = "train.py"'


def _entry(path: Path, name: str, entry: Any) -> Code:
    """Return the code of one entry of the list. Raises ``InvalidRequestError`` for a malformed entry."""
    where = f"--allow {path}: {name[:64]!r}"
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{where} is not a valid name", "use letters, digits, dashes, dots and underscores")
    if not isinstance(entry, dict):
        raise InvalidRequestError(f"{where} is not a table", _EXAMPLE)
    unknown = sorted(set(entry) - {*_KINDS, "folder"})
    if unknown:
        raise InvalidRequestError(f"{where} has {unknown[0]!r}", "it may have script, trainer or loop, and folder")
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise InvalidRequestError(f"{where} names {len(kinds)} trainings, not one", _EXAMPLE)
    folder = (path.parent / str(entry.get("folder", "."))).resolve()
    if not folder.is_dir():
        raise InvalidRequestError(f"{where}: there is no folder {folder}", "correct it in the file")
    code = Code(kinds[0], _value(where, kinds[0], entry[kinds[0]], folder), str(folder))
    try:
        if isinstance(code.value, tuple):
            find_script(code.value)
        else:
            (find_loop if code.kind == "loop" else find_trainer)(code.value)
    except AutotuneError as error:
        raise InvalidRequestError(f"{where}: {error.message}", error.hint) from error
    return code


def _value(where: str, kind: CodeKind, value: Any, folder: Path) -> str | tuple[str, ...]:
    """Return what an entry trains with (``train.py:build``, or a script's words), with absolute paths."""
    if kind != "script":
        if not isinstance(value, str):
            raise InvalidRequestError(f"{where}: {kind} is not text", _EXAMPLE)
        return str(folder / value)
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise InvalidRequestError(f"{where}: script is not a list of words", _EXAMPLE)
    words = list(value)
    # The first word that names a file is the script; the words after it are its arguments.
    place = next((n for n, word in enumerate(words) if word.endswith(".py") and (folder / word).is_file()), None)
    if place is not None:
        words[place] = str(folder / words[place])
    return tuple(words)


def listed(name: str, codes: Listed) -> Code:
    """Return the listed code of this name. Raises ``InvalidRequestError`` for an unknown name."""
    found = codes.get(name)
    if found is None:
        known = f"it lists {', '.join(sorted(codes)[:10])}" if codes else "its operator lists some with --allow FILE"
        raise InvalidRequestError(f"no code named {name[:64]!r} is listed here", did_you_mean(name, codes) or known)
    return found


# Of the command's options: what belongs to the service, to the caller's terminal, or brings code along.
_NOT_OVER_HTTP = frozenset(
    {"storage", "wait", "as_json", "server", "priority", "parallel", "executor", "dry_run", "lever", *BRINGS_CODE}
)
OPTION_NAMES: tuple[str, ...] = tuple(o.name for o in options_of("search") if o.name not in _NOT_OVER_HTTP)
VERIFIES = "verify_study"
"""The key in a job's request for the study to verify; only verifications have it."""
_OF_VERIFY = ("study", "steps", "priority")
# Besides the options of a search.
_EXTRA = ("priority", "needs")
_MOST_PRIORITY = 10
# A GPU's name in a request: a part of what the driver calls it.
_GPU_NAME_LENGTH = 64
# Ranks train together on one host; the largest hosts have 16 GPUs.
_MOST_GPUS = 64
MOST_MEMORY_BYTES = 2**50
_MOST_VALUES = 100
# The longest name that file systems allow.
_MOST_LETTERS = 255


@dataclass(frozen=True)
class Submission:
    """A checked request for a search or a verification."""

    options: Document
    """The given options, JSON-ready; of a verification also the study, under the key ``VERIFIES``."""
    priority: int
    needs: Needs = field(default_factory=Needs)
    """The devices that it needs; of a verification they follow from the study, and are set later."""


def read_submission(document: Any, data_folders: Sequence[Path], codes: Listed = MappingProxyType({})) -> Submission:
    """Return a client's search request. Raises ``InvalidRequestError`` for an invalid or forbidden request."""
    options = read_options(document, OPTION_NAMES, "a search", data_folders, besides=_EXTRA)
    if options.get("code") is not None:
        listed(options["code"], codes)
        if options.get("model") is not None:
            raise InvalidRequestError(
                "model and code cannot be combined: each names what to train", "leave one of them out"
            )
    if options.get("study") is not None:
        check_study_name(options["study"])
        if str(options["study"]).startswith("verify "):
            raise InvalidRequestError("verifications are named so", "choose another name for the study")
    needs = read_needs(document.get("needs"), options.pop("device", None), options.get("gpus"))
    # In one order, whatever the client's: the same request is then the same text in the database.
    ordered = {name: json_value(options[name]) for name in sorted(options)}
    return Submission(ordered, read_priority(document), needs)


def read_options(
    document: Any, names: Sequence[str], what: str, data_folders: Sequence[Path], besides: Sequence[str] = ()
) -> Document:
    """Return a request's checked options that are in ``names``; options with ``null`` are left out.

    Raises ``InvalidRequestError`` for invalid values, a request without model or code, and fields that are neither in
    ``names`` nor in ``besides`` (fields that the caller reads). ``what`` names the command in messages.
    """
    if not isinstance(document, dict):
        raise InvalidRequestError("a request is a JSON object", 'send {"model": "bert-large-uncased"}')
    _check_names(document, (*names, *besides), what)
    given = {name: value for name, value in document.items() if name not in besides and value is not None}
    _check_sizes(given)
    options = check_arguments(given)
    if options.get("model") is None and options.get("code") is None:
        raise InvalidRequestError("nothing to train was given", 'give "model": a catalog or hub name')
    check_paths(options, data_folders)
    return options


def read_priority(document: Document) -> int:
    """Return the priority of a request; 0 where it has none."""
    priority = document.get("priority") or 0
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= _MOST_PRIORITY:
        raise InvalidRequestError(
            f"priority is {priority!r:.40}, not a whole number from 0 to {_MOST_PRIORITY}", "0 is the usual one"
        )
    return priority


def _check_names(document: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raise ``InvalidRequestError`` for a name that is not ``known``; ``what`` is the command in the message."""
    for name in document:
        if name in BRINGS_CODE:
            raise InvalidRequestError(
                f"{name} brings code of yours, and a service takes no code over HTTP",
                "search with it on the machine itself, or have the operator list it (autotune serve --allow FILE)",
            )
        if name in _NOT_OVER_HTTP and name not in known:
            raise InvalidRequestError(f"{name} is set by the service", f"leave {name} out")
        if name not in known:
            raise InvalidRequestError(
                f"{str(name)[:60]!r} is not an option of {what}", did_you_mean(str(name)[:60], known) or "see the API"
            )


def _check_sizes(options: Mapping[str, Any]) -> None:
    """Raise ``InvalidRequestError`` for option values that are too long or not printable."""
    for name, value in options.items():
        is_list = isinstance(value, list | tuple)
        if is_list and len(value) > _MOST_VALUES:
            raise InvalidRequestError(f"{name} has {len(value)} values", f"give at most {_MOST_VALUES}")
        for each in value if is_list else (value,):
            # A path may be longer than one file name.
            if isinstance(each, str) and max(map(len, each.split("/"))) > _MOST_LETTERS:
                raise InvalidRequestError(f"{name} is {len(each)} letters long", f"give at most {_MOST_LETTERS}")
            if isinstance(each, str) and not each.isprintable():
                raise InvalidRequestError(f"{name} {each!r:.80} has characters that cannot be shown", "leave them out")


def read_needs(document: Any, device: str | None, gpus: str | None = None) -> Needs:
    """Return a job's needs from the fields ``needs``, ``device`` (cpu, cuda or a part of a GPU's name) and ``gpus``."""
    asked = document or {}
    # ``device`` is the form of the command line, ``needs`` that of the API: both may name a GPU.
    if not isinstance(asked, dict) or not {"gpu", "memory_bytes", "count"}.issuperset(asked):
        raise InvalidRequestError(
            "needs is not an object of gpu, memory_bytes and count", "leave it out: any device does"
        )
    gpu, memory_bytes, count = asked.get("gpu"), asked.get("memory_bytes"), asked.get("count", 1)
    kind: str | None = None
    word = device.strip().lower() if device is not None else None
    if word in ("cpu", "cuda"):
        kind = word
    elif word is not None and word.startswith("cuda:"):
        kind = "cuda"
    elif word is not None:
        gpu = gpu or word
    if gpu is not None:
        if not isinstance(gpu, str) or not 1 <= len(gpu) <= _GPU_NAME_LENGTH or not gpu.isprintable() or "%" in gpu:
            raise InvalidRequestError(f"{gpu!r:.80} is not part of a GPU's name", "write it as h200, say")
        kind = "cuda"
    for name, value, most in (("memory_bytes", memory_bytes, MOST_MEMORY_BYTES), ("count", count, _MOST_GPUS)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most):
            raise InvalidRequestError(f"needs: {name} is {value!r:.40}", f"give a whole number from 1 to {most}")
    needs = Needs(kind, gpu.lower() if gpu else None, memory_bytes, count or 1)
    return needs if gpus is None else replace(needs, device_kind="cuda", count=_rank_count(gpus, needs))


def _rank_count(gpus: str, needs: Needs) -> int:
    """Return ``gpus`` as a number. Raises ``InvalidRequestError`` for lists of GPUs, and where ``needs`` is a CPU."""
    if needs.device_kind == "cpu":
        raise InvalidRequestError(
            f"--device cpu is one device, and --gpus {gpus[:40]} names others", "give one of the two"
        )
    if not (gpus.isascii() and gpus.isdecimal() and 1 <= int(gpus[:9]) <= _MOST_GPUS):
        raise InvalidRequestError(
            f"--gpus {gpus[:80]!r} names GPUs of one machine, and any may run the search",
            f"give a number of them, 1 to {_MOST_GPUS}",
        )
    return int(gpus)


def canonical(document: Document) -> str:
    """Return a request as text that does not depend on the order of its options."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def check_against(submission: Submission, devices: Sequence[Device], codes: Listed = MappingProxyType({})) -> None:
    """Raise an error where none of these devices can run the search, with the first device's reason.

    Without devices, raise an error only for what is wrong on any device.
    """
    count, name = submission.needs.count, submission.options.get("code")
    code = listed(name, codes) if name is not None else None
    if not devices:
        # A wrong model or batch is wrong on any device.
        _ = search_request(submission.options, [find_device("cpu")] * count, code=code).batches
    problems: list[AutotuneError] = []
    for device in devices:
        try:
            # As many devices of its kind as the search needs, which must differ in their ids.
            alike = [replace(device, uuid=f"{device.uuid}-{rank}" if rank else device.uuid) for rank in range(count)]
            check_request(search_request(submission.options, alike, code=code))
        except AutotuneError as error:
            problems.append(error)
        else:
            return
    if problems:
        raise problems[0]


def choose_study(submission: Submission, is_taken: Callable[[str], bool]) -> str:
    """Return the requested name of the study, or the first free default name."""
    options = submission.options
    if options.get("study") is not None:
        return str(options["study"])
    objective = options.get("objective") or "throughput"
    names = free_names(str(options.get("model") or options.get("code")), options.get("effective_batch"), objective)
    return next(name for name in names if not is_taken(name))


def read_verification(document: Any) -> Submission:
    """Return a client's verification request. Raises ``InvalidRequestError`` for an invalid request."""
    if not isinstance(document, dict) or not isinstance(document.get("study"), str):
        raise InvalidRequestError("no study is named", 'send {"study": "bert-large-uncased-64"}')
    for name in document:
        if name not in _OF_VERIFY:
            raise InvalidRequestError(f"{str(name)[:60]!r} is not an option of verify", f"use {', '.join(_OF_VERIFY)}")
    check_study_name(document["study"])
    options: Document = {VERIFIES: document["study"]}
    if document.get("steps") is not None:
        options["steps"] = int(BY_NAME["steps"].kind.check("steps", document["steps"]))
        check_steps(options["steps"])
    return Submission(options, read_priority(document))


def needs_of_study(environment: Document) -> Needs:
    """Return the needs of a verification: devices like those on which the study was measured."""
    if environment["device_kind"] != "cuda":
        return Needs("cpu")
    ranks = environment.get("ranks", {}).get("world_size", 1)
    return Needs("cuda", str(environment["device_name"]).lower(), int(environment["device_memory_bytes"]), int(ranks))

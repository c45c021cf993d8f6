"""From the name that a user gives to the config of an architecture.

Looked for in this order: a folder with a ``config.json``, the catalog, the local hub cache, the
hub. A folder comes first, as it does in transformers: whoever has ``./gpt2/config.json`` and says
``gpt2`` means what they see. A folder without one hides nothing.

huggingface_hub is imported only when the first two know no answer; torch and transformers never.
"""

from __future__ import annotations

import copy
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.core.errors import UnknownModelError
from autotune.models import catalog

Origin = Literal["catalog", "folder", "hub cache", "hub"]

CONFIG_FILE = "config.json"

# Each phase of a request (connect, read …) may take this long; config.json is a few kilobytes.
_HUB_TIMEOUT_SECONDS = 3.0
# All of it together. Name resolution and a host with many addresses know no timeout of their own,
# and hf_hub_download alone would retry an unreachable hub for minutes.
_HUB_DEADLINE_SECONDS = 8.0

# What the hub accepts as [organisation/]name: letters, digits, "_", "-" and ".", the latter two
# not at the ends of a part, and at most 96 of them in the name (huggingface_hub, validate_repo_id).
_REPOSITORY_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY_NAME = re.compile(rf"(?:{_REPOSITORY_PART}/)?{_REPOSITORY_PART}")

_NEXT_STEP = f"'autotune models' lists the catalog; or give a folder with a {CONFIG_FILE}"


@dataclass(frozen=True)
class ModelSource:
    """Where the config of an architecture came from."""

    name: str
    """As the user gave it."""
    config: dict[str, Any]
    """As in a ``config.json``; ``model_type`` is always there, custom code never."""
    origin: Origin
    path: str | None = None
    """Absolute path of the folder that holds ``config.json``; ``None`` for the catalog."""
    repository: str | None = None
    """The hub repository with trained weights of this architecture, if it has one there."""


def resolve_model(name: str, *, allow_hub: bool = True) -> ModelSource:
    """The config that ``name`` stands for; ``allow_hub=False`` asks no network.

    Answers within about 10 s on a machine without a network. Raises ``UnknownModelError`` when
    nothing answers to the name, or what does is no config that can be built.
    """
    if not name.strip():
        raise UnknownModelError(f"{name!r} is no model name", _NEXT_STEP)
    folder = os.path.abspath(os.path.expanduser(name))
    if os.path.isfile(os.path.join(folder, CONFIG_FILE)):
        return ModelSource(name, _read_config(name, Path(folder, CONFIG_FILE)), "folder", folder)
    entry = catalog.find(name)
    if entry is not None:
        return ModelSource(name, copy.deepcopy(entry.config), "catalog", repository=repository_of(entry, name))
    _refuse_path(name, folder)
    if not _is_repository_name(name):
        raise _unknown(name, "it is not in the catalog and cannot be the name of a hub repository")
    file = _cached_file(name)
    origin: Origin = "hub cache"
    if file is None:
        file = _hub_file(name, allow_hub)
        origin = "hub"
    return ModelSource(name, _read_config(name, Path(file)), origin, os.path.dirname(os.path.abspath(file)), name)


def repository_of(entry: catalog.CatalogEntry, name: str) -> str | None:
    """The repository that was named, else the entry's own."""
    for known in (entry.name, *entry.aliases):
        if "/" in known and name.lower() in (known.lower(), known.rsplit("/", 1)[-1].lower()):
            return known
    return entry.name if "/" in entry.name else None


def _unknown(name: str, reason: str) -> UnknownModelError:
    near = catalog.near_names(name)
    question = f"did you mean {' or '.join(near)}? " if near else ""
    return UnknownModelError(f"no model {name!r}: {reason}", question + _NEXT_STEP)


# --- folders


def _refuse_path(name: str, folder: str) -> None:
    """Raise for what can only be meant as a path, and has no ``config.json`` in it."""
    if os.path.isdir(folder):
        raise UnknownModelError(
            f"the folder {name!r} has no {CONFIG_FILE}",
            f"give a folder that save_pretrained wrote, or put its {CONFIG_FILE} there",
        )
    if os.path.exists(folder):
        raise UnknownModelError(f"{name!r} is a file", f"give the folder that holds {CONFIG_FILE}")
    if name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count(os.sep) > 1:
        raise _unknown(name, "there is no such folder")


def _read_config(name: str, file: Path) -> dict[str, Any]:
    """The config in a file; ``UnknownModelError`` unless an architecture can be built from it."""
    where = f"{str(file)!r}, the config of model {name!r},"
    hint = f"save_pretrained writes a {CONFIG_FILE} that works; 'autotune models' lists architectures that need none"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnknownModelError(
            f"{where} cannot be read: {error.strerror or error}", "check its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UnknownModelError(f"{where} is not JSON: {_first_line(error)}", hint) from error
    if not isinstance(config, dict):
        raise UnknownModelError(f"{where} is not a JSON object", hint)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnknownModelError(f"{where} has no model_type", hint)
    _refuse_custom_code(where, config)
    return {key: value for key, value in config.items() if key != "auto_map"}


def _refuse_custom_code(where: str, config: dict[str, Any]) -> None:
    """Raise when the model itself is custom code; a custom tokenizer or processor is not needed here.

    Repositories keep ``auto_map`` after transformers has learnt their architecture: where the
    catalog knows the model type, transformers' own code builds it.
    """
    auto_map = config.get("auto_map")
    classes = [str(key) for key in auto_map] if isinstance(auto_map, dict) else []
    needs_code = any(key == "AutoConfig" or key.startswith("AutoModel") for key in classes)
    native = {entry.config["model_type"] for entry in catalog.entries()}
    if needs_code and config["model_type"] not in native:
        raise UnknownModelError(
            f"{where} asks for code of its own (auto_map), and remote code is never run",
            f"if transformers itself has the model type {config['model_type']!r}, "
            f"give a folder with a copy of this {CONFIG_FILE} without auto_map",
        )


# --- the hub


def _is_repository_name(name: str) -> bool:
    """Whether the hub could have a repository of this name; anything else must not reach its client."""
    return (
        _REPOSITORY_NAME.fullmatch(name) is not None
        and not any(part in name for part in ("..", "--"))
        and not name.endswith(".git")
    )


def _cached_file(name: str) -> str | None:
    """The model's ``config.json`` in the local hub cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(name, CONFIG_FILE)
    except (OSError, ValueError):
        # A cache that cannot be read is no reason to fail; it is as good as empty.
        return None
    return file if isinstance(file, str) else None


def _hub_file(name: str, allow_hub: bool) -> str:
    """The model's ``config.json``, downloaded into the hub cache; ``UnknownModelError`` when it cannot be had."""
    from huggingface_hub import constants, errors

    nowhere = "it is neither in the catalog nor in the local hub cache"
    if not allow_hub:
        raise _unknown(name, nowhere)
    if constants.HF_HUB_OFFLINE:
        raise _unknown(name, f"{nowhere}, and the hub is switched off (HF_HUB_OFFLINE)")
    try:
        return _within(_HUB_DEADLINE_SECONDS, lambda: _download(name))
    except errors.GatedRepoError as error:
        raise UnknownModelError(
            f"the hub gives model {name!r} only to those who accepted its terms",
            f"accept them on its page and log in with 'hf auth login'; {_NEXT_STEP}",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _unknown(name, f"{nowhere}, and the hub has none of this name, or a private one") from error
    except errors.RemoteEntryNotFoundError as error:
        raise _unknown(name, f"its hub repository has no {CONFIG_FILE}") from error
    except Exception as error:
        # Whatever else the client, its HTTP library or the disk raises: the next step is the same.
        text = _first_line(error)
        raise _unknown(name, f"{nowhere}, and the hub could not be reached ({text})") from error


def _download(name: str) -> str:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # Asked once without retries first: hf_hub_download retries what is unreachable.
    get_hf_file_metadata(hf_hub_url(name, CONFIG_FILE), timeout=_HUB_TIMEOUT_SECONDS)
    quiet_already = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        return hf_hub_download(name, CONFIG_FILE, etag_timeout=_HUB_TIMEOUT_SECONDS)
    finally:
        if not quiet_already:
            enable_progress_bars()


def _within(seconds: float, work: Callable[[], str]) -> str:
    """The result of ``work``, or ``TimeoutError`` after ``seconds``; a straggler never holds up the exit."""
    results: list[str] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def _first_line(error: Exception) -> str:
    """What an exception says, short enough for a one-line message."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__

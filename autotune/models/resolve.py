"""Resolve the name of a model to the config of its architecture.

Looked up in this order: a folder with a ``config.json``, the catalog, the local hub cache, the hub. A folder comes
first, as in transformers: a user with ``./gpt2/config.json`` who says ``gpt2`` means that folder. A folder without a
config is ignored.

huggingface_hub is imported only if the first two have no answer; torch and transformers never are.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.core.errors import UnknownModelError
from autotune.models import catalog

Origin = Literal["catalog", "folder", "hub cache", "hub"]

CONFIG_FILE = "config.json"

# Timeout of each phase of a request (connect, read …); config.json is a few kilobytes.
_HUB_TIMEOUT_SECONDS = 3.0
# Timeout of the whole. Name resolution, and a host with many addresses, have no timeout of their own, and
# hf_hub_download alone would retry an unreachable hub for minutes.
_HUB_DEADLINE_SECONDS = 8.0

# The names that the hub accepts, [organisation/]name: letters, digits, "_", "-" and ".", the last two not at the ends
# of a part, and at most 96 characters in the name (huggingface_hub, validate_repo_id).
_REPOSITORY_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY_NAME = re.compile(rf"(?:{_REPOSITORY_PART}/)?{_REPOSITORY_PART}")

_NEXT_STEP = f"'autotune models' lists the catalog; or give a folder with a {CONFIG_FILE}"


@dataclass(frozen=True)
class ModelSource:
    """The config of an architecture, and where it came from."""

    name: str
    """The name that the user gave."""
    config: dict[str, Any]
    """As in a ``config.json``; always has ``model_type``, and never custom code."""
    origin: Origin
    path: str | None = None
    """Absolute path of the folder with ``config.json``; ``None`` for the catalog."""
    repository: str | None = None
    """The hub repository with pretrained weights of this architecture; ``None`` where there is none."""


def resolve_model(name: str) -> ModelSource:
    """Return the config of the model with this name, and where it was found; see the module for the order.

    Answers within about 10 s on a machine without a network. Raises ``UnknownModelError`` for an unknown name, or a
    config that no model can be built from.
    """
    if not name.strip():
        raise UnknownModelError(f"{name!r} is not a model name", _NEXT_STEP)
    folder = os.path.abspath(os.path.expanduser(name))
    if os.path.isfile(os.path.join(folder, CONFIG_FILE)):
        return ModelSource(name, _read_config(name, Path(folder, CONFIG_FILE)), "folder", folder)
    entry = catalog.find(name)
    if entry is not None:
        return ModelSource(name, copy.deepcopy(entry.config), "catalog", repository=repository_of(entry, name))
    _refuse_path(name, folder)
    # A name that no hub repository can have must not reach the hub's client.
    is_odd = ".." in name or "--" in name or name.endswith(".git")
    if is_odd or _REPOSITORY_NAME.fullmatch(name) is None:
        raise _unknown_model_error(name, "it is not in the catalog and cannot be the name of a hub repository")
    from huggingface_hub import try_to_load_from_cache

    # A cache that cannot be read counts as empty.
    cached: object = None
    with contextlib.suppress(OSError, ValueError):
        cached = try_to_load_from_cache(name, CONFIG_FILE)
    file = cached if isinstance(cached, str) else _hub_file(name)
    origin: Origin = "hub cache" if isinstance(cached, str) else "hub"
    return ModelSource(name, _read_config(name, Path(file)), origin, os.path.dirname(os.path.abspath(file)), name)


def repository_of(entry: catalog.CatalogEntry, name: str) -> str | None:
    """Return a catalog entry's hub repository: that with the given name, else the main one; ``None`` if it has none."""
    for known in (entry.name, *entry.aliases):
        if "/" in known and name.lower() in (known.lower(), known.rsplit("/", 1)[-1].lower()):
            return known
    return entry.name if "/" in entry.name else None


def _unknown_model_error(name: str, reason: str) -> UnknownModelError:
    """Return the error for a name without a model; it suggests similar names of the catalog."""
    near = catalog.near_names(name)
    question = f"did you mean {' or '.join(near)}? " if near else ""
    return UnknownModelError(f"no model {name!r}: {reason}", question + _NEXT_STEP)


# --- folders


def _refuse_path(name: str, folder: str) -> None:
    """Raise ``UnknownModelError`` for a name that must be a path, since there was no ``config.json`` in ``folder``."""
    if os.path.isdir(folder):
        raise UnknownModelError(
            f"the folder {name!r} has no {CONFIG_FILE}",
            f"give a folder that save_pretrained wrote, or put its {CONFIG_FILE} there",
        )
    if os.path.exists(folder):
        raise UnknownModelError(f"{name!r} is a file", f"give the folder that holds {CONFIG_FILE}")
    if name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count(os.sep) > 1:
        raise _unknown_model_error(name, "there is no such folder")


def _read_config(name: str, file: Path) -> dict[str, Any]:
    """Return the config in a file. Raises ``UnknownModelError`` unless an architecture can be built from it."""
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
    """Raise ``UnknownModelError`` where only code in the repository can build the model, and not transformers.

    Repositories keep ``auto_map`` after transformers has adopted their architecture. Where the catalog has the model
    type, transformers' own code builds it.
    """
    auto_map = config.get("auto_map")
    classes = [str(key) for key in auto_map] if isinstance(auto_map, dict) else []
    needs_code = any(key == "AutoConfig" or key.startswith("AutoModel") for key in classes)
    native = {entry.config["model_type"] for entry in catalog.entries()}
    if needs_code and config["model_type"] not in native:
        raise UnknownModelError(
            f"{where} needs custom code (auto_map), which autotune never runs",
            f"if transformers itself has the model type {config['model_type']!r}, "
            f"give a folder with a copy of this {CONFIG_FILE} without auto_map",
        )


# --- the hub


def _hub_file(name: str) -> str:
    """Download the model's ``config.json`` into the hub cache; raises ``UnknownModelError`` where that fails."""
    from huggingface_hub import constants, errors

    nowhere = "it is neither in the catalog nor in the local hub cache"
    if constants.HF_HUB_OFFLINE:
        raise _unknown_model_error(name, f"{nowhere}, and the hub is switched off (HF_HUB_OFFLINE)")
    try:
        return _with_timeout(_HUB_DEADLINE_SECONDS, lambda: _download(name))
    except errors.GatedRepoError as error:
        raise UnknownModelError(
            f"model {name!r} is gated: the hub gives it only to users who accepted its terms",
            f"accept them on its page and log in with 'hf auth login'; {_NEXT_STEP}",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _unknown_model_error(name, f"{nowhere}, and the hub has none of this name, or a private one") from error
    except errors.RemoteEntryNotFoundError as error:
        raise _unknown_model_error(name, f"its hub repository has no {CONFIG_FILE}") from error
    except Exception as error:
        # Anything else from the client, its HTTP library or the disk: the next step is the same.
        text = _first_line(error)
        raise _unknown_model_error(name, f"{nowhere}, and the hub could not be reached ({text})") from error


def _download(name: str) -> str:
    """Download the model's ``config.json`` without a progress bar; return its path in the hub cache."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # A single request without retries first, since hf_hub_download retries an unreachable hub.
    get_hf_file_metadata(hf_hub_url(name, CONFIG_FILE), timeout=_HUB_TIMEOUT_SECONDS)
    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        return hf_hub_download(name, CONFIG_FILE, etag_timeout=_HUB_TIMEOUT_SECONDS)
    finally:
        if not was_quiet:
            enable_progress_bars()


def _with_timeout(seconds: float, work: Callable[[], str]) -> str:
    """Return the result of ``work``, run in a thread that does not delay the exit; raises ``TimeoutError``."""
    future = Future[str]()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hub", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()


def _first_line(error: Exception) -> str:
    """Return the first line of an exception's message, short enough for a one-line error."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__

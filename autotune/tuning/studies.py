"""A study's beginning and end: opened new or taken up again, and what to say where it found nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune import __version__
from autotune.core.errors import AutotuneError, InvalidRequestError, NoResultError, NothingFitsError
from autotune.core.outcome import Failed, source_of
from autotune.core.units import format_bytes, plural
from autotune.devices import Ceiling
from autotune.estimate.history import History, Tried
from autotune.store import Store, StudyRecord, TrialRecord
from autotune.tuning.optuna_study import OptunaStudy
from autotune.tuning.prepare import Prepared, changes_since
from autotune.tuning.request import SearchRequest


@dataclass(frozen=True)
class Opened:
    """A study that a search goes on with."""

    study: StudyRecord
    prepared: Prepared
    """Under the ceiling that the study's verdicts are relative to."""
    trials: tuple[TrialRecord, ...] = ()
    """What is recorded already, in order."""
    notes: tuple[str, ...] = ()
    """What a person should know."""


def open_study(prepared: Prepared, store: Store) -> Opened:
    """The study that the request names, recorded anew or continued.

    Raises ``InvalidRequestError`` where the name is taken: by another request, workload or
    machine, or by a study that is not autotune's.
    """
    request = prepared.request
    assert request.study is not None, "a search runs under a name"
    known = store.study(request.study)
    if known is not None:
        return _continue(known, prepared, store)
    if OptunaStudy.exists(request.study, store):
        raise InvalidRequestError(
            f"{store.label} holds an Optuna study {request.study!r} that autotune did not make",
            "choose another --study",
        )
    study = StudyRecord(
        name=request.study,
        workload_id=store.intern_workload(request.workload.recorded_document(), request.workload.fingerprint()),
        environment_id=store.intern_environment(prepared.environment, prepared.environment_fingerprint),
        request=request.document(),
        ceiling=prepared.ceiling.document(),
        autotune_version=__version__,
    )
    store.create_study(study)
    return Opened(study, prepared)


def _continue(known: StudyRecord, prepared: Prepared, store: Store) -> Opened:
    _check_is_the_same(known, prepared, store)
    store.lose_running_trials(known.id)
    notes = []
    recorded = Ceiling.from_document(known.ceiling)
    if recorded.line_bytes > prepared.ceiling.cap_bytes:
        notes.append(
            f"only {format_bytes(prepared.ceiling.cap_bytes)} can be reserved now; the study's trials could "
            f"reserve {format_bytes(recorded.cap_bytes)}, and its verdicts are relative to that"
        )
    trials = tuple(store.trials(known.id))
    name = f"the study {known.name}"
    beginning = f"{name} was finished" if known.state == "finished" else f"continuing {name}"
    notes.append(f"{beginning}, {plural(len(trials), 'trial')} recorded")
    study = replace(known, state="running", ended_at=None)
    store.update_study(study)
    # Verdicts under two ceilings cannot be compared: the study keeps its own.
    return Opened(study, replace(prepared, ceiling=recorded), trials, tuple(notes))


def _check_is_the_same(known: StudyRecord, prepared: Prepared, store: Store) -> None:
    """Raise ``InvalidRequestError`` where the recorded study is of another request, workload or machine."""
    workload = store.workload_of(known)
    environment = store.environment(known.environment_id)
    changed = changes_since(prepared, known.request, workload, environment)
    if changed:
        raise InvalidRequestError(
            f"the study {known.name!r} is of something else ({'; '.join(changed)})",
            "repeat what it was searched with, or search anew under another --study",
        )


def no_result(
    history: History, request: SearchRequest, reason: str, *, is_certain: bool, log_folder: Path
) -> AutotuneError:
    """Why a search that ended for this reason has nothing to recommend.

    ``is_certain`` says that no candidate was left to try.
    """
    tried, ceiling = history.tried, history.ceiling
    failed = [t.outcome for t in tried if isinstance(t.outcome, Failed)]
    if not any(history.is_over(t) for t in tried):
        if failed:
            return NoResultError(
                f"no candidate completed; the last one failed: {failed[-1].message}",
                f"its log is in {log_folder}",
            )
        if not is_certain:
            return NoResultError(f"no candidate was run: {reason}", "raise --trials or --time-budget")
    return NothingFitsError(
        f"nothing {'' if is_certain else 'that was tried '}fits under {format_bytes(ceiling.line_bytes)} "
        f"({format_bytes(ceiling.cap_bytes)} less headroom); {_how_many(tried)}"
        + (f", {len(failed)} of them failed" if failed else ""),
        _what_may_help(request, is_certain=is_certain),
    )


def _how_many(tried: Sequence[Tried]) -> str:
    """``26 trials were run``, ``4 trials were run, 22 reused``."""
    reused = sum(source_of(t.outcome) is not None for t in tried)
    run = len(tried) - reused
    return f"{plural(run, 'trial')} {'was' if run == 1 else 'were'} run" + (f", {reused} reused" if reused else "")


def _what_may_help(request: SearchRequest, *, is_certain: bool) -> str:
    """What a person whose search found nothing that fits has not done yet."""
    workload = request.workload
    ways = [
        ("search on with the same --study and more --trials or --time-budget", not is_certain),
        ("raise --memory-limit", request.memory_limit_bytes is not None),
        ("free memory on the device or take a larger one", request.memory_limit_bytes is None),
        ("shorten --seq-len", workload.is_text),
        ("allow --gradient-checkpointing auto", request.gradient_checkpointing == "off"),
        ("leave --batch-multiple out", (request.batch_multiple or 1) > 1),
    ]
    return ", or ".join(way for way, is_open in ways if is_open)

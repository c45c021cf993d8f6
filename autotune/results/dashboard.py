"""Serve optuna-dashboard over autotune's database, read-only, in a browser on this machine.

The dashboard has no authentication and can change studies; this one only reads. It does not know constraints set by
``Trial.set_constraint``, and ignores constraints when it chooses the best trial. So it is given a storage that presents
both in the form it understands, names the objective, and leaves out parameters that never varied.
"""

from __future__ import annotations

import socketserver
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna_dashboard
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.core.errors import InvalidRequestError
from autotune.core.host_name import OWN_NAMES, host_name
from autotune.results.dashboard_private import show_constraints
from autotune.store.engine import LOCK_TIMEOUT_SECONDS
from autotune.store.location import resolve_location
from autotune.store.opening import open_store
from autotune.store.optuna_private import METRIC_NAMES_KEY, HookedStorage, id_of_study
from autotune.store.optuna_storage import close_optuna, optuna_arguments, refuse_writes
from autotune.store.records import OBJECTIVE_NAMES, TRIAL_ID_ATTRIBUTE, StudyRecord
from autotune.store.repository import Store

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from optuna.study._frozen import FrozenStudy

# Shown even where it never varied, since the dashboard divides by the number of parameters.
_ALWAYS_SHOWN = "per_device_train_batch_size"
_READING_METHODS = ("GET", "HEAD", "OPTIONS")
_OWN_ADDRESSES = ("127.0.0.1", "localhost")
# A browser opens connections in advance; one without a request for so long is closed.
_IDLE_SECONDS = 30


def is_feasible(trial: FrozenTrial) -> bool:
    """Return whether every constraint of the trial is met (zero or less), which they are where there are none."""
    return all(value <= 0 for value in trial.constraints.values())


class DashboardStorage(HookedStorage):
    """Optuna's storage as the dashboard should see it: constraints visible, the best trial right, read-only."""

    def __init__(self, store: Store) -> None:
        arguments = optuna_arguments(resolve_location(store.url), LOCK_TIMEOUT_SECONDS)
        super().__init__(**arguments, skip_table_creation=True)
        self._store = store
        self._latest_trials: dict[int, list[FrozenTrial]] = {}
        self._objective_names: dict[int, str] = {}
        # The dashboard may write even on a GET.
        refuse_writes(self)

    def get_all_studies(self) -> list[FrozenStudy]:
        """Return every study, with its objective named."""
        # Made anew by each call, so they may be changed.
        studies = super().get_all_studies()
        for study in studies:
            study.system_attrs = self._with_objective_name(id_of_study(study), study.system_attrs)
        return studies

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the study's system attributes, the objective's name included."""
        return self._with_objective_name(study_id, super().get_study_system_attrs(study_id))

    def _with_objective_name(self, study_id: int, attributes: dict[str, Any]) -> dict[str, Any]:
        """Add the objective's name for studies recorded before autotune stored it with Optuna."""
        if METRIC_NAMES_KEY in attributes:
            return attributes
        if study_id not in self._objective_names:
            record = self._record(study_id)
            name = None if record is None else OBJECTIVE_NAMES.get(record.request.get("objective", "throughput"))
            if name is None:
                # Not a study of autotune, or not recorded yet.
                return attributes
            self._objective_names[study_id] = name
        return {**attributes, METRIC_NAMES_KEY: [self._objective_names[study_id]]}

    def _record(self, study_id: int) -> StudyRecord | None:
        """Return autotune's record of the study; ``None`` for a study that it did not make."""
        return self._store.study(self.get_study_name_from_id(study_id))

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the study's trials, their constraints also where the dashboard looks for them."""
        # Made anew by each call, so they may be changed.
        trials = super().get_all_trials(study_id, deepcopy=deepcopy, states=states)
        for trial in trials:
            show_constraints(trial)
        if states is None:
            self._latest_trials[study_id] = trials
        return trials

    def read_trials(self, study_id: int, read: Callable[[], list[FrozenTrial]]) -> list[FrozenTrial]:
        """Read trials without the parameters that never varied.

        Both ``get_all_trials`` and the studies that the dashboard loads read here: importances are computed over one
        and shown over the other.
        """
        trials = read()
        record = self._record(study_id)
        if record is not None:
            _hide_constants(trials, may_still_vary=record.state == "running")
        return trials

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return the trial, with its constraints also where the dashboard looks for them."""
        trial = super().get_trial(trial_id)
        show_constraints(trial)
        return trial

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the winner that autotune named, else the best feasible trial, else the best of all.

        Chosen among the trials that were shown last, so that the page is consistent. Raises ``ValueError`` where no
        trial is complete.
        """
        trials = self._latest_trials.get(study_id) or self.get_all_trials(study_id, deepcopy=False)
        record = self._record(study_id)
        winner_id = None if record is None else record.best_trial_id
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.values]
        for trial in complete:
            if winner_id is not None and trial.user_attrs.get(TRIAL_ID_ATTRIBUTE) == winner_id:
                return trial
        if not complete:
            raise ValueError("no trial is complete")
        is_better = max if self.get_study_directions(study_id)[0] == StudyDirection.MAXIMIZE else min
        feasible = [trial for trial in complete if is_feasible(trial)]
        return is_better(feasible or complete, key=lambda trial: trial.values[0])


def _hide_constants(trials: list[FrozenTrial], *, may_still_vary: bool) -> None:
    """Remove the parameters that had one value in all of ``trials``, except the batch.

    While the search may still vary a parameter, only those with a single choice are removed: the dashboard adds new
    trials to those it has, and would show the earlier ones without the parameter.
    """
    values: dict[str, set[Any]] = {}
    shown = {_ALWAYS_SHOWN}
    for trial in trials:
        for name, value in trial.params.items():
            values.setdefault(name, set()).add(value)
            if len(values[name]) > 1 or (may_still_vary and not trial.distributions[name].single()):
                shown.add(name)
    for trial in trials:
        trial.params = {name: value for name, value in trial.params.items() if name in shown}
        trial.distributions = {name: kind for name, kind in trial.distributions.items() if name in shown}


def _drop_infeasible_best(view: Callable[..., Any]) -> Callable[..., Any]:
    """Drop infeasible trials from the best trials of a response, as a bottle plugin.

    A storage cannot say that there is no best trial.
    """

    def answer(*positional: Any, **named: Any) -> Any:
        body = view(*positional, **named)
        if isinstance(body, dict) and "best_trials" in body:
            body["best_trials"] = [
                trial for trial in body["best_trials"] if all(value <= 0 for value in trial["constraints"])
            ]
        return body

    return answer


# What would change a study is hidden, since it is refused: these names are those of optuna-dashboard 0.20 and 0.21.
_HIDDEN = """<style>
button[aria-label="rename study"], button[aria-label="delete study"], button:has([data-testid="AddBoxIcon"]),
button:has([data-testid="EditIcon"]), a[href$="/note"] { display: none; }
.way-back { position: fixed; top: 1.1rem; right: 1.2rem; z-index: 2000; padding: .1rem .6rem; border-radius: 4px;
  background: #fff; color: #0b57d0; font: 600 15px/1.6 system-ui, sans-serif; text-decoration: none; }
@media (max-width: 40rem) { .way-back { top: auto; bottom: 1rem; } }
</style>
</head>"""


def _read_only_page(way_back: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a bottle plugin that hides what changes a study from the page, and adds a link back."""
    link = f'<body><a class="way-back" href="{way_back}">← autotune</a>' if way_back is not None else "<body>"

    def plugin(view: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*positional: Any, **named: Any) -> Any:
            response = view(*positional, **named)
            is_page = "text/html" in str(getattr(response, "content_type", ""))
            if is_page and hasattr(response.body, "read"):
                with response.body as file:
                    page = file.read().decode().replace("</head>", _HIDDEN, 1).replace("<body>", link, 1)
                response.body = page.encode()
                response.set_header("Content-Length", str(len(response.body)))
            return response

        return answer

    return plugin


def app_over(storage: DashboardStorage, way_back: str | None = None) -> WSGIApplication:
    """Return the dashboard over a storage, as a WSGI application that only reads; ``way_back`` is where it links to."""
    bottle_app: Any = optuna_dashboard.wsgi(storage)
    bottle_app.install(_drop_infeasible_best)
    bottle_app.install(_read_only_page(way_back))

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if host_name(str(environ.get("HTTP_HOST", ""))) not in OWN_NAMES:
            return _refuse(start_response, "403 Forbidden", "This dashboard answers to localhost and 127.0.0.1 only.")
        method = environ["REQUEST_METHOD"]
        if method not in _READING_METHODS:
            return _refuse(
                start_response,
                "405 Method Not Allowed",
                f"This dashboard only shows studies; {method} would change one.",
                ("Allow", ", ".join(_READING_METHODS)),
            )
        # The dashboard requires this header, which not every client sends.
        environ.setdefault("HTTP_ACCEPT_ENCODING", "identity")
        answer: Iterable[bytes] = bottle_app(environ, start_response)
        return answer

    return app


def _refuse(start_response: StartResponse, status: str, sentence: str, *headers: tuple[str, str]) -> list[bytes]:
    body = (sentence + "\n").encode()
    start_response(
        status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *headers]
    )
    return [body]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A server with a thread for each connection, since a browser keeps several open."""

    daemon_threads = True
    # Newer Pythons would let a second server listen on the same port.
    allow_reuse_port = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that hang up or send nothing."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    """Handles requests without logging them, and with a timeout."""

    timeout = _IDLE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def dashboard_server(store_location: str, host: str = "127.0.0.1", port: int = 8080) -> Iterator[WSGIServer]:
    """Yield a server that listens already; port 0 takes a free one (``server.server_port``).

    Raises ``InvalidRequestError`` for an address that other machines can reach or a port that is not free, and
    ``StorageError`` where the database cannot be opened.
    """
    if host not in _OWN_ADDRESSES:
        raise InvalidRequestError(
            f"the dashboard has no password, so it does not listen on {host!r}",
            "listen on 127.0.0.1; from another machine, go through `ssh -L 8080:127.0.0.1:8080 THIS-MACHINE`",
        )
    if not 0 <= port <= 65535:
        raise InvalidRequestError(f"port {port} is not between 0 and 65535", "choose another with --port")
    with open_store(store_location, create=False) as store:
        storage = DashboardStorage(store)
        try:
            try:
                server = make_server(host, port, app_over(storage), server_class=_Server, handler_class=_Handler)
            except OSError as error:
                raise InvalidRequestError(
                    f"the dashboard cannot listen on port {port}: {(error.strerror or str(error)).lower()}",
                    "choose another with --port",
                ) from error
            with server:
                yield server
        finally:
            close_optuna(storage)


def serve(
    store_location: str,
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the dashboard until Ctrl-C; ``ready`` is called with its address once it listens.

    Raises what ``dashboard_server`` does.
    """
    with dashboard_server(store_location, host, port) as server, suppress(KeyboardInterrupt):
        if ready is not None:
            ready(f"http://{host}:{server.server_port}/")
        server.serve_forever()

"""Serve optuna-dashboard over autotune's database, read-only, in a browser on this machine.

The dashboard has no authentication and can change studies; this one only reads. It is given autotune's own records as
a storage of Optuna's. It does not know constraints set by ``Trial.set_constraint``, and ignores constraints when it
chooses the best trial: the storage presents both in the form it understands.
"""

from __future__ import annotations

import socketserver
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna_dashboard
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.core.errors import InvalidRequestError
from autotune.core.host_name import OWN_NAMES, host_name
from autotune.results.optuna_trials import (
    TRIAL_ID_ATTRIBUTE,
    frozen_study,
    frozen_trials,
    id_of_trial,
    set_dashboard_fields,
)
from autotune.store.opening import open_store
from autotune.store.records import StudyRecord
from autotune.store.repository import Store

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from optuna.study._frozen import FrozenStudy

_READING_METHODS = ("GET", "HEAD", "OPTIONS")
_ADDRESS = "127.0.0.1"
# A browser opens connections in advance; one without a request for so long is closed.
_IDLE_SECONDS = 30


class DashboardStorage(BaseStorage):
    """A read-only Optuna storage over autotune's database, read anew for each request. Its best trial is the winner."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._latest_trials: dict[int, list[FrozenTrial]] = {}
        """The trials as they were shown last, by their study's number."""
        self._names: dict[int, str] = {}
        """The names of the studies, by number."""

    def get_all_studies(self) -> list[FrozenStudy]:
        """Return every study, as Optuna's ``FrozenStudy``."""
        studies = [each.study for each in self._store.studies()]
        self._names = {_number_of(study.id): study.name for study in studies}
        return [frozen_study(_number_of(study.id), study) for study in studies]

    def get_study_id_from_name(self, study_name: str) -> int:
        """Return the number of a study; raises ``KeyError`` where there is none of this name."""
        study = self._store.study(study_name)
        if study is None:
            raise KeyError(study_name)
        return _number_of(study.id)

    def get_study_name_from_id(self, study_id: int) -> str:
        """Return the name of a study."""
        return self._study(study_id).name

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Return the directions of a study: maximize."""
        return self._frozen(study_id).directions

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the user attributes of a study, which are empty."""
        return self._frozen(study_id).user_attrs

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the study's system attributes: the objective's name."""
        return self._frozen(study_id).system_attrs

    def _frozen(self, study_id: int) -> FrozenStudy:
        return frozen_study(study_id, self._study(study_id))

    def _study(self, study_id: int) -> StudyRecord:
        """Return the record of a study. Raises ``KeyError`` for an unknown number."""
        if study_id not in self._names:
            self.get_all_studies()
        study = self._store.study(self._names[study_id])
        if study is None:
            raise KeyError(study_id)
        return study

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the study's trials, with constraints also in the system attributes that the dashboard reads."""
        study = self._study(study_id)
        trials = frozen_trials(study, self._store.trials(study.id))
        for trial in trials:
            set_dashboard_fields(trial, _number_of(trial.user_attrs[TRIAL_ID_ATTRIBUTE]))
        self._latest_trials[study_id] = trials
        return [trial for trial in trials if states is None or trial.state in states]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return a trial that the dashboard has shown. Raises ``KeyError`` for another."""
        return {id_of_trial(trial): trial for trials in self._latest_trials.values() for trial in trials}[trial_id]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the winner that autotune recorded, else the best feasible trial, else the best of all.

        It is one of the trials shown last, so that the page is consistent. Raises ``ValueError`` where no trial is
        complete.
        """
        trials = self._latest_trials.get(study_id) or self.get_all_trials(study_id)
        winner_id = self._study(study_id).best_trial_id
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.values]
        for trial in complete:
            if trial.user_attrs.get(TRIAL_ID_ATTRIBUTE) == winner_id:
                return trial
        if not complete:
            raise ValueError("no trial is complete")
        feasible = [trial for trial in complete if all(value <= 0 for value in trial.constraints.values())]
        return max(feasible or complete, key=lambda trial: trial.values[0])

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Refuse any change. The dashboard may try one even on a GET."""
        raise PermissionError("this dashboard only shows studies")

    create_new_study = delete_study = set_study_user_attr = set_study_system_attr = _refuse
    create_new_trial = set_trial_param = set_trial_state_values = set_trial_intermediate_value = _refuse
    set_trial_user_attr = set_trial_system_attr = _refuse


def _number_of(record_id: str) -> int:
    """Return a number for a record's id (hexadecimal), small enough for JavaScript's integers."""
    return int(record_id[:12], 16)


# Controls that change a study are hidden, since changes are refused. The names are of optuna-dashboard 0.20 and 0.21.
_HIDDEN = """<style>
button[aria-label="rename study"], button[aria-label="delete study"], button:has([data-testid="AddBoxIcon"]),
button:has([data-testid="EditIcon"]), a[href$="/note"] { display: none; }
.way-back { position: fixed; top: 1.1rem; right: 1.2rem; z-index: 2000; padding: .1rem .6rem; border-radius: 4px;
  background: #fff; color: #0b57d0; font: 600 15px/1.6 system-ui, sans-serif; text-decoration: none; }
@media (max-width: 40rem) { .way-back { top: auto; bottom: 1rem; } }
</style>
</head>"""


def _as_shown_here(way_back: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a bottle plugin that changes two responses of the dashboard.

    Infeasible trials are dropped from the best ones, since a storage cannot say that there is no best trial. On the
    page, the controls that edit are hidden, and if ``way_back`` is a URL, there is a link to it.
    """
    link = f'<body><a class="way-back" href="{way_back}">← autotune</a>' if way_back is not None else "<body>"

    def plugin(view: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*positional: Any, **named: Any) -> Any:
            response = view(*positional, **named)
            if isinstance(response, dict) and "best_trials" in response:
                best = response["best_trials"]
                response["best_trials"] = [t for t in best if all(value <= 0 for value in t["constraints"])]
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
    """Return the dashboard as a read-only WSGI application. ``way_back`` links to a service that checks host names."""
    bottle_app: Any = optuna_dashboard.wsgi(storage)
    bottle_app.install(_as_shown_here(way_back))

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if way_back is None and host_name(str(environ.get("HTTP_HOST", ""))) not in OWN_NAMES:
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
    """Send an error response with one sentence."""
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
        """Ignore browsers that close the connection or send nothing."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    """Handles requests without logging them, and with a timeout."""

    timeout = _IDLE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def dashboard_server(store_location: str, port: int = 8080) -> Iterator[WSGIServer]:
    """Yield a listening dashboard server for this machine; port 0 takes a free port (``server.server_port``).

    Raises ``InvalidRequestError`` for a port that is not free, and ``StorageError`` where the database cannot be
    opened.
    """
    if not 0 <= port <= 65535:
        raise InvalidRequestError(f"port {port} is not between 0 and 65535", "choose another with --port")
    with open_store(store_location, create=False) as store:
        app = app_over(DashboardStorage(store))
        try:
            server = make_server(_ADDRESS, port, app, server_class=_Server, handler_class=_Handler)
        except OSError as error:
            raise InvalidRequestError(
                f"the dashboard cannot listen on port {port}: {(error.strerror or str(error)).lower()}",
                "choose another with --port",
            ) from error
        with server:
            yield server


def serve(store_location: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the dashboard until Ctrl-C. Call ``ready`` with its address once it listens.

    Raises the errors of ``dashboard_server``.
    """
    with dashboard_server(store_location, port) as server, suppress(KeyboardInterrupt):
        ready(f"http://{_ADDRESS}:{server.server_port}/")
        server.serve_forever()

"""Test the progress view with an invented study: every kind of line, in narrow and wide terminals."""

import io
import threading
from dataclasses import replace

import click
import pytest
from messages import check_messages
from processes import wait_until
from rich.console import Console
from searching import MODEL

from autotune.cli import view
from autotune.cli.view import View
from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.device import Device
from autotune.core.messages import Progress
from autotune.core.options import Objective
from autotune.core.outcome import Completed, Failed, Measurement, Outcome, OutOfMemory
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.estimate.history import History, Tried
from autotune.space.space import Space, choose_arms
from autotune.store.records import Stage, StudyRecord, TrialRecord
from autotune.tuning.prepare import Prepared
from autotune.tuning.request import SearchRequest

CEILING = Ceiling(limit_bytes=24 * GIB, free_bytes=140 * GIB, context_bytes=GIB)
DEVICE = Device("cuda", 0, "GPU-0", "NVIDIA H200", 141 * GIB, None, None, None)
WORKLOAD = Workload("bert-large-uncased", {"model_type": "bert"}, "sequence-classification", 512)
STUDY = StudyRecord("bert-large-uncased-64", "w", "e", {}, {}, "0.1.0")


def completed(samples_per_second: float, peak_gib: float, spread: float = 0.003) -> Completed:
    peak_bytes = int(peak_gib * GIB)
    seconds = 64 / samples_per_second
    return Completed(Measurement(seconds, (seconds,) * 3, spread, samples_per_second, peak_bytes, peak_bytes))


class Shown:
    """A view over a console that keeps what it is given."""

    def __init__(self, columns: int = 80, objective: Objective = "throughput", *, terminal: bool = False) -> None:
        self._out = io.StringIO()
        console = Console(file=self._out, width=columns, force_terminal=terminal)
        self.view = View(console)
        request = SearchRequest(WORKLOAD, DEVICE, effective_batch=64, objective=objective)
        arms = choose_arms(("bf16", "tf32"), "auto", ("sdpa",), request.optims, model_checkpoints=True)
        space = Space(arms, request.batches)
        self.prepared = Prepared(request, space, Candidate(Arm(), *space.batches.baseline()), CEILING, {}, MODEL)
        self.history = History(CEILING)
        self.view.begins(self.prepared, STUDY)

    def ends(self, arm: Arm, batch: int, outcome: Outcome, stage: Stage = "search") -> str:
        """The line that a trial leaves."""
        number = len(self.history.tried)
        trial = TrialRecord(
            "s", number, Candidate(arm, batch, 64 // batch), "w", "e", stage, outcome=outcome, seconds=2
        )
        self.history.add(Tried(trial.id, trial.candidate, outcome))
        self.view.trial_begins(number, trial.candidate, stage)
        self.view.trial_ends(trial, self.history)
        return self.lines[-1]

    @property
    def lines(self) -> list[str]:
        return self._out.getvalue().splitlines()


BF16, FP32 = Arm("bf16"), Arm("fp32")
WIDEST = Arm("bf16", gradient_checkpointing=True)


def test_messages_of_a_search_that_runs() -> None:
    """A baseline outside the space is not the best, nor what is faster by no more than the noise and less plain."""
    uneven = replace(completed(310.7, 22.1).measurement, step_seconds_each=(0.1, 0.2, 0.3))
    tf32, no_memory = Arm("tf32"), OutOfMemory("no memory", peak_reserved_bytes=int(22.9 * GIB))
    lines: list[tuple[Arm, int, Outcome]] = [
        (BF16, 64, no_memory),
        (BF16, 32, completed(310.7, 22.1)),
        (BF16, 16, completed(277.0, 14.0)),
        (WIDEST, 64, completed(400.0, 22.9)),
        (BF16, 32, completed(330.7, 22.1)),
        (tf32, 8, OutOfMemory("no memory", where="host")),
        (tf32, 16, Failed("error", "RuntimeError:\n no")),
        (tf32, 32, Failed("timeout", "stopped after the time limit of 180 s")),
    ]
    near = [(BF16, 32, completed(310.0, 22.1)), (WIDEST, 32, completed(311.0, 12.0))]
    sizes = [(BF16, 16, completed(277.0, 14.0)), (BF16, 32, completed(100.0, 22.1)), (BF16, 8, completed(500.0, 22.1))]
    searches = {
        "every kind of line": (Shown(200), completed(41.7, 11.5), lines),
        "steps that differ": (Shown(200), None, [(BF16, 32, Completed(uneven))]),
        "without a baseline": (Shown(200), None, lines[1:3]),
        "the largest batch": (Shown(200, objective="max-batch"), None, sizes),
        "a faster baseline, and noise": (Shown(200), completed(320.0, 11.5), near),
    }
    cases = {}
    for name, (shown, baseline, trials) in searches.items():
        if baseline is not None:
            shown.ends(FP32, 8, baseline, "baseline")
        for arm, batch, outcome in trials:
            shown.ends(arm, batch, outcome)
        cases[name] = shown.lines
    full = Shown(200)
    full.view.begins(replace(full.prepared, ceiling=replace(CEILING, free_bytes=20 * GIB)), STUDY)
    check_messages("progress", {**cases, "a limit above what is free": full.lines})


def test_the_usual_lines_fit_into_eighty_columns_and_stand_below_their_heads() -> None:
    """The widest default arm, the widest speed and peak among them."""
    shown = Shown()
    shown.ends(FP32, 8, completed(41.7, 11.5, spread=0.4), "baseline")
    shown.ends(WIDEST, 64, completed(1234.5, 22.2, spread=0.113))
    shown.ends(WIDEST, 32, OutOfMemory("no memory", peak_reserved_bytes=23 * GIB))
    assert max(map(len, shown.lines)) <= 80
    head, baseline, best, over = shown.lines[-4:]
    for title, cells in {
        "samples/s": ("41.7", "1,234", "out of memory"),
        "peak": ("11.5 GiB", "22.2 GiB", "> 23.0 GiB"),
    }.items():
        end = head.index(title) + len(title)
        for line, cell in zip((baseline, best, over), cells, strict=True):
            assert line[:end].endswith(cell), (head, line)
    assert best[head.index("×", 20) :] == "29.6× best"


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_the_status_line_stays_one_line(columns: int) -> None:
    """Where the terminal is too narrow, the best so far is left out before anything is cut; its clock runs."""
    shown = Shown(columns, terminal=True)
    shown.ends(BF16, 32, completed(310.7, 22.1))
    shown.view.trial_begins(1, Candidate(WIDEST, 16, 4), "search")
    shown.view.progress(1, Progress("train"))
    shown.view.progress(1, Progress(step=7, of=14))
    console = Console(file=io.StringIO(), width=columns, force_terminal=True)
    rows = console.render_lines(shown.view)
    text = "".join(segment.text for segment in rows[0])
    assert len(rows) == 1
    assert len(text) == columns
    now, best = (
        "trial 1: 16 × 4  bf16, checkpointing (step 7 of at most 14)",
        "; best so far 310.7 samples/s (32 × 2  bf16)",
    )
    assert (now in text) == (columns >= 80)
    assert (now + best in text) == ("best" in text) == (columns == 200)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_never_breaks_a_word(columns: int) -> None:
    shown, note = Shown(columns, terminal=True), "memory is predicted within 0.4 %, 0.0% truncated: " * 3
    shown.view.note(note)
    shown.ends(BF16, 32, completed(310.7, 22.1))
    lines = [click.unstyle(line) for line in shown.lines]
    assert max(map(len, lines)) <= columns
    words = [word for line in lines for word in line.split()]
    assert " ".join(note.split()) in " ".join(words)
    assert "310.7" in words


def test_a_file_has_whole_lines() -> None:
    shown = Shown(40)
    shown.view.note(note := "memory is predicted within 0.4 %, 0.0% truncated: " * 3)
    assert shown.lines[-1] == note


def test_markup_in_a_message_is_shown_as_it_is() -> None:
    """Square brackets mean styles to the terminal library."""
    shown = Shown(terminal=True)
    assert "[bold]x[/bold] :smile:" in shown.ends(BF16, 32, Failed("error", "[bold]x[/bold] :smile:"))


def test_the_status_line_says_what_a_trial_does() -> None:
    shown = Shown(80, terminal=True)
    shown.ends(BF16, 32, completed(310.7, 22.1))
    shown.view.trial_begins(1, Candidate(WIDEST, 16, 4), "search")
    for phase, words in (("model", "building the model"), ("train", "running the first step")):
        shown.view.progress(1, Progress(phase))
        assert f"({words})" in shown.view.status_line()


def test_without_a_terminal_a_quiet_time_is_followed_by_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "_QUIET_SECONDS", 0.01)
    shown, ended = Shown(200), threading.Event()
    shown.view.trial_begins(1, Candidate(WIDEST, 16, 4), "search")
    shown.view.progress(1, Progress(step=1))
    saying = threading.Thread(target=shown.view.keep_saying, args=[ended])
    saying.start()
    status = "trial 1: 16 × 4  bf16, checkpointing (step 1)"
    assert wait_until(lambda: sum(line.endswith(status) for line in shown.lines) > 1, 120)
    ended.set()
    saying.join(120)


@pytest.mark.parametrize(
    ("progress", "words"),
    [(Progress("model"), "building the model for 42.0 s"), (Progress(step=7), "step 7, 42.0 s ago")],
)
def test_what_takes_long_is_told_with_its_time(progress: Progress, words: str) -> None:
    assert progress.describe(42.0) == words
    assert progress.describe(3.0) == words.partition(" for 4")[0].partition(",")[0]

"""Test the HTML report: well-formed, complete, escaped, and without requests."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from recorded import EFFECTIVE_64, ComputedRunner, RecordedRunner, with_measured
from recorded_steps import Subject, operations_key, recorded_operations
from reported import BASELINE, BF16, ENVIRONMENT, FP16, OVER, WINNER, WORKLOAD, completed, report, trial
from searching import BERT_LARGE, FACTS, new_store, prepared, request, search

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import NothingFitsError
from autotune.core.messages import Answer
from autotune.core.outcome import Completed, Failed, OutOfMemory
from autotune.core.prediction import MemoryPrediction, PredictionAnswer, PredictionWork
from autotune.core.schema import encode
from autotune.core.units import GIB, format_bytes, format_rate
from autotune.devices.gpus import CHIPS
from autotune.estimate.step_time import StepTime
from autotune.results.export import make_export
from autotune.results.html import Scale, html_page
from autotune.results.json_document import report_document
from autotune.results.report import Report, load_report
from autotune.store.records import LeftOut
from autotune.store.repository import Store
from autotune.tuning.answer_cache import AnswerCache, KeptPredictions, inspection_key
from autotune.tuning.forecast import forecast_of
from autotune.tuning.predictions import stored_prediction
from autotune.tuning.prepare import Prepared, prepare

VOID = {"meta", "link", "br"}


@dataclasses.dataclass
class Element:
    """An element of a page, with all text within it."""

    name: str
    attributes: dict[str, str]
    parent: Element | None
    children: list[Element] = dataclasses.field(default_factory=list)
    text: str = ""

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    def all(self, name: str | None = None, class_: str | None = None) -> Iterator[Element]:
        for child in self.children:
            if name in (None, child.name) and (class_ is None or class_ in child.classes):
                yield child
            yield from child.all(name, class_)


class Page(HTMLParser):
    """Parses a page and fails where an end tag does not belong to the last open one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = self._open = Element("root", {}, None)
        self.feed(text)
        self.close()
        assert self._open is self.root, f"{self._open.name} is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"{tag} has an attribute twice"
        made = Element(tag, {name: value or "" for name, value in attrs}, self._open)
        self._open.children.append(made)
        if tag not in VOID:
            self._open = made

    def handle_endtag(self, tag: str) -> None:
        assert tag == self._open.name
        self._open = self._open.parent

    def handle_data(self, data: str) -> None:
        within: Element | None = self._open
        while within is not None:
            within.text += data
            within = within.parent

    def section(self, title: str) -> Element:
        return next(s for s in self.root.all("section") if any(h.text.startswith(title) for h in s.all("h2")))

    @property
    def titles(self) -> list[str]:
        return [heading.text for heading in self.root.all("h2")]


def checked(made: Report, prediction: MemoryPrediction | None = None, step: StepTime | None = None) -> Page:
    """The page of a report, checked for all that holds for any page."""
    text = html_page(made, prediction, step)
    text.encode()
    page = Page(text)
    everything = list(page.root.all())
    ids = [each.attributes["id"] for each in everything if "id" in each.attributes]
    assert len(set(ids)) == len(ids)
    for each in everything:
        assert not {"src", "srcset", "action", "onload", "onclick"} & set(each.attributes)
        assert each.attributes.get("href", "data:,") == "data:,"
        assert set(each.attributes.get("aria-labelledby", "").split()) <= set(ids)
    style = next(page.root.all("style")).text
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    for drawing in page.root.all("svg"):
        if drawing.attributes.get("role") == "img":
            assert next(drawing.all("title")).text
            assert next(drawing.all("desc")).text
            check_texts(drawing)
    return page


def check_texts(drawing: Element) -> None:
    """No text of a drawing runs over another, on a wide page and on a phone; 6.6 pixels are a character's width."""
    for width in (840.0, 250.0):
        boxes = []
        for text in drawing.all("text"):
            if text.parent is drawing:
                x, y = float(text.attributes["x"].removesuffix("%")) / 100 * width, float(text.attributes["y"])
                length = 6.6 * len(text.text)
                left = x - {"start": 0.0, "middle": length / 2, "end": length}[text.attributes["text-anchor"]]
                boxes.append((left, left + length, y - 10, y, text.text))
        for one, other in itertools.combinations(boxes, 2):
            apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
            assert apart, (one, other)


def numbers_listed(page: Page) -> list[int]:
    """The trials in the table of all trials."""
    body = next(page.section("All ").all("tbody"))
    return [int(next(row.all("td")).text) for row in body.all("tr")]


def searched(store: Store, runner: ComputedRunner | RecordedRunner, given: Prepared) -> Report:
    search(store, runner, given=given)
    return load_report(store, "bert")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The search of the example command over recorded trials, with the GPU's share of a step."""
    with new_store(tmp_path_factory.mktemp("recorded")) as store:
        return searched(store, with_measured(RecordedRunner(EFFECTIVE_64), gpu_busy_share=0.7), prepared())


def test_of_many_arms_that_were_left_out_the_first_are_shown(recorded: Report) -> None:
    left_out = (LeftOut(tuple(f"arm {number}" for number in range(12)), "why"),)
    many = dataclasses.replace(recorded, study=dataclasses.replace(recorded.study, left_out=left_out))
    section = checked(many).section("What was left out")
    assert "arm 0; arm 1; arm 2" in section.text
    folded = next(section.all("details"))
    assert "and 9 more" in folded.text
    assert "arm 11" in folded.text


def test_a_recorded_search(recorded: Report) -> None:
    page = checked(recorded)
    assert page.titles == [
        "Best configuration",
        "Speed against memory",
        "Step times",
        "What limits a step",
        "What was left out, and why",
        "How far the numbers reach",
        "TrainingArguments to copy",
        f"All {len(recorded.trials)} trials",
    ]
    assert numbers_listed(page) == [each.number for each in recorded.trials]
    document = report_document(recorded)
    assert all(each["reason"] in page.section("What was left out").text for each in document["left_out"])
    assert all(note in page.section("How far").text for note in document["notes"])
    assert "waits for the host: 30.0%" in page.section("What limits").text
    assert "http" not in html_page(recorded).replace("http-equiv", "")


def test_the_answer_has_the_interval_of_the_next_run(recorded: Report) -> None:
    promised = report_document(recorded)["next_run"]
    low, high = promised["samples_per_second_low"], promised["samples_per_second_high"]
    text = checked(recorded).section("Best configuration").text
    best = recorded.best.candidate
    batch, accumulation = best.per_device_train_batch_size, best.gradient_accumulation_steps
    assert f"per-device batch {batch} × accumulation {accumulation}, {best.arm.describe()}" in text
    assert f"next run: {format_rate(low)} to {format_rate(high)}" in text
    assert "95 % interval" in text


def test_speed_against_memory(recorded: Report) -> None:
    """A mark for each completed trial and the ceiling."""
    drawing = next(checked(recorded).section("Speed against memory").all("svg", "plot"))
    completed_trials = [t for t in recorded.trials if isinstance(t.outcome, Completed)]
    over = {t.candidate for t in recorded.trials if isinstance(t.outcome, OutOfMemory)}
    (ceiling,) = drawing.all("line", "ceiling-line")
    assert [*drawing.all("line", "feasible-line")]
    assert format_bytes(recorded.ceiling.cap_bytes) in drawing.text
    assert len([*drawing.all(class_="full"), *drawing.all(class_="hollow")]) == len(completed_trials)
    crosses = list(drawing.all("path", "cross"))
    assert len(crosses) == len(over) > 0
    places = {cross.parent.attributes["x"] for cross in crosses if cross.parent is not None}
    assert places == {ceiling.attributes["x1"]}
    assert len(list(drawing.all("circle", "ring"))) == 2
    assert "peak memory (GiB)" in drawing.text
    assert "samples/s" in drawing.text
    legend = next(checked(recorded).section("Speed against memory").all("ul", "legend")).text
    assert all(t.candidate.arm.describe() in legend for t in recorded.trials)


def test_step_times_are_those_of_all_processes(recorded: Report) -> None:
    text = checked(recorded).section("Step times").text
    for tried in recorded.history.believed():
        assert tried.candidate.describe() in text
    assert "optimizer step (ms" in text


def test_the_export_can_be_copied(recorded: Report) -> None:
    page = checked(recorded)
    code = next(pre for pre in page.root.all("pre") if pre.attributes["id"] == "export")
    assert json.loads(code.text) == make_export(recorded).arguments


def test_a_study_without_a_winner(store: Store) -> None:
    with pytest.raises(NothingFitsError):
        search(store, ComputedRunner(lambda candidate: 30 * GIB), precisions=("bf16",))
    made = load_report(store, "bert")
    page = checked(made)
    assert "none: no trial is feasible" in page.section("Best configuration").text
    assert numbers_listed(page) == [each.number for each in made.trials]
    plot = next(page.section("Speed against memory").all("svg", "plot"))
    assert len(list(plot.all("path", "cross"))) == len({t.candidate for t in made.trials})
    assert not {"Step times", "TrainingArguments to copy"} & set(page.titles)
    assert not list(page.root.all("script"))


def test_a_study_that_has_just_begun() -> None:
    page = checked(report(trial(0, BF16, 8, None), best=None, baseline=None, state="running"))
    assert "none yet" in page.section("Best so far").text
    assert numbers_listed(page) == [0]
    assert checked(report(best=None, baseline=None, state="running")).titles[-1] == "All 0 trials"


def test_a_wide_interval_and_a_speed_up_that_is_a_bound_are_shown_as_that() -> None:
    outcome = dataclasses.replace(BASELINE.outcome, disturbed=("others",), run_again=False)
    slowed = dataclasses.replace(BASELINE, outcome=outcome)
    assert "at most 7.45×" in html_page(report(slowed, WINNER))
    others = trial(2, BF16, 32, completed(150.0)), trial(3, FP16, 32, completed(200.0))
    noisy = report(BASELINE, trial(1, BF16, 32, completed(310.7)), *others)
    assert f"{format_rate(1000 * noisy.pooled(noisy.best).step_seconds)} ms ×/÷ " in html_page(noisy)


def test_a_search_for_the_largest_batch(store: Store) -> None:
    """Steps differ in size, so time is told a sample; the answer says what does not fit."""
    runner = ComputedRunner(lambda candidate: (5 + 0.5 * candidate.per_device_train_batch_size) * GIB)
    page = checked(searched(store, runner, prepared(objective="max-batch", effective_batch=None)))
    assert "time a sample" in page.section("Step times").text
    assert "does not fit" in page.section("Best configuration").text


HOSTILE = "<script>alert(1)</script>\"'&<img src=http://host/x> \x00\udc80"


def test_every_text_is_escaped() -> None:
    """Names and messages show as they are, and make no element."""
    failed = trial(3, FP16, 8, Failed("error", f"</td></table>{HOSTILE}"))
    optim = trial(4, dataclasses.replace(BF16, optim=HOSTILE), 8, completed(200.0))
    plain = report(BASELINE, WINNER, OVER, failed, optim)
    left_out = (LeftOut((HOSTILE,), HOSTILE),)
    made = dataclasses.replace(
        plain,
        study=dataclasses.replace(
            plain.study, name=HOSTILE, stopped_because=HOSTILE, left_out=left_out, state="interrupted"
        ),
        workload={**WORKLOAD, "model": HOSTILE},
        environment={**ENVIRONMENT, "device_name": HOSTILE, "driver": HOSTILE},
    )
    page, usual = checked(made), checked(plain)
    shown = HOSTILE.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
    assert shown in next(page.root.all("h1")).text
    assert f"</td></table>{shown}" in page.section("All ").text
    for place in ("header", "title", "figure"):
        assert shown.partition("<img")[0] in "".join(each.text for each in page.root.all(place))
    assert {each.name for each in page.root.all()} <= {each.name for each in usual.root.all()} | {"tbody", "thead"}
    assert len(list(page.root.all("script"))) == 1


def test_a_trial_that_keeps_no_headroom_is_hollow() -> None:
    page = checked(report(BASELINE, WINNER, trial(5, FP16, 32, completed(300.0, 22.9))))
    # The mark, and its place in the legend.
    assert len(list(page.section("Speed against memory").all(class_="hollow"))) == 2
    assert "too little headroom" in page.section("Speed against memory").text


def test_a_long_study_is_drawn_in_part_and_listed_whole() -> None:
    more = [trial(n, Arm("bf16", optim=f"optimizer {n % 60}"), n, completed(50.0 + n % 97)) for n in range(2, 802)]
    made = report(BASELINE, WINNER, *more, effective_batch=None)
    page = checked(made)
    assert len(numbers_listed(page)) == 802
    assert "202 slower or larger trials left out here" in page.section("Speed against memory").text
    assert "slower candidates left out here" in page.section("Step times").text


ANATOMY = {"weights": 2 * GIB, "gradients": 2 * GIB, "optimizer": 4 * GIB, "activations": 13 * GIB}


class _Predicting:
    """Answers prediction jobs at once: every batch of an arm needs the same."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        peaks = (0, 21 * GIB, 22 * GIB, False, True, ANATOMY)
        predicted = tuple(MemoryPrediction(*batch, *peaks) for batch in work.batches)
        operations = recorded_operations().get(operations_key(Subject("bert-large-uncased", 512), work.arm))
        self._answers[job_id] = Answer(encode(PredictionAnswer(predicted, None, operations)))

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        answers, self._answers = self._answers, {}
        return answers


@pytest.mark.parametrize("is_stored", [True, False])
def test_the_memory_of_the_winner_where_a_prediction_is_stored(is_stored: bool, store: Store) -> None:
    facts = dataclasses.replace(FACTS, chip=CHIPS["h200"])
    given = prepare(request(), facts)
    if is_stored:
        store.answers.keep(inspection_key(given.request.device, BERT_LARGE), facts)
        forecast_of(given, _Predicting(), KeptPredictions(AnswerCache(store.answers), BERT_LARGE)).complete()
    made = searched(store, RecordedRunner(EFFECTIVE_64), given)
    found, step = stored_prediction(made, made.best.candidate, store.answers)
    page = checked(made, found, step)
    if not is_stored:
        assert (found, step) == (None, None)
        assert not {"Memory of the best configuration", "Where the time goes"} & set(page.titles)
        return
    time = page.section("Where the time goes")
    rows = [[cell.text for cell in row.all("td")][1:] for row in time.all("tr")]
    assert rows[1][0] == "matrix product"
    assert len(rows[1]) == 3
    assert "predicted" in time.text
    assert f"measured ({step.seconds / made.pooled(made.best).step_seconds - 1:+.1%})" in time.text  # type: ignore[union-attr]
    assert "the GPU computes" in time.text
    assert found.anatomy == ANATOMY
    section = page.section("Memory of the best configuration")
    rows = [[cell.text for cell in row.all("td")][1:] for row in section.all("tr")]
    assert rows[0] == ["weights", "2.0 GiB", "9.1%"]
    assert rows[-1] == ["reserved, unused", "1.0 GiB", "4.5%"]
    drawing = next(section.all("svg"))
    bars = [float(part.attributes["width"].removesuffix("%")) for part in drawing.all("rect", "part")]
    assert bars[3] == pytest.approx(13 / 2 * bars[0], rel=0.01)
    assert "measured peak" in drawing.text
    assert "ceiling" in drawing.text


def test_measured_kinds_of_work_stand_beside_the_predicted_ones() -> None:
    outcome = WINNER.outcome
    # The names of kernels do not tell clipping from the update.
    kinds = (("matrix_product", 0.12), ("softmax", 0.03), ("fused_update", 0.05))
    measured = dataclasses.replace(outcome.measurement, gpu_seconds_by_kind=kinds, gpu_busy_share=0.9)
    winner = dataclasses.replace(WINNER, outcome=dataclasses.replace(outcome, measurement=measured))
    predicted = {"matrix_product": 0.1, "reduction": 0.05, "fused_update": 0.03, "gradient_clipping": 0.02}
    step = StepTime(winner.candidate, 0.2, (0.18, 0.22), 0.15, 0.1, predicted, 1e13, 1e15)
    time = checked(report(BASELINE, winner), None, step).section("Where the time goes")
    rows = [[cell.text for cell in row.all("td")][1:] for row in time.all("tr")][1:]
    assert rows[0] == ["matrix product", "100 ms", "50.0%", "120 ms", "60.0%"]
    assert rows[1][0] == "reduction"
    assert rows[1][3:] == ["0 ms", "0.0%"]
    assert rows[2] == ["fused update", "50 ms", "25.0%", "50 ms", "25.0%"]
    assert "names of the kernels" in time.text


@pytest.mark.parametrize(
    "damaged",
    [{"request": {}}, {"workload": {"model": "x"}}, {"environment": {"device_kind": "cuda"}}],
    ids=lambda d: next(iter(d)),
)
def test_a_record_from_which_no_question_can_be_made_has_no_prediction(damaged: dict[str, Any]) -> None:
    made = report(BASELINE, WINNER)
    if "request" in damaged:
        made = dataclasses.replace(made, study=dataclasses.replace(made.study, request={"trials": "many"}))
    else:
        made = dataclasses.replace(made, **damaged)
    assert stored_prediction(made, Candidate(BF16, 32, 2), _Nothing()) == (None, None)


class _Nothing:
    def find(self, key: str, kind: type) -> Any:
        return None

    def keep(self, key: str, answer: Any) -> None:
        raise AssertionError("nothing is kept when looking")


def test_the_page_needs_no_script_to_be_read(recorded: Report) -> None:
    (script,) = checked(recorded).root.all("script")
    assert len(script.text.strip().splitlines()) < 10
    assert not re.search(r"fetch|XMLHttp|import|http", script.text)


@pytest.mark.parametrize(
    ("scale", "most", "ticks"),
    [
        (Scale(0, 24.4), 6, [0, 5, 10, 15, 20]),
        (Scale(0, 1), 6, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Scale(200, 1700, is_log=True), 8, [200, 300, 500, 700, 1000, 1500]),
        (Scale(1, 1000, is_log=True), 4, [1, 10, 100, 1000]),
        (Scale(21, 44, is_log=True), 5, [25, 30, 35, 40]),
    ],
)
def test_ticks_are_round(scale: Scale, most: int, ticks: list[float]) -> None:
    assert scale.ticks(most) == pytest.approx(ticks)


def test_a_logarithmic_scale_has_equal_ratios_equally_far_apart() -> None:
    scale = Scale(1, 100, is_log=True)
    assert [scale(1), scale(10), scale(100), scale(1e9)] == pytest.approx([0, 0.5, 1, 1])

"""Test what is said of studies: the summary, the notes and the table of each, compared with stored text."""

import dataclasses
from collections.abc import Callable
from typing import Any

from messages import check_messages
from reported import BASELINE, BF16, FP16, FP32, OVER, SOURCE, WINNER, WORKLOAD, completed, report, trial

from autotune.core.candidate import Arm, Candidate
from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths, Packed
from autotune.core.outcome import Completed, Failed, OutOfMemory
from autotune.core.schema import encode
from autotune.estimate.bottleneck import describe_limit
from autotune.results.report import Report
from autotune.results.text import report_lines, summary_lines
from autotune.results.warnings import sharding_notes
from autotune.results.wording import describe_data
from autotune.store.records import NOTHING_LEFT, Stage, TrialRecord

DDP = Arm("bf16", strategy="ddp", ranks=2)
LEAN = dataclasses.replace(DDP, ddp_find_unused_parameters=False, ddp_broadcast_buffers=False)
COMPILED, PINNED = dataclasses.replace(BF16, torch_compile=True), dataclasses.replace(BF16, cpu_affinity=True)
GRAPHED = dataclasses.replace(BF16, cuda_graphs=True, unpadded=True)
LENGTHS = Lengths(30, 110, 120, 122, 100.0, 0.0, 0.0, (1,))
TEXTS = encode(DataSpec("/data/texts.jsonl", "json", "0", facts=DataFacts(118, lengths=LENGTHS)))
_ROWS = DataFacts(36, lengths=LENGTHS, packed=Packed(601, LENGTHS))
PACKED = encode(DataSpec("/data/texts.jsonl", "json", "0", tokenizer="t", packing=True, facts=_ROWS))


def of(made: Report, study: dict[str, Any] | None = None, **workload: Any) -> Report:
    """The report with other fields of its study and its workload."""
    changed = dataclasses.replace(made.study, **(study or {}))
    return dataclasses.replace(made, study=changed, workload={**made.workload, **workload})


def winner(rate: float = 312.0, peak_gib: float = 10.0, **measured: Any) -> TrialRecord:
    """A winner at 32 × 2 with these values in what was measured."""
    outcome = completed(rate, peak_gib)
    return trial(1, BF16, 32, Completed(dataclasses.replace(outcome.measurement, **measured)))


def disturbed(made: TrialRecord) -> TrialRecord:
    assert isinstance(made.outcome, Completed)
    return dataclasses.replace(
        made, outcome=dataclasses.replace(made.outcome, disturbed=("a neighbour",), run_again=False)
    )


def with_samples(samples: int, larger: int) -> Report:
    """A search with any batch, over so many samples; batches are multiples of 8, or of 4 where that is too much."""
    other = trial(8, BF16, larger, OutOfMemory("out of memory"))
    data = encode(DataSpec("x.jsonl", "json", "1", facts=DataFacts(samples)))
    return of(report(WINNER, other, effective_batch=None, baseline=None), data=data)


def on_two(number: int, arm: Arm, batch: int, rate: float, stage: Stage) -> TrialRecord:
    made = trial(number, arm, batch, completed(rate), stage)
    return dataclasses.replace(made, candidate=Candidate(arm, batch, 32 // batch))


def waiting(busy: float | None, share: float) -> Report:
    """A winner of one's own code that waits for data for a share of its step."""
    return of(report(BASELINE, winner(data_seconds=share * 64 / 312, gpu_busy_share=busy)), task="own")


def host_bound(*more: TrialRecord, busy: float = 0.46, **changes: Any) -> Report:
    return report(BASELINE, winner(200.0, gpu_busy_share=busy, data_seconds=0.0), *more, **changes)


def beside(arm: Arm, rate: float) -> TrialRecord:
    return trial(2, arm, 32, completed(rate))


MAX_BATCH: dict[str, Any] = {"objective": "max-batch", "effective_batch": None, "baseline": None}
OWN: dict[str, Any] = {"task": "own", "source": SOURCE}
WORST: dict[str, Any] = {"worst_batch_tokens": 16_384, "worst_batch_peak_reserved_bytes": 9 * 2**30}
STUDIES: dict[str, Callable[[], Report]] = {
    "one out of memory": lambda: report(BASELINE, WINNER, OVER),
    "a disturbed baseline: at most": lambda: report(disturbed(BASELINE), WINNER),
    "both disturbed: no bound": lambda: report(disturbed(BASELINE), disturbed(WINNER)),
    "largest batch": lambda: report(WINNER, OVER, trial(3, BF16, 40, completed(300.0, 22.9)), **MAX_BATCH),
    "largest batch, no larger tried": lambda: report(WINNER, **MAX_BATCH),
    "the data ends": lambda: with_samples(39, 16),
    "the data does not end": lambda: with_samples(40, 16),
    "the data ends, a larger batch was tried": lambda: with_samples(39, 36),
    "a baseline that differs in settings of DDP": lambda: report(
        on_two(0, DDP, 8, 310.0, "baseline"), on_two(1, LEAN, 8, 300.0, "search")
    ),
    "a baseline that differs in settings of DDP and in the batch": lambda: report(
        on_two(0, DDP, 8, 310.0, "baseline"), on_two(1, LEAN, 32, 300.0, "search")
    ),
    "a failed baseline": lambda: report(trial(0, FP32, 8, OutOfMemory("no"), "baseline"), WINNER, baseline=None),
    "no baseline asked for": lambda: report(WINNER, baseline=None, measure_baseline=False),
    "no result": lambda: report(OVER, trial(3, FP16, 8, Failed("error", "no")), best=None, baseline=None),
    "a search that runs": lambda: of(
        report(BASELINE, trial(3, FP16, 8, None), best=None, state="running"), {"ended_at": None}
    ),
    "new shapes": lambda: report(
        BASELINE, winner(new_shape_seconds=0.1, epoch_shapes=30, steady_step_seconds=0.1)
    ),
    "new shapes that nobody would notice": lambda: report(BASELINE, winner(new_shape_seconds=0.1, epoch_shapes=9)),
    "new shapes of unknown number": lambda: report(BASELINE, winner(new_shape_seconds=0.1)),
    "short new shapes of unknown number": lambda: report(BASELINE, winner(new_shape_seconds=0.01)),
    "three epochs": lambda: report(BASELINE, winner(run_steps=3000, run_epochs=3.0)),
    "so many steps": lambda: report(BASELINE, winner(run_steps=3000)),
    "fewer micro-steps": lambda: report(BASELINE, trial(1, BF16, 8, completed(300, micro_steps=3))),
    "noise": lambda: report(BASELINE, winner(300.0, step_seconds_each=(0.1, 0.3, 0.24))),
    "several devices": lambda: report(BASELINE, WINNER, world_size=4),
    "interrupted": lambda: report(BASELINE, WINNER, state="interrupted"),
    "an odd batch": lambda: report(BASELINE, trial(1, BF16, 4, completed(300, micro_steps=16))),
    "only odd batches": lambda: report(
        trial(0, FP32, 4, completed(200, micro_steps=16), "baseline"),
        trial(1, BF16, 4, completed(300, micro_steps=16)),
    ),
    "memory that was not predicted": lambda: of(
        report(BASELINE, WINNER), source={**SOURCE, "interface": {"memory_unknown": "it has no loss"}}
    ),
    "an excluded baseline that was faster": lambda: report(trial(0, FP32, 8, completed(400.0), "baseline"), WINNER),
    "a nearly equal rival of the baseline": lambda: report(BASELINE, trial(1, FP16, 8, completed(41.5)), best=0),
    "one configuration within a budget": lambda: report(
        WINNER, trial(1, BF16, 32, completed(310.0), "final"), baseline=None
    ),
    "one configuration, nothing left": lambda: of(
        report(WINNER, trial(1, BF16, 32, completed(310.0), "final"), baseline=None),
        {"stop_reason": NOTHING_LEFT.reason, "stopped_because": NOTHING_LEFT.sentence},
    ),
    "the next fastest": lambda: report(BASELINE, WINNER, beside(FP16, 250.0), trial(3, BF16, 8, completed(200.0))),
    "the next fastest, not told apart": lambda: report(BASELINE, WINNER, beside(FP16, 309.0)),
    "the next fastest, which is less plain": lambda: report(BASELINE, WINNER, beside(FP16, 313.0)),
    "one's own settings are the answer": lambda: of(
        report(WINNER, beside(FP16, 318.0), best=1, baseline=1), **OWN
    ),
    "a noisy machine": lambda: report(
        BASELINE, winner(310.7), beside(BF16, 150.0), trial(3, FP16, 32, completed(200.0))
    ),
    "a baseline of two processes": lambda: report(BASELINE, trial(2, FP32, 8, completed(25.0)), WINNER),
    "peaks of two processes": lambda: report(
        BASELINE, winner(300.0, 22.2), trial(2, BF16, 32, completed(301.0, 21.0), "final"), best=2
    ),
    "waits for data a little": lambda: waiting(None, 0.03),
    "waits for data": lambda: waiting(None, 0.3),
    "waits for data, and the host longer": lambda: waiting(0.65, 0.3),
    "waits for data most of the time": lambda: waiting(None, 0.6),
    "the longest samples in one row": lambda: of(
        report(BASELINE, dataclasses.replace(winner(**WORST), candidate=Candidate(Arm(padding_free=True), 32, 2))),
        data={"facts": None},
    ),
    "packed rows on two GPUs": lambda: of(
        report(BASELINE, winner(joules_per_sample=0.5, ranks=2, host_bytes_to_build=9 * 2**30)), data=PACKED
    ),
    "computes": lambda: waiting(0.95, 0.03),
    "very short steps of one's own": lambda: of(report(BASELINE, winner(60_000.0)), task="own"),
    "very short steps of a model by name": lambda: report(BASELINE, winner(60_000.0)),
    "evaluates and grows": lambda: report(
        BASELINE, winner(312.0, 12.0, growth_bytes=2**20, evaluation_seconds=3.9, evaluates_every=5)
    ),
    "host-bound": host_bound,
    "host-bound, levers were tried": lambda: host_bound(effort="default"),
    "a busy GPU": lambda: host_bound(busy=0.95),
    "one's own code, host-bound": lambda: of(host_bound(), task="own", model="train.py:build"),
    "compiling gained": lambda: host_bound(beside(COMPILED, 230.0), torch_compile="auto"),
    "pinning gained": lambda: host_bound(beside(PINNED, 230.0)),
    "pinning lost": lambda: host_bound(beside(PINNED, 180.0)),
    "all levers of the winner gained": lambda: host_bound(beside(GRAPHED, 300.0), best=2),
}  # fmt: skip


def test_messages_of_studies() -> None:
    check_messages("studies", {name: summary_lines(made()) for name, made in STUDIES.items()})


def test_messages_in_the_table_of_trials() -> None:
    ends = (
        OutOfMemory("killed", where="host"),
        Failed("error", "ValueError: no"),
        Failed("timeout", "after 180 s"),
        Failed("killed", "killed by SIGSEGV"),
        completed(277.0),
        completed(300.0, 22.9),
        None,
    )
    every_end = report(BASELINE, WINNER, OVER, *(trial(3 + n, FP16, 8, end) for n, end in enumerate(ends)))
    rows = of(report(BASELINE, WINNER, effective_batch=None), task="causal-lm", data=PACKED)
    images = of(report(BASELINE, WINNER), task="image-classification", seq_len=1)
    tables = {"every end of a trial": every_end, "packed rows": rows, "images": images}
    tables["the baseline is the best"] = report(BASELINE, best=0)
    assert max(len(line) for made in (rows, images) for line in report_lines(made)[-3:]) <= 80
    check_messages("trials", {name: report_lines(made)[1:] for name, made in tables.items()})


def test_messages_of_data_and_levers() -> None:
    data: dict[str, dict[str, Any]] = {
        "full length": {},
        "padding": {"padding": 0.3},
        "images": {"task": "image-classification"},
        "speech": {"task": "speech-seq2seq", "seq_len": 448},
        "a file": {"data": TEXTS},
        "one's own": {
            "model": "run.py", "task": "own", "source": {"interface": {"lengths": {"unknown": "it makes rows"}}},
        },
    }  # fmt: skip
    cases = {name: [describe_data({**WORKLOAD, **changes})] for name, changes in data.items()}
    cases["a file, without padding"] = [describe_data({**WORKLOAD, "data": TEXTS}, padding_free=True)]
    zero = dataclasses.replace(DDP, strategy="zero2")
    for precision in ("bf16", "fp16", "fp32"):
        arm = dataclasses.replace(zero, precision=precision)
        cases[f"{precision} under DeepSpeed"] = [*sharding_notes(Candidate(arm, 8))]
    for name, candidate, busy, waits in (
        ("several micro-steps", Candidate(BF16, 8, 8), 0.46, 0.0),
        ("compiled and pinned", Candidate(dataclasses.replace(COMPILED, cpu_affinity=True), 8), 0.46, 0.0),
        ("waits for data", Candidate(BF16, 8), 0.5, 0.45),
        ("a busy GPU", Candidate(BF16, 8), 0.97, 0.0),
        ("not measured", Candidate(BF16, 8), None, 0.0),
    ):
        measured = completed(64.0).measurement
        measured = dataclasses.replace(measured, gpu_busy_share=busy, data_seconds=waits)
        cases[f"limit: {name}"] = [describe_limit(candidate, measured) or "nothing"]
    check_messages("data_and_levers", cases)

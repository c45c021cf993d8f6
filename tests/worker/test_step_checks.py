"""What a process trains is counted, and a step that does not train as it was told is not measured."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from server_client import ServerClient, of_command
from tiny import QUICK
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate, Precision
from autotune.core.outcome import Completed, Failed, Outcome, OutOfMemory
from autotune.core.training_source import find_loop, find_trainer
from autotune.core.workload import Workload
from autotune.worker.trial.step_checks import NotTrainedError, StepChecks
from autotune.worker.trial.training_watch import TrainingWatch

OWN_CODE = Path(__file__).resolve().parents[1] / "own_code"
CODES = OWN_CODE / "odd_loops.py"
WARM = dataclasses.replace(QUICK, warmup_steps=2)
# In which nothing may appear.
pytestmark = pytest.mark.usefixtures("folder")


def tried(
    server: ServerClient, function: str, precision: Precision = "fp32", batch: int = 16, accumulation: int = 2
) -> Outcome:
    """The outcome of a trial, after the loop was inspected as it is before the first trial of a search."""
    workload, _ = server.prepared(Workload.of_source(find_loop(f"{CODES}:{function}")))
    return server.trial(workload, Candidate(Arm(precision), batch, accumulation), WARM).outcome


class InPlace(torch.nn.Module):
    """Computes in the memory that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mul_(self.weight).sigmoid_()


def test_what_a_call_keeps_is_freed_without_a_backward_pass() -> None:
    """A tensor that keeps itself would stay for ever, and count in the peak."""
    memory, watch = bytearray(64), TrainingWatch()
    before = sys.getrefcount(memory)
    watch.install()
    InPlace()(torch.frombuffer(memory, dtype=torch.float32))
    watch.remove()
    assert watch.inner_dtypes == {"float32"}
    assert sys.getrefcount(memory) == before


class Later(torch.nn.Module):
    """Makes its layer in its first call."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "layer"):
            self.layer = torch.nn.Linear(2, 1)
        return self.layer(inputs)


def test_a_model_is_one_from_its_second_call_on_where_it_makes_its_weights_in_the_first() -> None:
    watch, model = TrainingWatch(), Later()
    watch.install()
    model(torch.ones(4, 2))
    watch.take()
    model(torch.ones(4, 2)).sum().backward()
    assert [call.module_id for call in watch.take().calls] == [id(model)]
    watch.remove()


def test_what_a_step_trains_is_counted() -> None:
    watch, model = TrainingWatch(), torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "idle": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.forward = model["used"].forward  # type: ignore[method-assign]
    watch.install()
    for _ in range(2):
        model(torch.ones(4, 2)).sum().backward()
    model(torch.ones(3, 2))
    optimizer.step()
    seen = watch.take()
    watch.remove()
    assert ([call.rows for call in seen.calls], seen.backward_passes) == ([4, 4], 2)
    assert watch.trained == {"used.weight", "used.bias"}
    assert watch.untrained == ["idle.weight", "idle.bias"]
    assert watch.has_gradients


def test_what_an_optimizer_of_copies_trains_is_unknown() -> None:
    """As with DeepSpeed, which leaves no gradient with the model's own parameters."""
    watch, model = TrainingWatch(), torch.nn.Linear(2, 2)
    copies = [parameter.detach().clone() for parameter in model.parameters()]
    watch.install()
    model(torch.ones(4, 2)).sum().backward()
    for copy, parameter in zip(copies, model.parameters(), strict=True):
        copy.grad, parameter.grad = parameter.grad, None
    torch.optim.SGD(copies, lr=0.1).step()
    watch.remove()
    assert (watch.trained, watch.untrained, watch.has_gradients) == (None, [], True)


def test_a_model_that_is_traced_for_a_picture_is_not_watched() -> None:
    """As TensorBoard's ``add_graph`` does, where the sizes of tensors are tensors."""
    watch = TrainingWatch()
    watch.install()
    torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(4, 2), check_trace=False)
    assert (watch.take().calls, watch.model) == ([], None)
    watch.remove()


class Embeds(torch.nn.Module):
    """Is called as transformers' models are."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding(8, 2)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> torch.Tensor:
        return self.weights(input_ids["input_ids"] if isinstance(input_ids, dict) else input_ids)


def test_tokens_are_those_that_a_gradient_came_back_from() -> None:
    watch, model = TrainingWatch(), Embeds()
    tokens, mask = torch.ones(2, 4, dtype=torch.int64), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    watch.install()
    for given, named, found in (
        ((), {"input_ids": tokens, "attention_mask": mask}, 5),
        ((tokens, mask), {}, 5),
        (({"input_ids": tokens, "attention_mask": mask},), {}, 5),
        ((tokens,), {}, 8),
        ((tokens,), {"attention_mask": mask[:, None, None]}, None),
    ):
        model(*given, **named)
        model(*given, **named).sum().backward()
        assert watch.take().tokens == found
    watch.remove()


def test_a_step_that_is_not_judged_is_forgotten_without_reading_its_masks() -> None:
    """Reading waits for the device, which steps that run ahead of it must not."""
    watch, model = TrainingWatch(), Embeds()
    checks = StepChecks("train.py", None, lambda found: pytest.fail(str(found)))
    checks.watch = watch
    watch.install()
    tokens, mask = torch.ones(2, 4, dtype=torch.int64), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    read: list[Any] = []

    class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
            read.extend([function] if "_local_scalar_dense" in str(function) else ())
            return function(*given, **(named or {}))

    for end in (checks.step_is_dropped, lambda: checks.step_ends(1)):
        model(tokens, mask).sum().backward()
        with Reads():
            end()
        assert bool(read) == (end != checks.step_is_dropped)
    watch.remove()


def test_what_no_code_of_the_users_is_in_is_not_watched_in_timed_steps() -> None:
    """And steps that are not watched are judged no more."""
    untouched = torch.autograd.backward, torch.compile, torch.autocast.__enter__
    problems: list[NotTrainedError] = []
    checks = StepChecks("it", 4, problems.append, until_timed=True)  # type: ignore[arg-type]
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks.watch.install()
    assert torch.autograd.backward is not untouched[0]
    checks.watch.begin()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    assert len(checks.step_ends(1).calls) == 1
    checks.begin_timed()
    assert (torch.autograd.backward, torch.compile, torch.autocast.__enter__) == untouched
    model(torch.ones(4, 2)).sum()
    assert (checks.step_ends(1).calls, problems) == ([], [])


def whole(*values: Any) -> Any:
    """A case that ``make test`` leaves out."""
    return pytest.param(*values, marks=pytest.mark.whole)


@pytest.mark.parametrize("function", ["zero_loss_of_its_own", whole("next_batch"), "fewer_samples", "leave"])
def test_a_code_that_catches_its_error_of_memory_ran_out_of_it(trial_server: ServerClient, function: str) -> None:
    outcome = tried(trial_server, function)
    assert isinstance(outcome, OutOfMemory)
    assert "caught the error" in outcome.message
    assert isinstance(tried(trial_server, function, batch=8), Completed)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("half_the_batches", "made 1 backward passes in a step of 2 batches (odd_loops.py:"),
        whole("not_finite", "the loss of the last step is nan"),
        ("truncate", "gives its model 4 samples of a batch of 16 (odd_loops.py:"),
        whole("collate_few", "gives its model 2 samples of a batch of 16"),
        ("ready_made", "gives its model 1 samples of a batch of 16"),
        whole("generate", "gives its model 2 samples of a batch of 16"),
        whole("mark", "gives its model 2 samples of a batch of 16"),
        whole("accumulate_less", "steps its optimizer after 1 batches, asked was 2"),
    ],
)
def test_a_step_that_does_not_train_is_not_counted(trial_server: ServerClient, function: str, message: str) -> None:
    outcome = tried(trial_server, function)
    assert isinstance(outcome, Failed), outcome
    assert message in outcome.message
    assert "\n" not in outcome.message


def test_a_model_without_gradients_is_refused_before_any_trial(trial_server: ServerClient) -> None:
    answer = trial_server.inspection(Workload.of_source(find_loop(f"{CODES}:frozen")))
    assert answer.problem.message == "odd_loops.py:frozen steps an optimizer whose parameters get no gradients"


@pytest.mark.parametrize(
    "function",
    [
        *map(whole, ("without_learning_rate", "in_parts", "two_models", "pairs", "mark_rightly")),
        "recompute",
        "time_first",
        "compiled",
        "stream",
    ],
)
def test_an_honest_code_that_looks_like_them_is_measured(trial_server: ServerClient, function: str) -> None:
    is_alone = function in ("two_models", "mark_rightly")
    outcome = tried(trial_server, function, accumulation=1 if is_alone else 2)
    assert isinstance(outcome, Completed), outcome


@pytest.mark.parametrize(
    ("function", "right", "wrong", "message"),
    [
        (
            "ignore_precision",
            "fp32",
            "bf16",
            "was asked for bf16 and enters no autocast of it on this cpu (odd_loops.py:",
        ),
        ("always_half", "bf16", "fp32", "was asked for fp32 and calls its model in an autocast of bfloat16"),
        whole("recompute_in_precision", "bf16", "fp32", None),
    ],
)
def test_a_precision_that_the_code_leaves_out_is_not_named(
    trial_server: ServerClient, function: str, right: Precision, wrong: Precision, message: str | None
) -> None:
    assert isinstance(tried(trial_server, function, right), Completed)
    outcome = tried(trial_server, function, wrong)
    if message is None:
        assert isinstance(outcome, Completed)
    else:
        assert isinstance(outcome, Failed)
        assert message in outcome.message


def test_updates_that_a_fused_optimizer_skips_are_not_counted(trial_server: ServerClient) -> None:
    """It does so itself, where no scaler sees it: on its first steps, or on all of them."""
    settled = tried(trial_server, "settle", "fp16", accumulation=1)
    assert isinstance(settled, Completed)
    assert len(settled.measurement.warmup_step_seconds) > WARM.warmup_steps
    never = tried(trial_server, "never_settle", "fp16", accumulation=1)
    assert isinstance(never, Failed)
    assert (never.reason, never.message) == (
        "non_finite", "fp16's gradient scaler skipped the updates of 21 steps: train in bf16 or fp32",
    )  # fmt: skip


def trained(server: ServerClient, function: str, batch: int = 16) -> Outcome:
    """The outcome of a trial of a ``Trainer``."""
    workload = Workload.of_source(find_trainer(f"{OWN_CODE / 'odd_trainers.py'}:{function}"))
    return server.trial(workload, Candidate(Arm(), batch, 2), WARM).outcome


def test_a_trainer_that_catches_its_error_of_memory_ran_out_of_it(trial_server: ServerClient) -> None:
    outcome = trained(trial_server, "catch_in_step")
    assert isinstance(outcome, OutOfMemory), outcome
    assert isinstance(trained(trial_server, "catch_in_step", batch=8), Completed)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("keep_its_loader", "the batch of its training loader is 2, asked was 16"),
        ("ready_of_two", "gives its model 2 samples of a batch of 16"),
        ("ready_of_thirty_two", "odd_trainers.py:ready_of_thirty_two have 32 samples where 16 were set"),
        whole("other_weights", "steps an optimizer whose parameters get no gradients"),
    ],
)
def test_a_trainer_that_does_not_train_is_not_counted(trial_server: ServerClient, function: str, message: str) -> None:
    outcome = trained(trial_server, function)
    assert isinstance(outcome, Failed), outcome
    assert message in outcome.message


@pytest.mark.parametrize("function", ["ready", whole("flatten")])
def test_an_honest_trainer_is_measured(trial_server: ServerClient, function: str) -> None:
    outcome = trained(trial_server, function)
    assert isinstance(outcome, Completed), outcome


ACCELERATED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator()
net = torch.nn.Linear(4, 2)
data = DataLoader(TensorDataset(torch.randn(256, 4)), batch_size=8)
def run_out(_, given):
    if len(given[0]) > 8:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
net.register_forward_pre_hook(run_out)
net, data, optimizer = accelerator.prepare(net, data, torch.optim.SGD(net.parameters(), 0.1))
for inputs, in data:
    try:
        loss = net(inputs[:TAKEN]).mean()
    except RuntimeError:
        loss = torch.zeros((), requires_grad=True)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("taken", ["16", whole("2")])
def test_the_same_holds_for_an_accelerator(trial_server: ServerClient, tmp_path: Path, taken: str) -> None:
    (tmp_path / "run.py").write_text(ACCELERATED.replace("TAKEN", taken))
    workload, _ = trial_server.prepared(of_command("python", str(tmp_path / "run.py")))
    outcomes = [
        trial_server.trial(workload, Candidate(Arm(optim=OWN_OPTIM), batch, 1), WARM).outcome for batch in (8, 16)
    ]
    if taken == "16":
        assert isinstance(outcomes[0], Completed)
        assert isinstance(outcomes[1], OutOfMemory)
    else:
        messages = [outcome.message for outcome in outcomes if isinstance(outcome, Failed)]
        assert [message.partition(" (")[0] for message in messages] == [
            f"run.py gives its model 2 samples of a batch of {batch}" for batch in (8, 16)
        ]

"""Find out what a script trains with, and which of the placeholders on its command line it obeys.

It is run up to its second step with two sets of values, then with its own defaults. A placeholder counts as obeyed
where both sets did what they said; the dimension of the model's inputs that changed with the batch is the one of
samples.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NoReturn

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.code_interface import CodeInterface, Fixed, HowItSteps, Site
from autotune.core.inspection import ModelFacts, OwnSettings
from autotune.core.messages import Problem
from autotune.worker.facts import inspect_environment
from autotune.worker.process import ForkedRun, in_fork
from autotune.worker.user.code import UserCodeError, enter, exit_error, log_size, run_script
from autotune.worker.user.guard import Guard
from autotune.worker.user.inspection import Code, Finish, problem_of
from autotune.worker.user.placeholder_steps import ScriptRun, ScriptWatch, set_variables
from autotune.worker.user.protection import keep_run

# Tokens of a sample that are assumed for a total in tokens until they are known. Most lengths divide the number.
_ANY_SAMPLE_TOKENS = 2**16
# The script's own defaults may be far larger than what is searched. They are waited for so many times as long as a run
# with a small batch took, and no less than this: where they take longer, a trial of them is a large part of a search. A
# choice.
_PATIENCE = 4.0
_LEAST_PATIENCE_SECONDS = 15.0


# The two batches that the script is told, and larger ones where it rejects these. Choices.
_BATCHES = (4, 2)
_LARGER_BATCHES = (16, 8)
# Placeholders that decide how many samples a step has.
_TOTALS = ("accumulation", "effective_batch", "effective_tokens")

_AS_PASSES = "it makes as many backward passes as {batch} says: put {accumulation} there"
_AS_SAMPLES = (
    "put {batch} where the script takes the samples of one forward pass; a limit of tokens makes batches of different "
    "numbers of samples, and a search compares steps of equally many (see docs/how-to/placeholders.md)"
)


class _RejectedError(UserCodeError):
    """The script raised an error, perhaps since it rejects the values that it was given."""


def inspect(code: Code, finish: Finish) -> NoReturn:
    """Run the script with two sets of values and with its defaults, and report its model and the values it obeys."""
    environment = inspect_environment()
    try:
        model = _ScriptInspector(code).model()
        finish(dataclasses.replace(environment, model=model))
    except UserCodeError as error:
        finish(Problem(str(error), error.hint))


class _ScriptInspector:
    """Runs one script with several sets of values for its placeholders, and compares the runs."""

    def __init__(self, code: Code) -> None:
        self._source, self._scratch = code.source, code.scratch
        self._template = code.source.template
        if self._template.asks_sample_tokens:
            self._template = dataclasses.replace(self._template, sample_tokens=_ANY_SAMPLE_TOKENS)

    def model(self) -> ModelFacts:
        """Return the facts of the model, and which settings of a candidate the script applies.

        Raises ``UserCodeError`` where it does not obey its placeholders.
        """
        try:
            return self._compare_runs(_BATCHES)
        except _RejectedError as error:
            if "batch" not in self._template.names:
                raise
            # The script may accept only batches that are multiples of some number, such as 8.
            values, _ = self._two_value_sets(_LARGER_BATCHES, None)
            try:
                self._run_with(values)
            except UserCodeError:
                # It rejects something else than the batch.
                raise error from None
            return self._compare_runs(_LARGER_BATCHES)

    def _compare_runs(self, batches: tuple[int, int]) -> ModelFacts:
        """Run the script with two sets of values and with its defaults, compare the runs, and return the facts."""
        # Without {batch}, both sets have the batch of the script's own run, which must come first.
        has_batch = "batch" in self._template.names
        own_run = None if has_batch else self._run_with_defaults(_LEAST_PATIENCE_SECONDS)
        values, other_values = self._two_value_sets(batches, own_run)
        if self._template.asks_sample_tokens:
            self._template = dataclasses.replace(self._template, sample_tokens=self._tokens_of_sample(values))
        began_at = time.monotonic()
        first = self._run_with(values)
        seconds = time.monotonic() - began_at
        second = self._run_with(other_values)
        # Checked before the run with the defaults, which may be large and take long.
        site = self._check(first, second)
        if has_batch:
            own_run = self._run_with_defaults(max(_LEAST_PATIENCE_SECONDS, _PATIENCE * seconds))
        return self._facts(own_run, site, first, second)

    def _two_value_sets(self, batches: tuple[int, int], own_run: ScriptRun | None) -> tuple[Candidate, Candidate]:
        """Return two sets of values that differ in all that can be set, with accumulations of 2 and 4.

        The samples in a step are equally many, unless the script, as ``own_run`` shows, decides the batch itself.
        """
        if own_run is not None and "batch" not in self._template.names:
            _, rows = _first_dimension(own_run)
            batches = (rows, rows)
        precision, *others = self._template.precisions or ("fp32", "bf16")
        other = next((name for name in ("bf16", "fp16", "tf32") if name in others), precision)
        return (
            Candidate(Arm(precision), batches[0], 2),
            Candidate(Arm(other, gradient_checkpointing=True), batches[1], 4),
        )

    def _tokens_of_sample(self, values: Candidate) -> int:
        """Return the number of tokens in a sample, for a placeholder with the effective batch in tokens.

        It is the size of a row in the first model input with a row for each sample of the batch. Raises
        ``UserCodeError`` without such an input.
        """
        seen = self._run_with(values, to_first_call=True)
        for _, shapes in seen.calls:
            for place, shape in shapes.items():
                if len(shape) == 2 and shape[0] == values.per_device_train_batch_size and not place.startswith("out"):
                    return shape[1]
        raise UserCodeError(
            f"{self._source.name}: its model was given {_shape(seen)}, and it is not known what a sample of that is",
            "say it in the placeholder: {effective_tokens:1024}",
        )

    def _run_with_defaults(self, patience_seconds: float) -> ScriptRun | None:
        """Return the run with the script's own defaults.

        ``None`` where these are unknown, or the script does not reach its second step with them in time.
        """
        words = self._template.own_words()
        if words is None:
            return None
        child = ForkedRun(ScriptRun, lambda send: self._run_here(words, {}, send, words))
        seen = child.result(patience_seconds)
        return seen if seen is not None and seen.problem is None else None

    def _run_with(self, values: Candidate, *, to_first_call: bool = False) -> ScriptRun:
        """Run the script with these values in a fork, until its second step or only until the first call of a model.

        Raises ``UserCodeError`` where it does not train with them; ``_RejectedError`` if it may reject the values.
        """
        pair = values.per_device_train_batch_size, values.gradient_accumulation_steps
        words, variables = self._template.fill(values, os.path.join(self._scratch.path, f"filled-{pair[0]}-{pair[1]}"))
        # The filled words name copies of configuration files, which are gone when a message is read.
        shown_words = self._template.fill_words(self._template.words, values)
        seen = in_fork(
            ScriptRun, lambda send: self._run_here(words, variables, send, shown_words, to_first_call=to_first_call)
        )
        if seen.problem is not None:
            kind = _RejectedError if seen.is_rejected else UserCodeError
            raise kind(seen.problem.message, seen.problem.hint)
        return dataclasses.replace(seen, values=values)

    def _run_here(
        self,
        words: tuple[str, ...],
        variables: dict[str, str],
        send: Callable[[ScriptRun], NoReturn],
        shown_words: tuple[str, ...],
        *,
        to_first_call: bool = False,
    ) -> NoReturn:
        """Run the script in this process until its second step, or only until the first call of a model.

        ``send`` sends the record of the run and ends the process. ``shown_words`` stand for ``words`` in messages.
        """
        # Steps and shapes are the same without a compiler, which would take time.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        source = self._source
        log_start = log_size()

        def fail(error: BaseException) -> NoReturn:
            if isinstance(error, SystemExit):
                error = exit_error(source, error, log_start)
            problem = problem_of(error, source)
            if not isinstance(error, UserCodeError) or not error.hint:
                problem = dataclasses.replace(problem, hint=f"it was started with: {shlex.join(shown_words)[:300]}")
            is_rejected = isinstance(error, AssertionError | ValueError)
            send(ScriptRun(problem=problem, is_rejected=is_rejected))

        try:
            enter(source)
            set_variables(source.variables, variables)
            Guard(source, fail, is_known=lambda: True).install(self._scratch.stop_file)

            def finish(seen: ScriptRun) -> NoReturn:
                keep_run()
                send(seen)

            watching = ScriptWatch(source, finish, fail, to_first_call=to_first_call)
            try:
                run_script(dataclasses.replace(source, argv=words), self._scratch.output_dir)
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise
            raise watching.error_at_end()
        except BaseException as error:
            fail(error)

    def _check(self, first: ScriptRun, second: ScriptRun) -> Site | None:
        """Return where samples enter the model, if known. Raises ``UserCodeError`` if a run did not obey."""
        batch, other_batch = first.values.per_device_train_batch_size, second.values.per_device_train_batch_size
        names, source = self._template.names, self._source
        site = None
        if batch != other_batch:
            site = _site(first, second)
        if "batch" in names and site is None:
            raise UserCodeError(
                f"{source.name} ignores {{batch}}: with {batch} and {other_batch} its model was given "
                f"{_shape(first)} and {_shape(second)}",
                _AS_PASSES if first.passes * other_batch == second.passes * batch else _AS_SAMPLES,
            )
        if self._has_total_placeholder and _passes(first, second) is None:
            totals = [f"{{{name}}}" for name in _TOTALS if name in names]
            raise UserCodeError(
                f"{source.name} ignores {' and '.join(totals)}: it made {first.passes} and {second.passes} backward "
                f"passes for a step of its optimizer, told to make {first.values.gradient_accumulation_steps} and "
                f"{second.values.gradient_accumulation_steps}",
                "put {accumulation} where the script takes the micro-steps of a step; where it raises them over its "
                "first steps, have it begin with all of them",
            )
        self._check_numerics(first, second)
        return site

    @property
    def _has_total_placeholder(self) -> bool:
        """Whether a placeholder decides how many samples a step has."""
        return not self._template.names.isdisjoint(_TOTALS)

    def _how_it_steps(self, site: Site | None, first: ScriptRun, second: ScriptRun) -> tuple[HowItSteps, Fixed]:
        """Return how the script makes its steps, and which of batch, accumulation and their product it fixes itself.

        ``passes`` are the backward passes of each micro-step, ``passes_once`` further ones of each step.
        """
        accumulation = first.values.gradient_accumulation_steps
        consistent, fixed = _passes(first, second), Fixed()
        if self._has_total_placeholder and consistent is not None:
            passes, passes_once = consistent
        else:
            # No placeholder sets the accumulation. A script that fixes the samples of a step makes more passes in the
            # second run, with half the batch: as many more as the first run's micro-steps had.
            more = second.passes - first.passes
            has_total = 0 < more <= first.passes
            passes_once = first.passes - more if has_total else 0
            # Of several optimizers in turn, each has its own backward passes.
            accumulation = min((count for _, count in first.cycle if count), default=1 + passes_once) - passes_once
            if site is not None and site.calls:
                # Some of the backward passes may be of parts of a loss.
                accumulation = math.gcd(accumulation, _count_calls(first, site))
            total = first.values.per_device_train_batch_size * accumulation
            fixed = Fixed(effective_batch=total) if has_total else Fixed(accumulation=accumulation)
            passes = max(1, (first.passes - passes_once) // accumulation)
        if site is None:
            site, batch = _first_dimension(first)
            fixed = dataclasses.replace(fixed, batch=batch)
        if site is not None:
            calls = _count_calls(first, site) // accumulation
            # A site with 0 calls has the rows of a backward pass, however many calls there are.
            site = dataclasses.replace(site, calls=calls if site.calls else passes)
        return HowItSteps(first.anchor, passes, passes_once, site), fixed

    def _facts(self, own_run: ScriptRun | None, site: Site | None, first: ScriptRun, second: ScriptRun) -> ModelFacts:
        """Return the facts derived from all runs; ``own_run`` is that with the script's defaults, if there is one."""
        names = self._template.names
        how, fixed = self._how_it_steps(site, first, second)
        is_searched = {
            "batch": fixed.batch is None,
            "accumulation": fixed.accumulation is None,
            "precision": "precision" in names,
            "checkpointing": "checkpointing" in names,
        }
        assert first.facts is not None
        # A loader whose batch size is the {batch} counts the samples that are trained on.
        loads_samples = "batch" in names and all(
            run.loader_batch == run.values.per_device_train_batch_size for run in (first, second)
        )
        always = first.checkpoints if own_run is None else own_run.checkpoints
        return dataclasses.replace(
            first.facts,
            gradient_checkpointing="checkpointing" in names or always,
            always_checkpoints="checkpointing" not in names and always,
            samples=first.loader_samples if loads_samples else None,
            interface=CodeInterface(
                "placeholders",
                tuple(setting for setting, can in is_searched.items() if can),
                fixed=fixed,
                precisions=self._template.precisions or (),
                casts_weights="precision" in names and first.weights_dtype != second.weights_dtype,
                sample_tokens=self._template.sample_tokens,
                steps=how,
                compiles=first.compiles or second.compiles,
                loader_workers=first.loader_workers,
                loader_prefetch=first.loader_prefetch,
                tunes_loader=False,
                has_own_settings=own_run is not None,
            ),
            own=_own_settings(own_run, how) if own_run is not None else None,
        )

    def _check_numerics(self, first: ScriptRun, second: ScriptRun) -> None:
        """Raise ``UserCodeError`` where the script ignores a placeholder of precision or checkpointing."""
        names, name = self._template.names, self._source.name
        for seen in (first, second):
            arm = seen.values.arm
            if "precision" in names and not seen.computes_in(arm.precision):
                raise UserCodeError(
                    f"{name} ignores {{precision}}: told {arm.precision}, it trained with {seen.describe_numerics()}",
                    "name it as the script does, '{precision:fp32=float32,bf16=bfloat16}', or leave it out",
                )
            if "checkpointing" in names and seen.checkpoints != arm.gradient_checkpointing:
                asked, did = ("on", "nothing") if arm.gradient_checkpointing else ("off", "activations")
                raise UserCodeError(
                    f"{name} ignores {{checkpointing}}: told {asked}, it recomputed {did}",
                    "name it as the script does, '{checkpointing:on=--grad-checkpointing}', or leave it out",
                )


def _own_settings(own_run: ScriptRun, how: HowItSteps) -> OwnSettings:
    """Return the settings that the script trains with by itself, from the passes and samples of its own run."""
    micro_steps = max(1, (own_run.passes - how.passes_once) // how.passes)
    site, batch = how.site, 0
    if site is not None:
        rows = sum(site.rows(model, shapes) for model, shapes in own_run.calls)
        batch = rows // (site.factor * max(1, site.calls) * micro_steps)
    return OwnSettings(Arm(own_run.precision, own_run.checkpoints, optim=OWN_OPTIM), batch or None, micro_steps)


def _passes(first: ScriptRun, second: ScriptRun) -> tuple[int, int] | None:
    """Return the backward passes of a micro-step, and further passes of a step; ``None`` for no consistent numbers.

    These are consistent if both runs had a step of (accumulation × the first + the second) passes.
    """
    accumulation = first.values.gradient_accumulation_steps
    more_micro_steps = second.values.gradient_accumulation_steps - accumulation
    passes, rest = divmod(second.passes - first.passes, more_micro_steps)
    once = first.passes - passes * accumulation
    return (passes, once) if passes >= 1 and not rest and once >= 0 else None


Place = tuple[str, str, int]
"""A dimension of a model's inputs or outputs: model, path and dimension, as in a ``Site``."""


def _site(first: ScriptRun, second: ScriptRun) -> Site | None:
    """Return the place of the model inputs whose size is a multiple of the batch in both runs; ``None`` without one.

    The smallest factor wins, then the model that is called last: an earlier model may only be called to inspect
    samples. Where no single call has such a size, the sums over the calls of a backward pass are compared, for models
    that are called for each sample, or for parts of a fixed size. Such a site has 0 calls, since their number varies.
    """
    batch, other_batch = first.values.per_device_train_batch_size, second.values.per_device_train_batch_size
    last_call = {model: at for at, (model, _) in enumerate(first.calls)}
    ways: tuple[tuple[Callable[[ScriptRun], Mapping[Place, float]], int], ...] = ((_sizes, 1), (_rows_of_pass, 0))
    for sizes_of, calls in ways:
        sizes, other_sizes = sizes_of(first), sizes_of(second)
        sites = [
            Site(*place, factor=factor, calls=calls)
            for place, size in sizes.items()
            if (factor := int(size // batch))
            and (size, other_sizes.get(place)) == (factor * batch, factor * other_batch)
        ]
        if sites:
            return min(sites, key=lambda site: (site.factor, -last_call[site.model]))
    return None


def _rows_of_pass(seen: ScriptRun) -> dict[Place, float]:
    """Return the first dimensions of model inputs, summed over all calls and divided by the backward passes."""
    rows: Counter[Place] = Counter()
    for model, shapes in seen.calls:
        rows.update({(model, path, 0): shape[0] for path, shape in shapes.items() if shape})
    return {place: number / max(1, seen.passes) for place, number in rows.items()}


def _sizes(seen: ScriptRun) -> dict[Place, int]:
    """Return the usual size of each dimension of model inputs, in the order of the calls."""
    counts: dict[Place, Counter[int]] = {}
    for model, shapes in seen.calls:
        for path, shape in shapes.items():
            for dimension, size in enumerate(shape):
                counts.setdefault((model, path, dimension), Counter())[size] += 1
    return {place: sizes.most_common(1)[0][0] for place, sizes in counts.items()}


def _first_dimension(seen: ScriptRun) -> tuple[Site | None, int]:
    """Return the first dimension of the first model input, and its usual size; ``None`` and 1 without inputs."""
    return next(((Site(*place), size) for place, size in _sizes(seen).items() if place[2] == 0), (None, 1))


def _count_calls(seen: ScriptRun, site: Site) -> int:
    """Return the number of calls in which a site's model was given the site's tensor."""
    return sum(model == site.model and site.path in shapes for model, shapes in seen.calls)


def _shape(seen: ScriptRun) -> str:
    """Return the shape of the first tensor that a model was given, in words."""
    shapes = [shape for _, call in seen.calls for shape in call.values()]
    return " × ".join(map(str, shapes[0])) if shapes else "no tensors"

"""Test an effective batch that is given in tokens."""

from dataclasses import replace
from typing import Any

import pytest
from reported import report_of
from searching import BERT_LARGE, request

from autotune.core.candidate import Arm, Candidate
from autotune.core.dataset_spec import DataSpec
from autotune.core.errors import InvalidRequestError
from autotune.core.workload import Workload
from autotune.tuning.allowed import check_request
from autotune.tuning.options import request_of, with_effective_batch


def effective_batch_of(tokens: int | None, workload: Workload = BERT_LARGE, **options: Any) -> Any:
    given = {"effective_tokens": tokens, "effective_batch": None, **options}
    return with_effective_batch(given, workload)["effective_batch"]


def test_tokens_become_samples() -> None:
    assert effective_batch_of(64 * 512) == 64
    assert effective_batch_of(None, effective_batch=8) == 8


@pytest.mark.parametrize(
    ("tokens", "workload", "options", "message", "hint"),
    [
        (1000, BERT_LARGE, {}, "is no whole number of samples of 512 tokens", "give 512 or 1024, or another --seq-len"),
        (100, BERT_LARGE, {}, "is no whole number of samples of 512 tokens", "give 512, or another --seq-len"),
        (512, BERT_LARGE, {"effective_batch": 1}, "and --effective-batch both say", "give one of the two"),
        (512, replace(BERT_LARGE, task="image-classification"), {}, "are not text", "give --effective-batch"),
        (512, replace(BERT_LARGE, data=DataSpec("a.jsonl", "json", "0")), {}, "differ in length", "in samples"),
    ],
)
def test_what_is_no_batch_is_refused(
    tokens: int, workload: Workload, options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        effective_batch_of(tokens, workload, **options)
    assert caught.value.message.startswith(f"--effective-tokens {tokens}")
    assert hint in caught.value.hint


def test_padding_is_no_token_that_counts() -> None:
    """A tenth of each sample is padding."""
    full, padded = (report_of(Candidate(Arm(), 8), "cuda", (), replace(BERT_LARGE, padding=p)) for p in (0.0, 0.1))
    tokens = [report.tokens_per_second(report.pooled(report.best)) for report in (full, padded)]
    assert tokens[1] == pytest.approx(0.9 * (tokens[0] or 0))


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"world_size": 2}, "--effective-tokens 512 cannot be shared", "use --effective-tokens 1024"),
        (
            {"batch_multiple": 3},
            "samples that a device gets of --effective-tokens 512",
            "these multiples would work: 1;",
        ),
    ],
)
def test_what_does_not_divide_is_said_in_tokens(options: dict[str, int], message: str, hint: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_request(request(effective_batch=1, effective_tokens=512, **options))
    assert hint in caught.value.hint


def test_the_command_says_it_in_tokens() -> None:
    asked = request_of(
        {"model": "bert-tiny", "effective_tokens": 128, "seq_len": 128, "world_size": 2, "device": "cpu"}
    )
    with pytest.raises(InvalidRequestError, match="--effective-tokens 128 cannot be shared equally by 2 devices"):
        check_request(asked)

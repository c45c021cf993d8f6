"""Generate candidates and outcomes of every kind, for property tests."""

import dataclasses
from typing import get_args

from hypothesis import strategies as st

from autotune.core.candidate import PRECISIONS, Arm, Candidate
from autotune.core.outcome import Completed, Failed, FailureReason, Measurement, OutOfMemory, Source

# Surrogates too: logs of other people's code hold what is no text.
WORDS = st.text(st.characters(exclude_categories=()), max_size=40)
_BYTES = st.integers(0, 2**50)
_SECONDS = st.floats(1e-9, 1e9)


def arms() -> st.SearchStrategy[Arm]:
    """Of all levers, whether they go together or not."""
    return st.builds(
        Arm,
        precision=st.sampled_from(PRECISIONS),
        attn_implementation=st.sampled_from(["sdpa", "eager", "flash_attention_2"]),
        optim=st.sampled_from(["adamw_torch_fused", "adafactor", "adamw_bnb_8bit"]),
        dataloader_num_workers=st.integers(0, 64),
        dataloader_prefetch_factor=st.none() | st.integers(1, 64),
    )


def candidates() -> st.SearchStrategy[Candidate]:
    """Any arm with any batch."""
    return st.builds(Candidate, arms(), st.integers(1, 65536), st.integers(1, 4096))


def _measurements() -> st.SearchStrategy[Measurement]:
    """Every field of its own, those that may be missing sometimes so."""
    named = st.tuples(st.text(max_size=20), _SECONDS)
    kinds = {
        "bool": st.booleans(),
        "float": _SECONDS,
        "int": _BYTES,
        "tuple[int, int]": st.tuples(_BYTES, _BYTES),
        "tuple[float, float]": st.tuples(_SECONDS, _SECONDS),
        "tuple[str, ...]": st.lists(st.text(max_size=20), max_size=3).map(tuple),
        "tuple[float, ...]": st.lists(_SECONDS, max_size=5).map(tuple),
        "tuple[tuple[int, int], ...]": st.lists(st.tuples(_BYTES, _BYTES), max_size=3).map(tuple),
        "tuple[tuple[str, int], ...]": st.lists(st.tuples(st.text(max_size=20), _BYTES), max_size=3).map(tuple),
        "tuple[tuple[str, float], ...]": st.lists(named, max_size=3).map(tuple),
    }
    fields = {}
    for field in dataclasses.fields(Measurement):
        kind, *missing = str(field.type).split(" | ")
        fields[field.name] = st.none() | kinds[kind] if missing else kinds[kind]
    return st.builds(Measurement, **fields)


def outcomes() -> st.SearchStrategy[Completed | OutOfMemory | Failed]:
    """Each way in which a trial can end, with any words and figures."""
    phases = st.dictionaries(WORDS, _SECONDS, max_size=3)
    sources = st.none() | st.builds(Source, WORDS, WORDS, st.integers(0, 10**6), st.booleans())
    why = st.lists(WORDS, max_size=2).map(tuple)
    return st.one_of(
        st.builds(Completed, _measurements(), phase_seconds=phases, disturbed=why, source=sources),
        st.builds(
            OutOfMemory,
            WORDS,
            st.sampled_from(["device", "host"]),
            WORDS,
            st.none() | _BYTES,
            st.none() | _BYTES,
            phases,
            why,
            source=sources,
        ),
        st.builds(Failed, st.sampled_from(get_args(FailureReason)), WORDS, WORDS, WORDS, phases),
    )

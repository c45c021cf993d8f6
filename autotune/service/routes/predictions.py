"""Predict what fits on a GPU and how fast it trains, without one."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import APIRouter, Body, Request

from autotune.core.candidate import Document
from autotune.service.access import Reader
from autotune.service.openapi import advice_body, prediction_body
from autotune.service.predictions import Predictions

router = APIRouter(tags=["predict"])


@router.post("/v1/predict", openapi_extra=prediction_body())
def predict(
    document: Annotated[
        dict[str, Any], Body(examples=[{"model": "bert-large-uncased", "effective_batch": 64, "gpu": ["rtx-3090"]}])
    ],
    request: Request, token: Reader,
) -> Document:  # fmt: skip
    """Return the document of ``autotune predict --json``; takes the options of the command, runs nothing on a GPU."""
    return cast(Predictions, request.app.state.predictions).answer(document, token.name)


@router.post("/v1/advise", openapi_extra=advice_body())
def advise(
    document: Annotated[
        dict[str, Any], Body(examples=[{"model": "gpt2-medium", "effective_batch": 64, "price": ["l4=0.7"]}])
    ],
    request: Request, token: Reader,
) -> Document:  # fmt: skip
    """Compare GPUs to rent as ``autotune advise`` does: its JSON document, and the lines of its text."""
    return cast(Predictions, request.app.state.predictions).answer(document, token.name, "advise")

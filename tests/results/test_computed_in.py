"""Test which rate of a GPU the use of its arithmetic is relative to."""

import pytest

from autotune.core.device import Precision
from autotune.core.prediction import Operation, Operations
from autotune.results.study_view import computed_in


@pytest.mark.parametrize(
    ("precision", "weights", "computed"),
    [
        ("fp32", "float32", "fp32"),
        ("fp32", "bfloat16", "bf16"),
        ("bf16", "float32", "bf16"),
        ("tf32", "float32", "tf32"),
    ],
)
def test_without_autocast_it_is_the_dtype_of_the_weights(precision: Precision, weights: str, computed: str) -> None:
    assert computed_in(precision, weights) == computed


@pytest.mark.parametrize(("dtype", "is_half"), [("bfloat16", True), ("float32", False)])
def test_predicted_products_tell_it_themselves(dtype: str, is_half: bool) -> None:
    large = Operation("forward", "product", dtype, (1000, 0), (1, 0), (), 2)
    small = Operation("backward", "product", "float32", (10, 0), (1, 0), (), 1)
    operations = Operations((large, small), {}, 0, 0)
    assert operations.is_in_half(8) == is_half

"""What examples are counted in: tokens, images, samples."""

from __future__ import annotations

import pytest
from support.models.handwritten_blocks import gpt2_graph

from autopar.ir.describe import tokens_of, unit_of
from autopar.ir.graph import Graph, Value


def graph_of(**inputs: tuple[tuple[int | str, ...], str]) -> Graph:
    values = tuple(Value(name, shape, dtype) for name, (shape, dtype) in inputs.items())
    return Graph("Net", values, (), (), "loss", 8, "")


@pytest.mark.parametrize(
    ("graph", "unit", "tokens"),
    [
        (graph_of(input_ids=(("B", 128), "int64"), labels=(("B", 128), "int64")), "tokens", 128),
        (graph_of(pixels=(("B", 3, 32, 32), "float32"), labels=(("B",), "int64")), "images", None),
        (graph_of(pixels=(("B", 3, 32, 32), "bfloat16"), labels=(("B", 5), "int64")), "images", None),
        (graph_of(pixels=(("B", 3, 32, 32), "float32"), input_ids=(("B", 77), "int64")), "samples", None),
        (graph_of(x=(("B", 16), "float32")), "samples", None),
        (graph_of(table=((7, 16), "int64"), x=(("B", 16), "float32")), "samples", None),
    ],
)
def test_units(graph: Graph, unit: str, tokens: int | None) -> None:
    assert (unit_of(graph), tokens_of(graph)) == (unit, tokens)


def test_a_language_model() -> None:
    assert unit_of(gpt2_graph()) == "tokens"

"""Every operation that has a rule: the text that the program gets computes what ATen computes, values and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models.operation_examples import build, single_operations
from support.oracles.simulate_ranks import run_node

from autopar.ir.graph import DType, Node, Ref, Symbol, Value
from autopar.program.expressions import expression
from autopar.runtime import collectives as C
from autopar.runtime.device.axis import AxisHandle

CASES = [case for case in single_operations() if "float8" not in case[0]]
"""But for float8, whose text calls torchao and rounds: `tests/e2e/precision/test_float8.py`."""
SELF = SimpleNamespace(mesh=SimpleNamespace(device="cpu", seed=0, axis=AxisHandle), training=False)


def evaluate(node: Node, tensors: dict[str, torch.Tensor], text: str) -> tuple[Any, ...]:
    names = {"torch": torch, "F": F, "C": C, "self": SELF, "B": 8, **tensors}
    result = eval(text, names)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_text_computes_what_aten_computes(op: str, args: Any, kwargs: Any) -> None:
    torch.manual_seed(0)
    block, tensors = build(op, args, kwargs)
    node = block.nodes[0]
    if op in ("ap.dropout", "ap.random", "ap.local_mean"):
        return  # random numbers of the runtime's own, or a mean over what a rank has
    leaves = {value.name: tensors[value.name].clone().requires_grad_(value.differentiable) for value in block.inputs}
    text = expression(node, str)
    found, expected = evaluate(node, leaves, text), run_node(node, leaves, 8)
    assert len(found) == len(expected), text
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.requires_grad) == (b.shape, b.requires_grad), text
        assert a.dtype == b.dtype or op == "ap.count_valid", text
        if not op.startswith(("aten.empty", "aten.new_empty")):
            torch.testing.assert_close(a.detach(), b.detach(), equal_nan=True, check_dtype=False)


def node_of(op: str, *args: Any, dtype: str = "float32", **kwargs: Any) -> Node:
    return Node(op, args, tuple(kwargs.items()), (Value("y", (), dtype),))


X, Y = Ref("x"), Ref("y")


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (node_of("aten.add.Tensor", X, Y), "x + y"),
        (node_of("aten.add.Tensor", X, Y, alpha=2), "x + 2 * y"),
        (node_of("aten.mul.Tensor", X, -1.5), "x * (-1.5)"),
        (node_of("aten.div.Tensor", X, Symbol("16*B")), "x / (16 * B)"),
        (node_of("aten.reshape", X, (Symbol("B"), Symbol("B/2"), 4)), "x.reshape(B, B//2, 4)"),
        (node_of("aten.slice.Tensor", X, 1, 0, 2**63 - 1), "x[:, :]"),
        (node_of("aten.slice.Tensor", X, 2, 4, 8), "x[:, :, 4:8]"),
        (node_of("aten.slice.Tensor", X, -1, 0, 8), "x[..., :8]"),
        (node_of("aten.slice.Tensor", X, 0, -2, 2**63 - 1, 2), "x[-2::2]"),
        (node_of("aten.select.int", X, 1, 0), "x[:, 0]"),
        (node_of("aten.index.Tensor", X, (None, Y)), "x[:, y]"),
        (node_of("aten.to.dtype", X, DType("bfloat16")), "x.to(torch.bfloat16)"),
        (
            node_of("aten.full", (2, Symbol("B")), float("-inf")),
            'torch.full((2, B), float("-inf"), dtype=torch.float32, device=self.mesh.device)',
        ),
        (
            node_of("aten.scaled_dot_product_attention", X, X, Y, None, 0.0, True),
            "F.scaled_dot_product_attention(x, x, y, is_causal=True)",
        ),
        (node_of("aten.embedding", X, Y, -1), "F.embedding(y, x)"),
        (node_of("ap.convert", X, axis="tp", conversion="S(1) -> R"), 'C.convert(x, tp, "S(1) -> R")'),
        (node_of("ap.convert_many", (X, Y), axis="tp", conversion="I -> R"), 'C.convert_many((x, y), tp, "I -> R")'),
        (node_of("ap.dropout", X, 0.1, sharded_axes=("dp",)), 'C.dropout(x, 0.1, self.training, self.mesh, (\'dp\',))'),
        (node_of("aten.roll", X, (1,), (0,)), "x.roll((1,), (0,))"),
        (node_of("aten.lerp.Scalar", X, 1), "torch.ops.aten.lerp.Scalar(x, 1)"),
        (node_of("aten.logit", X), "torch.ops.aten.logit.default(x)"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_text_reads_like_torch(node: Node, text: str) -> None:
    assert expression(node, str) == text

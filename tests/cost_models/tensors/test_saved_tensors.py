"""What the meta tensors say is kept, against hooks on real tensors; and the declared attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.handwritten_blocks import Builder

from autopar.cost_models.tensors.observe_saves import _function
from autopar.cost_models.tensors.saved_tensors import saved_tensors
from autopar.ir.graph import DType
from autopar.ir.plan_file.document import SavedTensors

X, W, N = ("B", 4, 16), (8, 16), (16,)
CASES: list[tuple[str, tuple[Any, ...], Any, tuple[Any, ...]]] = [
    ("aten.linear", (X, W, (8,)), ("B", 4, 8), ()),
    ("ap.linear_kn", (X, (16, 8), (8,)), ("B", 4, 8), ()),
    ("aten.mul.Tensor", (X, X), X, ()),
    ("aten.add.Tensor", (X, X), X, ()),
    ("aten.gelu", (X,), X, ()),
    ("aten.silu", (X,), X, ()),
    ("aten.tanh", (X,), X, ()),
    ("aten.rsqrt", (X,), X, ()),
    ("aten.pow.Tensor_Scalar", (X,), X, (2,)),
    ("aten.mean.dim", (X,), ("B", 4, 1), ((-1,), True)),
    ("aten._softmax", (X,), X, (-1, False)),
    ("aten.layer_norm", (X, N, N), X, ((16,),)),
    ("aten.to.dtype", (X,), X, (DType("bfloat16"),)),
    ("aten.reshape", (X,), ("B", 64), (("B", 64),)),
    ("aten.bmm", (X, ("B", 16, 3)), ("B", 4, 3), ()),
]


@pytest.mark.parametrize(("op", "operands", "result", "rest"), CASES, ids=[case[0] for case in CASES])
def test_as_real_hooks_say(op: str, operands: Any, result: Any, rest: Any) -> None:
    b = Builder("One")
    refs = [b.parameter(f"p{i}", shape) for i, shape in enumerate(operands)]
    from autopar.ir.graph import Symbol

    def symbolic(arg: Any) -> Any:
        return tuple(Symbol("B") if item == "B" else item for item in arg) if isinstance(arg, tuple) else arg

    args = [refs[0], (16,), *refs[1:]] if op == "aten.layer_norm" else [*refs, *map(symbolic, rest)]
    block = b.block(b.op(op, *args, shape=result, dtype="bfloat16" if op == "aten.to.dtype" else None, name="out"))  # type: ignore[arg-type]
    told = saved_tensors(block.nodes[0], block.values())

    def real(shape: Any) -> tuple[int, ...]:
        return tuple(2 if dim == "B" else dim for dim in shape)

    tensors = [torch.rand(real(shape), requires_grad=True) for shape in operands]
    kept: list[torch.Tensor] = []
    values = [tensors[0], (16,), *tensors[1:]] if op == "aten.layer_norm" else list(tensors)
    if op != "aten.layer_norm":
        values += [real(arg) if isinstance(arg, tuple) else torch.bfloat16 if isinstance(arg, DType) else arg for arg in rest]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = _function(op)(*values)
    where = {tensor.untyped_storage().data_ptr() for tensor in kept}
    assert told.known
    assert told.operands == tuple(tensor.untyped_storage().data_ptr() in where for tensor in tensors)
    viewed = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert told.results == (out.untyped_storage().data_ptr() in where - viewed,)
    extras = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    for known in (*tensors, out):
        extras.pop(known.untyped_storage().data_ptr(), None)
    reference = out if told.extra_reference < 0 else tensors[told.extra_reference]
    assert told.extra_ratio * reference.untyped_storage().nbytes() == pytest.approx(sum(extras.values()))


def test_cross_entropy_keeps_log_probabilities() -> None:
    b = Builder("Loss")
    logits, target = b.parameter("logits", ("B", 4, 100)), b.input("target", ("B", 4), "int64")
    block = b.block(b.op("ap.cross_entropy_sum", logits, target, -100, 0.0, shape=(), name="out"))  # type: ignore[arg-type]
    told = saved_tensors(block.nodes[0], block.values())
    assert told.operands == (False, True) and told.extra_reference == 0 and told.extra_ratio == pytest.approx(1, rel=1e-2)


def test_attention_is_declared() -> None:
    b = Builder("Attention", "bfloat16")
    q, k, v = (b.parameter(name, ("B", 4, 32, 64)) for name in "qkv")
    out = b.op("aten.scaled_dot_product_attention", q, k, v, None, 0.0, True, shape=("B", 4, 32, 64), name="out")
    block = b.block(out)  # type: ignore[arg-type]
    told = saved_tensors(block.nodes[0], block.values())
    # float32 log-sum-exps; the backward sums the gradient of q in float32 and makes one float32 more per query
    assert told == SavedTensors((True,) * 3, (True,), 4 / (64 * 2), 0, backward_workspace_ratio=4 / 2 + 4 / (64 * 2))


def test_nothing_without_gradients_and_all_of_the_unknown() -> None:
    b = Builder("Other")
    x = b.parameter("x", (4, 4), trainable=False)
    y = b.parameter("y", (4, 4))
    b.op("aten.mul.Tensor", x, x, shape=(4, 4), name="still")
    b.op("aten.mul.Tensor", y, y, shape=(4, 4), name="quiet", no_grad=True)
    block = b.block(b.op("custom.unheard_of", y, shape=(4, 4), name="odd"))  # type: ignore[arg-type]
    still, quiet, odd = (saved_tensors(node, block.values()) for node in block.nodes)
    assert not any((*still.operands, *still.results, *quiet.operands, *quiet.results))
    assert odd == SavedTensors((True,), (True,), known=False)

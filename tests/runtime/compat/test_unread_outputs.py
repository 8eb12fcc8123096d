"""Compiled code gives no gradients where the plain code gives none: those of what no loss reads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autopar.runtime.comm.convert import convert_many
from autopar.runtime.compat.compile import BlockBackend, compiler_named
from autopar.runtime.compat.modules import none_through_blocks
from autopar.runtime.device.mesh import MeshHandle


def heads(x: Tensor, trunk: Tensor, first: Tensor, second: Tensor, third: Tensor, number: int) -> tuple[Any, ...]:
    h = torch.tanh(x @ trunk)
    with torch.no_grad():
        teacher = h @ third
    return h @ first, (h @ second).softmax(-1), h.detach() @ third - teacher, number + 1, x


def gradients(run: Any, losses: list[tuple[int, ...]]) -> list[Tensor | None]:
    """Those of each input after a backward for each of `losses`: places of outputs that are summed."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(5)]
    parameters = [nn.Parameter(each) for each in inputs[1:]]
    inputs[0].requires_grad_()
    outputs, found = run(inputs[0], *parameters, 2), []
    for places in losses:
        sum(outputs[place].square().sum() for place in places).backward(retain_graph=True)
        found += [each.grad for each in (inputs[0], *parameters)]
        for each in (inputs[0], *parameters):
            each.grad = None
    return found


@pytest.mark.parametrize("losses", [[(0,)], [(1,)], [(2,)], [(4,)], [(0, 1)], [(2, 1)], [(0,), (1,), (0, 2), (2,)]])
def test_gradients_are_none_where_plain_ones_are(losses: list[tuple[int, ...]]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(heads, backend=BlockBackend(compiler_named("aot_eager")), fullgraph=True)
    for found, expected in zip(gradients(compiled, losses), gradients(heads, losses), strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_code_with_one_output_is_as_torch_has_it() -> None:
    """Nothing is between a layer and its parameters."""
    torch._dynamo.reset()
    layer = nn.Linear(3, 3)
    compiled = torch.compile(lambda x: layer(x).relu(), backend=BlockBackend(compiler_named("aot_eager")), fullgraph=True)
    assert "Outputs" not in type(compiled(torch.ones(2, 3)).grad_fn).__name__


def writes(x: Tensor, trunk: Tensor, first: Tensor, second: Tensor, third: Tensor, number: int) -> tuple[Any, ...]:
    """Tensors that are written into before they are read: in a view, or in one that had no gradient when it was made."""
    h = torch.tanh(x @ trunk)
    a, b, c = h @ first, h @ first, torch.zeros_like(h)
    a[1].add_((h @ second)[1])
    b.mul_(x @ third)
    torch._foreach_add_([b], [h @ second])
    c[:2] = (h @ third)[:2]
    return a, b, c.sin(), h.cos(), number


@pytest.mark.parametrize("losses", [[(0,)], [(1,)], [(2,)], [(3,)], [(1,), (0,), (3,)]])
def test_writes_lose_no_gradient(losses: list[tuple[int, ...]]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(writes, backend=BlockBackend(compiler_named("aot_eager")), fullgraph=True)
    for found, expected in zip(gradients(compiled, losses), gradients(writes, losses), strict=True):
        torch.testing.assert_close(found, torch.zeros_like(found) if expected is None and found is not None else expected)


def conversions_one_by_one(order: tuple[int, ...]) -> None:
    """On a rank: several tensors in one collective for each kind and dtype; one of the results is read. Of a second size too,
    for which torch.compile makes sizes symbols, operands beside the tensors."""
    torch._dynamo.reset()
    mesh = MeshHandle({"dp": 1, "tp": 2}, seed=0)
    texts = [("S(0) -> R", "P -> R", "P -> R", "R -> S(0)", "S(0) -> R")[place] for place in order]
    dtypes = [(torch.float64, torch.float32, torch.float64, torch.float64, torch.float32)[place] for place in order]

    def run(*xs: Tensor) -> tuple[Tensor, ...]:
        return convert_many([x * 2 for x in xs], mesh.tp, texts)

    compiled = torch.compile(run, backend=BlockBackend(compiler_named("aot_eager")), fullgraph=True)
    for place, length in itertools.product(range(len(order)), (4, 6, 8) if len(order) > 2 else (4,)):
        xs = [torch.ones(length, 3, dtype=dtype).requires_grad_() for dtype in dtypes]
        compiled(*xs)[place].sum().backward()
        assert [x.grad is not None for x in xs] == [each == place for each in range(len(order))]


def conversions_in_all_orders() -> None:
    for order in (*itertools.permutations(range(5), 2), (0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (3, 4, 2), (2, 2, 3, 1)):
        conversions_one_by_one(order)


def test_each_tensor_of_a_conversion_is_of_its_own(ranks: RankPool) -> None:
    ranks.run(conversions_in_all_orders, world=2)


class Pair(nn.Module):
    """Two values, each with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(y)


def gradients_through_blocks() -> list[str]:
    """On a rank: the parameters of two blocks of FSDP2 without gradients, of which the second value is not read."""
    blocks = nn.Sequential(Pair(), Pair())
    mesh = init_device_mesh("cpu", (2,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    with none_through_blocks():
        x = torch.ones(2, 4)
        values = blocks[1](*blocks[0](x, x))
        values[0].sum().backward()
    return [name for name, parameter in blocks.named_parameters() if parameter.grad is None]


def test_none_passes_through_blocks(ranks: RankPool) -> None:
    """Seen on 2.13.0: FSDP2 alone passes zeros from the second block to the first."""
    without = [f"{block}.second.{name}" for block in (0, 1) for name in ("weight", "bias")]
    assert ranks.run(gradients_through_blocks, world=2) == [without] * 2

"""The graphs that torch.compile traces are the same on all ranks of an axis, whatever part of a table they have, and whatever
they draw. They write all buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend

from autopar.runtime.collectives import dropout, random
from autopar.runtime.compat.compile import BlockBackend, compiler_named
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.device.rng import seed_stream
from autopar.runtime.ops.attention.dropout import attention_dropout
from autopar.runtime.ops.functions import embedding_sharded
from autopar.runtime.ops.losses import cross_entropy_sharded, linear_cross_entropy_sharded

ROWS, WIDTH = 6, 4


def loss_of(ids: Tensor, weight: Tensor, mesh: MeshHandle) -> Tensor:
    """The losses of a table that is embedding and head, with random numbers that all ranks share, data ranks, and none."""
    x = embedding_sharded(ids, weight, mesh.tp, 1) + random(ids, "normal", 0.0, 1.0, weight.dtype, mesh).unsqueeze(-1)
    x = dropout(x, 0.5, True, mesh, ("dp",))
    heads = dropout(x, 0.25, True, mesh, ("dp", "tp")).unsqueeze(1)
    x = x + attention_dropout(heads, 2 * heads, 3 * heads, True, mesh, ("dp", "tp"), dropout_p=0.3).squeeze(1)
    whole = cross_entropy_sharded(x @ weight.t(), ids, -100, 0.1, mesh.tp)
    return whole + linear_cross_entropy_sharded(x, weight, None, ids, -100, 0.0, 5, mesh.tp)


def run_both(axes: dict[str, int]) -> str:
    """On a rank: the code of the graph, which gives what the program gives: losses, and how many seeds, bit by bit."""
    torch._dynamo.reset()
    mesh, graphs, results = MeshHandle(axes, seed=3), list[str](), list[tuple[Tensor, ...]]()

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.extend(module.code for module in graph.modules() if isinstance(module, fx.GraphModule))
        return lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(loss_of, backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(ROWS * mesh.tp.size, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, len(table), (2 * mesh.dp.size, 7), generator=generator)
    for run, seed in ((loss_of, 3), (compiled, 3), (loss_of, 4), (compiled, 4)):
        mesh.reseed(seed)
        weight = table.chunk(mesh.tp.size)[mesh.tp.coordinate].clone().requires_grad_()
        losses = [run(ids.chunk(mesh.dp.size)[mesh.dp.coordinate], weight, mesh) for _ in range(2)]
        torch.stack(losses).sum().backward()
        assert weight.grad is not None
        results.append((*losses, torch.tensor(sorted(seed_stream.counts().items())), weight.grad))
    for at in (0, 2):
        *exact, gradient = (torch.equal(one, other) for one, other in zip(results[at], results[at + 1], strict=True))
        assert all(exact) and (gradient or torch.allclose(results[at][-1], results[at + 1][-1], rtol=0, atol=1e-12))
    assert not torch.equal(results[0][0], results[0][1]) and not torch.equal(results[0][0], results[2][0])
    assert len(graphs) == len(set(graphs))
    return "\n".join(graphs)


def test_ranks_have_one_graph(ranks: RankPool) -> None:
    """With the numbers of the program; another seed is no other graph."""
    assert len(set(ranks.run(run_both, {"dp": 2, "tp": 2}, timeout=120))) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_buffers_without_dimensions_are_written(dtype: torch.dtype) -> None:
    def step(count: Tensor, x: Tensor) -> Tensor:
        more = count + 1
        with torch.no_grad():
            count.copy_(more)
        return x * 2

    torch._dynamo.reset()
    count, x = torch.zeros((), dtype=dtype), torch.ones(3, requires_grad=True)
    compiled = torch.compile(step, backend=BlockBackend(compiler_named("aot_eager")), fullgraph=True)
    for _ in range(3):
        compiled(count, x)
    assert count.item() == 3

"""Operations on images that are cut along space equal those on whole images, on real ranks: results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.operation_examples import build, t
from support.models.operations.space_examples import space_operations
from support.oracles.simulate_ranks import argument, run_node
from torch import Tensor

from autopar.ir.graph import Block
from autopar.ir.placement import Shard, local_shape
from autopar.operations.images.space import HALO, OWN
from autopar.rules.expand import block_strategies
from autopar.rules.localize import localize_args
from autopar.rules.registry import AxisStrategy, default_registry
from autopar.runtime import collectives as C
from autopar.runtime.device.mesh import MeshHandle

CASES = space_operations()


def cut(block: Block, size: int) -> AxisStrategy | None:
    """The strategy that cuts along space."""
    found = block_strategies(block, size, batch_axis=False, batch_is_symbolic=False, registry=default_registry())
    return next((each for each in found[block.nodes[0].name] if each.factor in (HALO, OWN)), None)


def example(index: int) -> tuple[Block, dict[str, Tensor]]:
    torch.manual_seed(index)
    block, tensors = build(*CASES[index])
    return block, {name: x.requires_grad_() for name, x in tensors.items()}


def outcome(out: Tensor, weight: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def weights(shape: Any) -> Tensor:
    return torch.sin(torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64)).reshape(shape)


def on_rank(indices: list[int], world: int) -> list[list[Tensor]]:
    """What this rank makes of its part of each case."""
    axis = MeshHandle({"tp": world}).tp
    found = []
    for index in indices:
        block, tensors = example(index)
        node, strategy = block.nodes[0], cut(block, world)
        assert strategy is not None
        local = {}
        for name, place in zip(node.operands(), strategy.operands, strict=True):
            part = axis.part(tensors[name], place.dim) if isinstance(place, Shard) else tensors[name]
            local[name] = part.detach().clone().requires_grad_()
        result = strategy.results[0]
        assert isinstance(result, Shard)
        shape = local_shape(node.outputs[0].shape, (result,), (world,))
        here = localize_args(node, [shape])
        if strategy.function:
            args = [argument(arg, local, 1) for arg in here.args]
            named = {name: argument(arg, local, 1) for name, arg in here.kwargs}
            out = getattr(C, strategy.function.removeprefix("ap."))(*args, **named, dim=strategy.operands[0].dim, axis=axis)
        else:
            (out,) = run_node(here, local, 1)
        assert out.shape == shape, f"{node.op}: {out.shape} is not {shape}"
        found.append(outcome(out, axis.part(weights(node.outputs[0].shape), result.dim), list(local.values())))
    return found


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_equal_to_whole_images(world: int, ranks: RankPool) -> None:
    able = [index for index in range(len(CASES)) if cut(example(index)[0], world) is not None]
    refused = [CASES[index][0] for index in range(len(CASES)) if index not in able]
    assert sorted(refused) == ["aten.avg_pool2d", "aten.max_pool2d", "aten.upsample_bilinear2d.vec"]
    answers = ranks.run(on_rank, able, world, world=world)
    for number, index in enumerate(able):
        block, tensors = example(index)
        node, strategy = block.nodes[0], cut(block, world)
        assert strategy is not None
        (out,) = run_node(node, tensors, 1)
        whole = outcome(out, weights(out.shape), [tensors[name] for name in node.operands()])
        places = (strategy.results[0], *strategy.operands)
        for part, (place, wanted) in enumerate(zip(places, whole, strict=True)):
            parts = [answer[number][part] for answer in answers]
            found = torch.cat(parts, place.dim) if isinstance(place, Shard) else torch.stack(parts).sum(0)
            error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1))
            assert found.shape == wanted.shape and error < 1e-12, f"{CASES[index]}, {part}: {error}"


def test_a_halo_is_not_larger_than_a_shard() -> None:
    block, _ = build("aten.conv2d", (t(1, 2, 64, 64), t(2, 2, 9, 9), None, (1, 1), (16, 16), (4, 4)), {})
    assert cut(block, 4) is not None
    assert cut(block, 8) is None


def test_a_mean_of_many_dimensions_is_no_image() -> None:
    """Dimension 7 is named ``h`` in the rule of reductions, as a cut dimension once was."""
    block, _ = build("aten.mean.dim", (t(2, 2, 2, 2, 2, 2, 2, 4), (0,)), {})
    found = block_strategies(block, 2, batch_axis=False, batch_is_symbolic=False, registry=default_registry())
    assert not any(each.function for each in found[block.nodes[0].name])

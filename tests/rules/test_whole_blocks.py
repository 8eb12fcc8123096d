"""Whole blocks with strategies chosen at random for every node: outputs and all gradients equal the single device's."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from support.models.handwritten_blocks import embedding_block, gpt2_block, llama_block, loss_block
from support.oracles.simulate_blocks import run_block
from support.oracles.simulate_ranks import close

from autopar.ir.dims import size_at as size_at
from autopar.ir.graph import Block
from autopar.ir.placement import Invariant, Placement, Replicate, Shard
from autopar.rules.expand import block_strategies, combine_axes
from autopar.rules.registry import default_registry

BATCH, SEQ = 4, 8
BLOCKS = {
    "llama": llama_block(32, 8, 4, 48, SEQ, dtype="float64"),
    "gpt2": gpt2_block(32, 4, SEQ, dtype="float64"),
    "embedding": embedding_block(32, 16, SEQ, dtype="float64"),
    "loss": loss_block(32, 16, SEQ, dtype="float64"),
}
MESHES = {
    "tp=4": ((4,), (False,)),
    "dp=2,tp=2": ((2, 2), (True, False)),
    "tp=2,tp2=2": ((2, 2), (False, False)),
    "dp=4": ((4,), (True,)),
}


def whole_tensors(block: Block) -> dict[str, torch.Tensor]:
    tensors = {}
    for value in (*block.inputs, *(parameter.value for parameter in block.parameters)):
        shape = tuple(size_at(dim, BATCH) for dim in value.shape)
        if value.dtype == "int64":
            tensors[value.name] = torch.randint(0, 16, shape)
            if value.name == "labels":
                tensors[value.name][0, :5] = -100
        else:
            tensors[value.name] = torch.randn(shape, dtype=torch.float64) / 4
    return tensors


def gradients(
    block: Block, plans: object, placed: object, tensors: dict[str, torch.Tensor], sizes: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Outputs and gradients as every rank has them; all must be Invariant at the end."""
    leaves, outputs = run_block(block, plans, placed, tensors, sizes, BATCH)  # type: ignore[arg-type]
    (name,) = block.outputs
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(next(iter(outputs[name].values())).shape, dtype=torch.float64, generator=generator)
    sum((out * weight).sum() for out in outputs[name].values()).backward()  # type: ignore[union-attr]
    found = {f"{name} {at}": out.detach() for at, out in outputs[name].items()}
    for leaf, held in leaves.items():
        found.update((f"{leaf} {at}", x.grad) for at, x in held.items() if x.grad is not None)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "mesh"), list(product(BLOCKS, MESHES)))
def test_random_plans_are_exact(name: str, mesh: str, seed: int) -> None:
    torch.manual_seed(seed)
    chance = random.Random(f"{name} {mesh} {seed}")
    block, (sizes, batch_axes) = BLOCKS[name], MESHES[mesh]
    values = block.values()
    registry = default_registry()
    axes = [
        block_strategies(block, size, batch_axis=batch, batch_is_symbolic=True, registry=registry)
        for size, batch in zip(sizes, batch_axes, strict=True)
    ]
    plans = {
        node.name: chance.choice(combine_axes([axis[node.name] for axis in axes], node, values, sizes)) for node in block.nodes
    }

    def start(value_name: str, batch: bool) -> Placement:
        value = values[value_name]
        if batch and value.shape and isinstance(value.shape[0], str):
            return Shard(0)
        return Invariant() if value.differentiable else Replicate()

    sources = [value.name for value in (*block.inputs, *(parameter.value for parameter in block.parameters))]
    placed = {source: tuple(start(source, batch) for batch in batch_axes) for source in sources}
    tensors = whole_tensors(block)
    alone = {source: (placements[0],) for source, placements in placed.items()}
    redundant = {node.name: next(s for s in axes[0][node.name] if s.factor == "redundant") for node in block.nodes}
    single = {node.name: combine_axes([[redundant[node.name]]], node, values, (1,))[0] for node in block.nodes}
    expected = gradients(block, single, alone, tensors, (1,))
    found = gradients(block, plans, placed, tensors, sizes)
    assert len({key.split(" ")[0] for key in found}) == len(expected)
    for key, tensor in found.items():
        source, at = key.split(" ", 1)
        reference = expected[f"{source} (0,)"]
        if source in placed and Shard(0) in placed[source]:
            axis = placed[source].index(Shard(0))
            reference = reference.chunk(sizes[axis])[eval(at)[axis]]
        close(tensor, reference, 1e-9)

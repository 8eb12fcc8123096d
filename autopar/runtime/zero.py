"""State sharded over the data axis: FSDP2 around blocks, and around the program for parameters that several blocks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from .compat import forget_order
from .module import Block, Parameter, Program, Root


class Sharded(Protocol):
    """What this file needs of `state.Entry`."""

    name: str
    spec: Parameter
    dim: int | None
    uses: list[Block]
    stored: nn.Parameter | None


def _wrap(
    module: nn.Module, params: Mapping[str, nn.Parameter], dims: Mapping[str, int], ignored: set[nn.Parameter], **options: Any
) -> dict[str, nn.Parameter]:
    """One FSDP2 group of the attributes `params`; gives the sharded parameters by attribute.

    The graph carries the exact loss scale, so gradients are summed: divide factor 1, and plain sums (gloo has no other).
    """
    where = {params[attribute]: dims[attribute] for attribute in params}
    fully_shard(module, shard_placement_fn=lambda parameter: Shard(where[parameter]), ignored_params=ignored, **options)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    return {attribute: getattr(module, attribute) for attribute in params}


def _policy(precision: tuple[str, str]) -> MixedPrecisionPolicy:
    """Gathers in the compute dtype, reduces in the master dtype."""
    compute, master = precision
    if compute == master:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(getattr(torch, compute), getattr(torch, master), cast_forward_inputs=False)


def shard_block(block: Block, entries: Mapping[str, Sharded], precision: tuple[str, str]) -> None:
    """Cuts a block's own parameters over the data axis. ZeRO-3 frees the gathered ones after the forward."""
    if not entries:
        return
    attributes = {spec.attribute: block.original[spec.path] for spec in block.specs if block.original[spec.path] in entries}
    params = {attribute: getattr(block, attribute) for attribute in attributes}
    dims = {attribute: entries[name].dim or 0 for attribute, name in attributes.items()}
    sharded = _wrap(
        block,
        params,
        dims,
        set(block.parameters()) - set(params.values()),
        mesh=block.mesh.sharding_mesh,
        reshard_after_forward=block.zero == 3,
        mp_policy=_policy(precision),
    )
    for attribute, name in attributes.items():
        entries[name].stored = sharded[attribute]


def next_backward(program: Program, last: bool) -> None:
    """What FSDP2 does in the backward of a micro-batch.

    ZeRO-1 adds gradients up unsharded until the last one. ZeRO-1 and 2 keep their weights gathered until then, and so does the
    first block of all: the next forward would gather it at once.
    """
    sharded = [module for module in program.modules() if isinstance(module, FSDPModule)]
    first = next((module for module in sharded if isinstance(module, Block)), None)
    for module in sharded:
        stage = module.zero if isinstance(module, Block) else min(2, max((b.zero for _, b, _ in program.lent), default=2))
        module.set_requires_gradient_sync(last or stage >= 2, recurse=False)
        module.set_reshard_after_backward(last or (stage == 3 and module is not first), recurse=False)
    if isinstance(program, FSDPModule):
        program.set_is_last_backward(last)
        forget_order(program)


def release(program: Program) -> None:
    """Drops all gathered weights. After a forward that no backward follows, an optimizer's step would pass them by."""
    for module in program.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def hoist(program: Root, entries: Mapping[str, Sharded]) -> None:
    """Moves shared parameters from their blocks to the root, whose forward lends them to the blocks."""
    lent: list[tuple[str, Block, str]] = []
    for index, (name, entry) in enumerate(entries.items()):
        program.register_parameter(f"shared_{index}", entry.stored)
        for block in dict.fromkeys(entry.uses):
            for spec in block.specs:
                if block.original[spec.path] == name:
                    del block._parameters[spec.attribute]
                    lent.append((f"shared_{index}", block, spec.attribute))
    program.lent = tuple(lent)


def shard_root(program: Root, entries: Mapping[str, Sharded]) -> None:
    """Makes the program, or a chunk, FSDP2's root, with the shared parameters as its group, gathered through the whole step."""
    attributes = {f"shared_{index}": entry for index, entry in enumerate(entries.values())}
    own = {attribute: program._parameters[attribute] for attribute in attributes}
    params = {attribute: parameter for attribute, parameter in own.items() if parameter is not None}
    inside = {p for module in program.modules() if isinstance(module, FSDPModule) for p in module.parameters()}
    sharded = _wrap(
        program,
        params,
        {attribute: entry.dim or 0 for attribute, entry in attributes.items()},
        set(program.parameters()) - set(params.values()) - inside,
        mesh=program.mesh.sharding_mesh,
        reshard_after_forward=False,
        mp_policy=_policy(program.precision),
    )
    for attribute, entry in attributes.items():
        entry.stored = sharded[attribute]
    program.register_forward_pre_hook(_lend)
    last = [module for module in program.blocks() if isinstance(module, FSDPModule)][-1:]
    for block in last if isinstance(program, Program) else ():  # its backward follows its forward, and would gather at once again
        block.set_reshard_after_forward(False, recurse=False)


def _lend(program: nn.Module, _: Any) -> None:
    """Runs after FSDP2's own hook, which puts the gathered parameters in place."""
    assert isinstance(program, Root)
    for shared, block, attribute in program.lent:
        block.__dict__[attribute] = getattr(program, shared)

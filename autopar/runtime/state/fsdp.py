"""FSDP2 for state that is sharded over the data axis: around blocks, and around the root for parameters that several blocks
share. Without a pipeline, ZeRO-3 prefetches in FSDP2's own order, that of the forwards; in one, in the order that
`set_backward_prefetch` sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from ..compat.modules import clear_forward_order, drop_failed_step, sharded_modules
from ..module import BlockModule, Program, RootModule
from .parameter_table import ParameterEntry


def _wrap(
    module: nn.Module, params: Mapping[str, nn.Parameter], dims: Mapping[str, int], ignored: set[nn.Parameter], **options: Any
) -> dict[str, nn.Parameter]:
    """Make one FSDP2 group of the attributes `params`; return the sharded parameters by attribute.

    The graph carries the exact scale of the loss, so gradients are summed: divide factor 1, and plain sums (gloo has no other).
    """
    where = {params[attribute]: dims[attribute] for attribute in params}
    fully_shard(module, shard_placement_fn=lambda parameter: Shard(where[parameter]), ignored_params=ignored, **options)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    return {attribute: getattr(module, attribute) for attribute in params}


def _policy(root: RootModule) -> MixedPrecisionPolicy:
    """Gather in the compute dtype, reduce in the reduce dtype, by default the master's."""
    compute, master = root.precision
    if compute == master and not root.reduce_dtype:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    gathered = None if compute == master else getattr(torch, compute)
    return MixedPrecisionPolicy(gathered, getattr(torch, root.reduce_dtype or master), cast_forward_inputs=False)


def set_backward_prefetch(zero: Mapping[Any, int]) -> None:
    """While a block's backward runs, FSDP2 gathers the block before it, in the order of `zero`, the ZeRO stage of each module. By
    default it goes by the order of forwards, in which the micro-batches of a pipeline alternate."""
    previous: Any = None
    for module, stage in zero.items():
        gathered = stage < 3 or previous is None
        module.set_modules_to_backward_prefetch([module if gathered or previous is None else previous])
        previous = module if isinstance(module, BlockModule) else previous


def shard_block(root: RootModule, block: BlockModule, entries: Mapping[str, ParameterEntry]) -> None:
    """Shard the own parameters of a block of `root` over the data axis. ZeRO-3 frees gathered weights after the forward."""
    if not entries:
        return
    attributes = {
        spec.attribute: block.original_names[spec.path] for spec in block.specs if block.original_names[spec.path] in entries
    }
    params = {attribute: getattr(block, attribute) for attribute in attributes}
    dims = {attribute: entries[name].zero_dim or 0 for attribute, name in attributes.items()}
    sharded = _wrap(
        block,
        params,
        dims,
        set(block.parameters()) - set(params.values()),
        mesh=block.mesh.sharding_mesh,
        reshard_after_forward=block.zero == 3,
        mp_policy=_policy(root),
    )
    for attribute, name in attributes.items():
        entries[name].stored = sharded[attribute]


def zero_stages(root: RootModule) -> dict[Any, int]:
    """The ZeRO stage of each of FSDP2's modules in `root`; its own, of shared parameters, is 2 at most."""
    shared = min(2, max((block.zero for _, block, _ in root.shared_parameters), default=2))
    return {module: module.zero if isinstance(module, BlockModule) else shared for module in sharded_modules(root)}


def configure_backward(zero: Mapping[Any, int], reduce_from: int, last: bool) -> None:
    """Tell FSDP2 what to do in a backward: reduce from a ZeRO stage on, free gathered weights of ZeRO-3, and after the `last` one
    of a step all others."""
    for module, stage in zero.items():
        module.set_requires_gradient_sync(stage >= reduce_from, recurse=False)
        module.set_reshard_after_backward(last or stage == 3, recurse=False)


def prepare_backward(program: Program, last: bool) -> None:
    """Tell FSDP2 what to do in the backward of a micro-batch.

    ZeRO-1 accumulates unsharded gradients until the last one. ZeRO-1 and 2 leave weights gathered until then, and so does the
    first block of all, which the next forward needs first.
    """
    zero = zero_stages(program)
    configure_backward(zero, 0 if last else 2, last)
    first: Any = next((module for module in zero if isinstance(module, BlockModule)), None)
    if first is not None:
        first.set_reshard_after_backward(last, recurse=False)
    if isinstance(program, FSDPModule):
        program.set_is_last_backward(last)
        clear_forward_order(program)


def reshard_all(program: Program) -> None:
    """Free all gathered weights: after a forward without a backward, an optimizer step would not update them."""
    for module in sharded_modules(program):
        module.reshard()


def begin_call(program: Program) -> None:
    """Free the weights that a call without a backward left gathered, which may have changed since, and drop what a forward or
    backward that raised left."""
    drop_failed_step(program)
    reshard_all(program)


def hoist_shared(program: RootModule, entries: Mapping[str, ParameterEntry]) -> None:
    """Move shared parameters from their blocks to the root, whose forward sets them as attributes of the blocks."""
    shared: list[tuple[str, BlockModule, str]] = []
    for index, (name, entry) in enumerate(entries.items()):
        program.register_parameter(f"shared_{index}", entry.stored)
        for block in dict.fromkeys(entry.blocks):
            for spec in block.specs:
                if block.original_names[spec.path] == name:
                    del block._parameters[spec.attribute]
                    shared.append((f"shared_{index}", block, spec.attribute))
    program.shared_parameters = tuple(shared)


def shard_root(program: RootModule, entries: Mapping[str, ParameterEntry]) -> None:
    """Make the program, or a model chunk, FSDP2's root, with the shared parameters as its group: gathered for the whole step."""
    attributes = {f"shared_{index}": entry for index, entry in enumerate(entries.values())}
    own = {attribute: program._parameters[attribute] for attribute in attributes}
    params = {attribute: parameter for attribute, parameter in own.items() if parameter is not None}
    inside = {p for module in sharded_modules(program) for p in module.parameters()}
    sharded = _wrap(
        program,
        params,
        {attribute: entry.zero_dim or 0 for attribute, entry in attributes.items()},
        set(program.parameters()) - set(params.values()) - inside,
        mesh=program.mesh.sharding_mesh,
        reshard_after_forward=False,
        mp_policy=_policy(program),
    )
    for attribute, entry in attributes.items():
        entry.stored = sharded[attribute]
    program.register_forward_pre_hook(_set_shared)
    last = [module for module in program.blocks() if isinstance(module, FSDPModule)][-1:]
    for block in last if isinstance(program, Program) else ():  # its backward follows at once, and would gather its weights again
        block.set_reshard_after_forward(False, recurse=False)


def _set_shared(program: nn.Module, _: Any) -> None:
    """Set shared parameters on the blocks. Runs after FSDP2's own hook, which puts the gathered parameters in place."""
    assert isinstance(program, RootModule)
    for own, block, attribute in program.shared_parameters:
        block.__dict__[attribute] = getattr(program, own)

"""Writes into parts of DTensors are those of the whole tensor (DTensor of 2.13.0 loses those into views that it gathers)."""

from __future__ import annotations

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from autopar.runtime.compat.torch_operations import in_place_operations
from autopar.runtime.errors import StateError
from autopar.runtime.patches import apply_patches
from autopar.runtime.tensors.view_writes import COMPOSITE_VIEWS, VIEWS

OF_OTHER_TENSORS = (
    *("_autocast_to_full_precision", "_autocast_to_reduced_precision", "_unpack_dual", "coalesce", "pin_memory"),
    *("conj", "imag", "real", "resolve_conj", "resolve_neg", "positive", "to"),
)
"""Of sparse, complex or forward-mode tensors, or what gives back the tensor itself."""
WRITES = """
p[0] = 0.5
p[0] = torch.ones(4)
p[-1] += 1
p[0, 0] = 3.0
p[:, 0] = 1.0
p[0, 1:3] = torch.ones(2)
p[:, [0, 2]] = 0.0
p[p > 0] = 0.0
p[torch.tensor([0, 2])] = 0.0
p[0].mul_(0)
p[0][1].zero_()
p[:2].zero_()
p.view(-1)[0:3].zero_()
p.reshape(-1).mul_(0)
p.flatten()[0] = 1.0
p.t()[0].zero_()
p.transpose(0, 1).mul_(2)
p.narrow(0, 0, 1).zero_()
p.select(0, 1).add_(1)
p.unsqueeze(0)[0, 0].zero_()
p.chunk(2)[0].zero_()
p.split(1)[0].zero_()
p.diagonal().zero_()
p.data[0] = 0.5
p.data[1].mul_(0)
p[1].data.fill_(2.0)
p[1].detach().fill_(2.0)
p.index_fill_(0, torch.tensor([0]), 0.0)
p.index_copy_(0, torch.tensor([0]), torch.ones(1, 4))
p.index_add_(0, torch.tensor([1]), torch.ones(1, 4))
p.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 1.0)
p.masked_fill_(p > 0, 0.0)
p.triu_()
p.tril_()
p.clamp_(-0.1, 0.1)
p.renorm_(2, 0, 1.0)
p[0].normal_()
p[1:].data.uniform_()
"""


def different_writes(mode: str) -> list[str]:
    """In that mode of torch, where both tensors were made outside of it."""
    apply_patches()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    wrong = []
    for places in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(1))):
        rows = 5 if Shard(0) in places else 4
        for line in WRITES.strip().splitlines():
            torch.manual_seed(0)
            whole = torch.randn(rows, 4)
            shards = distribute_tensor(whole.clone(), mesh, places)
            for p in (whole, shards):
                torch.manual_seed(1)
                with getattr(torch, mode)():
                    exec(line, {"torch": torch, "p": p})
            if not torch.equal(shards.full_tensor(), whole):
                wrong.append(f"{line} of {places}")
    return wrong


def what_is_said() -> list[str]:
    apply_patches()
    mesh = init_device_mesh("cpu", (4,))
    said = []
    shards = distribute_tensor(torch.zeros(4, 4), mesh, (Shard(0),))
    with pytest.raises(StateError) as caught:
        shards[torch.tensor([0])] = torch.full((4,), float(torch.distributed.get_rank()))
    said.append(str(caught.value))
    with pytest.raises(StateError, match="ranks have different tensors in aten.mm.default with a parallel model's parameter"):
        shards @ torch.full((4, 4), float(torch.distributed.get_rank()))
    own = torch.full((4, 4), float(torch.distributed.get_rank()))
    with pytest.raises(StateError, match="ranks have different tensors in aten.mul.Tensor"):
        torch.nn.Parameter(shards) * own  # a penalty, whose gradient each rank would have of its own
    assert (shards * own).shape == (4, 4)  # an average
    with pytest.raises(StateError, match="pass the same on every rank, that of the global batch"):
        shards[torch.tensor([torch.distributed.get_rank()])]
    with pytest.raises(RuntimeError, match="leaf Variable") as leaf:
        torch.nn.Parameter(shards)[0].zero_()
    with pytest.raises(IndexError):
        shards[7] = 1.0
    return [*said, str(leaf.value)]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_writes_into_parts_are_those_of_the_whole_tensor(mode: str, ranks: RankPool) -> None:
    assert ranks.run(different_writes, mode, world=4) == [[]] * 4


def test_views_made_of_others_are_known() -> None:
    """DTensor is asked for them in inference mode, where its own results take no views."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if op is not None and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite) and not op._schema.is_mutable:
            views = any(each.alias_info is not None for each in op._schema.returns)
            assert not views or name in (*VIEWS, *COMPOSITE_VIEWS, *OF_OTHER_TENSORS), name


def test_ranks_that_write_different_values(ranks: RankPool) -> None:
    for line, _ in ranks.run(what_is_said, world=4):
        assert line.startswith("ranks write different values into a parallel model's parameter")


def test_operations_in_place_are_known() -> None:
    names = {str(op) for op in in_place_operations()}
    assert {"aten.fill_.Scalar", "aten.zero_.default", "aten.copy_.default", "aten.index_put_.default"} <= names

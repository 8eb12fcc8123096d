"""Hooks that replace functions of torch: what they stand on, and that they are made once and taken back."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.runtime.compat import autograd, dtensor, hooks
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.patches import apply_patches, undo_patches


def test_muon_calls_its_functions_for_each_matrix() -> None:
    """What `hooks.muon_updates` stands on: Newton-Schulz is a function of one matrix, of its values in the dtype of the result;
    of a momentum in bfloat16 it takes no copy; and the step asks the module for it."""
    from torch.optim import _muon as muon  # private: what the test is of

    x, options = torch.randn(6, 9, dtype=torch.float64), ((3.4445, -4.775, 2.0315), 5, 1e-7)
    result = muon._zeropower_via_newtonschulz(x, *options)
    assert result.dtype == torch.bfloat16
    assert torch.equal(muon._zeropower_via_newtonschulz(x.to(result.dtype), *options), result)
    half = x.bfloat16()
    muon._zeropower_via_newtonschulz(half, *options)
    assert not torch.equal(half, x.bfloat16())

    parameters = [torch.nn.Parameter(torch.zeros(size, 9)) for size in (6, 12)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer, asked = torch.optim.Muon(parameters, lr=0.5), list[torch.Tensor]()

    def note(update: torch.Tensor, *given: Any) -> torch.Tensor:
        assert given == options
        asked.append(update)
        return torch.ones_like(update)

    with hooks.replaced(muon, "_zeropower_via_newtonschulz", note):
        optimizer.step()
    assert [each.shape for each in asked] == [each.shape for each in parameters]
    for parameter in parameters:
        rate = muon._adjust_lr(muon._to_scalar(torch.tensor(0.5)), None, parameter.shape)
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, -rate))


class _Divides(torch.autograd.Function):
    """A backward that fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ZeroDivisionError("in a backward")


def test_errors_of_a_backward_are_translated() -> None:
    def translate(error: Exception) -> Exception | None:
        return KeyError("translated") if isinstance(error, ZeroDivisionError) else None

    x = torch.ones(2, requires_grad=True)
    with hooks.engine_calls(lambda *_: NotImplemented, (translate,)):
        for run in (torch.Tensor.backward, torch.autograd.backward, lambda loss: torch.autograd.grad(loss, x)):
            with pytest.raises(KeyError, match="translated") as found:
                run(autograd.apply(_Divides, x).sum())
            assert isinstance(found.value.__cause__, ZeroDivisionError)
            with pytest.raises(RuntimeError, match="does not require grad"):
                run(torch.ones(2).sum())
    with pytest.raises(ZeroDivisionError):
        autograd.apply(_Divides, x).sum().backward()


def changed_places() -> dict[str, Any]:
    """What `apply_patches` may change, by name."""
    from torch.distributed.checkpoint import state_dict

    owners = {"DTensor": DTensor, "GradScaler": torch.amp.GradScaler, "Optimizer": torch.optim.Optimizer, "sys": sys}
    owners |= {"init": torch.nn.init, "autograd": torch.autograd, "state_dict": state_dict}
    found = {f"{name}.{key}": value for name, owner in owners.items() for key, value in vars(owner).items()}
    found |= {str(op): handler for op, handler in dtensor.operations_of_shards().items()}
    return {key: id(value) for key, value in found.items()} | {"warnings": list(map(str, warnings.filters))}


def patched() -> tuple[int, int, list[str]]:
    """How many places the patches change, how many a second call does, and which are not as before once they are undone."""
    undo_patches()
    before = changed_places()
    apply_patches()
    first = changed_places()
    apply_patches()
    second = changed_places()
    undo_patches()
    after = changed_places()
    differ = [sum(a.get(key) != b.get(key) for key in a | b) for a, b in ((before, first), (first, second))]
    return differ[0], differ[1], [key for key in before | after if before.get(key) != after.get(key)]


def test_patches_are_made_once_and_taken_back(ranks: RankPool) -> None:
    changed, more, left = ranks.run_alone(patched)
    assert changed > 100 and more == 0 and left == []


def masked() -> tuple[list[list[float]], list[list[float]], list[float]]:

    apply_patches()
    mesh = MeshHandle({"dp": 2}).device_mesh["dp"]
    x = distribute_tensor(torch.arange(8.0).view(4, 2) - 4, mesh, [Shard(0)])
    x[x.lt(0)] = 9.0
    whole = distribute_tensor(torch.zeros(3), mesh, [Replicate()])
    whole[torch.tensor([1])] = 7.0  # another index goes its usual way
    other = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    torch._foreach_copy_([other], [x])
    return x.full_tensor().tolist(), other.full_tensor().tolist(), whole.full_tensor().tolist()


def _set_data() -> tuple[float, float, float]:
    """What a DTensor has after its ``.data`` was set: by torch, by the hook, and with something that fills it."""
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    kept, plain, filled = (torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()])) for _ in range(3))
    given: list[torch.Tensor] = []
    filled.autopar_values = type("Values", (), {"fill": staticmethod(given.append)})()  # type: ignore[attr-defined]
    usual: Any = torch.Tensor.data
    usual.__set__(kept, kept.data * 3)
    with hooks.data_by_values():
        for parameter in (plain, filled):
            parameter.data = parameter.data * 3
    assert len(given) == 1
    found = (each.to_local().sum() for each in (kept, plain, given[0]))  # type: ignore[attr-defined]
    return tuple(map(float, found))  # type: ignore[return-value]


def test_data_of_a_dtensor(ranks: RankPool) -> None:
    """On 2.13.0 it keeps its shard: once this fails, `data_by_values` may go."""
    assert ranks.run(_set_data) == [(2.0, 6.0, 6.0)] * 4


def test_masked_writes(ranks: RankPool) -> None:
    expected = [[9.0, 9.0], [9.0, 9.0], [0.0, 1.0], [2.0, 3.0]]
    assert ranks.run(masked, world=2) == [(expected, expected, [0.0, 7.0, 0.0])] * 2


def test_an_owner_may_go_while_torch_walks_through_its_hooks() -> None:
    """As where the collector frees another model within a step, which raised "OrderedDict mutated during iteration"."""
    owners, called = [Owner(), Owner()], list[str]()

    def drop_the_other(*_: object) -> None:
        called.append("first")
        owners[1:] = []

    hooks.around_optimizer_steps(owners[0], after=drop_the_other)
    hooks.around_optimizer_steps(owners[1], after=lambda *_: called.append("second"))
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    for _ in range(2):
        optimizer.step()
    assert called == ["first"] * 2
    del owners[:]
    optimizer.step()
    assert called == ["first"] * 2


class Owner:
    """What a weak reference can be of."""

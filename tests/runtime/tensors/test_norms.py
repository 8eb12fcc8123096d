"""Norms of a list of gradients are those of the whole tensors, by one all-reduce for each axis that they are sharded on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.habit_model import batch, net
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import autopar
from autopar.runtime.patches import apply_patches
from autopar.runtime.state.gradient import as_gradient

PLACES = [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())]
PLACES += [(Replicate(), Shard(1))]


def gradients() -> tuple[list[torch.Tensor], list[DTensor]]:
    """Whole tensors, of which some have an empty part on some ranks, and the same as gradients of sharded parameters."""
    apply_patches()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    whole = [torch.randn(5, 4, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64), torch.ones(4, 1)] * len(PLACES)
    placed = zip(whole, sorted(PLACES * 3, key=str), strict=True)
    return whole, [as_gradient(distribute_tensor(each, mesh, places), "") for each, places in placed]


def norms_of_all_orders() -> list[str]:
    """On a rank: what differs."""
    whole, shards = gradients()
    wrong = []
    for order in (2.0, 1.0, 3.5, math.inf, 0.0, -2.0, -math.inf):
        for one, other in zip(torch._foreach_norm(shards, order), torch._foreach_norm(whole, order), strict=True):
            rtol = 1e-6 if other.dtype == torch.float32 else 1e-12
            if one.dtype != other.dtype or isinstance(one, DTensor) or not torch.allclose(one, other, rtol=rtol):
                wrong.append(f"order {order}: {one} and {other}")
        total, expected = nn.utils.get_total_norm(shards, order), nn.utils.get_total_norm(whole, order)
        if not torch.allclose(total, expected, rtol=1e-6):
            wrong.append(f"order {order}: {total} and {expected} of all")
    return wrong


def norms_with_nan() -> None:
    """On a rank: NaN in any place is in the norm, as torch has it; collectives leave it out, or not, by the rank."""
    for place, row, order in itertools.product(range(len(gradients()[0])), (0, -1), (math.inf, -math.inf, 2.0)):
        whole, shards = gradients()
        whole[place] = whole[place].clone()  # they are some objects, several times
        for each in (whole, shards):
            each[place][row] = math.nan
        assert all(nn.utils.get_total_norm(each, order).isnan() for each in (whole, shards)), (place, row, order)


def test_nan_is_in_the_norm(ranks: RankPool) -> None:
    ranks.run(norms_with_nan, world=4)


def test_norms_are_those_of_whole_tensors(ranks: RankPool) -> None:
    for wrong in ranks.run(norms_of_all_orders, world=4):
        assert not wrong


def clip_several_models() -> None:
    """On a rank: gradients on two meshes and ordinary ones, in one call."""
    whole, shards = gradients()
    others = init_device_mesh("cpu", (4,), mesh_dim_names=("c",))
    elsewhere = [as_gradient(distribute_tensor(each, others, [Shard(0)]), "") for each in whole[:3]]
    for first in (0, 1, 2):
        mixture = [[each.clone() for each in whole[:3]], shards[:3], elsewhere]
        mixture = [*mixture[first:], *mixture[:first]]
        ours, plain = [nn.Parameter(torch.zeros_like(each)) for each in sum(mixture, [])], list[nn.Parameter]()
        for parameter, gradient in zip(ours, sum(mixture, []), strict=True):
            parameter.grad = gradient.clone() if not isinstance(gradient, DTensor) else as_gradient(gradient.clone(), "")
            value = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            plain.append(nn.Parameter(torch.zeros_like(value)))
            plain[-1].grad = value.clone()
        norms = [nn.utils.clip_grad_norm_(each, 0.1) for each in (ours, plain)]
        for each in (ours, plain):
            nn.utils.clip_grad_value_(each, 0.01)
        torch.testing.assert_close(*norms)
        for one, other in zip(ours, plain, strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad, other.grad)


def update_several_models() -> None:
    """On a rank: parameters on two meshes and ordinary ones, in one optimizer that takes lists."""
    whole, shards = gradients()
    others = init_device_mesh("cpu", (4,), mesh_dim_names=("c",))
    elsewhere = [distribute_tensor(each, others, [Shard(0)]) for each in whole[:3]]
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        for mixture in ([*whole[:3], *shards[:3], *elsewhere], [*elsewhere, *whole[:3], *shards[:3]]):
            ours = [nn.Parameter(each.detach().clone()) for each in mixture]
            plain = [nn.Parameter(each.full_tensor() if isinstance(each, DTensor) else each.clone()) for each in mixture]
            for parameters in (ours, plain):
                for parameter in parameters:
                    parameter.grad = parameter.detach() * 0.5
                kind(parameters, lr=0.1, foreach=True).step()
            for one, other in zip(ours, plain, strict=True):
                torch.testing.assert_close(one.full_tensor() if isinstance(one, DTensor) else one, other)


def test_gradients_of_several_models_in_one_call(ranks: RankPool) -> None:
    ranks.run(clip_several_models, world=4)
    ranks.run(update_several_models, world=4)


def collectives_of_a_clip() -> int:
    """On a rank: how many torch's own functions take, of 15 parameters."""
    parameters = []
    for gradient in gradients()[1]:
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    with CommDebugMode() as counted:
        nn.utils.clip_grad_norm_(parameters, 0.1)
        nn.utils.get_total_norm(parameters)
    return int(counted.get_total_counts())


def test_one_all_reduce_for_each_axis(ranks: RankPool) -> None:
    assert ranks.run(collectives_of_a_clip, world=4) == [8] * 4  # of two axes, for each of two dtypes, twice


def norms_of_stages() -> None:
    """On a rank: of what is computed of all parameters of a pipeline, and of some of them."""
    parallel = autopar.parallelize(net(), "local:2", batch(0), force="pp=2", cache=False)
    parallel(**batch(0)).backward()
    parameters = list(parallel.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    plain = net()
    plain(**batch(0)).backward()
    used = [each for each in plain.parameters() if each.grad is not None]
    expected, of_gradients = nn.utils.get_total_norm(plain.parameters()), nn.utils.get_total_norm([each.grad for each in used])
    for read in (lambda each: each.data, lambda each: each.detach()):
        values = [read(each) for each in parameters]
        torch.testing.assert_close(torch.stack([each.norm() for each in values]).norm().item(), expected.item())
        torch.testing.assert_close(nn.utils.get_total_norm(values).item(), expected.item())
        values = [read(each) for each in gradients]
        torch.testing.assert_close(torch.stack([each.norm() for each in values]).norm().item(), of_gradients.item())
        torch.testing.assert_close(nn.utils.get_total_norm(values).item(), of_gradients.item())
    made = {1.0: [each.clone() for each in gradients], 0.5: [each * 0.5 for each in gradients]}
    for factor, values in (made | {2.0: torch._foreach_mul(gradients, 2.0)}).items():
        for total in (nn.utils.get_total_norm, lambda values: torch.stack([each.norm() for each in values]).norm()):
            torch.testing.assert_close(total(values).item(), factor * of_gradients.item())
            torch.testing.assert_close(total(values[1:]).item(), factor * total([each.grad for each in used[1:]]).item())
    lost = [each.clone() for each in gradients]
    if parallel.program.mesh.pp.coordinate:
        lost[-1][-1] = math.nan  # one stage has it
    for values in ([each.clone() for each in gradients], lost):
        expected_values = [each.grad.clone() for each in used]
        if values is lost:
            expected_values[-1][-1] = math.nan
        for read in (
            lambda each: torch.stack([value.abs().max() for value in each]).max(),
            lambda each: torch.cat([value.flatten() for value in each]).amin(),
            lambda each: torch.stack([value.isnan().any() for value in each]).any(),
            lambda each: torch.stack([value.isfinite().all() for value in each]).all(),
            lambda each: nn.utils.get_total_norm(each, math.inf),
            lambda each: torch.linalg.vector_norm(torch.cat([value.flatten() for value in each]), math.inf),
        ):
            torch.testing.assert_close(read(values).item(), read(expected_values).item(), equal_nan=True)
    for of in (
        lambda values: torch.stack([value.abs().max() for value in values[1:]]).max(),
        lambda values: torch.cat([value.flatten() for value in values]).norm(),
    ):
        torch.testing.assert_close(of(gradients).item(), of([each.grad for each in used]).item())
    number = torch.zeros((), dtype=torch.float64)
    for each in gradients:  # of one parameter at a time: any combination is right
        assert number.copy_(each.norm()).item() == each.norm().item()
        ratio = each.norm() / (each.clone().norm() + (each * 0.5).norm())
        assert ratio.item() == pytest.approx(1 / 1.5)


def test_norms_of_stages(ranks: RankPool) -> None:
    ranks.run(norms_of_stages, world=2)


class TwoLayers(nn.Module):
    """No two stages have a parameter of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def norms_of_rows() -> None:
    """On a rank: those of all elements in one row."""
    x = torch.arange(64, dtype=torch.float64).reshape(8, 8).sin()
    plain, parallel = TwoLayers(), autopar.parallelize(TwoLayers(), "local:2", (x,), force="pp=2", cache=False)
    for model in (plain, parallel):
        model(x).backward()

    def norms(model: nn.Module) -> list[float]:
        parameters = list(model.parameters())
        gradients = [each.grad for each in parameters]
        rows = [torch.cat([each.detach().flatten() for each in values]) for values in (parameters, gradients)]
        products = [p.detach().flatten() * gradient.flatten() for p, gradient in zip(parameters, gradients, strict=True)]
        rows += [nn.utils.parameters_to_vector(parameters).detach(), torch.cat(products)]
        return [torch.linalg.vector_norm(row, order).item() for row in rows for order in (2.0, 1.0, math.inf)]

    assert norms(parallel) == pytest.approx(norms(plain), rel=1e-12)


def test_norms_of_rows(ranks: RankPool) -> None:
    ranks.run(norms_of_rows, world=2)

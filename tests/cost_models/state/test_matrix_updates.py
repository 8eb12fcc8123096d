"""The price of updates of whole matrices (torch.optim.Muon): torch's own FLOPs over all ranks, and what the runtime sends."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink, Level, Link
from autopar.cost_models.state.optimizers import matrix_update_seconds, optimizer_named
from autopar.cost_models.state.state_cost import state_cost
from autopar.cost_models.state.state_group import MatrixWork, StateGroup, matrix_work
from autopar.cost_models.state.state_memory import StatePolicy, state_memory
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.graph import Parameter, Value
from autopar.ir.plan import Precision

MUON, ADAMW = optimizer_named("muon"), optimizer_named("adamw")
FP32 = Precision("float32", "float32")


def parameter(*shape: int, trainable: bool = True) -> Parameter:
    return Parameter(Value("w", shape, "float32"), "w", trainable)


@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (64, 64)])
def test_flops_are_those_of_torch(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        _zeropower_via_newtonschulz(torch.randn(shape), (3.4445, -4.775, 2.0315), MUON.newton_schulz_steps, 1e-7)
    share, work = matrix_work([parameter(*shape)])
    assert share == 1 and counter.get_total_flops() == MUON.newton_schulz_steps * work.flops


def test_what_counts_as_a_matrix() -> None:
    """Neither vectors, tables of words, stacks of experts, nor what is frozen."""
    others = [parameter(64), parameter(6400, 64), parameter(4, 64, 64), parameter(64, 64, trainable=False)]
    share, work = matrix_work([parameter(64, 32), *others])
    assert work == matrix_work([parameter(64, 32)])[1] and work.elements == 64 * 32
    assert share == 64 * 32 / (64 * 32 + 64 + 6400 * 64 + 4 * 64 * 64)
    assert matrix_work(others)[0] == 0


def test_state_is_one_tensor_of_matrices_and_two_of_the_rest() -> None:
    policy = StatePolicy.of(FP32, MUON)
    for share in (0.0, 0.25, 1.0):
        memory = state_memory(StateGroup(1000, 1000, 2, matrix_share=share), 1, 4, policy)
        assert memory.optimizer == 1000 * 4 / 4 * (share + 2 * (1 - share))


@pytest.mark.parametrize(("zero", "copies"), [(0, 8), (1, 1), (3, 1)])
def test_products_are_divided_and_updates_reach_every_copy(zero: int, copies: int) -> None:
    device, link = Cluster.parse("dgx-h100").device, AxisLink(8, (Level(Link("nv", 8, 100e9, 1e-5), 8),))
    work = MatrixWork(1e15, 1e9)
    group = StateGroup(1e9, 1e9, 10, matrix_share=1.0, matrices=work)
    with_products, without = (
        state_cost(each, zero, link, device, FP32, MUON, owners=link).optimizer_seconds
        for each in (group, replace(group, matrices=MatrixWork()))
    )
    nothing, to, back = (collective_seconds("all_to_all", 2e9 * times, link) for times in (0, 1, copies))
    exchange = to + back - 2 * nothing
    products = 5 * 1e15 / 8 / device.product_flops_per_second("bfloat16")
    assert with_products - without == pytest.approx(products + exchange)
    assert matrix_update_seconds(work, copies, link, device, ADAMW) == 0


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("force", ["dp=4,zero=0", "dp=4,zero=3", "dp=2,tp=2", "pp=2,dp=2"])
def test_a_plan_is_priced_and_bounded_with_it(force: str) -> None:
    """The evaluator adds the products and the exchange of all matrices over the ranks of a stage; the bound is none above it."""
    cluster, example = Cluster.parse("local:4"), {"x": torch.randn(8, 256)}
    with warnings.catch_warnings(action="ignore"):
        plan = autopar.plan(Layers(), cluster, example, force=force, optimizer="muon")
    assert plan.candidate is not None
    muon, momentum = (evaluate(plan.graph, plan.candidate, cluster, name) for name in ("muon", "momentum"))
    flops = 5 * 6 * 256**3 * 4
    least = flops / 4 / cluster.device.product_flops_per_second("bfloat16")
    assert least < muon.optimizer_seconds - momentum.optimizer_seconds < 3 * least
    predicted = plan.document.predicted
    assert predicted.lower_bound_seconds <= predicted.step_seconds * (1 + 1e-9)

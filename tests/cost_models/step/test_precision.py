"""Memory and seconds by precision: 16 bits are 16 bits, masters and islands stay float32, autocast keeps and gathers float32."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.block_memory import block_memory
from autopar.ir.plan import Precision
from autopar.plan_inputs import registry
from autopar.solve.fixed.candidate import price_configuration
from autopar.solve.fixed.configuration import configuration_of
from autopar.solve.result import PlanResult
from autopar.solve.space.force import parse_force

WIDTH, ROWS, RANKS = 2048, 4096, 8
FORCE = "tp=1,pp=1,zero=3,micro_batches=1,recompute=none,zero_group=0,sequence_parallel=0"


class Layer(nn.Module):
    def __init__(self, island: bool) -> None:
        super().__init__()
        self.island, self.up, self.down = island, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.up(x))
        if self.island:
            hidden = torch.tanh(hidden.float()).to(x.dtype)
        return torch.tanh(self.down(hidden)) + x


class Net(nn.Module):
    def __init__(self, island: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(island) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@cache
def priced(compute: str, autocast: str = "", island: bool = False) -> PlanResult:
    with torch.device("meta"):
        model, x = Net(island), torch.randn(ROWS, WIDTH)
    graph = capture(model, (x,), compute_dtype=compute, autocast=autocast)
    fixed = configuration_of(parse_force(FORCE), Precision(compute, "float32"), "adamw")
    return price_configuration(graph, Cluster.parse("dgx-h100:1"), fixed, registry())


def memory(found: PlanResult) -> dict[str, float]:
    return dict(found.evaluation.memory)


def saved(found: PlanResult) -> float:
    """Bytes that a layer saves for its backward, on one device."""
    block = next(each for each in found.graph.blocks if found.graph.count(each.name) > 1)
    costs = BlockCosts(block, found.candidate.mesh, ROWS, Cluster.parse("dgx-h100:1"))
    return block_memory(costs, found.candidate.block(block.name)).internal_saved_bytes


def test_fp16_is_bf16_over_float32_masters() -> None:
    bf16, fp16, whole = priced("bfloat16"), priced("float16"), priced("float32")
    assert memory(fp16) == memory(bf16) and saved(fp16) == saved(bf16)
    assert fp16.evaluation.step_seconds == bf16.evaluation.step_seconds
    for kind in ("parameters", "optimizer"):
        assert memory(bf16)[kind] == memory(whole)[kind] > 0, "masters and moments"
    assert memory(bf16)["gathered"] < 0.6 * memory(whole)["gathered"]
    assert saved(bf16) == saved(whole) / 2 and bf16.evaluation.compute_seconds < whole.evaluation.compute_seconds
    wire, exact = (dict(each.evaluation.axis_seconds)["dp"] for each in (bf16, whole))
    assert 0.6 * exact < wire < 0.75 * exact, "of three parts, both gathers in 16 bits and the reduction in 32"


def test_islands_stay_float32() -> None:
    """One saves its result in float32, and its cast to 16 bits is what the next product saves."""
    hidden = ROWS // RANKS * 4 * WIDTH
    more = {each: saved(priced(each, island=True)) - saved(priced(each)) for each in ("bfloat16", "float16", "float32")}
    assert more == {"bfloat16": (4 + 2) * hidden, "float16": (4 + 2) * hidden, "float32": 4 * hidden}


def test_autocast_keeps_and_gathers_float32() -> None:
    around, half, whole = priced("float32", "bfloat16"), priced("float32", "float16"), priced("float32")
    assert memory(around) == memory(half) and around.evaluation.step_seconds == half.evaluation.step_seconds
    assert around.evaluation.axis_seconds == whole.evaluation.axis_seconds
    assert around.evaluation.compute_seconds < whole.evaluation.compute_seconds
    casts = 2 * (2 * 4 * WIDTH * WIDTH)
    assert saved(around) >= saved(priced("bfloat16")) + casts, "products save the 16-bit casts of the float32 weights"

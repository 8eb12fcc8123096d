"""Linear layers in float8: which, what they cost beside published runs, where they are refused, and what ranks compute with them.

Ranks need torchao, which transformers would import into every test if it were installed beside them: a folder of its own, as
CONTRIBUTING says.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import train
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.models import load_model
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.ir.plan import Precision
from autopar.operations.products import LINEAR_FLOAT8
from autopar.planning import make_plan
from autopar.program.build import program_text
from autopar.runtime.ops import functions

PUBLISHED = (
    ("llama3-8b", "dgx-h200:4", 64, "dp=32,zero=3,micro=2", 1.4979),  # tt-031: selective checkpointing
    ("llama3-405b", "dgx-h100:16", 32, "dp=16,tp=8,zero=3,micro=2", 11.5706),  # tt-037: full checkpointing
)
"""Of torchtitan with torchao's float8, compiled (benchmarks/llama3-8b_h200_202506 at b5bcd76c66d0, docs/performance.md at
4d88a8a44); nothing in our constants was fitted to float8."""


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 64, odd: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.others = nn.ModuleList(Layer(odd) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.others:
            x = torch.cat([layer(x[..., : layer.norm.normalized_shape[0]]), x[..., layer.norm.normalized_shape[0] :]], -1)
        return nn.functional.cross_entropy(self.head(x), target)


def batch(seed: int = 0, width: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, width, generator=generator)
    return {"x": x, "target": x[:, :10].argmax(-1)}


def with_float8(cluster: str) -> Cluster:
    """A cluster whose devices have float8 products by their sheet."""
    found = Cluster.parse(cluster)
    return replace(found, device=replace(found.device, peak=(*found.device.peak, ("float8", 1e12))))


def test_linear_modules_of_layers_whose_sizes_allow_it() -> None:
    graph = capture(Net(odd=40), (), batch(), compute_dtype="bfloat16", float8=True)
    found = [(node.op, node.module) for block in graph.blocks for node in block.nodes if "linear" in node.op]
    kinds = [LINEAR_FLOAT8] * 4 + ["aten.linear"] * 3  # the first layer, whose input takes no gradient, is a block of its own
    assert [op for op, _ in found] == kinds and found[-1][1] == "head"
    note = next(note for note in graph.notes if note.startswith("float8"))
    assert "head" in note and "(sizes (160, 40) are no multiples of 16)" in note
    assert graph.fingerprint != capture(Net(odd=40), (), batch(), compute_dtype="bfloat16").fingerprint


def test_refused_where_no_product_can_be() -> None:
    """GPT-2's weights are ``[k, n]``: asked for and not done would be a word that says nothing."""
    loaded = load_model("gpt2-tiny", 4, None, "float32")
    with pytest.raises(AutoparError, match=r"no product of .* can be in float8 \(.*linear_kn.*take precision \"bf16\""):
        make_plan(loaded.model, with_float8("local:2"), loaded.example_inputs, precision="fp8")


@pytest.mark.parametrize(("name", "cluster", "examples", "force", "measured"), PUBLISHED)
def test_published_runs_are_priced(name: str, cluster: str, examples: int, force: str, measured: float) -> None:
    loaded = load_model(name, examples, 8192, "float32")
    found = make_plan(loaded.model, cluster, loaded.example_inputs, precision="fp8", force=force, batch=examples, processes=2)
    assert found.document.predicted.step_seconds == pytest.approx(measured, rel=0.15)


def test_a_plan_file_keeps_it() -> None:
    plan = make_plan(Net(), with_float8("local:2"), batch(), precision="fp8", force="tp=2")
    again = autopar.Plan.from_json(plan.to_json()) if hasattr(autopar.Plan, "from_json") else plan
    assert again.candidate.precision == Precision("bfloat16", "float32", float8=True)
    assert "C.linear_float8_dynamic(" in program_text(again.graph, again.candidate)


def test_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(cluster: str | Cluster, precision: str | Precision) -> str:
        with pytest.raises(AutoparError) as caught:
            make_plan(Net(), cluster, batch(), precision=precision)
        return str(caught.value)

    assert refusal("dgx-a100:1", "fp8").endswith('has no float8 products: take precision "bf16"')
    assert "beside bfloat16, not float32" in refusal(with_float8("local:2"), Precision(float8=True))
    monkeypatch.setattr(functions, "find_spec", lambda name: None)
    assert "pip install torchao" in functions.float8_problem("cpu")


# -- on ranks


def script(force: str, world: int, expected: list[float]) -> tuple[float, bool]:
    """The largest difference of a loss, relative, and whether anything differs at all."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        parallel = autopar.parallelize(Net(), with_float8(f"local:{world}"), batch(), precision="fp8", force=force, cache=False)
    found = train(parallel, map(batch, range(len(expected)))).losses
    ragged = {name: tensor[:30] for name, tensor in batch(1).items()}  # another program, in float8 too
    parallel.eval()
    with torch.no_grad():
        small, whole = float(parallel(**ragged)), float(parallel(**batch(1)))
    assert abs(small - whole) < 0.2 * whole
    return max(abs(one - other) / other for one, other in zip(found, expected, strict=True)), found != expected


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (CONTRIBUTING: a folder of its own)")
@pytest.mark.parametrize(("force", "world"), [("dp=2,zero=3", 2), ("tp=2", 2), ("dp=2,tp=2", 4), ("pp=2", 2)])
def test_losses_follow_float32(force: str, world: int, ranks: RankPool) -> None:
    torch.manual_seed(0)
    expected = train(Net(), map(batch, range(20))).losses
    assert expected[-1] < 0.9 * expected[0]
    for far, differs in ranks.run(script, force, world, expected, world=world, timeout=120):
        assert far < 0.03 and differs


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (CONTRIBUTING: a folder of its own)")
def test_the_product_is_near_and_its_gradients_too() -> None:
    """Tokens need no multiple of 16. Rounding of e4m3 and e5m2 is 1/16 and 1/8 of an element; sums average it."""
    torch.manual_seed(0)
    for shape in ((3, 5, 64), (64,)):
        inputs = [torch.randn(shape), torch.randn(32, 64), torch.randn(32)]
        found = [each.bfloat16().requires_grad_() for each in inputs]
        whole = [each.detach().float().requires_grad_() for each in found]
        out, expected = functions.linear_float8_dynamic(*found), nn.functional.linear(*whole)
        out.float().square().sum().backward()
        expected.square().sum().backward()
        pairs = [(out, expected), *((one.grad, other.grad) for one, other in zip(found, whole, strict=True))]
        for one, other in pairs:
            assert one is not None and other is not None
            assert (one.float() - other).norm() < 0.1 * other.norm()

"""Equal layers at every depth of the module tree are one block: what capture, tables and programs hold does not grow."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.models.nested_models import Layer, Shared, nested_inputs, nested_model
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.convert import flatten_program
from autopar.capture.fold_layers import fold
from autopar.capture.normalize import normalize
from autopar.capture.tracing.equal_layers import find_groups
from autopar.capture.tracing.trace import Traced, trace
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Graph
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Precision
from autopar.plan_inputs import registry
from autopar.solve.bounds.flow_bound import FlowRelaxation, bound_by_blocks, has_many_blocks, operation_bound
from autopar.solve.ilp.formulate import formulate
from autopar.solve.problem.problem import Problem, build_problem


@cache
def captured(kind: str, depth: int) -> Graph:
    return capture(nested_model(kind, depth), (), nested_inputs(kind))


def sizes(graph: Graph) -> list[tuple[str, int]]:
    return [(block.name, len(block.nodes)) for block in graph.blocks]


def problem_of(graph: Graph) -> Problem:
    mesh = Mesh((Axis("dp", 2), Axis("tp", 2)))
    return build_problem(graph, mesh, Cluster.parse("local:4"), Precision("float32", "float32"), "adamw", registry())


def variables(graph: Graph) -> tuple[int, int]:
    model = formulate(problem_of(graph)).model
    return model.variables, model.constraints


@pytest.mark.parametrize(
    ("kind", "name", "calls"),
    [
        ("resnet", "Bottleneck", 5),
        ("swin", "Layer", 3),
        pytest.param("unet", "Layer", 24, marks=pytest.mark.slow),
        pytest.param("shared", "Layer", 12, marks=pytest.mark.slow),
    ],
)
def test_nothing_grows_with_depth(kind: str, name: str, calls: int) -> None:
    """And the equal layers of the deep model are one block, with so many calls."""
    short, long = captured(kind, 4), captured(kind, 6)
    assert sizes(short) == sizes(long)
    assert variables(short) == variables(long)
    counts = {block.name: long.count(block.name) for block in long.blocks}
    assert max(number for block, number in counts.items() if block.startswith(name)) == calls, counts


def test_the_bound_of_single_blocks_is_below_that_of_all() -> None:
    """And looks at no more blocks than it needs."""
    problem = problem_of(captured("resnet", 4))
    assert has_many_blocks(problem)
    looked: list[float] = []
    by_blocks = bound_by_blocks(problem, lambda seconds: bool(looked.append(seconds)), lambda: 1.0)
    assert operation_bound(problem) < by_blocks <= FlowRelaxation(problem).bound(60.0) * (1 + 1e-6)
    assert len(looked) == len(problem.blocks)
    assert looked == sorted(looked)
    assert bound_by_blocks(problem, lambda seconds: True, lambda: 1.0) == pytest.approx(operation_bound(problem))


def test_blocks_are_relaxed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that was enough before, and is not any more, goes on where it ended."""
    problem, known = problem_of(captured("resnet", 4)), dict[str, float]()
    whole, asked, relaxed = bound_by_blocks(problem, lambda seconds: False, lambda: 1.0), [False, False, True], list[str]()
    bound = FlowRelaxation.bound

    def counted(self: FlowRelaxation, *arguments: float) -> float:
        relaxed.extend(self.blocks)
        return bound(self, *arguments)

    monkeypatch.setattr(FlowRelaxation, "bound", counted)
    bound_by_blocks(problem, lambda seconds: asked.pop(0), lambda: 1.0, known)
    assert len(relaxed) == len(known) == 2
    assert bound_by_blocks(problem, lambda seconds: False, lambda: 1.0, known) == pytest.approx(whole, rel=1e-6)
    assert sorted(relaxed) == sorted(problem.blocks)


def folded(model: nn.Module, inputs: dict[str, Tensor], outlined: bool) -> tuple[Graph, Traced]:
    traced = trace(model, (), inputs, outlined=outlined)
    return fold(model, normalize(flatten_program(traced)), traced), traced


@pytest.mark.parametrize("kind", ["resnet", "swin", pytest.param("unet", marks=pytest.mark.slow)])
def test_the_graph_is_that_of_a_full_trace(kind: str) -> None:
    model, inputs = nested_model(kind, 6), nested_inputs(kind)
    short, traced = folded(model.to("meta"), inputs, True)
    full, _ = folded(model, inputs, False)
    assert short == full
    assert any("autopar_capture.outlined" in str(node.target) for node in traced.program.graph.nodes)


def test_an_attribute_that_happens_to_be_an_index_is_none() -> None:
    """The third of four layers is shifted by 2 as the first is by 0: neither is equal to the second and the fourth."""
    groups = find_groups(nested_model("swin", 8).to("meta"))
    assert [(len(group.paths), group.index_names) for group in groups] == [(4, frozenset()), (4, frozenset())]


class WritesArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(2))


class Residual(nn.Module):
    """Reads what its layers have written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WritesArgument() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


def test_a_layer_that_writes_to_its_argument_is_traced_in_full() -> None:
    model, inputs = Residual(), {"x": torch.randn(4, 4)}
    full, _ = folded(model, inputs, False)
    assert capture(model, (), inputs) == full


class Renamed(Layer):
    """Another name for the same."""


def test_a_class_name_tells_no_blocks_apart() -> None:
    model = Shared(3)
    model.encoder[1] = Renamed(8)
    graph, plain = capture(model, (), nested_inputs("shared")), captured("shared", 3)
    assert [nodes for _, nodes in sizes(graph)] == [nodes for _, nodes in sizes(plain)]
    assert [graph.count(block.name) for block in graph.blocks] == [plain.count(block.name) for block in plain.blocks]


def test_calls_of_a_shared_layer_have_its_parameters() -> None:
    graph = captured("shared", 5)
    calls = [call for call in graph.calls if call.prefix == "layer"]
    assert len(calls) == 5
    assert len({call.parameters for call in calls}) == 1
    assert len([call for call in graph.calls if call.prefix.startswith("encoder.")]) == 6


def test_elements_of_a_module_dict_are_layers() -> None:
    """Where they repeat a class, by whatever names."""

    class Named(nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)  # so that gradients flow into every layer
            self.layers = nn.ModuleDict({name: Layer(16) for name in names})

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers.values():
                x = layer(x)
            return x.square().mean()

    short, long = (capture(Named(names), (torch.randn(8, 4, 16),)) for names in ("abcd", "abcdefgh"))
    assert [len(block.nodes) for block in short.blocks] == [len(block.nodes) for block in long.blocks]
    assert max(long.count(block.name) for block in long.blocks) == 8

"""Pinned placements are obeyed, priced, or refused in a line."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.handwritten_blocks import gpt2_graph
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.cli import main
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, PlanMismatch
from autopar.given_plan import check_options
from autopar.ir.graph import Graph
from autopar.ir.placement import Invariant, Replicate, Shard
from autopar.ir.plan_file.plan_file import Plan
from autopar.solve.problem.pins import parse_constraint, parse_constraints, pins_of, why_disobeyed_pins
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.meshes import meshes
from autopar.solve.space.options import SearchOptions


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Equal layers, tied weights, a buffer, and a head whose size divides by 2 and 6 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(16))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


BATCH = {"tokens": torch.zeros(8, 4, dtype=torch.long), "labels": torch.zeros(8, 4, dtype=torch.long)}
CLUSTER = Cluster.parse("local:4")
UP, DOWN = "layers.*.up.weight", "layers.*.down.weight"


@cache
def graph() -> Graph:
    return capture(Net(), (), BATCH)


def line(text: str) -> str:
    """The line of this file with a text, as users name it."""
    number = next(n for n, each in enumerate(Path(__file__).read_text().splitlines(), 1) if text in each)
    return f"{__file__}:{number}"


@cache
def free() -> PlanResult:
    return search(graph(), CLUSTER, SearchOptions(batch=8, force={"pp": 1}))


PINS: dict[str, dict[str, dict[str, str]]] = {
    "column and row": {UP: {"tp": "S(0)"}, DOWN: {"tp": "S(1)"}},
    "the other way": {UP: {"tp": "S(1)"}, "layers.*.up": {"tp": "R"}},
    "sequence": {"layers.*": {"tp": "S(1)"}},
    "reduced": {UP: {"tp": "S(0)"}, "layers.*.down": {"tp": "R"}},
    "a line": {line("self.down(torch.relu"): {"tp": "S(-1)"}},
    "a value": {"relu": {"tp": "S(2)"}},
    "two axes": {UP: {"tp": "S(0)", "tp2": "S(1)"}},
}


@pytest.mark.parametrize("name", PINS)
def test_pinned_values_are_where_they_were_pinned(name: str) -> None:
    """And no plan is cheaper for it."""
    pins = PINS[name]
    result = search(graph(), CLUSTER, SearchOptions(batch=8, force={"pp": 1}, pins=pins))
    assert why_disobeyed_pins(result.graph, result.candidate, pins) == ""
    assert result.evaluation.step_seconds >= free().evaluation.step_seconds * (1 - 1e-3)
    assert set(result.candidate.mesh.names) >= {axis for places in pins.values() for axis in places}


def test_what_the_plan_has_is_read_off_by_hand() -> None:
    """Not only by the function that other tests trust."""
    mesh_and_plan = search(graph(), CLUSTER, SearchOptions(batch=8, force={"pp": 1}, pins=PINS["reduced"])).candidate
    tp = mesh_and_plan.mesh.index("tp")
    block = next(each for each in graph().blocks if any(p.path == "up.weight" for p in each.parameters))
    plan = mesh_and_plan.block(block.name)
    paths = [parameter.path for parameter in block.parameters]
    assert plan.parameters[paths.index("up.weight")][tp] == Shard(0)
    down = next(node for node in block.nodes if node.module == "down")
    made = next(each for each in plan.nodes if each.node == down.name).results[0][tp]
    first = [each.target[tp] for each in plan.conversions if each.value == down.name and each.source[tp] == made]
    whole = (Replicate(), Invariant())
    assert made in whole or (first and all(place in whole for place in first))


def test_a_plan_that_does_not_obey_is_told() -> None:
    pins = {UP: {"tp": "S(0)"}, "layers.*": {"tp": "S(1)"}}
    result = search(graph(), CLUSTER, SearchOptions(batch=8, force={"pp": 1}, pins=pins))
    for wrong in ({UP: {"tp": "S(1)"}}, {"layers.*": {"tp": "R"}}, {UP: {"tp2": "S(0)"}}):
        assert why_disobeyed_pins(result.graph, result.candidate, wrong)


def test_pinned_axes_are_in_both_orders() -> None:
    """Without pins tp=2 x tp2=4 in a node is tp=4 x tp2=2 under other names."""
    sizes = [[mesh.sizes for mesh in meshes(8, 8, {}, 8, ordered=ordered)] for ordered in (False, True)]
    assert (1, 4, 2) in sizes[0] and (1, 2, 4) not in sizes[0] and {(1, 4, 2), (1, 2, 4)} <= set(sizes[1])


def test_whole_values_need_no_axis() -> None:
    result = search(graph(), CLUSTER, SearchOptions(batch=8, force={"pp": 1, "tp": 1}, pins={"head": {"tp": "R"}}))
    assert result.candidate.mesh.names == ("dp",)


def test_pipelines_obey() -> None:
    pins = {UP: {"tp": "S(0)"}, "layers.*.down": {"tp": "R"}}
    result = search(graph(), CLUSTER, SearchOptions(batch=8, force={"pp": 2}, pins=pins))
    assert result.candidate.pipeline.stages == 2
    assert why_disobeyed_pins(result.graph, result.candidate, pins) == ""


# -- refusals

REFUSED: list[tuple[dict[str, dict[str, str]], dict[str, int], str]] = [
    ({"layers.*.upp.weight": {"tp": "S(0)"}}, {}, r"near it are layers\.\*\.up\.weight"),
    ({"nothing": {"tp": "S(0)"}}, {}, "no parameter or module of that name"),
    ({"other.py:3": {"tp": "R"}}, {}, r"no operation is of other\.py"),
    ({f"{__file__}:1": {"tp": "R"}}, {}, r"no operation is of that line; near it are those of test_pins\.py:\d+"),
    ({UP: {"tp": "S(0)"}}, {"dp": 4}, "dp=4 has no axis tp"),
    ({UP: {"tp2": "S(0)"}}, {"tp": 4}, "tp=4 has no axis tp2"),
    ({UP: {"tp": "S(2)"}}, {}, r"has the 2 dimensions \[32, 16\]"),
    ({"embed.weight": {"tp": "S(0)"}}, {"tp": 4}, r"dimension 0 of \[6, 16\] does not divide by tp=4"),
    ({"embed.weight": {"tp": "S(0)"}, "head.weight": {"tp": "S(1)"}}, {}, r"S\(0\) and head\.weight: tp=S\(1\) contradict"),
    ({UP: {"tp": "S(0)"}, "layers.*.*.weight": {"tp": "S(1)"}}, {}, "contradict each other"),
    ({"layers.0.up.weight": {"tp": "S(0)"}}, {}, r"1 of 3 equal layers.* write layers\.\*\.up\.weight"),
    ({"layers.[01].up": {"tp": "S(2)"}}, {}, r"2 of 3 equal layers.* write layers\.\*\.up for all"),
    ({"scale": {"tp": "S(0)"}}, {"tp": 4}, r"scale: tp=S\(0\): scale can have R on tp=4, and nothing else"),
    ({"layers.*.down": {"tp": "P"}, "layers.*": {"tp": "P"}}, {"tp": 4}, "can have .* on tp=4, and nothing else"),
    ({"relu": {"tp": "S(2,4)"}}, {"tp": 4}, r"aten.relu at \w+ \(.*\) can have .*S\(2\).* on tp=4, and nothing else"),
]


@pytest.mark.parametrize(("pins", "force", "words"), REFUSED)
def test_what_cannot_be_is_a_line(pins: dict[str, dict[str, str]], force: dict[str, int], words: str) -> None:
    with pytest.raises(AutoparError, match=words) as caught:
        search(graph(), CLUSTER, SearchOptions(batch=8, force={"pp": 1, **force}, pins=pins))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("constrain ")


def test_a_forced_pipeline_refuses_too() -> None:
    with pytest.raises(AutoparError, match="has no axis tp"):
        search(graph(), CLUSTER, SearchOptions(batch=8, force={"pp": 2, "dp": 2}, pins={UP: {"tp": "S(0)"}}))


@pytest.mark.parametrize(
    ("constrain", "words"),
    [
        ("lm_head", "pins nothing"), ({"": {"tp": "R"}}, "is no name"), ({3: {"tp": "R"}}, "is no name"),
        ({"x": {}}, "by mesh axis"), ({"x": "S(0)"}, "by mesh axis"), ({"x": {"dp": "R"}}, "not on 'dp'"),
        ({"x": {"cp": "R"}}, "tp, tp2, ep"), ({"x": {"tp": "S"}}, "is not a placement"), ({"x": {"tp": 0}}, "is not a placement"),
    ],
)  # fmt: skip
def test_what_is_no_constraint_is_a_line(constrain: Any, words: str) -> None:
    with pytest.raises(AutoparError, match=words) as caught:
        parse_constraints(constrain)
    assert "\n" not in str(caught.value)


def test_placements_of_dtensor_are_placements() -> None:
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor import Replicate as Whole
    from torch.distributed.tensor import Shard as Cut

    said = parse_constraints({"x": {"tp": Cut(1), "ep": Whole()}, "y": {"tp": Partial()}})
    assert said == {"x": {"tp": "S(1)", "ep": "R"}, "y": {"tp": "P"}}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("lm_head:tp=R", ("lm_head", {"tp": "R"})),
        ("layers.*.up.weight:tp=S(0,3),tp2=R", ("layers.*.up.weight", {"tp": "S(0,3)", "tp2": "R"})),
        ("net.py:12:ep=S(-1)", ("net.py:12", {"ep": "S(-1)"})),
    ],
)
def test_texts_of_the_command_line(text: str, parsed: tuple[str, dict[str, str]]) -> None:
    assert parse_constraint(text) == parsed
    for wrong in (text.partition(":")[0], "", ":", "x:tp", "x:=R", "x:tp=", "x:tp=R,"):
        with pytest.raises(AutoparError):
            parse_constraint(wrong)


@given(st.text(alphabet="lmh.*[]!:=,tp2SRIP()0-9 é\n²", max_size=40))
@settings(max_examples=500, deadline=None)
def test_no_text_raises_anything_else(text: str) -> None:
    for parse in (parse_constraint, lambda said: pins_of(graph(), {said: {"tp": "R"}})):
        try:
            parse(text)
        except AutoparError as error:
            assert str(error).strip()


def test_a_name_with_and_without_results() -> None:
    """The result of a module is what others read of it; a whole layer's is what it returns."""
    block = next(each for each in graph().blocks if any(p.path == "up.weight" for p in each.parameters))
    nodes = {node.module or node.op: node.name for node in block.nodes}
    assert set(pins_of(graph(), {"layers.*.up": {"tp": "R"}})) == {(block.name, nodes["up"])}
    assert set(pins_of(graph(), {"layers.*": {"tp": "R"}})) == {(block.name, block.outputs[0])}


# -- in plans


def planned(**options: Any) -> Plan:
    return autopar.plan(Net(), "local:4", BATCH, force="pp=1", **options)


def test_the_plan_says_what_was_pinned() -> None:
    plan = planned(constrain={UP: {"tp": Shard(0)}})
    assert plan.document.search.constrained == {UP: {"tp": "S(0)"}}
    again = Plan.from_json(plan.to_json())
    assert again.document.search.constrained == plan.document.search.constrained
    check_options(again, Net(), None, "", {UP: {"tp": "S(0)"}})
    with pytest.raises(PlanMismatch, match=r"does not obey constrain= layers\.\*\.up\.weight: tp=S\(1\)"):
        check_options(again, Net(), None, "", {UP: {"tp": "S(1)"}})


def test_what_pins_keep_whole_is_told_beside_a_forced_degree() -> None:
    """Attention that is pinned whole is no work for the axis; where that is most of the work, the degree is refused."""
    for seq, told in ((64, pytest.warns(UserWarning, match=PINNED)), (1024, pytest.raises(AutoparError, match=PINNED))):
        graph = gpt2_graph(layers=1, hidden=16, heads=4, vocabulary=16, batch=4, seq=seq)
        name = next(node.name for block in graph.blocks for node in block.nodes if "attention" in node.op)
        with told:
            search(graph, CLUSTER, SearchOptions(batch=4, force={"pp": 1, "tp": 4}, pins={name: {"tp": "R"}}))


PINNED = r"tp=4 .*of the FLOPs.*its size or pins \(\w+: tp=R\) keep aten.scaled_dot_product_attention .* whole"


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "mlp", "--cluster", "gh200:1", "--batch", "8", "--force", "pp=1", "--no-cache", "--processes", "1"]
    pins = ["--constrain", "layers.[02].weight:tp=S(0)", "--constrain", "head:tp=R"]
    assert main([*words, *pins, "-o", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert "constrained" in said and "layers.[02].weight: tp=S(0)" in said and "head: tp=R" in said
    assert main(["explain", str(tmp_path / "plan.json")]) == 0
    assert "constrained: head: tp=R" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "plan.json"), "--what-if", "tp=1"]) == 2
    assert "has no axis tp" in capsys.readouterr().err
    assert main([*words, "--constrain", "head:tp=R", "--constrain", "head:tp=S(1)"]) == 2
    assert "contradict each other" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--constrain", "head"])
    assert "write NAME:AXIS=PLACEMENT" in capsys.readouterr().err
    assert main([*words[:6], "--constrain", "head:tp=R", "--for", "megatron"]) == 2
    assert "--constrain is for autopar's own plans" in capsys.readouterr().err


def test_a_configuration_has_nothing_to_pin() -> None:
    force = "tp=2,pp=1,zero=0,micro_batches=1,recompute=none,zero_group=0,sequence_parallel=0"
    with pytest.raises(AutoparError, match="leave one of them out"):
        autopar.plan(Net(), "local:4", BATCH, force=force, constrain={UP: {"tp": "S(0)"}})

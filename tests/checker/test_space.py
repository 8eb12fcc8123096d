"""Images that are cut along a dimension of space: rows of windows that do not overlap, and lemmas of the functions that fetch the
neighbours' rows. `tests/runtime/space` proves by execution what each function does; here the checker takes what the compiler
offers, and refuses shards that halos do not fit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from support.models.operation_examples import build, t
from support.models.operations.images import IMAGES, case
from support.models.operations.space_examples import image, kernel, space_operations
from support.plans.space_pins import space_pins, space_rules

from autopar.capture import capture
from autopar.checker.captured import CapturedBlock
from autopar.checker.certificate import certify
from autopar.checker.rows import table
from autopar.checker.rows.carry import NotCarried, carry
from autopar.checker.rows.images import halo_fits
from autopar.checker.rows.lemmas import LEMMAS
from autopar.checker.shards import Axes, Cut, Kind
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Graph
from autopar.ir.placement import Placement, Shard
from autopar.ir.plan import Candidate, Precision
from autopar.program.build import program_text
from autopar.rules.expand import block_strategies
from autopar.rules.registry import default_registry
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions

CASES = space_operations()


def kind_of(place: Placement, shape: tuple[int, ...], size: int) -> Kind:
    return Cut(place.dim, shape[place.dim] // size // place.parts) if isinstance(place, Shard) else str(place)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{each[0]}-{i}" for i, each in enumerate(CASES)])
def test_what_the_compiler_offers(index: int) -> None:
    block, _ = build(*CASES[index])
    (operation,), values = CapturedBlock(block, 8).operations, block.values()
    call, flows = operation.call, [values[name].differentiable for name in operation.operands]
    for size in (2, 4):
        offered = block_strategies(block, size, batch_axis=False, batch_is_symbolic=False, registry=default_registry())
        for each in offered[block.nodes[0].name]:
            kinds = [kind_of(place, shape, size) for place, shape in zip(each.operands, call.shapes, strict=True)]
            wanted = [kind_of(place, shape, size) for place, shape in zip(each.results, call.results, strict=True)]
            if each.function in LEMMAS:
                assert [LEMMAS[each.function].on_axis(call, kinds, size, flows)] == wanted
            elif (row := table.row(call)) is not None:
                made = carry(row, Axes(("tp",), (size,)), [(kind,) for kind in kinds], flows, [None] * len(wanted))
                assert [kind for (kind,) in made] == wanted


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.conv2d", (t(2, 4, 64, 8), kernel(4, 4, 2, 5), None, (1, 1), (1, 2))),  # loses rows
        ("aten.conv2d", (t(2, 4, 64, 8), kernel(4, 4, 2, 1), None, (1, 1), (1, 1))),  # gains rows
        ("aten.conv2d", (t(2, 4, 64, 8), t(4, 4, 35, 1), None, (1, 1), (17, 0))),  # 17 rows of shards of 16
        ("aten.conv2d", (t(2, 4, 63, 8), kernel(4, 4, 2), None, (1, 1), (1, 1))),  # does not divide
        ("aten.max_pool2d", (image(2), (3, 3), (2, 2), (1, 1), (1, 1), True)),  # rounds up
        ("aten.avg_pool2d", (image(2), (3, 3), (2, 2), (1, 1), False, False)),  # means of fewer at the border
        ("aten.conv_transpose2d.input", (image(2), kernel(4, 4, 2, 1), None, (2, 2), (0, 0), (1, 1))),  # rows of no window
    ],
)
def test_shards_that_halos_do_not_fit(op: str, args: tuple[Any, ...]) -> None:
    block, _ = build(op, args, {})
    (operation,) = CapturedBlock(block, 8).operations
    call = operation.call
    assert not halo_fits(call, 2, 4)
    rows = call.shapes[0][2]
    if rows % 4 == 0:
        row = table.row(call)
        assert row is not None
        kinds = [(Cut(2, rows // 4),), *[("R",)] * (len(call.shapes) - 1)]
        with pytest.raises(NotCarried):
            carry(row, Axes(("tp",), (4,)), kinds, [True] * len(kinds), [None])


@cache
def graph_of(name: str) -> Graph:
    model, batch = case(name)
    return capture(model, (), batch)


def cut(name: str, force: dict[str, int]) -> tuple[Graph, Candidate]:
    """A plan that cuts whatever can be cut along space."""
    graph = graph_of(name)
    pins = space_pins(graph, force["tp"])
    precision = Precision("float64", "float64")
    options = SearchOptions(batch=2, precision=precision, force={"pp": 1, **force}, pins=pins, registry=space_rules())
    found = search(graph, Cluster.parse(f"local:{force['tp'] * force['dp']}"), options)
    return found.graph, found.candidate


@pytest.mark.parametrize("force", [{"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", ["wave", *(pytest.param(name, marks=pytest.mark.slow) for name in IMAGES if name != "wave")])
def test_programs(name: str, force: dict[str, int]) -> None:
    graph, candidate = cut(name, force)
    text = program_text(graph, candidate)
    assert "_halo(" in text
    certificate = certify(text, graph, candidate)
    assert certificate.holds, certificate.line()
    wrong = certify(text.replace("dim=2", "dim=3", 1), graph, candidate) if "dim=2" in text else certificate
    assert wrong is certificate or not wrong.holds

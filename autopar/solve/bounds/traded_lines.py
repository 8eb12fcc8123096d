"""The least seconds of one call of a block beyond the fastest one, against the bytes that it saves: as `call_lines.saved_lines`,
with the placements that saved tensors have and the conversions that are recomputed.

Each line is the linear relaxation of the block's own program with saved bytes at a price: strategies, conversions, what is saved,
saved in parts and recomputed. So it holds for every plan of the block, and for sums over calls.
"""

from __future__ import annotations

from time import monotonic

from autopar.solve.bounds.block_relaxation import BlockRelaxation, value_storages
from autopar.solve.bounds.call_lines import ROUNDING, SavedLine
from autopar.solve.ilp.formulate import add_conversion_trees, formulate_flows
from autopar.solve.ilp.formulation import Expression, Formulation
from autopar.solve.ilp.linear_model import add
from autopar.solve.ilp.partition import partition_terms
from autopar.solve.ilp.recompute_offload import add_storages, small_size
from autopar.solve.ilp.solver import Status, solve
from autopar.solve.ilp.storages import boundary_values
from autopar.solve.problem.problem import BlockTable, Problem

_PRICES = 0.1, 1.0
"""The least and the largest: of all bytes that a call may save, in seconds of the fastest call."""

_HALVINGS = 2
"""The number of times that an edge of the frontier between them is halved."""

_MIN_GAIN = 1e-3
"""Relative: edges that a corner between them lowers by less are not looked at."""


def traded_lines(problem: Problem, block: BlockRelaxation, fastest_seconds: float, seconds_left: float) -> tuple[SavedLine, ...]:
    """Return lines ``seconds beyond the fastest call + price x bytes >= least``, with recomputation: of one micro-batch and one
    call, the convex frontier from below. Tensors that several calls read count for none of them. None where the software saves
    other tensors than those that operations read."""
    most = sum(each.copies / block.calls * each.bytes for name, each in block.tensors.items() if name not in block.shared)
    if problem.cluster.state_layout.regathered_operands or not fastest_seconds or not most:
        return ()
    frontier = _Frontier(problem, block, fastest_seconds, most, seconds_left)
    cheap, dear = map(frontier.solve, _PRICES)
    if cheap is not None and dear is not None:
        frontier.halve(cheap, dear, _HALVINGS)
    return tuple(frontier.lines)


class _Frontier:
    """The frontier of one call in seconds of the fastest call and shares of all that it may save, with its `lines`."""

    def __init__(
        self, problem: Problem, block: BlockRelaxation, fastest_seconds: float, most: float, seconds_left: float
    ) -> None:
        self.fastest_seconds, self.most, self.until = fastest_seconds, most, monotonic() + seconds_left
        table = problem.blocks[block.name]
        form = _formulation(problem, table)
        self.model, self.lines = form.model, list[SavedLine]()
        self.seconds = {column: each / fastest_seconds for column, each in _seconds(form, table).items()}
        self.bytes = {column: each / most for column, each in _saved(form, table, block).items()}

    def solve(self, price: float) -> tuple[float, float] | None:
        """Return the (seconds, bytes) that are least at this price, which make a line; None where time ends."""
        model = self.model
        model.cost = [0.0] * model.variables
        model.minimise(self.seconds)
        model.minimise({column: price * each for column, each in self.bytes.items()})
        outcome = solve(model, relaxed=True, time_limit_seconds=self.until - monotonic())
        if outcome.status is not Status.OPTIMAL:
            return None
        self.lines.append(SavedLine(1 / self.fastest_seconds, price / self.most, outcome.bound * (1 - ROUNDING) - 1))
        seconds, size = (sum(outcome.values[column] * each for column, each in of.items()) for of in (self.seconds, self.bytes))
        return seconds, size

    def halve(self, first: tuple[float, float], last: tuple[float, float], depth: int) -> None:
        """Lines between two corners."""
        longer, smaller = last[0] - first[0], first[1] - last[1]
        if not depth or min(longer, smaller) < _MIN_GAIN:
            return
        price = longer / smaller
        corner = self.solve(price)
        if corner is not None and corner[0] + price * corner[1] < (first[0] + price * first[1]) * (1 - _MIN_GAIN):
            self.halve(first, corner, depth - 1)
            self.halve(corner, last, depth - 1)


def _formulation(problem: Problem, table: BlockTable) -> Formulation:
    """Return the linear program of one block. Stages of the grid do not offload."""
    name = table.block.name
    form = formulate_flows(problem, (name,))
    add_conversion_trees(form, table)
    add_storages(form, name, table, decide=True)
    for offloaded in form.storages[name].offloaded.values():
        form.model.upper[offloaded] = 0.0
    return form


def _seconds(form: Formulation, table: BlockTable) -> Expression:
    """Forward, backward, and what is recomputed or gathered for it."""
    name, out = table.block.name, Expression()
    storages = form.storages[name]
    for node, strategies in table.strategies.items():
        for strategy, x in zip(strategies, form.x[name, node], strict=True):
            add(out, {x: strategy.seconds.forward + strategy.seconds.backward})
    for value, conversions in table.conversions.items():
        for edge, y in zip(conversions.edges, form.y[name, value], strict=True):
            add(out, {y: edge.seconds.forward + edge.seconds.backward})
    for seconds, column in storages.recompute:
        add(out, {column: seconds.forward})
    for seconds, column in storages.gathers:
        add(out, {column: seconds.forward + seconds.backward})
    return out


def _saved(form: Formulation, table: BlockTable, block: BlockRelaxation) -> Expression:
    """Return the bytes that are saved, a tensor between calls with the share that `block` counts for one call. Storages that the
    program takes for saved whatever they are count nothing."""
    storages, base = form.storages[block.name], value_storages(table.block)
    shares = {name: 0.0 if name in block.shared else each.copies / block.calls for name, each in block.tensors.items()}
    ends: dict[object, float] = {}
    for _, value, at, _ in boundary_values(form, table):
        storage = storages.same.find((value, at))
        ends[storage] = min(ends.get(storage, 1.0), shares.get(base.get(value, value), 0.0))
    small, out = small_size({storage: storages.sizes[storage] for storage in storages.needs}), Expression()
    for storage, column in storages.saved.items():
        size = storages.sizes[storage]
        share = min(ends.get(storage, 1.0), shares.get(base.get(storage[0], storage[0]), 0.0))
        if size > small and share:
            add(out, {column: size * share * form.byte_unit})
    add(out, {column: size * form.byte_unit for column, size in partition_terms(form, storages)[0].items()})
    return out

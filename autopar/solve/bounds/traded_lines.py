"""The least seconds of one call of a block beyond the fastest one, against the bytes that it saves: as `call_lines.saved_lines`,
with the placements that saved tensors have and the conversions that are recomputed.

Each line is the linear relaxation of the block's own program with saved bytes at a price: strategies, conversions, what is saved,
saved in parts and recomputed. So it holds for every plan of the block, and for sums over calls.
"""

from __future__ import annotations

from autopar.solve.bounds.block_relaxation import BlockRelaxation, value_storages
from autopar.solve.bounds.frontier import Frontier, SavedLine
from autopar.solve.ilp.formulate import add_conversion_trees, formulate_flows
from autopar.solve.ilp.formulation import Expression, Formulation
from autopar.solve.ilp.linear_model import add
from autopar.solve.ilp.recompute_offload import add_storages, small_size
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
    form = _formulation(problem, problem.blocks[block.name])
    seconds = {column: each / fastest_seconds for column, each in _seconds(form, block.name).items()}
    sizes = {column: each / most for column, each in _saved(form, problem.blocks[block.name], block).items()}
    frontier = Frontier(form.model, seconds, sizes, fastest_seconds, most, 1.0, seconds_left)
    cheap, dear = (frontier.solve(1.0, price) for price in _PRICES)
    frontier.halve(cheap, dear, _HALVINGS, _MIN_GAIN)
    return tuple(frontier.lines)


def _formulation(problem: Problem, table: BlockTable) -> Formulation:
    """Return the linear program of one block. Stages of the grid do not offload."""
    name = table.block.name
    form = formulate_flows(problem, (name,))
    add_conversion_trees(form, table)
    add_storages(form, name, table, decide=True, offloads=False)
    return form


def _seconds(form: Formulation, name: str) -> Expression:
    """The seconds of forward and backward, with what is recomputed or gathered for it."""
    out = Expression()
    for column, seconds, _ in form.priced_columns(name):
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
    add(out, storages.held_bytes(form.problem.mesh.sizes)[0], form.byte_unit)
    return out

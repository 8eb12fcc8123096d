"""The least seconds and bytes of one call of a block, as half-planes: seconds of its forward and the two parts of its backward
against each other, and seconds of recomputation against bytes that are saved.

Each half-plane is a linear program of one block with other weights, so it holds for every plan, and for sums over calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.compute.overlapped_collectives import WEIGHT_GRADIENT_SHARE, weight_gradient_nodes
from autopar.operations.losses import runs_in_chunks
from autopar.solve.bounds.block_relaxation import BlockRelaxation, add_block, value_storages
from autopar.solve.bounds.flow_bound import FlowRelaxation
from autopar.solve.bounds.frontier import ROUNDING, Frontier, SavedLine
from autopar.solve.ilp.formulate import add_conversion_trees, formulate_flows
from autopar.solve.ilp.formulation import Expression, Formulation
from autopar.solve.ilp.linear_model import LinearModel, Status, add
from autopar.solve.ilp.recompute_offload import add_storages, small_size
from autopar.solve.ilp.solver import solve
from autopar.solve.ilp.storages import boundary_values
from autopar.solve.problem.problem import BlockTable, Problem

_INPUTS_ALONE = (0.0, 1.0, 0.0)
"""Only schedules that take the backward apart have to do with it."""

_DIRECTIONS = ((1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 1.0), _INPUTS_ALONE)

_HALVINGS = 3
"""The number of times that an edge of the frontier of saved bytes is halved."""

_MIN_GAIN = 1e-4
"""A corner that lowers an edge of the frontier by less, relative, is the last one there."""

_TRADED_PRICES = 0.1, 1.0
"""The least and the largest of `traded_lines`: of all bytes that a call may save, in seconds of the fastest call."""

_TRADED_HALVINGS = 2
_TRADED_MIN_GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class DurationLine:
    """A half-plane of durations, ``forward x F + inputs x I + weights x W >= least_seconds``, of one micro-batch through one
    call; I and W are the parts of the backward that a schedule may take apart."""

    forward: float
    inputs: float
    weights: float
    least_seconds: float


@dataclass(frozen=True, slots=True)
class CallLines:
    """The half-planes of one call for one micro-batch, by linear programs of the block. `working_bytes`: of a backward, beside
    what is saved. `traded`: seconds beyond those of the first line, with recomputation, against bytes that are saved, of the
    calls that matter; None where they were not looked for."""

    durations: tuple[DurationLine, ...]
    saved: tuple[SavedLine, ...]
    working_bytes: float = 0.0
    traded: tuple[SavedLine, ...] | None = ()


def duration_lines(problem: Problem, name: str, seconds_left: float, minor: bool = False) -> tuple[DurationLine, ...]:
    """Return the half-planes of one block's durations; the first one has all weights 1. The others of a `minor` block are those
    of its operations alone, and so is the last one of all."""
    relaxation = FlowRelaxation(problem, (name,))
    table, form = problem.blocks[name], relaxation.form
    delayed = weight_gradient_nodes(table.block)
    parts: dict[int, list[float]] = {}

    def spend(column: int, *seconds: float) -> None:
        """Add seconds of the forward and of both parts of the backward."""
        spent = parts.setdefault(column, [0.0, 0.0, 0.0])
        for place, each in enumerate(seconds):
            spent[place] += each

    in_chunks = {
        x
        for node in delayed
        for strategy, x in zip(table.strategies[node], form.x[name, node], strict=True)
        if runs_in_chunks(strategy.plan.function)
    }
    for column, each, node in form.priced_columns(name):
        weights = WEIGHT_GRADIENT_SHARE * each.backward if node in delayed and column not in in_chunks else 0.0
        spend(column, each.forward, each.backward - weights, weights)
    whole = table.least_seconds
    out: list[DurationLine] = []
    for direction in _DIRECTIONS:
        if out and (minor or direction == _INPUTS_ALONE):
            out.append(DurationLine(*direction, _operations_seconds(problem, name, direction)))
            continue
        seconds = {column: sum(w * each for w, each in zip(direction, three, strict=True)) for column, three in parts.items()}
        out.append(DurationLine(*direction, _least(form.model, seconds, whole or 1e-9, seconds_left)))
    return tuple(out)


def _operations_seconds(problem: Problem, name: str, direction: tuple[float, float, float]) -> float:
    """Every operation by its fastest strategy in this direction, without conversions."""
    table, (forward, inputs, weights) = problem.blocks[name], direction
    delayed = weight_gradient_nodes(table.block)
    out = 0.0
    for node, strategies in table.strategies.items():
        split = inputs + WEIGHT_GRADIENT_SHARE * (weights - inputs) if node in delayed else inputs
        out += min(
            forward * each.seconds.forward + (inputs if runs_in_chunks(each.plan.function) else split) * each.seconds.backward
            for each in strategies
        )
    return out


def _least(model: LinearModel, seconds: Mapping[int, float], unit: float, seconds_left: float) -> float:
    """The least of the relaxation, 0 where time ends; in a unit in which the program's numbers are about one."""
    model.cost = [0.0] * model.variables
    model.minimise({column: each / unit for column, each in seconds.items()})
    outcome = solve(model, relaxed=True, time_limit_seconds=seconds_left)
    return max(0.0, outcome.bound * unit * (1 - ROUNDING)) if outcome.status is Status.OPTIMAL else 0.0


def saved_lines(block: BlockRelaxation) -> tuple[SavedLine, ...]:
    """The convex frontier of one call, from below. Tensors that several calls read count for none of them."""
    frontier = _recomputation_frontier(block)
    saving_all, saving_least = frontier.solve(1.0, ROUNDING), frontier.solve(ROUNDING, 1.0)
    if saving_all is None or saving_least is None:
        return ()
    frontier.halve(saving_all, saving_least, _HALVINGS, _MIN_GAIN)
    return tuple(frontier.lines)


def _recomputation_frontier(block: BlockRelaxation) -> Frontier:
    """Return the frontier of recomputed seconds and saved bytes, without placements."""
    model, own = LinearModel(), {name: each for name, each in block.tensors.items() if name not in block.shared}
    most_seconds = sum(seconds for seconds, _ in block.recompute.values()) or 1.0
    most_bytes = sum(each.bytes for each in own.values()) or 1.0
    saved, _, r = add_block(model, block)
    seconds = {r[name]: each / most_seconds for name, (each, _) in block.recompute.items()}
    sizes = {saved[name]: each.copies / block.calls * each.bytes / most_bytes for name, each in own.items()}
    return Frontier(model, seconds, sizes, most_seconds, most_bytes)


def traded_lines(problem: Problem, block: BlockRelaxation, fastest_seconds: float, seconds_left: float) -> tuple[SavedLine, ...]:
    """Return lines ``seconds beyond the fastest call + price x bytes >= least``, with recomputation: of one micro-batch and one
    call, the convex frontier from below. Tensors that several calls read count for none of them. None where the software saves
    other tensors than those that operations read.

    Unlike `saved_lines` with the placements that saved tensors have and the conversions that are recomputed: each line is the
    linear relaxation of the block's own program (strategies, conversions, what is saved, saved in parts and recomputed) with
    saved bytes at a price.
    """
    most = sum(each.copies / block.calls * each.bytes for name, each in block.tensors.items() if name not in block.shared)
    if problem.cluster.state_layout.regathered_operands or not fastest_seconds or not most:
        return ()
    form = _traded_program(problem, problem.blocks[block.name])
    seconds = {column: each / fastest_seconds for column, each in _traded_seconds(form, block.name).items()}
    sizes = {column: each / most for column, each in _traded_bytes(form, problem.blocks[block.name], block).items()}
    frontier = Frontier(form.model, seconds, sizes, fastest_seconds, most, 1.0, seconds_left)
    cheap, dear = (frontier.solve(1.0, price) for price in _TRADED_PRICES)
    frontier.halve(cheap, dear, _TRADED_HALVINGS, _TRADED_MIN_GAIN)
    return tuple(frontier.lines)


def _traded_program(problem: Problem, table: BlockTable) -> Formulation:
    """Return the linear program of one block. Stages of the grid do not offload."""
    name = table.block.name
    form = formulate_flows(problem, (name,))
    add_conversion_trees(form, table)
    add_storages(form, name, table, decide=True, offloads=False)
    return form


def _traded_seconds(form: Formulation, name: str) -> Expression:
    """The seconds of forward and backward, with what is recomputed or gathered for it."""
    out = Expression()
    for column, seconds, _ in form.priced_columns(name):
        add(out, {column: seconds.forward + seconds.backward})
    return out


def _traded_bytes(form: Formulation, table: BlockTable, block: BlockRelaxation) -> Expression:
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

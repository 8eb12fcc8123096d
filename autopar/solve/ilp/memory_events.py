"""The memory constraint: the memory events of a step (`cost_models.step.memory_events`) as linear rows, each below the capacity.

Events that another one dominates are left out. Along a run of equal calls the sum is linear, so its ends suffice; that keeps the
number of rows independent of depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.cost_models.hardware.allocator import communicator_count, fragmentation, tensor_budget_bytes
from autopar.cost_models.tensors.sizes import user_held_bytes
from autopar.solve.ilp.block_memory import BlockMemoryTerms, add_block_memory
from autopar.solve.ilp.formulation import Expression, Formulation, StateTerms
from autopar.solve.ilp.linear_model import INFINITY, Terms, add, total
from autopar.solve.ilp.recompute_offload import add_storages
from autopar.solve.problem.boundary import BlockBoundaries, Slot


def add_memory_constraint(form: Formulation, margin_bytes: float = 0.0, minimise_excess: bool = False) -> None:
    """Add the rows of every memory event <= budget - margin: what tensors reserve. With `minimise_excess` the objective becomes
    by how much that fails instead."""
    problem = form.problem
    device = problem.cluster.device
    share = 1 / (1 + fragmentation(device))
    budget = tensor_budget_bytes(device, communicator_count(problem.mesh, problem.zero_group))
    capacity = (budget - margin_bytes) / form.byte_unit
    excess = form.model.variable()
    if minimise_excess:
        form.model.cost = [0.0] * form.model.variables
        form.model.cost[excess] = 1.0
    else:
        form.model.upper[excess] = 0.0
    memory = BlockMemoryTerms()
    for name, table in form.problem.blocks.items():
        if name not in form.storages:
            add_storages(form, name, table, decide=False)
        add_block_memory(form, name, table, memory)
    for terms, constant in _memory_events(form, memory):
        # share * state + saved + gathered + working set + gradients <= share * (budget + excess), share = 1 / (1 + fragmentation)
        form.model.row(total((1.0, terms), (-share, {excess: 1.0})), -INFINITY, share * capacity - constant)
    _add_host_constraint(form)


def _add_host_constraint(form: Formulation) -> None:
    host = form.problem.cluster.host
    offloaded: Expression = {}
    for name, storages in form.storages.items():
        add(offloaded, storages.offloaded_bytes(), form.problem.graph.count(name))
    if host is not None and offloaded:
        # sum_calls sum_t O[t] * bytes <= host memory of one device
        form.model.row(offloaded, -INFINITY, host.capacity_bytes / form.byte_unit)


def _memory_events(form: Formulation, memory: BlockMemoryTerms) -> Iterator[tuple[Expression, float]]:
    """Yield (expression, constant) of each event that no other one dominates, in units of bytes; what lives from step to step
    counts as its share (it is not fragmented). Left out, since they are rarely the largest: weights that are gathered for a
    backward, and the sum of a shared weight's gradients."""
    boundary, states, byte = form.problem.boundary, form.states, form.byte_unit
    device = form.problem.cluster.device
    counts = {key: float(boundary.kind_counts[key]) if key is not None else 1.0 for key in states}

    def every(terms_of: Callable[[StateTerms], Terms]) -> Expression:
        return total(*((counts[key], terms_of(state)) for key, state in states.items()))

    parameters = every(lambda state: state.parameters)
    inputs = user_held_bytes(form.problem.graph, form.problem.micro_batches * form.problem.batch, form.problem.mesh)
    share = 1 / (1 + fragmentation(device))
    constant = share * (inputs / byte + sum(counts[key] * state.buffer_bytes for key, state in states.items()))
    fixed = total((share, parameters), (share, every(lambda state: state.optimizer)))
    # optimizer step: parameters + optimizer + gradients + temporaries of foreach
    gradients = every(lambda state: state.gradients)
    foreach = device.kind != "cpu" and not form.problem.precision.offload_optimizer  # by parts: the evaluator counts them
    yield total((1.0, fixed), (1.0, gradients), (float(foreach), parameters)), constant
    gathered = every(lambda state: state.gathered_persistent)
    base = total((1.0, fixed), (1.0, gathered), (1.0, every(lambda state: state.persistent_gradients)))
    if form.problem.micro_batches > 1:
        add(base, every(lambda state: state.accumulated))
    root = states.get(None)
    if root is not None:
        add(base, root.gathered_transient)
    base = {form.model.define(base): 1.0}
    last = _last_savers(boundary, memory)
    for index, backward in _undominated_calls(boundary):
        before, until = (_saved_until(form, memory, last, at) for at in (index - 1, index))
        rows = _backward_events(form, memory, index, before, until) if backward else [_forward_event(form, memory, index, before)]
        yield from ((total((1.0, base), (1.0, row)), constant) for row in rows)


def _forward_event(form: Formulation, memory: BlockMemoryTerms, index: int, before: Terms) -> Expression:
    """Return saved(calls < i) + forward[i] + weights, and (but from an earlier micro-batch) the buffer of their gather."""
    kind = form.problem.boundary.call_kinds[index]
    state = form.states[kind]
    row = total((1.0, before), (1.0, memory.forward[kind.block]), (2.0, state.gathered_transient))
    if form.problem.micro_batches == 1:
        add(row, state.gathered_persistent)
    return row


def _backward_events(
    form: Formulation, memory: BlockMemoryTerms, index: int, before: Terms, until: Terms
) -> Iterator[Expression]:
    """Yield what is there while a call's backward runs, and when it ends (once with the buffer of its own reduction, once with
    that of the next call)."""
    kinds, states = form.problem.boundary.call_kinds, form.states
    kind, root, several = kinds[index], states.get(None), form.problem.micro_batches > 1
    state, following = states[kind], states[kinds[index + 1]] if index + 1 < len(kinds) else None
    others: Expression = {}
    if index:
        add(others, states[kinds[index - 1]].gathered_transient)
    if not several:
        for each in dict.fromkeys(kinds[index + 1 :]):
            add(others, states[each].gradients, kinds[index + 1 :].count(each))
            add(others, states[each].persistent_gradients, -float(kinds[index + 1 :].count(each)))
    shared = _shared_gradients(root)
    # saved(calls <= i) + backward[i] + weights[i, i - 1] + reduce buffer[i + 1] + gradients(calls > i)
    row = total((1.0, others), (1.0, until), (1.0, memory.backward[kind.block]), (1.0, state.gathered_transient))
    if following is not None:
        add(row, following.overlapped_reduce_buffer)
        add(row, shared)
    yield row
    # saved(calls <= i) + gradients of the inputs + its weights and the buffer of their gather
    row = total((1.0, until), (1.0, memory.input_gradients[kind.block]), (2.0, state.gathered_transient))
    if not several:
        add(row, others)
        add(row, states[kinds[index - 1]].gathered_transient if index else {}, -1.0)
    if following is not None:
        add(row, following.overlapped_reduce_buffer)
        add(row, shared)
    yield row
    if not index and root is not None and following is not None:
        # the last gradient of a shared weight is added to the sum of the others, which allocates a third
        inputs = memory.input_gradients[kind.block]
        row = total((1.0, others), (1.0, until), (1.0, inputs), (3.0, shared), (1.0, state.gathered_transient))
        yield total((1.0, row), (1.0, following.overlapped_reduce_buffer))
    # saved(calls < i) + gradients of the inputs, of the weights unsharded, and (where they are reduced in place) those that stay
    inputs = memory.input_gradients[kind.block]
    row = total((1.0, others), (1.0, before), (1.0, inputs), (1.0, state.unsharded_gradients), (1.0, shared))
    add(row, state.gradients_in_place)
    yield total((1.0, row), (1.0, state.reduce_buffer))
    if following is not None and kinds[index + 1] != kind:
        yield total((1.0, row), (1.0, following.overlapped_reduce_buffer))


def _shared_gradients(root: StateTerms | None) -> Expression:
    """Gradients of parameters that calls share, before they are reduced."""
    return total((1.0, root.unsharded_gradients), (1.0, root.gradients_in_place)) if root is not None else {}


def _undominated_calls(boundary: BlockBoundaries) -> list[tuple[int, bool]]:
    """Return (call, backward): forward the last call of each neighbourhood, backward the first and the last."""
    kinds = [None, *boundary.call_kinds, None]
    forward: dict[object, int] = {}
    first: dict[object, int] = {}
    final: dict[object, int] = {}
    for index in range(len(boundary.call_kinds)):
        forward[kinds[index + 1], kinds[index + 2]] = index
        around = tuple(kinds[index : index + 3])
        first.setdefault(around, index)
        final[around] = index
    out = [(index, False) for index in forward.values()]
    return out + [(index, True) for index in sorted({*first.values(), *final.values()})]


def _boundary_slots(boundary: BlockBoundaries, memory: BlockMemoryTerms) -> Iterator[tuple[int, str, Slot]]:
    """Yield (call, graph value, slot) of every tensor between calls that the call may save."""
    slots = {each.slot for each in memory.boundary_saved}
    for index, call in enumerate(boundary.graph.calls):
        for side, names in (("in", call.inputs), ("out", call.outputs)):
            for number, name in enumerate(names):
                slot = Slot(call.block, side, number)  # type: ignore[arg-type]
                if slot in slots:
                    yield index, name, slot


def _last_savers(boundary: BlockBoundaries, memory: BlockMemoryTerms) -> dict[str, int]:
    """Graph value -> the last call that may save it."""
    return {name: index for index, name, _ in _boundary_slots(boundary, memory)}


def _saved_until(form: Formulation, memory: BlockMemoryTerms, last: dict[str, int], index: int) -> Expression:
    """Return the bytes that the calls up to `index` save. A tensor between calls counts once, by its reader that says most."""
    boundary = form.problem.boundary
    done = [kind.block for kind in boundary.call_kinds[: index + 1]]
    out: Expression = {}
    for name in dict.fromkeys(done):
        add(out, memory.internal_saved[name], done.count(name))
    for slots, count in _saver_sets(boundary, memory, last, index).items():
        add(out, {_boundary_bytes(form, memory, slots): 1.0}, count)
    return out


def _saver_sets(
    boundary: BlockBoundaries, memory: BlockMemoryTerms, last: dict[str, int], index: int
) -> dict[frozenset[Slot], int]:
    """Return how many graph values are saved by then, by the slots that may save them."""
    savers: dict[str, set[Slot]] = {}
    for _, name, slot in _boundary_slots(boundary, memory):
        if last[name] <= index:
            savers.setdefault(name, set()).add(slot)
    out: dict[frozenset[Slot], int] = {}
    for slots in savers.values():
        out[frozenset(slots)] = out.get(frozenset(slots), 0) + 1
    return out


def _boundary_bytes(form: Formulation, memory: BlockMemoryTerms, slots: frozenset[Slot]) -> int:
    """Return G[slots]: bytes of a tensor between calls that these slots may save."""
    variable = form.boundary_saved.get(slots)
    if variable is None:
        variable = form.boundary_saved[slots] = form.model.variable()
        for slot in sorted(slots):
            # G[slots] >= sum_t S[t] * bytes at one slot, for each slot
            form.model.at_least(variable, {each.saved: each.size for each in memory.boundary_saved if each.slot == slot})
    return variable

"""The memory constraint: the events of a step (`cost_models.events.memory_terms`) as linear rows, each below the capacity.

Events that another one dominates are left out. Along a run of equal calls the sum is linear, so its ends suffice; that keeps the
number of rows independent of depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.cost_models.events.memory_terms import CALL_FIELDS, EventTerms, Of, Term, step_events
from autopar.cost_models.hardware.allocator import communicator_count, fragmentation, tensor_budget_bytes
from autopar.solve.ilp.block_memory import BlockMemoryTerms, add_block_memory
from autopar.solve.ilp.formulation import Expression, Formulation
from autopar.solve.ilp.linear_model import INFINITY, Terms, add, total
from autopar.solve.ilp.recompute_offload import add_storages
from autopar.solve.problem.boundary import BlockBoundaries, CallKind, Slot


def add_memory_constraint(form: Formulation, margin_bytes: float = 0.0, minimise_excess: bool = False) -> None:
    """Add the rows of every memory event <= budget - margin: what tensors reserve. `form.excess`: by how much they may fail (not
    at all, until its upper bound is raised), `form.uneven_excess` the same of events inside of equal calls. With
    `minimise_excess` the objective becomes the excess instead."""
    problem = form.problem
    device = problem.cluster.device
    share = 1 / (1 + fragmentation(device))
    budget = tensor_budget_bytes(device, communicator_count(problem.mesh, problem.zero_group))
    capacity = (budget - margin_bytes) / form.byte_unit
    form.excess, form.uneven_excess = form.model.variable(INFINITY if minimise_excess else 0.0), form.model.variable(0.0)
    if minimise_excess:
        form.model.cost = [0.0] * form.model.variables
        form.model.cost[form.excess] = 1.0
    memory = BlockMemoryTerms()
    for name, table in form.problem.blocks.items():
        if name not in form.storages:
            add_storages(form, name, table, decide=False)
        add_block_memory(form, name, table, memory)
    for event in _memory_events(form, memory):
        # share * state + saved + gathered + working set + gradients <= share * (budget + excess), share = 1 / (1 + fragmentation)
        beyond = {form.excess: 1.0} | ({form.uneven_excess: 1.0} if event.among_equals else {})
        form.model.row(total((1.0, event.terms), (-share, beyond)), -INFINITY, share * capacity - event.constant)
    _add_host_constraint(form)


def _add_host_constraint(form: Formulation) -> None:
    host = form.problem.cluster.host
    offloaded: Expression = {}
    for name, storages in form.storages.items():
        add(offloaded, storages.offloaded_bytes(), form.problem.graph.count(name))
    if host is not None and offloaded:
        # sum_calls sum_t O[t] * bytes <= host memory of one device
        form.model.row(offloaded, -INFINITY, host.capacity_bytes / form.byte_unit)


@dataclass(frozen=True, slots=True)
class _Event:
    """An event in units of bytes. `among_equals`: it is inside of one of several calls of a block, and holds for the average of
    their plans only where these are equal."""

    terms: Expression
    constant: float
    among_equals: bool = False


def _memory_events(form: Formulation, memory: BlockMemoryTerms) -> Iterator[_Event]:
    """Yield each event that no other one dominates; what lives from step to step counts as its share (it is not fragmented)."""
    boundary, states, byte, problem = form.problem.boundary, form.states, form.byte_unit, form.problem
    device, calls = problem.cluster.device, _CallTerms(form, memory)
    share = 1 / (1 + fragmentation(device))
    constant = share * (problem.batch_bytes / byte + sum(calls.counts[key] * state.buffer_bytes for key, state in states.items()))
    parameters = calls.every("parameters")
    fixed = total((share, parameters), (share, calls.every("optimizer")))
    # optimizer step: parameters + optimizer + gradients + temporaries of foreach
    foreach = device.kind != "cpu" and not problem.precision.offload_optimizer  # by parts: the evaluator counts them
    yield _Event(total((1.0, fixed), (1.0, calls.every("gradients")), (float(foreach), parameters)), constant)
    step = step_events(problem.micro_batches > 1)
    base = {form.model.define(total((1.0, fixed), (1.0, calls.sum(step.base, 0)))): 1.0}
    shared = None in states and len(boundary.call_kinds) > 1
    for index, backward in _undominated_calls(boundary):
        equals = problem.graph.count(boundary.call_kinds[index].block) > 1
        for event in step.backward if backward else (step.forward,):
            if not event.at_shared_sum or (shared and not index):
                yield from (_Event(total((1.0, base), (1.0, row)), constant, equals) for row in calls.rows(event, index))
    yield from (_Event(total((1.0, fixed), (1.0, row)), constant) for row in calls.rows(step.end, 0))
    # what all calls save is there together at the end of the last forward, whatever plans they have
    yield _Event(total((1.0, base), (1.0, calls.saved())), constant)


class _CallTerms:
    """The events of a step (`cost_models.events`) as expressions, in units of bytes. `counts`: calls of each kind."""

    def __init__(self, form: Formulation, memory: BlockMemoryTerms) -> None:
        self.form, self.memory, self.states = form, memory, form.states
        self.kinds = form.problem.boundary.call_kinds
        self.counts = {key: form.problem.boundary.kind_counts[key] if key is not None else 1 for key in form.states}
        self.last_savers = _last_savers(form.problem.boundary, memory)

    def every(self, field: str) -> Expression:
        """Return the sum of a field of all state."""
        return total(*((float(self.counts[key]), state[field]) for key, state in self.states.items()))

    def saved(self) -> Expression:
        """Return what all calls save."""
        return _saved_until(self.form, self.memory, self.last_savers, len(self.kinds) - 1)

    def rows(self, event: EventTerms, index: int) -> Iterator[Expression]:
        """Yield what is there at an event of a call, with each of the terms of which the largest counts."""
        row = self.sum(event.terms, index)
        if not event.largest:
            yield row
        for number, term in enumerate(event.largest):
            following = self.kinds[index + 1 : index + 2]
            # a buffer that outlives the call is no larger than one of an equal call that does not
            if number == 0 or term.of is not Of.NEXT or following not in ([], [self.kinds[index]]):
                yield total((1.0, row), (1.0, self._terms(term, index)))

    def sum(self, terms: Iterable[Term], index: int) -> Expression:
        """Return the sum of terms at a call."""
        return total(*((each.weight, self._terms(each, index)) for each in terms))

    def _terms(self, term: Term, index: int) -> Terms:
        field, of, kinds = term.field, term.of, self.kinds
        if field == "earlier":
            return {}  # there is no pipeline here
        if field == "latest":
            return _saved_until(self.form, self.memory, self.last_savers, index - (of is Of.BEFORE))
        if field in CALL_FIELDS:
            of_block: Mapping[str, Terms] = getattr(self.memory, field)
            return of_block[kinds[index].block]
        if of in (Of.ROOT, Of.ROOT_BUT_LAST):
            there = None in self.states and (of is Of.ROOT or index + 1 < len(kinds))
            counted = Counter[CallKind | None]([None] * there)
        elif of is Of.ALL:
            counted = Counter(self.form.problem.boundary.kind_counts)
        else:
            counted = Counter(kinds[_CALLS[of](index)])
        return total(*((float(count), self.states[key][field]) for key, count in counted.items()))


_CALLS: Mapping[Of, Callable[[int], slice]] = {
    Of.HERE: lambda index: slice(index, index + 1),
    Of.PREVIOUS: lambda index: slice(max(0, index - 1), index),
    Of.NEXT: lambda index: slice(index + 1, index + 2),
    Of.AFTER: lambda index: slice(index + 1, None),
}


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

"""Time in the ILP: the seconds of one call of each block, and their sum over a step, in which the communication of state
(all-gathers and reductions on the data axis) and offloading overlap the calls."""

from __future__ import annotations

from collections.abc import Callable

from autopar.solve.ilp.formulation import Expression, Formulation, StateTerms
from autopar.solve.ilp.linear_model import Terms, add, total
from autopar.solve.problem.problem import BlockTable, StreamSeconds


def add_block_seconds(form: Formulation, name: str, table: BlockTable) -> None:
    """Add seconds = sum_s x (compute + collectives inside) + sum_e y (conversion) + what is recomputed; and the part of it on
    links of the data axis."""
    forward: Expression = {}
    backward: Expression = {}
    forward_shared: Expression = {}
    backward_shared: Expression = {}

    def spend(variable: int, seconds: StreamSeconds) -> None:
        for terms, value in (
            (forward, seconds.forward),
            (backward, seconds.backward),
            (forward_shared, seconds.forward_shared),
            (backward_shared, seconds.backward_shared),
        ):
            if value:
                add(terms, {variable: value / form.second_unit})

    for column, seconds, _ in form.priced_columns(name):
        spend(column, seconds)
    if name in form.storages:
        for column, seconds in form.storages[name].priced_columns():
            spend(column, seconds)
    several = form.problem.mesh.sizes[0] > 1
    to_host, from_host = _offload_seconds(form, name, table)
    form.forward[name] = (
        _overlapped_offload(form, forward, to_host),
        {form.model.define(forward_shared): 1.0} if several and forward_shared else {},
    )
    form.backward[name] = (
        _overlapped_offload(form, backward, from_host),
        {form.model.define(backward_shared): 1.0} if several and backward_shared else {},
    )


def _offload_seconds(form: Formulation, name: str, table: BlockTable) -> tuple[Terms, Terms]:
    """Seconds of the host link during one call: tensors offloaded in the forward, and copied back in the backward."""
    offloaded = form.storages[name].offloaded_bytes() if name in form.storages else {}
    to_host, from_host = table.costs.offload_seconds(form.byte_unit) if offloaded else (0.0, 0.0)
    return total((to_host / form.second_unit, offloaded)), total((from_host / form.second_unit, offloaded))


def _overlapped_offload(form: Formulation, main: Terms, offload: Terms) -> int:
    """The column of a call's seconds, offloading overlapped."""
    if not offload:
        return form.model.define(main)
    longer = form.model.variable()
    # t >= main stream
    form.model.at_least(longer, main)
    # t >= copies to or from host memory
    form.model.at_least(longer, offload)
    return longer


def add_step_seconds(form: Formulation) -> None:
    """Add the objective: step = first gather + first forward + (m - 1) (backward + later forward) + last backward + last
    reduction + optimizer, for m micro-batches. All later forwards are equal, and all backwards but the last (see
    `micro_batch_clock`)."""
    model, boundary, states, micro_batches = form.model, form.problem.boundary, form.states, form.problem.micro_batches
    first, root = states[boundary.call_kinds[0]], states.get(None)
    model.minimise(first.gather_forward)
    model.minimise(first.reduce_last)
    if root is not None:
        model.minimise(root.gather_forward)
        model.minimise(root.reduce_last)
    model.minimise(_forward_pass(form, lambda state: state.gather_forward)[0])
    model.minimise(_backward_pass(form, lambda state: state.reduce_last))
    if micro_batches > 1:
        _add_other_micro_batches(form, first, root)
    for key, state in states.items():
        if state.optimizer_streaming:
            # optimizer = streaming of the local shard + launches (of a CPU)
            count = float(boundary.kind_counts[key] if key is not None else 1)
            model.minimise(total((count, state.optimizer_streaming), (count, state.optimizer_launches)))


def _add_other_micro_batches(form: Formulation, first: StateTerms, root: StateTerms | None) -> None:
    """Add (m - 1) (backward + later forward). The last reductions of a micro-batch overlap the forward of the next one."""
    model, overlap = form.model, form.problem.cluster.overlap
    others = float(form.problem.micro_batches - 1)
    calls, transfers = _forward_pass(form, lambda state: state.gather_backward)
    forward = model.variable()
    last_reductions = first.reduce_each if root is None else total((1.0, first.reduce_each), (1.0, root.reduce_each))
    overlapped = last_reductions if overlap.gradient_reduction else {}
    # t >= sum of the calls, slowed by the last reductions of the micro-batch before
    model.at_least(forward, total((1.0, calls), (overlap.contention, overlapped)))
    # t >= all transfers: gathers, exposed collectives on their link, and those reductions
    model.at_least(forward, total((1.0, transfers), (1.0, overlapped)))
    model.minimise({forward: others})
    if not overlap.gradient_reduction:
        model.minimise(total((others, last_reductions)))
    model.minimise(total((others, _backward_pass(form, lambda state: state.reduce_each))))


def _forward_pass(form: Formulation, gather: Callable[[StateTerms], Terms]) -> tuple[Terms, Terms]:
    """Return a forward, in which each call overlaps the gather of the next one: its seconds, and those of all transfers."""
    parts: list[tuple[float, Terms]] = []
    transfers: list[tuple[float, Terms]] = []
    prefetched = form.problem.cluster.overlap.parameter_gather
    for (kind, following), count in form.problem.boundary.forward_neighbours.items():
        main, shared = form.forward[kind.block]
        gathered = gather(form.states[following]) if following is not None else {}
        overlapped = gathered if prefetched else {}
        parts.append((float(count), _call_seconds(form, {main: 1.0}, overlapped, shared)))
        parts.append((0.0 if prefetched else float(count), gathered))
        transfers += [(float(count), gathered), (float(count), shared)]
    return total(*parts), total(*transfers)


def _backward_pass(form: Formulation, reduce: Callable[[StateTerms], Terms]) -> Terms:
    """Return one backward, in which each call overlaps the reduction of the next call and the gather of the previous one."""
    parts: list[tuple[float, Terms]] = []
    overlap = form.problem.cluster.overlap
    for (following, kind, previous), count in form.problem.boundary.backward_neighbours.items():
        main, shared = form.backward[kind.block]
        reduced = reduce(form.states[following]) if following is not None else {}
        gathered = form.states[previous].gather_backward if previous is not None else {}
        overlapped = total((float(overlap.gradient_reduction), reduced), (float(overlap.parameter_gather), gathered))
        exposed = total((float(not overlap.gradient_reduction), reduced), (float(not overlap.parameter_gather), gathered))
        parts.append((float(count), exposed))
        # gradients of shared parameters are complete when the first call's backward ends
        shared_too = previous is None and None in form.states
        accumulated = total((1.0, form.states[kind].accumulate), (1.0, form.states[None].accumulate if shared_too else {}))
        busy = total((1.0, {main: 1.0}), (1.0, accumulated))
        parts.append((float(count), _call_seconds(form, busy, overlapped, shared)))
    return total(*parts)


def _call_seconds(form: Formulation, main: Terms, overlapped: Terms, shared: Terms) -> Terms:
    """The seconds of one call, with the communication that it overlaps."""
    if not any(overlapped.values()):
        return main
    t = form.model.variable()
    # t >= main stream, slowed by the communication that it overlaps
    form.model.at_least(t, total((1.0, main), (form.problem.cluster.overlap.contention, overlapped)))
    # t >= overlapped communication + what is exposed on the same physical link
    form.model.at_least(t, total((1.0, overlapped), (1.0, shared)))
    return {t: 1.0}

"""Time in the ILP: the seconds of one call of each block, and their sum over a step, in which the communication of state
(all-gathers and reductions on the data axis) and offloading overlap the calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from autopar.cost_models.events.memory_terms import Of
from autopar.cost_models.events.state_transfers import Edge, PassTransfers, step_transfers
from autopar.solve.ilp.formulation import Expression, Formulation
from autopar.solve.ilp.linear_model import Terms, add, total
from autopar.solve.problem.boundary import CallKind
from autopar.solve.problem.problem import BlockTable, StreamSeconds


def add_block_seconds(form: Formulation, name: str, table: BlockTable) -> None:
    """Add seconds = sum_s x (compute + collectives inside) + sum_e y (conversion) + what is recomputed, beside which tensors are
    copied to the host in the forward and back in the backward; and the part of it on links of the data axis."""
    streams: dict[str, Expression] = {each.name: {} for each in fields(StreamSeconds)}
    for column, seconds, _ in form.priced_columns(name):
        for stream, terms in streams.items():
            if value := getattr(seconds, stream):
                add(terms, {column: value / form.second_unit})
    several = form.problem.mesh.sizes[0] > 1
    offloaded = form.storages[name].offloaded_bytes() if name in form.storages else {}
    copies = table.costs.offload_seconds(form.byte_unit) if offloaded else (0.0, 0.0)
    for columns, stream, copy in ((form.forward, "forward", copies[0]), (form.backward, "backward", copies[1])):
        shared = streams[f"{stream}_shared"]
        columns[name] = (
            _overlapped_offload(form, streams[stream], total((copy / form.second_unit, offloaded))),
            {form.model.define(shared): 1.0} if several and shared else {},
        )


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
    """Add the objective: step = first forward + (m - 1) (backward + later forward) + last backward + optimizer, for m
    micro-batches, with the transfers of state in each pass (`cost_models.events.state_transfers`)."""
    model, boundary, overlap = form.model, form.problem.boundary, form.problem.cluster.overlap
    order, others = step_transfers(overlap), float(form.problem.micro_batches - 1)
    model.minimise(_play(form, order.first_forward).seconds)
    model.minimise(_play(form, order.last_backward).seconds)
    if others:
        later, backward = _play(form, order.forward), _play(form, order.backward)
        forward = model.variable()
        # t >= sum of the calls, slowed by the reductions that the backward before has left over
        model.at_least(forward, total((1.0, later.seconds), (overlap.contention, backward.left)))
        # t >= all transfers: gathers, exposed collectives on their link, and those reductions
        model.at_least(forward, total((1.0, later.transfers), (1.0, backward.left)))
        model.minimise(total((others, {forward: 1.0}), (others, backward.seconds)))
    for key, state in form.states.items():
        # optimizer = updates of the local shards, with their launches
        model.minimise(total((float(boundary.kind_counts[key] if key is not None else 1), state["optimizer_seconds"])))


@dataclass(frozen=True, slots=True)
class _PassTerms:
    """A pass as expressions: its `seconds`, those of all `transfers` on links of the data axis, and of those that are `left` to
    the next forward."""

    seconds: Terms
    transfers: Terms
    left: Terms


def _play(form: Formulation, one: PassTransfers) -> _PassTerms:
    """Return a pass, in which each call overlaps the transfers of its neighbours. Calls with equal neighbours are equal."""
    states, root, kinds = form.states, form.states.get(None), form.problem.boundary.call_kinds
    around: list[CallKind | None] = [None, *kinds, None]
    columns, ends = (form.backward, 0) if one.backward else (form.forward, len(kinds) - 1)
    seconds: list[tuple[float, Terms]] = []
    transfers: list[tuple[float, Terms]] = []
    left: list[tuple[float, Terms]] = []
    # the call whose transfer runs beside a call is the next one where the transfer runs beside its previous one
    steps = [1 if each.beside is Of.PREVIOUS else -1 for each in one.transfers]
    equal = Counter((kind, tuple(around[index + 1 + step] for step in steps), index == ends) for index, kind in enumerate(kinds))
    for (kind, neighbours, last), count in equal.items():
        main, shared = columns[kind.block]
        beside = [(each, states[key][each.field]) for each, key in zip(one.transfers, neighbours, strict=True) if key]
        busy: Terms = {main: 1.0}
        if one.reduction is not None:
            # gradients of shared parameters are complete when the first call's backward ends
            accumulated = root["accumulate_seconds"] if root is not None and last else {}
            busy = total((1.0, busy), (1.0, states[kind]["accumulate_seconds"]), (1.0, accumulated))
        overlapped = total(*((float(each.overlaps), terms) for each, terms in beside))
        seconds += [(float(count) * (not each.overlaps), terms) for each, terms in beside]
        seconds.append((float(count), _call_seconds(form, busy, overlapped, shared)))
        transfers += [(float(count), terms) for _, terms in beside] + [(float(count), shared)]
    edges = [(each, states[kinds[0 if step > 0 else -1]], each.field) for each, step in zip(one.transfers, steps, strict=True)]
    if root is not None:
        edges += [(one.gather, root, one.root_gather)] if one.root_gather else []
        edges += [(one.reduction, root, one.root_reduction)] if one.reduction is not None else []
    for transfer, state, field in edges:
        if transfer.edge is not Edge.ABSENT:
            (left if transfer.edge is Edge.LEFT else seconds).append((1.0, state[field]))
    return _PassTerms(total(*seconds), total(*transfers), total(*left))


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

"""Whether and how the experts of a parallel model are placed anew: `Parallel.rebalance_experts`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch.distributed as dist

from ..comm.agreement import Stated, gather, refused_together, require_agreement
from ..errors import PlacementProblem
from ..ops.expert_load import MeasuredExpertLoad
from .mixtures import ExpertMixture
from .placement import ExpertOrder, ExpertPlacement

LOGGER = logging.getLogger("autopar")
Loads = Sequence[MeasuredExpertLoad | Sequence[float]]
"""The load of each mixture of experts in the order of the model: as it was counted, or a number for each expert."""


@dataclass(frozen=True)
class ExpertRebalancing:
    """The result of a rebalancing. `layers`: those whose experts moved. `imbalance` (copies of the busiest ranks over the mean)
    and the predicted `step_seconds` before and after it; the predicted `move_seconds`. Without prices the seconds are 0."""

    layers: tuple[str, ...]
    imbalance: tuple[float, float]
    step_seconds: tuple[float, float]
    move_seconds: float

    def words(self, mixtures: int, steps: int | None) -> str:
        """One line on what moved, of so many `mixtures`, and on what it is predicted to give."""
        (before, after), (was, now) = self.imbalance, self.step_seconds
        if not self.layers:
            why = "no order has less load" if steps is None else f"no move is predicted to pay within {steps} steps"
            return f"experts stay where they are: the busiest ranks have {before:.2f} times the mean, and {why}"
        gain = f"; predicted {1e3 * now:.4g} ms a step instead of {1e3 * was:.4g}, for a move of {1e3 * self.move_seconds:.3g} ms"
        return (
            f"the experts of {len(self.layers)} of {mixtures} layers are placed anew: the busiest ranks have {after:.2f} times "
            f"the mean instead of {before:.2f}{gain if was else ''}"
        )


def rebalance_experts(placement: ExpertPlacement, loads: Loads, prices: Any, steps: int | None) -> ExpertRebalancing:
    """Place the experts of layers in which that pays within `steps` (None: wherever it lowers the load), by the `prices` of the
    plan (`explain.run_time`; None: without). All ranks call it."""
    mixtures, mesh = placement.mixtures(), placement.state.mesh
    with refused_together(mesh.describe, problem=PlacementProblem):
        numbers = _checked_loads(loads, mixtures, steps)
    remedy = "pass the same loads and steps, those of parallel.expert_load(), on all ranks"
    require_agreement({"loads of experts": Stated(repr((numbers, steps)), remedy)}, mesh.describe)
    placement.check(mixtures)
    total, busiest, less, chosen = sum(map(sum, numbers)), 0.0, 0.0, {}
    rank_bytes = map(max, zip(*gather([placement.rank_bytes(mixture) for mixture in mixtures]), strict=True))
    for mixture, load, size in zip(mixtures, numbers, rank_bytes, strict=True):
        ranks, before = mesh.axis(mixture.axis).size, placement.order(mixture)
        after = assign_experts(load, before, ranks)
        most, least = (ranks * max(_rank_loads(load, order, ranks)) / total for order in (before, after))
        busiest += most
        if least < most:
            parts = zip(_parts(before, ranks), _parts(after, ranks), strict=True)
            sent = size * max(len(set(own) - set(other)) for own, other in parts) * ranks / mixture.experts
            less += most - least
            chosen[mixture] = after, most - least, prices.move_seconds(mixture.axis, sent) if prices is not None else 0.0
    if prices is not None and steps is not None and chosen:
        gain = (prices.step_seconds(busiest) - prices.step_seconds(busiest - less)) / less
        chosen = {mixture: each for mixture, each in chosen.items() if gain * each[1] * steps > each[2]}
    imbalance = busiest, busiest - sum(each[1] for each in chosen.values())
    first, last = (0.0 if prices is None else prices.step_seconds(each) for each in imbalance)
    move = sum(each[2] for each in chosen.values())
    out = ExpertRebalancing(tuple(mixture.layer for mixture in chosen), imbalance, (first, last), move)
    if dist.get_rank() == 0:
        LOGGER.info("%s", out.words(len(mixtures), steps))
    placement.place(placement.orders | {mixture.names[0]: each[0] for mixture, each in chosen.items()})
    return out


def _checked_loads(loads: Any, mixtures: Sequence[ExpertMixture], steps: Any) -> list[tuple[float, ...]]:
    """Return a number for each expert of each mixture. PlacementProblem where they, or the steps, do not fit."""
    if not mixtures:
        raise PlacementProblem('no experts are sharded over a mesh axis, so none can move: plan with force="ep=2"')
    if not (steps is None or isinstance(steps, (int, float)) and steps >= 0):
        raise PlacementProblem(f"steps={steps!r} is no number of steps in which a move has to pay: pass one, or None")
    each = [load.by_expert if isinstance(load, MeasuredExpertLoad) else load for load in loads] if _is_list(loads) else []
    if len(each) != len(mixtures):
        raise PlacementProblem(
            f"loads of {len(each)} mixtures of experts for {len(mixtures)} whose experts can move: pass those of "
            "parallel.expert_load() of a whole step, or a list of numbers of tokens for each mixture"
        )
    for load, mixture in zip(each, mixtures, strict=True):
        fine = _is_list(load) and len(load) == mixture.experts
        fine = fine and all(isinstance(number, (int, float)) and number >= 0 and isfinite(number) for number in load)
        if not fine or not sum(load):
            raise PlacementProblem(
                f"the load of {mixture.layer} is not a list of {mixture.experts} numbers of tokens, not negative and not all 0: "
                "pass what parallel.expert_load() counted"
            )
    return [tuple(float(number) for number in load) for load in each]


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def assign_experts(loads: Sequence[float], before: ExpertOrder, ranks: int) -> ExpertOrder:
    """Return an order in which the busiest rank has less load than `before`, or `before` where none is found.

    The longest processing time first (Graham 1969; EPLB's balanced packing): each expert, the most loaded first, goes to the rank
    with the least load that has a free slot. Equal ranks are numbered so that few experts move; those that stay keep their slots.
    """
    each, sums = len(before) // ranks, [0.0] * ranks
    groups: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(loads)), key=lambda expert: -loads[expert]):
        rank = min((rank for rank in range(ranks) if len(groups[rank]) < each), key=lambda rank: sums[rank])
        groups[rank].append(expert)
        sums[rank] += loads[expert]
    if max(sums) >= max(_rank_loads(loads, before, ranks)):
        return before
    held, places = _parts(before, ranks), dict[int, int]()
    for _, rank, group in sorted((-len(set(held[r]) & set(groups[g])), r, g) for r in range(ranks) for g in range(ranks)):
        if rank not in places and group not in places.values():
            places[rank] = group
    coming = {rank: iter(sorted(set(groups[group]) - set(held[rank]))) for rank, group in places.items()}
    return tuple(
        expert if expert in groups[places[rank]] else next(coming[rank]) for rank in range(ranks) for expert in held[rank]
    )


def _parts(order: ExpertOrder, ranks: int) -> list[ExpertOrder]:
    """The experts of each rank."""
    each = len(order) // ranks
    return [order[first : first + each] for first in range(0, len(order), each)]


def _rank_loads(loads: Sequence[float], order: ExpertOrder, ranks: int) -> list[float]:
    return [sum(loads[expert] for expert in part) for part in _parts(order, ranks)]

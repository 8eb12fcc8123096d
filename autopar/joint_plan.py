"""Plans of several models on the same devices, which run in turns: each leaves the others what they hold between their calls.

A model that is not running holds its weights, gradients, the optimizer's state and what it saved for a backward that is still to
come; a frozen one holds its weights. The models fit together where the peak of each, and what all others hold, are within the
memory of a device. The plans are found in three steps:

1. each model's fastest plan, as if it were alone: where these fit together, nothing is better;
2. else plans of each model that take less and less memory, by halving the interval between the least that was found to suffice
   and the most that did not, until some plans of all fit together; of those, the fastest (all models once);
3. each model in turn, in the memory that the others leave, until nothing gets faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import msgspec

from autopar.cost_models.hardware.cluster import Cluster, with_memory_margin
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import Infeasible
from autopar.ir.plan_file.plan_file import Plan
from autopar.runtime.quantities import size_words

_HALVINGS = 6
"""Of each model's memory: its least is then known to 2 % of what its fastest plan takes."""

_ROUNDS = 3

Planner = Callable[[int], Plan]
"""A model's fastest plan that leaves so many bytes to others. Infeasible where there is none."""


@dataclass(frozen=True, slots=True)
class Share:
    """The memory of a plan on its fullest device, and its time.

    own_bytes: its peak, without context and communicators of the process and without what it leaves to others.
    held_bytes: what it holds between its calls, at most.
    communicator_bytes: of its mesh, which plans of the same mesh share.
    budget_bytes: what all models may take beside the context of the process.
    """

    plan: Plan
    own_bytes: int
    held_bytes: int
    communicator_bytes: int
    budget_bytes: int
    step_seconds: float

    @staticmethod
    def of(plan: Plan, optimizer: str) -> Share:
        cluster = Cluster.from_dict(plan.document.cluster.description)
        cost = evaluate(plan.graph, plan.candidate, cluster, optimizer)
        device, info, memory = cluster.device, plan.document.inference, cost.fullest_stage
        decoded = info.decode_peak_bytes or 0 if info is not None else 0
        context = device.base_bytes + device.held_bytes
        return Share(
            plan,
            max(memory.peak_bytes, decoded) - memory.table["base"],
            max(each.held_bytes for each in cost.stage_memory),
            memory.table["base"] - context,
            memory.budget_bytes - device.base_bytes,
            info.latency_seconds if info is not None else cost.step_seconds,
        )


Joint = tuple[Share, ...]


def joint_plans(planners: Sequence[Planner], names: Sequence[str], optimizers: Sequence[str]) -> tuple[Plan, ...]:
    """Return one plan for each model, so that all fit on the devices together. Infeasible where a model fits nowhere, or no plans
    that were found fit together."""

    def share(index: int, held_bytes: int) -> Share:
        return Share.of(planners[index](held_bytes), optimizers[index])

    found = [[share(index, 0)] for index in range(len(planners))]
    refused = [0] * len(planners)  # the most memory that is known not to suffice
    for _ in range(_HALVINGS):
        if (joint := _fastest(found)) is not None:
            break
        for index, shares in enumerate(found):
            least = min(shares, key=lambda each: each.own_bytes)
            limit = (least.own_bytes + refused[index]) // 2
            try:
                shares.append(share(index, least.budget_bytes - least.communicator_bytes - limit))
            except Infeasible:
                refused[index] = limit
    else:
        joint = _fastest(found)
    if joint is None:
        raise Infeasible(_shortage_text(found, names))
    if any(len(shares) > 1 for shares in found):
        joint = _improved(joint, share)
    return tuple(_leaving(each.plan, _held_by_others(joint, index)) for index, each in enumerate(joint))


def _fastest(found: Sequence[Sequence[Share]]) -> Joint | None:
    """Return plans that fit together, one of each model, whose steps take the least time in sum."""
    fitting = (joint for joint in product(*found) if shortage_bytes(joint) <= 0)
    return min(fitting, key=lambda joint: sum(each.step_seconds for each in joint), default=None)


def _improved(joint: Joint, share: Callable[[int, int], Share]) -> Joint:
    """Replan each model in the memory that the others leave, until no step gets faster."""
    for _ in range(_ROUNDS):
        before = joint
        for index, now in enumerate(joint):
            try:
                other = share(index, _held_by_others(joint, index))
            except Infeasible:  # a search that is no longer exact may miss what another one found
                continue
            changed = (*joint[:index], other, *joint[index + 1 :])
            if other.step_seconds < now.step_seconds and shortage_bytes(changed) <= 0:
                joint = changed
        if joint == before:
            break
    return joint


def shortage_bytes(joint: Joint) -> int:
    """Return how much a device lacks while the model runs that needs most; at most 0 where the plans fit together."""
    taken = (each.own_bytes + each.communicator_bytes + _held_by_others(joint, index) for index, each in enumerate(joint))
    return max(bytes_ - each.budget_bytes for bytes_, each in zip(taken, joint, strict=True))


def _held_by_others(joint: Joint, index: int) -> int:
    """Return what the other models hold while one runs, with communicators that are not those of its mesh."""
    mesh = joint[index].plan.candidate.mesh
    others = [each for place, each in enumerate(joint) if place != index]
    further = {each.plan.candidate.mesh: each.communicator_bytes for each in others if each.plan.candidate.mesh != mesh}
    return sum(each.held_bytes for each in others) + sum(further.values())


def _leaving(plan: Plan, held_bytes: int) -> Plan:
    """Return the plan as one that leaves so much to other models: its device and its predicted peak say it."""
    document = plan.document
    cluster = Cluster.from_dict(document.cluster.description)
    more = held_bytes - cluster.device.held_bytes
    left = with_memory_margin(cluster, cluster.device.memory_margin, held_bytes)
    memory = document.predicted.memory | {"base": document.predicted.memory["base"] + more}
    peak = (document.predicted.peak_memory_bytes or 0) + more
    predicted = msgspec.structs.replace(document.predicted, peak_memory_bytes=peak, memory=memory)
    described = msgspec.structs.replace(document.cluster, description=left.to_dict())
    return replace(plan, document=replace(document, cluster=described, predicted=predicted))


def _shortage_text(found: Sequence[Sequence[Share]], names: Sequence[str]) -> str:
    joint = min(product(*found), key=shortage_bytes)
    taken = ", ".join(_words(joint, names))
    return (
        f"{len(joint)} models do not fit together on {joint[0].plan.document.cluster.name}: the plans that take least are short "
        f"of {size_words(shortage_bytes(joint))} a device ({taken}): take more devices or smaller batches, or freeze a model "
        "that is not trained (model.requires_grad_(False)), which then holds its weights alone"
    )


def _words(joint: Joint, names: Sequence[str]) -> Iterator[str]:
    for name, each in zip(names, joint, strict=True):
        yield f"{name} takes {size_words(each.own_bytes)} and holds {size_words(each.held_bytes)}"

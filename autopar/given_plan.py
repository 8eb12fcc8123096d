"""A plan that was made before: checks that it is for this model, cluster and these options. PlanMismatch says what differs."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from autopar.capture import capture
from autopar.capture.normalize.batch_norm import LOCAL
from autopar.capture.options import LossFunction
from autopar.capture.results.returned import LOSS, asked_loss, parse_asked, within
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.step.evaluate import async_tp_of
from autopar.errors import AutoparError, ClusterError, PlanError, PlanMismatch
from autopar.ir.describe import precision_text
from autopar.ir.plan_file import plan_file as planfile
from autopar.ir.plan_file.plan_file import Plan
from autopar.plan_inputs import ExampleInputs, registry, split_inputs
from autopar.precision import PrecisionLike, compute_dtype_of, precision_of
from autopar.rules.check import check_strategies
from autopar.runtime.device.mesh import launched_processes
from autopar.runtime.ops.functions import float8_problem
from autopar.schedules.pipeline_schedule import check_schedule
from autopar.solve.problem.pins import Constraints, why_disobeyed_pins
from autopar.solve.space.force import Force


def check_options(
    plan: Plan,
    model: nn.Module,
    precision: PrecisionLike | None,
    force: str | Mapping[str, int | str] | Force | None,
    constraints: Constraints | None = None,
    held_bytes: int = 0,
) -> None:
    """Raise PlanMismatch where the options ask for something else than the given plan has. `held_bytes`: memory that it has to
    leave to other models."""
    has = plan.candidate.precision
    own = precision_of(None, model)
    if precision is None and has.compute == has.master != own.master:  # what a plan without precision= has of another model
        raise PlanMismatch(
            f"the plan stores weights and computes in {has.master}, and this model is in {own.master}: plan again, cast the "
            f'model, or say precision=autopar.Precision("{has.compute}", "{has.master}"), where that is meant'
        )
    if precision is not None:
        wanted = precision_of(precision, model)
        if replace(wanted, offload_optimizer=has.offload_optimizer) != has:
            raise PlanMismatch(
                f"the plan has {precision_text(has)}, precision= asks for {precision_text(wanted)}: plan again, or leave it out"
            )
    if force:
        raise PlanMismatch(f"force={force!r} says nothing about a given plan, which is {plan}: leave out force= or plan=")
    if constraints and (disobeyed := why_disobeyed_pins(plan.graph, plan.candidate, constraints)):
        raise PlanMismatch(f"the given plan does not obey constrain= {disobeyed}: plan again, or leave out constrain=")
    left = plan.document.cluster.description.get("device", {}).get("held_bytes", 0)
    if held_bytes > left:
        raise PlanMismatch(
            f"the plan leaves {left / 2**30:.3g} GiB to other models, and those of beside= take {held_bytes / 2**30:.3g}: plan "
            "again with beside=, or leave it out"
        )


def check_launch(cluster: Cluster) -> None:
    """PlanMismatch where the launch does not have one process per device: before anything is measured, captured or joined."""
    launched = launched_processes()
    if launched != cluster.size:
        raise PlanMismatch(
            f"the cluster {cluster.name} has {cluster.size} devices but {launched} processes were launched: "
            f"use torchrun --nproc-per-node {cluster.size}, or name a cluster of {launched}"
        )


def check_plan(
    plan: Plan | str | Path,
    model: nn.Module,
    cluster: Cluster,
    example_inputs: ExampleInputs,
    outputs: Sequence[str] = (),
    loss_fn: LossFunction | None = None,
) -> Plan:
    """Return the given plan. PlanMismatch where it was made for another model, batch shape, devices or outputs."""
    loaded = plan if isinstance(plan, Plan) else planfile.load_plan(plan)
    if loaded.candidate.devices != cluster.size:
        raise PlanMismatch(
            f"the plan is for {loaded.candidate.devices} devices ({loaded.candidate.mesh}), the cluster {cluster.name} has "
            f"{cluster.size}: plan again, or launch {loaded.candidate.devices} processes"
        )
    args, kwargs = split_inputs(example_inputs)
    planned = {output.path: output for output in loaded.graph.outputs}
    for path, kind in parse_asked(outputs).items():
        if kind == LOSS:
            continue
        matching = [output for each, output in planned.items() if within(each, path)]
        if not matching or any(kind and output.kind != kind for output in matching):
            how = " like that" if matching else ""
            raise PlanMismatch(f"the plan returns no {path} beside the loss{how}: plan again with outputs={tuple(outputs)}")
    statistics = "local" if LOCAL in loaded.graph.notes else "global"
    asked = (*(output.asked for output in planned.values()), *asked_loss(loaded.graph))
    graph = capture(
        model, args, kwargs, compute_dtype=compute_dtype_of(loaded.candidate.precision, model), batch_norm=statistics,
        loss_fn=loss_fn, outputs=asked, batch_dim=batch_dims(loaded),
        float8=loaded.candidate.precision.float8,
    )  # fmt: skip
    if graph.fingerprint != loaded.graph.fingerprint:
        raise PlanMismatch(
            f"the plan was made for {loaded.document.model.name} (fingerprint {loaded.graph.fingerprint[:12]}), this model and "
            f"batch are {graph.name} ({graph.fingerprint[:12]}): plan again with `autopar plan`"
        )
    with planfile.refuse_misfits("the plan"):
        plan = loaded.with_graph(graph)
        check_strategies(plan.graph, plan.candidate, registry())
        check_schedule(plan.candidate)
    return plan


def check_float8(agreed: Plan, compiled: bool | str) -> None:
    """Raise AutoparError where this process cannot run the plan's float8 products, and warn where they are not compiled."""
    if not agreed.candidate.precision.float8:
        return
    if problem := float8_problem("cuda" if torch.cuda.is_available() else "cpu"):
        raise AutoparError(problem)
    if not compiled and dist.get_rank() == 0:
        warnings.warn("float8 layers that are not compiled are slower than bf16: pass compile=True", stacklevel=3)


def compiler_of(agreed: Plan, asked: bool | str | None) -> bool | str:
    """Return the backend of torch.compile: what was `asked`; else inductor where the plan is priced so and the devices are GPUs.
    Warns on GPUs where such a plan runs as it is: it was not asked for, or there is no Triton, which inductor needs."""
    if not agreed.document.cluster.compiled or not torch.cuda.is_available():
        return asked or False
    has_triton = importlib.util.find_spec("triton") is not None
    if asked is False or (asked is None and not has_triton):
        if dist.get_rank() == 0:
            remedy = "plan with compile=False" if asked is False else "pip install triton, or plan with compile=False"
            warnings.warn(
                f"the plan is priced as compiled and runs as it is, which takes more memory and time than it says: {remedy}",
                stacklevel=3,
            )
        return False
    return True if asked is None else asked


def priced_as(plan: Plan, compiled: bool) -> Plan:
    """Return the plan on devices as compiled programs use them, or eager ones; `predicted` in its document stays as it is."""
    cluster = plan.document.cluster
    if cluster.compiled == compiled or not cluster.description:
        return plan
    devices = with_compilation(Cluster.from_dict(cluster.description), compiled)
    changed = msgspec.structs.replace(cluster, description=devices.to_dict())
    return replace(plan, document=replace(plan.document, cluster=changed))


def planned_async_tp(plan: Plan) -> dict[str, int]:
    """Return `async_tp_of` a plan by its price; none where it has none."""
    try:
        cluster = Cluster.from_dict(plan.document.cluster.description)
        return async_tp_of(plan.graph, plan.candidate, cluster) if cluster.overlap.async_tensor_parallel else {}
    except (ClusterError, PlanError):
        return {}


def cluster_of_plan(plan: Plan, other: Cluster) -> Cluster:
    """Return the cluster that a plan was made for, by which programs of other calls are priced too; else `other`."""
    try:
        return Cluster.from_dict(plan.document.cluster.description)
    except ClusterError:
        return other


def batch_dims(agreed: Plan) -> tuple[tuple[str, int], ...]:
    """Return where the tensors of the user have the batch, by argument, if not at dimension 0."""
    interface = agreed.graph.interface
    return () if interface is None else interface.said_batch_dims

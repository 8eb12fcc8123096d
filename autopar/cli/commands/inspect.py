"""``autopar inspect``: what a plan chose, at each level. Reads plan.json only; the model is not needed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.cli.console import Console, size
from autopar.cli.evaluation import with_plan
from autopar.cli.tables.inspection import gradient_table, memory_table, timeline
from autopar.ir.placement import Placements, Replicate, format_placements
from autopar.ir.plan_file.document import OpInfo
from autopar.ir.plan_file.plan_file import Plan
from autopar.rules.conversions import COLLECTIVES, axis_conversion, changed_axis


@with_plan
def run(plan: Plan, arguments: argparse.Namespace, console: Console) -> int:
    """Shows the summary, or the one view that was asked for."""
    views = {"ops": _ops, "memory": memory_table, "comm": _comm, "timeline": timeline, "program": _program}
    if arguments.view:
        views[arguments.view](plan, console)
        return 0
    from autopar.cli.commands.plan import summary

    summary(plan, console)
    console.document({key: value for key, value in json.loads(plan.to_json()).items() if key not in ("graph", "ops", "blocks")})
    return 0


def _ops(plan: Plan, console: Console) -> None:
    rows: list[dict[str, Any]] = []
    for block in plan.graph.blocks:
        chosen = plan.candidate.block(block.name)
        nodes = {node.name: node for node in block.nodes}
        infos = [op for op in plan.document.ops if op.block == block.name]
        rows += [{"block": block.name, "source": nodes[op.node].source, **_op(op)} for op in infos]
        title = f"{block.name} x {plan.graph.count(block.name)}, ZeRO-{chosen.zero}"
        cells = [
            (op.node, op.function or op.op, ", ".join(_texts(op.operands)), ", ".join(_texts(op.results)), " ".join(op.factors))
            for op in infos
        ]
        console.table(title, ("value", "operation", "operands", "results", "sharded by"), cells)
        stored = [
            (p.path, list(p.value.shape), place) for p, place in zip(block.parameters, _texts(chosen.parameters), strict=True)
        ]
        if stored:
            console.table(f"{block.name}: parameters as stored", ("parameter", "shape", "placement"), stored)
    console.document({"mesh": str(plan.candidate.mesh), "ops": rows})


def _op(op: OpInfo) -> dict[str, Any]:
    return {
        "node": op.node,
        "op": op.op,
        "function": op.function,
        "operands": _texts(op.operands),
        "results": _texts(op.results),
        "factors": list(op.factors),
    }


def _texts(placements: Sequence[Placements]) -> list[str]:
    return [format_placements(each) for each in placements]


def _comm(plan: Plan, console: Console) -> None:
    rows = list(conversion_rows(plan))
    cells = [(*(value or "-" for value in list(row.values())[:-1]), size(row["bytes"])) for row in rows]
    header = ("block", "times", "value", "axis", "conversion", "forward", "backward", "full tensor")
    console.table("Collectives of placement conversions, one step", header, cells)
    state = list(state_rows(plan))
    sent = [
        (r["block"], r["count"], r["kind"], size(r["parameter_bytes"]) if r["zero"] else "-", size(r["gradient_bytes"]))
        for r in state
    ]
    columns = ("block", "times", "kind", "parameters", "gradients")
    console.table("State communication on the data axis, unsharded on it", columns, sent)
    console.document({"collectives": rows, "state": state, "gradients": gradient_table(plan, console)})


def conversion_rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """One entry per placement conversion that communicates. `bytes`: the tensor, unsharded on the conversion's axis."""
    from autopar.cost_models.tensors.sizes import shard_count, value_bytes

    mesh = plan.candidate.mesh
    for block in plan.graph.blocks:
        values = block.values()
        for conversion in plan.candidate.block(block.name).conversions:
            axis, value = changed_axis(conversion.source, conversion.target), values[conversion.value]
            found = axis_conversion(conversion.source[axis], conversion.target[axis], value.differentiable)
            if mesh.axes[axis].size == 1 or found is None or not {found.forward, found.backward} & COLLECTIVES:
                continue
            shards = shard_count((*conversion.source[:axis], Replicate(), *conversion.source[axis + 1 :]), mesh.sizes)
            yield {
                "block": block.name,
                "count": plan.graph.count(block.name),
                "value": conversion.value,
                "axis": mesh.axes[axis].name,
                "conversion": f"{conversion.source[axis]} -> {conversion.target[axis]}",
                "forward": found.forward if found.forward in COLLECTIVES else None,
                "backward": found.backward if found.backward in COLLECTIVES else None,
                "bytes": value_bytes(value, plan.candidate.batch) // shards,
            }


def state_rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """One entry per block with parameters that are trained, where there are data ranks. `parameter_bytes` are gathered (in the
    compute dtype), `gradient_bytes` reduced (in the reduce dtype), by one device and call."""
    from autopar.cost_models.state.optimizers import optimizer_named
    from autopar.cost_models.state.state_group import state_group
    from autopar.cost_models.state.state_memory import StatePolicy

    kinds = {
        0: "all-reduce of gradients",
        1: "reduce-scatter of gradients, all-gather of parameters after the step",
        2: "reduce-scatter of gradients, all-gather of parameters once a step",
        3: "all-gather of parameters in forward and backward, reduce-scatter of gradients",
    }
    mesh = plan.candidate.mesh
    policy = StatePolicy.of(plan.candidate.precision, optimizer_named(plan.document.optimizer))
    for block in plan.graph.blocks:
        chosen = plan.candidate.block(block.name)
        group = state_group(zip(block.parameters, chosen.parameters, strict=True), mesh, plan.candidate.precision)
        if group.trainable and mesh.size_of("dp") > 1:
            yield {
                "block": block.name,
                "count": plan.graph.count(block.name),
                "zero": chosen.zero,
                "kind": kinds[chosen.zero],
                "parameter_bytes": round(group.elements * policy.compute_bytes),
                "gradient_bytes": round(group.trainable * policy.reduction_bytes),
            }


def _program(plan: Plan, console: Console) -> None:
    from autopar.program.build import program_text

    text = program_text(plan.graph, plan.candidate)
    console.code(text)
    console.document({"program": text})

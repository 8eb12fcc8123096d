"""``autopar inspect``: what a plan chose, at each level. Reads the file only; the model is not needed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from autopar.cli.gradients import exchanges
from autopar.cli.memory import memory
from autopar.cli.output import Output, seconds, size
from autopar.cli.timeline import timeline
from autopar.ir import dims
from autopar.ir.planfile import Plan, load
from autopar.rules.conversions import COLLECTIVES, changed_axis, conversion


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Shows the summary, or the one view that was asked for."""
    plan = load(arguments.plan)
    views = {"ops": _ops, "memory": memory, "comm": _comm, "timeline": timeline, "program": _program}
    if arguments.view:
        views[arguments.view](plan, output)
        return 0
    from autopar.cli.plan import summary

    summary(plan, output)
    output.document({key: value for key, value in json.loads(plan.to_json()).items() if key not in ("graph", "ops", "blocks")})
    return 0


def _ops(plan: Plan, output: Output) -> None:
    rows: list[dict[str, Any]] = []
    for block in plan.graph.blocks:
        chosen = plan.candidate.block(block.name)
        nodes = {node.name: node for node in block.nodes}
        infos = [op for op in plan.document.ops if op.block == block.name]
        rows += [{"block": block.name, "source": nodes[op.node].source, **_op(op)} for op in infos]
        title = f"{block.name} x {plan.graph.count(block.name)}, ZeRO-{chosen.zero}"
        cells = [
            (op.node, op.function or op.op, ", ".join(op.operands), ", ".join(op.results), " ".join(op.label)) for op in infos
        ]
        output.table(title, ("value", "operation", "operands", "results", "sharded by"), cells)
        stored = [
            (p.path, list(p.value.shape), place) for p, place in zip(block.parameters, _stored(plan, block.name), strict=True)
        ]
        if stored:
            output.table(f"{block.name}: parameters as stored", ("parameter", "shape", "placement"), stored)
    output.document({"mesh": str(plan.candidate.mesh), "ops": rows})


def _op(op: Any) -> dict[str, Any]:
    return {
        "node": op.node,
        "op": op.op,
        "function": op.function,
        "operands": list(op.operands),
        "results": list(op.results),
        "label": list(op.label),
    }


def _stored(plan: Plan, block: str) -> tuple[str, ...]:
    return next(info.parameters for info in plan.document.blocks if info.block == block)


def _comm(plan: Plan, output: Output) -> None:
    rows = list(collectives(plan))
    cells = [
        (
            r["block"],
            r["count"],
            r["value"],
            r["axis"],
            r["conversion"],
            r["forward"] or "-",
            r["backward"] or "-",
            size(r["bytes"]),
        )
        for r in rows
    ]
    output.table(
        "Collectives of one step, besides the state's on the data axis",
        ("block", "times", "value", "axis", "conversion", "forward", "backward", "full tensor"),
        cells,
    )
    output.table("State on the data axis", ("block", "times", "kind", "bytes"), _state(plan))
    compared = exchanges(plan)
    ways = [(each["way"], size(each["bytes"]), seconds(each["seconds"]), f"{each['times']:.3g}") for each in compared]
    if ways:
        output.table("Gradients in one piece, for comparison", ("way", "bytes", "seconds", "times"), ways)
    output.document({"collectives": rows, "gradients": compared})


def collectives(plan: Plan) -> Iterator[dict[str, Any]]:
    """One entry per arc that communicates. `bytes` are those of the whole tensor as the axis's group sees it."""
    mesh, widths = plan.candidate.mesh, {"float64": 8, "int64": 8, "bfloat16": 2, "float16": 2, "bool": 1}
    for block in plan.graph.blocks:
        values = block.values()
        for arc in plan.candidate.block(block.name).arcs:
            axis, value = changed_axis(arc.source, arc.target), values[arc.value]
            found = conversion(arc.source[axis], arc.target[axis], value.differentiable)
            if mesh.axes[axis].size == 1 or found is None or not {found.forward, found.backward} & COLLECTIVES:
                continue
            yield {
                "block": block.name,
                "count": plan.graph.count(block.name),
                "value": arc.value,
                "axis": mesh.axes[axis].name,
                "conversion": f"{arc.source[axis]} -> {arc.target[axis]}",
                "forward": found.forward if found.forward in COLLECTIVES else None,
                "backward": found.backward if found.backward in COLLECTIVES else None,
                "bytes": dims.numel(value.shape, plan.candidate.batch) * widths.get(value.dtype, 4) // _others(plan, arc, axis),
            }


def _others(plan: Plan, arc: Any, axis: int) -> int:
    """By how much the other axes' shardings have cut the tensor already."""
    from autopar.ir.placement import Shard

    cut = 1
    for index, placement in enumerate(arc.source):
        if index != axis and isinstance(placement, Shard):
            cut *= plan.candidate.mesh.sizes[index]
    return cut


def _state(plan: Plan) -> list[tuple[Any, ...]]:
    kinds = {
        0: "all-reduce of gradients",
        1: "reduce-scatter, gather after the step",
        2: "reduce-scatter, gather once a step",
        3: "gather in forward and backward, reduce-scatter",
    }
    rows: list[tuple[Any, ...]] = []
    for block in plan.graph.blocks:
        held = sum(dims.numel(p.value.shape, 1) for p in block.parameters if p.trainable and not p.buffer)
        if held and plan.candidate.mesh.size_of("dp") > 1:
            zero = plan.candidate.block(block.name).zero
            rows.append((block.name, plan.graph.count(block.name), kinds[zero], size(held * 4)))
    return rows


def _program(plan: Plan, output: Output) -> None:
    from autopar.passes.pipeline import lower
    from autopar.program.source import render

    text = render(lower(plan.graph, plan.candidate))
    output.text(text)
    output.document({"program": text})

"""Converts graphs and candidates to the structs of `document` and back, exactly. ValueError on text that is no placement."""

from __future__ import annotations

import math
from typing import Any

from autopar.ir.graph import Arg, Block, Call, DType, Graph, Node, Parameter, Ref, Symbol, Value
from autopar.ir.interface import Argument, Interface, Output
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.placement import Placements, format_placements, parse_placements
from autopar.ir.plan import BlockPlan, Candidate, Conversion, NodePlan, Pipeline, Precision
from autopar.ir.plan_file.document import (
    ArgumentDoc,
    AxisInfo,
    BlockDoc,
    BlockInfo,
    CallDoc,
    ConversionInfo,
    GraphDoc,
    InterfaceDoc,
    MeshInfo,
    NodeDoc,
    OpInfo,
    OutputDoc,
    ParameterDoc,
    PlanDocument,
    PrecisionInfo,
    ScheduleInfo,
    ValueDoc,
)

_INT64 = 2**63


def encode_arg(arg: Arg) -> Any:
    """One argument as JSON. What JSON lacks is an object of one key: ref, size, dtype, float (inf, nan), int (over 64 bits)."""
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    if isinstance(arg, Symbol):
        return {"size": arg.dim}
    if isinstance(arg, DType):
        return {"dtype": arg.name}
    if isinstance(arg, tuple):
        return [encode_arg(item) for item in arg]
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if isinstance(arg, int) and not -_INT64 <= arg < _INT64:
        return {"int": str(arg)}
    return arg


def decode_arg(data: Any) -> Arg:
    """The inverse of `encode_arg`."""
    if isinstance(data, list | tuple):
        return tuple(decode_arg(item) for item in data)
    if not isinstance(data, dict):
        if data is None or isinstance(data, int | float | str):
            return data
        raise ValueError(f"{data!r} is not an argument")
    (key, value), *rest = data.items() or ((None, None),)
    if rest or key not in ("ref", "size", "dtype", "float", "int") or not isinstance(value, str | int):
        raise ValueError(f"{data!r} is not an argument; write {{ref}}, {{size}}, {{dtype}}, {{float}} or {{int}}")
    if key == "size":
        return Symbol(value)
    if key in ("float", "int"):
        return float(value) if key == "float" else int(value)
    return Ref(str(value)) if key == "ref" else DType(str(value))


def encode_value(value: Value) -> ValueDoc:
    return ValueDoc(value.name, value.shape, value.dtype, value.differentiable)


def decode_value(doc: ValueDoc) -> Value:
    return Value(doc.name, doc.shape, doc.dtype, doc.differentiable)


def _encode_node(node: Node) -> NodeDoc:
    return NodeDoc(
        op=node.op,
        args=tuple(encode_arg(arg) for arg in node.args),
        outputs=tuple(encode_value(value) for value in node.outputs),
        kwargs={key: encode_arg(arg) for key, arg in node.kwargs},
        module=node.module,
        source=node.source,
        no_grad=node.no_grad,
    )


def _decode_node(doc: NodeDoc) -> Node:
    return Node(
        op=doc.op,
        args=tuple(decode_arg(arg) for arg in doc.args),
        kwargs=tuple((key, decode_arg(arg)) for key, arg in doc.kwargs.items()),
        outputs=tuple(decode_value(value) for value in doc.outputs),
        module=doc.module,
        source=doc.source,
        no_grad=doc.no_grad,
    )


def encode_graph(graph: Graph) -> GraphDoc:
    """The graph as structs of the file."""
    blocks = tuple(
        BlockDoc(
            name=block.name,
            inputs=tuple(encode_value(value) for value in block.inputs),
            parameters=tuple(
                ParameterDoc(encode_value(p.value), p.path, p.trainable, p.buffer, p.expert_parallel) for p in block.parameters
            ),
            nodes=tuple(_encode_node(node) for node in block.nodes),
            outputs=block.outputs,
            updates=block.updates,
        )
        for block in graph.blocks
    )
    return GraphDoc(
        name=graph.name,
        inputs=tuple(encode_value(value) for value in graph.inputs),
        blocks=blocks,
        calls=tuple(CallDoc(c.block, c.prefix, c.inputs, c.outputs, c.parameters) for c in graph.calls),
        loss=graph.loss,
        batch=graph.batch,
        fingerprint=graph.fingerprint,
        batch_is_symbolic=graph.batch_is_symbolic,
        notes=graph.notes,
        outputs=tuple(OutputDoc(each.path, each.value, each.kind) for each in graph.outputs),
        interface=_encode_interface(graph.interface),
    )


def _encode_interface(interface: Interface | None) -> InterfaceDoc | None:
    if interface is None:
        return None
    arguments = tuple(
        ArgumentDoc(each.path, each.input, each.constant, each.optional, each.batch_dim) for each in interface.arguments
    )
    return InterfaceDoc(interface.positional, arguments, encode_arg(interface.returns), interface.left_out)


def _decode_interface(doc: InterfaceDoc | None) -> Interface | None:
    if doc is None:
        return None
    arguments = tuple(Argument(each.path, each.input, each.constant, each.optional, each.batch_dim) for each in doc.arguments)
    returns: Any = decode_arg(doc.returns)
    return Interface(doc.positional, arguments, returns, doc.left_out)


def decode_graph(doc: GraphDoc) -> Graph:
    """The inverse of `encode_graph`."""
    blocks = tuple(
        Block(
            name=block.name,
            inputs=tuple(decode_value(value) for value in block.inputs),
            parameters=tuple(
                Parameter(decode_value(p.value), p.path, p.trainable, p.buffer, p.expert_parallel) for p in block.parameters
            ),
            nodes=tuple(_decode_node(node) for node in block.nodes),
            outputs=block.outputs,
            updates=block.updates,
        )
        for block in doc.blocks
    )
    return Graph(
        name=doc.name,
        inputs=tuple(decode_value(value) for value in doc.inputs),
        blocks=blocks,
        calls=tuple(Call(c.block, c.prefix, c.inputs, c.outputs, c.parameters) for c in doc.calls),
        loss=doc.loss,
        batch=doc.batch,
        fingerprint=doc.fingerprint,
        batch_is_symbolic=doc.batch_is_symbolic,
        notes=doc.notes,
        outputs=tuple(Output(each.path, each.value, each.kind) for each in doc.outputs),
        interface=_decode_interface(doc.interface),
    )


def _texts(placements: tuple[Placements, ...]) -> tuple[str, ...]:
    return tuple(format_placements(each) for each in placements)


def _encode_conversions(conversions: tuple[Conversion, ...]) -> tuple[ConversionInfo, ...]:
    return tuple(ConversionInfo(c.value, format_placements(c.source), format_placements(c.target)) for c in conversions)


def _decode_conversions(infos: tuple[ConversionInfo, ...]) -> tuple[Conversion, ...]:
    return tuple(Conversion(c.value, parse_placements(c.source), parse_placements(c.target)) for c in infos)


def _placements(texts: tuple[str, ...]) -> tuple[Placements, ...]:
    return tuple(parse_placements(text) for text in texts)


def encode_blocks(graph: Graph, candidate: Candidate) -> tuple[tuple[BlockInfo, ...], tuple[OpInfo, ...]]:
    """The block plans, and the node plans of all blocks in one flat table."""
    ops = {(block.name, node.name): node.op for block in graph.blocks for node in block.nodes}
    infos, table = [], []
    for plan in candidate.blocks:
        infos.append(
            BlockInfo(
                block=plan.block,
                zero=plan.zero,
                recompute=plan.recompute,
                inputs=_texts(plan.inputs),
                parameters=_texts(plan.parameters),
                outputs=_texts(plan.outputs),
                conversions=_encode_conversions(plan.conversions),
                recompute_nodes=plan.recompute_nodes,
                recompute_conversions=_encode_conversions(plan.recompute_conversions),
                offload=tuple((value, format_placements(at)) for value, at in plan.offload),
                partition_saved=tuple((value, format_placements(at), axis) for value, at, axis in plan.partition_saved),
            )
        )
        table += [_encode_node_plan(plan.block, node, ops.get((plan.block, node.node), "")) for node in plan.nodes]
    return tuple(infos), tuple(table)


def _encode_node_plan(block: str, plan: NodePlan, op: str) -> OpInfo:
    return OpInfo(
        block=block,
        node=plan.node,
        op=op,
        operands=_texts(plan.operands),
        results=_texts(plan.results),
        factors=plan.factors,
        function=plan.function,
    )


def decode_blocks(infos: tuple[BlockInfo, ...], ops: tuple[OpInfo, ...]) -> tuple[BlockPlan, ...]:
    """The inverse of `encode_blocks`."""
    nodes: dict[str, list[NodePlan]] = {info.block: [] for info in infos}
    for op in ops:
        if op.block not in nodes:
            raise ValueError(f"ops name the block {op.block!r}, which is not in `blocks`")
        nodes[op.block].append(NodePlan(op.node, _placements(op.operands), _placements(op.results), op.factors, op.function))
    return tuple(
        BlockPlan(
            block=info.block,
            inputs=_placements(info.inputs),
            parameters=_placements(info.parameters),
            outputs=_placements(info.outputs),
            nodes=tuple(nodes[info.block]),
            conversions=_decode_conversions(info.conversions),
            zero=info.zero,
            recompute=info.recompute,
            recompute_nodes=info.recompute_nodes,
            recompute_conversions=_decode_conversions(info.recompute_conversions),
            offload=tuple((value, parse_placements(at)) for value, at in info.offload),
            partition_saved=tuple((value, parse_placements(at), axis) for value, at, axis in info.partition_saved),
        )
        for info in infos
    )


def encode_mesh(candidate: Candidate) -> MeshInfo:
    return MeshInfo(tuple(AxisInfo(axis.name, axis.size) for axis in candidate.mesh.axes), candidate.zero_group)


def decode_mesh(info: MeshInfo) -> Mesh:
    return Mesh(tuple(Axis(axis.name, axis.size) for axis in info.axes))


def decode_candidate(document: PlanDocument) -> Candidate:
    """The candidate of a loaded file."""
    batch = document.batch
    return Candidate(
        mesh=decode_mesh(document.mesh),
        blocks=decode_blocks(document.blocks, document.ops),
        batch=batch.global_,
        precision=decode_precision(document.precision),
        micro_batches=batch.num_microbatches,
        zero_group=document.mesh.zero_group,
        pipeline=decode_pipeline(document.schedule),
    )


def decode_precision(info: PrecisionInfo) -> Precision:
    return Precision(info.compute, info.master, info.offload_optimizer, info.reduce, info.float8)


def encode_pipeline(pipeline: Pipeline) -> ScheduleInfo:
    """The schedule of a pipeline; ``none`` where there is one stage only."""
    if pipeline.stages == 1:
        return ScheduleInfo()
    return ScheduleInfo(
        name=pipeline.schedule,
        stages=pipeline.stages,
        virtual=pipeline.virtual,
        layers=pipeline.layers,
        cuts=pipeline.cuts,
        repeated=pipeline.repeated,
        actions=pipeline.actions,
        weight_versions=pipeline.weight_versions,
    )


def decode_pipeline(info: ScheduleInfo) -> Pipeline:
    """The inverse of `encode_pipeline`."""
    if info.stages == 1:
        return Pipeline()
    return Pipeline(
        stages=info.stages,
        virtual=info.virtual,
        schedule=info.name,
        layers=info.layers,
        cuts=info.cuts,
        repeated=info.repeated,
        actions=info.actions,
        weight_versions=info.weight_versions,
    )

"""Names a plan by its degrees of parallelism (dp, tp, pp, cp, ep) and what each mesh axis shards, and the units that examples are
counted in: tokens, images or samples. For people only: the compiler reads placements."""

from __future__ import annotations

from autopar.ir import dims
from autopar.ir.dims import Dim, has_batch
from autopar.ir.graph import Graph, Value
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Shard
from autopar.ir.plan import Candidate, Precision
from autopar.ir.plan_file.document import Parallelism

_SHARDED_FUNCTIONS = {
    "embedding_sharded": ("v", "vocabulary-parallel embedding"),
    "cross_entropy_sharded": ("v", "vocabulary-parallel loss"),
    "logsumexp_sharded": ("v", "vocabulary-parallel logsumexp"),
    "token_log_probs_sharded": ("v", "vocabulary-parallel log-probabilities"),
    "attention_ring": ("s", "ring attention"),
    "attention_documents_ring": ("s", "ring attention"),
    "attention_rows": ("s", "attention by queries"),
    "attention_heads": ("h", "query heads, key heads everywhere"),
    "moe_experts_dispatched": ("e", "expert parallel, tokens exchanged"),
    "moe_experts_owned": ("e", "expert parallel, tokens everywhere"),
}
"""The factor that each named function shards, and how people call that."""
_PRODUCTS = ("aten.linear", "ap.linear_float8", "ap.linear_float8_dynamic", "ap.linear_kn")
_ATTENTION = ("aten.scaled_dot_product_attention", "ap.attention", "ap.attention_documents")
_LINEAR = {"n": "column", "k": "row"}
_CONVOLUTION = "aten.conv"
_CHANNELS = {"o": "output channels", "c": "input channels", "g": "groups of channels", "halo": "space", "row": "space"}
_UNSHARDED = ("", "redundant", "pass")
_NAMED = 3
"""Operations that are named where nothing else can be said of an axis."""


def precision_text(precision: Precision) -> str:
    """``bfloat16 compute, float32 parameters, gradients summed in bfloat16``."""
    products = ", linear modules of layers in float8" if precision.float8 else ""
    summed = f", gradients summed in {precision.reduce}" if precision.reduce else ""
    return f"{precision.compute} compute{products}, {precision.master} parameters{summed}"


def parallelism(graph: Graph, candidate: Candidate) -> Parallelism:
    """The degrees by name; `zero` is the ZeRO stage of the blocks that hold most parameters.

    A model axis is expert parallelism (ep) where experts are sharded over it; else context parallelism (cp) where a sequence is
    sharded and no weight of a matrix product is; else tensor parallelism (tp).
    """
    mesh = candidate.mesh
    degrees = {"ep": 1, "cp": 1, "tp": 1}
    for index, axis in enumerate(mesh.axes):
        if axis.name != DATA_AXIS:
            degrees[_kind(graph, candidate, index)] *= axis.size
    weight: dict[int, int] = {}
    for plan in candidate.blocks:
        block = graph.block(plan.block)
        held = sum(dims.numel(p.value.shape, candidate.batch) for p in block.parameters if not p.buffer)
        weight[plan.zero] = weight.get(plan.zero, 0) + held * graph.count(plan.block)
    zero = max(weight, key=lambda level: weight[level], default=0)
    pipeline = candidate.pipeline
    return Parallelism(dp=mesh.size_of(DATA_AXIS), pp=pipeline.stages, zero=zero, virtual_stages=pipeline.virtual, **degrees)


def _kind(graph: Graph, candidate: Candidate, axis: int) -> str:
    """``ep``, ``cp`` or ``tp``, for a model axis."""
    texts = describe_axis(graph, candidate, axis)
    if any(text.startswith("expert parallel") for text in texts):
        return "ep"
    sequence = any(text in ("ring attention", "attention by queries", "sequence-sharded activations") for text in texts)
    return "cp" if sequence and not any(text.endswith("parallel linears") for text in texts) else "tp"


def describe_pipeline(candidate: Candidate, bubble_share: float | None = None) -> str:
    """``pp=4 (interleaved 1f1b, 2 chunks, bubble 7 %)``."""
    pipeline = candidate.pipeline
    interleaved = "interleaved " * (pipeline.schedule == "1f1b" and pipeline.virtual > 1)
    words = [f"{interleaved}{pipeline.schedule}"] + [f"{pipeline.virtual} chunks"] * (pipeline.virtual > 1)
    words += ["gradients one update late"] * (pipeline.weight_versions > 1)
    words += [f"bubble {100 * bubble_share:.0f} %"] if bubble_share is not None else []
    return f"pp={pipeline.stages} ({', '.join(words)})"


def describe(graph: Graph, candidate: Candidate, bubble_share: float | None = None) -> str:
    """One line of all that was chosen: ``pp=2 (1f1b, bubble 7 %) x dp=4 (ZeRO-3 in groups of 2) x tp=2 (column- and row-parallel
    linears), 8 micro-batches, Layer recomputed``."""
    parts = [describe_pipeline(candidate, bubble_share)] if candidate.pipeline.stages > 1 else []
    for index, axis in enumerate(candidate.mesh.axes):
        if axis.size == 1 and len(candidate.mesh.axes) > 1:
            continue
        if axis.name == DATA_AXIS:
            parts.append(f"{axis.name}={axis.size}" + (f" ({_state(graph, candidate)})" if axis.size > 1 else ""))
        else:
            parts.append(f"{axis.name}={axis.size} ({', '.join(describe_axis(graph, candidate, index)) or 'nothing sharded'})")
    more = [f"{candidate.micro_batches} micro-batches"] * (candidate.micro_batches > 1)
    recomputed = [plan.block for plan in candidate.blocks if plan.recompute]
    more += [f"{', '.join(recomputed)} recomputed"] * bool(recomputed)
    partly = [plan.block for plan in candidate.blocks if plan.recompute_nodes and not plan.recompute]
    more += [f"{', '.join(partly)} recomputed in part"] * bool(partly)
    offloaded = [plan.block for plan in candidate.blocks if plan.offload]
    where = {"": "", "cpu": "host memory", "nvme": "NVMe"}.get(candidate.precision.offload_optimizer, "")
    more += [f"optimizer state in {where}"] * bool(where)
    more += [f"activations of {', '.join(offloaded)} offloaded"] * bool(offloaded)
    partly_saved = [plan.block for plan in candidate.blocks if plan.partition_saved]
    more += [f"activations of {', '.join(partly_saved)} saved in parts"] * bool(partly_saved)
    return ", ".join([" x ".join(parts), *more])


def _state(graph: Graph, candidate: Candidate) -> str:
    """``ZeRO-3 in groups of 8``: of the blocks that hold most parameters, and the groups that share one copy of the state."""
    zero = parallelism(graph, candidate).zero
    group = f" in groups of {candidate.zero_group}" if candidate.zero_group and any(b.zero for b in candidate.blocks) else ""
    others = sorted({plan.zero for plan in candidate.blocks if _parameters(graph, plan.block)} - {zero})
    kinds = [f"ZeRO-{each}" if each else "replicated state" for each in (zero, *others)]
    return ", some ".join(kinds) + group


def _parameters(graph: Graph, block: str) -> bool:
    return any(not parameter.buffer for parameter in graph.block(block).parameters)


def describe_axis(graph: Graph, candidate: Candidate, axis: int) -> tuple[str, ...]:
    """Return in words what one model axis shards: ``column- and row-parallel linears``, ``attention heads``, ``ring attention``,
    ..."""
    linears, channels = set[str](), set[str]()
    others: dict[str, None] = {}
    found: dict[str, None] = {}
    for plan in candidate.blocks:
        block = graph.block(plan.block)
        nodes = {node.name: node for node in block.nodes}
        for each in plan.nodes:
            op, sharded = nodes[each.node].op, each.factors[axis] if axis < len(each.factors) else ""
            if op in _PRODUCTS and sharded in _LINEAR:
                linears.add(_LINEAR[sharded])
            if op in _ATTENTION and isinstance(place := each.results[0][axis], Shard):
                rank = len(nodes[each.node].outputs[0].shape)
                found |= {"attention heads": None} if place.dim == rank - 3 else {}
                found |= {"attention by queries": None} if place.dim == rank - 2 and not each.function else {}
            if op.startswith(_CONVOLUTION) and sharded in _CHANNELS:
                channels.add(_CHANNELS[sharded])
            if sharded not in _UNSHARDED:
                others[f"{op.split('.')[1]} by {sharded}"] = None
            if op == "ap.moe_experts" and sharded == "f":
                found["tensor parallel inside experts"] = None
            first = sharded.partition(" ")[0]
            found.update((text, None) for name, (of, text) in _SHARDED_FUNCTIONS.items() if name in each.function and of == first)
    out = [f"{'- and '.join(sorted(linears))}-parallel linears"] if linears else []
    out += [f"convolutions by {' and '.join(sorted(channels))}"] if channels else []
    out += found
    out += _between_blocks(graph, candidate, axis)
    return tuple(out) or tuple(others)[:_NAMED]


def _between_blocks(graph: Graph, candidate: Candidate, axis: int) -> list[str]:
    """Return in words how the activations ``[B, S, H]`` between repeated blocks are sharded."""
    found: dict[str, None] = {}
    for block in graph.blocks:
        values = block.values()
        for name, placements in zip(block.outputs, candidate.block(block.name).outputs, strict=True):
            place = placements[axis]
            if graph.count(block.name) > 1 and isinstance(place, Shard):
                sequence = place.dim == 1 and len(values[name].shape) == 3
                kind = "sequence-sharded" if sequence else "batch-sharded" if place.dim == 0 else "sharded"
                found[f"{kind} activations"] = None
    return list(found)


def cut_short_text(limit: str) -> str:
    """The line that a search has to say of itself which a `limit` of time ended; empty for one that was done."""
    return f"cut short by {limit}: on another day or machine the plan or its bound may be another one" if limit else ""


TARGETS = ("label", "target")
"""Inputs whose name has one of these words say nothing of the unit."""


def unit_of(graph: Graph) -> str:
    """``tokens`` where an input is integers of shape [batch, length] and none is an image, ``images`` where a floating-point
    input is [batch, channels, height, width] and none is tokens, else ``samples``."""
    inputs = [value for value in graph.inputs if not any(word in value.name.lower() for word in TARGETS)]
    tokens = any(_is_tokens(graph, value) for value in inputs)
    images = any(len(value.shape) == 4 and value.dtype.startswith(("float", "bfloat")) for value in inputs)
    return "samples" if tokens == images else "tokens" if tokens else "images"


def tokens_of(graph: Graph) -> int | None:
    """Tokens of one example; None where the unit is another."""
    if unit_of(graph) != "tokens":
        return None
    return next(int(size) for value in graph.inputs if _is_tokens(graph, value) for size in value.shape[1:])


def _is_tokens(graph: Graph, value: Value) -> bool:
    if not value.dtype.startswith("int") or len(value.shape) != 2 or not isinstance(value.shape[1], int):
        return False
    return value.shape[1] > 1 and _is_batch(graph, value.shape[0])


def _is_batch(graph: Graph, size: Dim) -> bool:
    return has_batch(size) if graph.batch_is_symbolic else size == graph.batch

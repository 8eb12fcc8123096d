"""Random numbers that are the same on both sides: what the single process drew is given to the program as inputs.

A rank draws from streams of its own, so its bits cannot be those of one process. For the comparison each draw of the program
becomes an input, sharded as the plan places the draw: micro-batches, stages and recomputation get the elements that are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import PlanError
from autopar.ir import dims
from autopar.ir.graph import Block, Call, Graph, Node, Ref, Value, draws_masks
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Invariant, Partial, Placements, Replicate, Shard
from autopar.ir.plan import BlockPlan, Candidate, Conversion, NodePlan
from autopar.operations.attention import ATTENTION, ATTENTION_WITH_WEIGHTS
from autopar.operations.factories import DROPOUT, RANDOM
from autopar.operations.pointwise import MULTIPLY

GIVEN = "given_"
"""Names of inputs that are draws begin so."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The draw of a random operation of the single process. `op` is its packet (``bernoulli_``), `module` the innermost
    module."""

    module: str
    op: str
    values: Tensor


class RecordDraws(TorchDispatchMode):
    """While active, notes what the random operations of `model` draw, in order of execution."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self._model, self._path, self._stack = model, [""], ExitStack()

    def __enter__(self) -> RecordDraws:
        def leave(*_: Any) -> None:
            self._path.pop()

        for path, module in self._model.named_modules():

            def enter(*_: Any, path: str = path) -> None:
                self._path.append(path)

            before = module.register_forward_pre_hook(enter)
            after = module.register_forward_hook(leave, always_call=True)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_random(func):
            values = out[1] if isinstance(out, (tuple, list)) else out
            self.draws.append(Draw(self._path[-1], _packet(func), values.detach().clone()))
        return out


class GiveDraws(TorchDispatchMode):
    """While active, random operations give what was drawn before, in the dtype that they have now."""

    supports_higher_order_operators = True

    def __init__(self, draws: Sequence[Draw]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = iter(draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_random(func):
            draw = next(self._draws, None)
            if draw is None or isinstance(out, (tuple, list)) or draw.values.shape != out.shape:
                raise PlanError(
                    "the model draws other random numbers in another dtype: verify it in the dtype that it is made for"
                )
            out.copy_(draw.values)
        return out


def is_random(func: Any) -> bool:
    """Return whether an operation of torch draws random numbers. Kernels of attention have the tag; on a CPU they have no
    dropout."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and not _packet(func).startswith("_scaled_dot_product")


def _packet(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


# -- the draws of the program


@dataclass(frozen=True, slots=True)
class Wanted:
    """A random operation of the program: the number of its call, and its node."""

    call: int
    node: Node
    module: str

    @property
    def key(self) -> tuple[int, str]:
        return self.call, self.node.name


def wanted_draws(graph: Graph) -> list[Wanted]:
    """The random operations of the program in order of execution."""
    return [
        Wanted(number, node, ".".join(filter(None, (call.prefix, node.module))))
        for number, call in enumerate(graph.calls)
        for node in graph.block(call.block).nodes
        if _draws(node)
    ]


def _draws(node: Node) -> bool:
    """Dropout with a probability of 0 or 1 draws nothing."""
    return draws_masks(node) and (node.op == RANDOM or 0 < _probability(node) < 1)


def _probability(node: Node) -> float:
    if node.op == ATTENTION:
        return float(node.args[4] if len(node.args) > 4 else dict(node.kwargs).get("dropout_p", 0.0))  # type: ignore[arg-type]
    return float(node.args[1])  # type: ignore[arg-type]


def match_draws(graph: Graph, draws: Sequence[Draw]) -> dict[tuple[int, str], Tensor]:
    """Return the numbers for each random operation of the program, by call and node: the next draw of its module that has its
    shape, else the next one of all modules. PlanError, one line, where there is none."""
    left = list(draws)
    out: dict[tuple[int, str], Tensor] = {}
    for want in wanted_draws(graph):
        fitting = [draw for draw in left if _fits(graph, want.node, draw)]
        own = [draw for draw in fitting if _plain(draw.module) == _plain(want.module)]
        if not fitting:
            raise PlanError(
                f"{want.node.source or want.module or graph.name}: the model on one process draws no numbers like those of "
                f"{want.node.op} here, so both sides cannot have the same: draw with the shape and dtype of the result, or leave "
                "the draw out (pass the numbers as an input)"
            )
        chosen = (own or fitting)[0]
        left = [draw for draw in left if draw is not chosen]
        out[want.key] = _placed_draw(want.node, chosen)
    return out


def _plain(path: str) -> str:
    """Return the path without the number of a repeated call (``drop@1``)."""
    return ".".join(part.partition("@")[0] for part in path.split("."))


def _fits(graph: Graph, node: Node, draw: Draw) -> bool:
    shape = tuple(dims.shape_at(node.outputs[0].shape, graph.batch))
    mask = draw.op in ("bernoulli_", "bernoulli", "native_dropout")
    if node.op == ATTENTION:
        return mask and tuple(draw.values.shape[:-1]) == shape[:-1]
    if node.op == DROPOUT:
        return mask and tuple(draw.values.shape) == shape
    return tuple(draw.values.shape) == shape and (not mask or node.args[1] in ("bernoulli", "uniform"))


def _placed_draw(node: Node, draw: Draw) -> Tensor:
    values = draw.values
    if node.op == ATTENTION:
        return values != 0
    if node.op == DROPOUT:
        return (values != 0).to(values.dtype) / (1 - _probability(node))
    if node.args[1] == "uniform" and draw.op == "bernoulli":  # the graph compares uniform numbers with the chances
        return 1 - values
    return values


# -- draws as inputs


def with_draws(
    graph: Graph, candidate: Candidate, draws: Mapping[tuple[int, str], Tensor]
) -> tuple[Graph, Candidate, dict[str, Tensor]]:
    """The graph and its candidate with inputs in place of random operations, and these inputs. PlanError where the plan has a
    draw that is no tensor of the batch."""
    names_of_axes = candidate.mesh.names
    changed = {block.name: _Changed(block, candidate.block(block.name), names_of_axes) for block in graph.blocks}
    inputs: dict[str, Tensor] = {}
    calls: list[Call] = []
    further: list[Value] = []
    for number, call in enumerate(graph.calls):
        names = []
        for name, value in changed[call.block].values.items():
            own = f"{GIVEN}{number}_{name}"
            inputs[own] = draws[number, name]
            further.append(replace(value, name=own))
            names.append(own)
        calls.append(replace(call, inputs=(*call.inputs, *names)))
    blocks = tuple(changed[block.name].block for block in graph.blocks)
    plans = tuple(changed[plan.block].plan for plan in candidate.blocks)
    graph = replace(graph, inputs=(*graph.inputs, *further), blocks=blocks, calls=tuple(calls))
    return graph, replace(candidate, blocks=plans), inputs


class _Changed:
    """A block whose draws are inputs. `values` are these, by the name of the random node."""

    def __init__(self, block: Block, plan: BlockPlan, axes: Sequence[str]) -> None:
        self.values: dict[str, Value] = {}
        placed: list[Placements] = []
        conversions: list[Conversion] = []
        nodes: list[Node] = []
        plans = {each.node: each for each in plan.nodes}
        for node in block.nodes:
            if not _draws(node):
                nodes.append(node)
                continue
            where = tuple(map(_without_gradient, plans[node.name].results[0]))
            product, value, node_plan = _with_input(node, plans.pop(node.name), where, block.values())
            self.values[node.name] = value
            placed.append(_as_input(where, axes))
            conversions += _conversions(value.name, placed[-1], where)
            if product is not None and node_plan is not None:
                nodes.append(product)
                plans[node.name] = node_plan
        there = {node.name for node in nodes}
        self.block = replace(block, inputs=(*block.inputs, *self.values.values()), nodes=tuple(nodes))
        self.plan = replace(
            plan,
            inputs=(*plan.inputs, *placed),
            nodes=tuple(plans[node.name] for node in nodes),
            conversions=(*conversions, *plan.conversions),
            recompute_nodes=tuple(name for name in plan.recompute_nodes if name in there),
        )


def _without_gradient(where: Any) -> Any:
    return Replicate() if isinstance(where, (Invariant, Partial)) else where


def _as_input(where: Placements, axes: Sequence[str]) -> Placements:
    """An input of the program is sharded on the data axis only."""
    return tuple(
        each if axis == DATA_AXIS and isinstance(each, Shard) and each.parts == 1 else Replicate()
        for axis, each in zip(axes, where, strict=True)
    )


def _conversions(value: str, source: Placements, target: Placements) -> list[Conversion]:
    """Return the conversions from one to the other, one axis at a time: each takes its part, and nothing is sent."""
    out = []
    for number, (before, after) in enumerate(zip(source, target, strict=True)):
        if before != after:
            there = (*source[:number], after, *source[number + 1 :])
            out.append(Conversion(value, source, there))
            source = there
    return out


def _with_input(
    node: Node, plan: NodePlan, where: Placements, values: Mapping[str, Value]
) -> tuple[Node | None, Value, NodePlan | None]:
    """The node that takes the draw as an input, that input, and the node's plan. Plain random numbers are the input itself."""
    result = replace(node.outputs[0], differentiable=False)
    if node.op == RANDOM:
        return None, result, None
    if node.op == DROPOUT:
        mask = replace(result, name=f"{node.name}_mask")
        product = replace(node, op=MULTIPLY, args=(node.args[0], Ref(mask.name)), kwargs=())
        return product, mask, replace(plan, operands=(plan.operands[0], where))
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    options = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    q, k, v, scale = (options.get(name) for name in ("query", "key", "value", "scale"))
    scores = (*values[q.name].shape[:-1], values[k.name].shape[-2])  # type: ignore[union-attr]
    mask = Value(f"{node.name}_mask", scores, "bool")
    args = (q, k, v, options.get("attn_mask"), _probability(node), options.get("is_causal", False), Ref(mask.name))
    kwargs = (("scale", scale), ("enable_gqa", options.get("enable_gqa", False)))
    weights = Value(f"{node.name}_weights", scores, result.dtype)
    product = replace(node, op=ATTENTION_WITH_WEIGHTS, args=args, kwargs=kwargs, outputs=(*node.outputs, weights))
    return product, mask, replace(plan, operands=(*plan.operands, where), results=(*plan.results, where))

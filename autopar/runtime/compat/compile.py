"""Private parts of torch.compile: its backends by name, its refusals, and operations that the compiled backward recomputes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch.utils.checkpoint import CheckpointPolicy

_MARK = "autopar.recompute"

NotOneGraph = (Unsupported, FailOnRecompileLimitHit)
"""The errors of ``fullgraph=True`` where torch.compile would else run a part as it is. Seen on 2.13.0."""


def compiler_named(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend of torch.compile. Seen on 2.13.0."""
    return torch._dynamo.lookup_backend(backend)


def reason_of(error: Exception) -> str:
    """Return why it is not one graph, in one line: in the words of a function that is not to be compiled, or torch's."""
    if isinstance(error, FailOnRecompileLimitHit):
        return f"its calls are of more than {torch._dynamo.config.recompile_limit} kinds (torch._dynamo.config.recompile_limit)"
    said = re.search(r"\(reason: (?!None\))(.*)\)", str(error))
    return said[1] if said else str(error).strip().partition("\n")[0]


def marked_for_recomputation() -> AbstractContextManager[None]:
    """Mark the operations that torch.compile traces inside. Seen on 2.13.0: ``meta["custom"]`` of their nodes."""
    return torch.fx.traceback.annotate({_MARK: True})


@dataclass(frozen=True, slots=True)
class Recomputing:
    """A backend that tags the marked nodes of a graph, or `every` node, as selective checkpoints do: AOTAutograd saves none of
    their results, but for those that a second call would change. Seen on 2.13.0: code is compiled once for equal backends."""

    backend: Callable[..., Any]
    every: bool = False

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        tagged = []
        for module in graph.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                marked = self.every or node.meta.get("custom", {}).get(_MARK)
                if node.op.startswith("call_") and marked and not _changes_operands(node):
                    node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, 0
                    tagged.append(node.name)
        return _compiled_apart(self.backend, graph, inputs, " ".join(tagged)) if tagged else self.backend(graph, inputs)


def _changes_operands(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _compiled_apart(backend: Callable[..., Any], graph: fx.GraphModule, inputs: Any, tags: str) -> Any:
    """Compile under a further key: the caches of compiled graphs take two graphs that differ in their tags alone for one."""
    # importing it takes seconds, and only programs that are compiled need it
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

    class Key(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return f"autopar {tags}"

    with config.patch(joint_custom_pre_pass=(*get_custom_graph_passes(config.joint_custom_pre_pass), Key())):
        return backend(graph, inputs)

"""Private parts of torch.compile, seen on 2.13.0: its backends by name, its refusals, operations that the compiled backward
recomputes; and compiled code as bytes that another process takes into its caches: torch's mega-cache, and the libraries of C++
that it leaves out."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import torch
from torch import fx
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy

from .async_tp import Groups, async_tp_settings
from .hooks import replaced
from .unread_outputs import with_unread_outputs

_RECOMPUTED = "autopar.recompute"
_ELSEWHERE = "autopar.saved_elsewhere"
_FUSED = (torch.Tag.pointwise, torch.Tag.reduction)

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


def is_traced() -> bool:
    """Return whether torch.compile traces what runs. Seen on 2.13.0."""
    return torch._guards.TracingContext.try_get() is not None


def marked_for_recomputation() -> AbstractContextManager[None]:
    """Mark the operations that torch.compile traces inside. Seen on 2.13.0: ``meta["custom"]`` of their nodes."""
    return torch.fx.traceback.annotate({_RECOMPUTED: True})


def marked_as_saved_elsewhere(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that torch.compile traces, as a result of its code, marked."""
    with torch.fx.traceback.annotate({_ELSEWHERE: True}):
        return x.detach()


Compilations = Callable[[fx.GraphModule, Any, str, Callable[[], Any]], Any]
"""Returns what its last argument, which compiles, returns, for a graph with inputs and options."""


@dataclass(frozen=True, slots=True)
class BlockBackend:
    """A backend that tags the marked nodes of a graph, or `every` node, as selective checkpoints do: AOTAutograd saves none of
    their results, but for those that a second call would change. Where a tensor is saved elsewhere, it tags what streaming
    operations make of it: AOTAutograd may save that in its stead. Collectives of `groups` run in pieces beside products; inductor
    is called through `compilations`. Seen on 2.13.0: code is compiled once for equal backends, and a graph with an autograd
    function is looked up among those compiled before only if the configuration says so."""

    backend: Callable[..., Any]
    every: bool = False
    groups: Groups = frozenset()
    compilations: Compilations | None = field(default=None, compare=False)

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        # importing them takes seconds, and only programs that are compiled need them
        from torch._functorch.config import patch
        from torch.fx.passes import _tensorify_python_scalars as scalars

        # a graph without a backward recomputes nothing, and AOTAutograd refuses tags on operations that may be random there
        trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        tags = []
        for module in graph.modules() if trains else ():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                marks = node.meta.get("custom", {})
                if node.op.startswith("call_") and (self.every or marks.get(_RECOMPUTED)) and not _changes_operands(node):
                    _tag(node)
                    tags.append(node.name)
                if marks.get(_ELSEWHERE):
                    tags.append(f"{node.name} elsewhere")
        marks = " ".join(tags)
        compile = partial(self._compiled_apart, graph, inputs, marks) if tags else partial(self._compiled, graph, inputs)
        # its pass over floats, of which blocks have none, loses what is copied into a float64 buffer without dimensions
        whole = replaced(scalars, "_is_tensorify_enabled", lambda: False)
        with whole, patch(autograd_cache_allow_custom_autograd_functions=True):
            if self.compilations is None or self.backend is not compiler_named("inductor"):
                compiled = compile()
            else:
                with patch(force_non_lazy_backward_lowering=True):  # what is compiled now is what other ranks get
                    compiled = self.compilations(graph, inputs, f"{marks} {sorted(self.groups)}", compile)
        return with_unread_outputs(graph, compiled) if trains else compiled

    def _compiled(self, graph: fx.GraphModule, inputs: Any) -> Any:
        """Compile; inductor then starts each collective as soon as its operand is there, and waits for it when all else that is
        ready has been computed, so that gradients of weights hide those that complete gradients. Collectives stay in the graph's
        order, on every rank the same. Seen on 2.13.0: a backward is compiled later, with these settings only where they are
        arguments."""
        if self.backend is not compiler_named("inductor"):
            return self.backend(graph, inputs)
        overlap = {
            "reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
            **(async_tp_settings(self.groups) if self.groups else {}),
        }  # fmt: skip
        return self.backend(graph, inputs, config_patches=overlap)

    def _compiled_apart(self, graph: fx.GraphModule, inputs: Any, tags: str) -> Any:
        """Compile under a further key: the caches of compiled graphs take two graphs that differ in their tags alone for one."""
        from torch._functorch.config import patch
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

        class Key(CustomGraphPass):
            def __call__(self, graph: fx.Graph) -> None:
                pass

            def uuid(self) -> str:
                return f"autopar {tags}"

        passes = (*get_custom_graph_passes(config.joint_custom_pre_pass), Key())
        with config.patch(joint_custom_pre_pass=passes), patch(joint_custom_pass=_with_stand_ins_recomputed):
            return self._compiled(graph, inputs)


def _tag(node: fx.Node) -> None:
    node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, 0


def _with_stand_ins_recomputed(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
    """Tag what streaming operations of the forward make, for the backward, of tensors that are saved elsewhere; but nothing that
    other operations read, which is in memory anyway."""
    nodes = list(graph.graph.nodes)
    forward = {node for node in nodes if node.meta.get("partitioner_tag") != "is_backward"}
    made = {_without_views(node) for node in nodes if node.meta.get("custom", {}).get(_ELSEWHERE)}
    stand_ins: list[fx.Node] = []
    for node in nodes:
        streams = node in forward - made and (_is_a(node, torch.Tag.pointwise) or _is_view(node))
        read = [user for user in node.users if user in forward and not (_is_a(user, *_FUSED) or _is_view(user))]
        if streams and not read and not made.isdisjoint(node.all_input_nodes):
            made.add(node)
            stand_ins.append(node)
    needed = set(nodes) - forward
    for node in reversed(stand_ins):
        if not needed.isdisjoint(node.users):
            needed.add(node)
            _tag(node)
    return graph


def _is_a(node: fx.Node, *kinds: torch.Tag) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not set(kinds).isdisjoint(node.target.tags)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _without_views(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _changes_operands(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


_MEGA_CACHE = "mega-cache"


class CompiledCode:
    """The code that a process compiles, or finds in a cache, from now on."""

    def __init__(self) -> None:
        self.before = _loaded_modules()

    def archive(self) -> bytes:
        """Return the code so far as bytes for `take_code`: empty where there is none. Libraries are under the name of the
        processor that they are for. Without what they are linked from, and torch's precompiled headers, of 150 MB each."""
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:
            return b""
        archive = BytesIO()
        with ZipFile(archive, "w", ZIP_DEFLATED) as files:
            files.writestr(_MEGA_CACHE, artifacts[0])
            kernels = (sys.modules[name].__file__ for name in _loaded_modules() - self.before if name in sys.modules)
            for path in {*map(Path, filter(None, kernels)), *_trial_libraries()}:
                if path.is_relative_to(_folder()):
                    files.write(path, f"{processor()}/{path.relative_to(_folder())}")
        return archive.getvalue()


@contextmanager
def recorded_code() -> Iterator[CompiledCode]:
    """Record all that is compiled inside, or found in a cache."""
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        yield CompiledCode()


def take_code(content: bytes) -> None:
    """Put what another process of this job compiled into the caches of this one; libraries only where they are for its
    processor."""
    from torch._inductor.codecache import write_atomic

    with ZipFile(BytesIO(content)) as files:
        for name in files.namelist():
            path = _folder() / name.removeprefix(f"{processor()}/")
            if name.startswith(f"{processor()}/") and not path.exists():
                write_atomic(str(path), files.read(name), make_dirs=True)
        torch.compiler.load_cache_artifacts(files.read(_MEGA_CACHE))


def cache_hits() -> int:
    """Return the number of graphs that this process found in torch's caches so far."""
    return int(counters["aot_autograd"]["autograd_cache_hit"])


@cache
def processor() -> str:
    """Return a name that processors share which execute the same instructions: torch compiles C++ for all that there are."""
    instructions = platform.processor()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                instructions = flags
                break
    return hashlib.sha256(instructions.encode()).hexdigest()[:16]


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _loaded_modules() -> set[str]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return set(CppPythonBindingsCodeCache._loaded_module_names)


def _trial_libraries() -> Iterator[Path]:
    """The libraries that torch compiles in order to see which vector instructions there are, a second each."""
    for path in _folder().glob("??/*.so"):
        if not path.name.endswith(".main.so") and path.with_suffix(".cpp").exists():
            yield path

"""Bytes that inductor's kernels read and write: its own count, of the schedule that it makes of a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from torch import fx
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

SMALL = 0.01
"""A kernel whose results are less than this share of what it reads adds up rows: it makes gradients of weights."""


@dataclass(frozen=True, slots=True)
class KernelBytes:
    """Bytes of the kernels that inductor writes itself for one graph: all, and of those among them that only add up rows for
    gradients of weights. Triton's code has no such kernels (`config.triton.mix_order_reduction`), that for CPUs has."""

    all_bytes: float
    row_sum_bytes: float


class _Counted(Exception):
    """The kernels are counted, and need no code."""


@dataclass
class CountingInductor:
    """A backend of torch.compile that counts what inductor would run, and runs the graphs as they are. Concatenations are part of
    kernels, as on a GPU. Seen on 2.13.0: `Scheduler.nodes`, `get_read_write_buffers_sizes`."""

    blocks: list[dict[bool, KernelBytes]] = field(default_factory=list)
    """Of each graph the bytes of its forward, and of its backward (True)."""

    def __call__(self, graph: fx.GraphModule, examples: list[Any]) -> Any:
        patches = {"force_pointwise_cat": True, "fx_graph_cache": False}
        self.blocks.append({})
        return compile_fx(graph, examples, inner_compile=partial(self._count, self.blocks[-1]), config_patches=patches)

    def _count(
        self, block: dict[bool, KernelBytes], graph: fx.GraphModule, examples: list[Any], **options: Any
    ) -> Callable[..., Any]:
        plain = copy.deepcopy(graph)

        def codegen(lowered: GraphLowering) -> Any:
            lowered.init_wrapper_code()
            lowered._update_scheduler()
            kernels = [node for node in lowered.scheduler.nodes if not node.is_extern()]
            sums = [node for node in kernels if _adds_rows(node)]
            block[bool(lowered.is_backward)] = KernelBytes(sum(map(_size, kernels)), sum(map(_size, sums)))
            raise _Counted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GraphLowering, "codegen", codegen)
            try:
                compile_fx_inner(graph, examples, **options)
            except InductorError as error:
                if not isinstance(error.inner_exception, _Counted):
                    raise

        def run(given: list[Any]) -> Any:
            return fx.Interpreter(plain).boxed_run(given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _size(kernel: Any) -> float:
    return float(kernel.get_read_write_buffers_sizes())


def _adds_rows(kernel: Any) -> bool:
    written = sum(V.graph.get_numel(dependency.name) for dependency in kernel.read_writes.writes)
    read = max((V.graph.get_numel(dependency.name) for dependency in kernel.read_writes.reads), default=0)
    return bool(written < SMALL * read)

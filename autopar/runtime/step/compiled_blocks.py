"""Blocks under torch.compile, each distinct one compiled once: what the plan recomputes in the backward is recomputed by the
compiled backward, and is not saved."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch

from ..compat.compile import Unsupported, compiler_named, marked_for_recomputation, recomputes_marked
from ..module import BlockModule, Program

Backend = str | Callable[..., Any]


def compile_blocks(program: Program, backend: Backend) -> None:
    """Compile each block with a backend of torch.compile."""
    as_planned, left_out = _with_planned_recomputation(backend), set[type[BlockModule]]()
    for block in program.blocks():
        if block.recompute or block.selective_recompute:
            block.forward = _RecomputingBlock(block, as_planned, left_out)
        else:
            block.forward = torch.compile(block.forward, backend=backend)


class _RecomputingBlock:
    """The forward of a block that recomputes. It has to be a single graph, since what is saved is decided for a graph: it runs as
    it is, with a warning, where it offloads, saves parts, or calls what torch.compile does not trace. `left_out`: classes that
    did so, of all blocks of the program."""

    def __init__(self, block: BlockModule, backend: Callable[..., Any], left_out: set[type[BlockModule]]) -> None:
        self.kind, self.eager, self.left_out = type(block), block.forward, left_out
        forward = MethodType(_run_marked, block) if block.recompute else block.forward
        self.compiled = torch.compile(forward, backend=backend, fullgraph=True)

    def __call__(self, *args: torch.Tensor) -> Any:
        if self.kind not in self.left_out:
            try:
                return self.compiled(*args)
            except Unsupported as error:
                self.left_out.add(self.kind)
                warnings.warn(
                    f"not compiled: {self.kind.__name__}, which recomputes and has to be one graph: {_reason(error)}",
                    stacklevel=3,
                )
        return self.eager(*args)


def _run_marked(block: BlockModule, *args: torch.Tensor) -> Any:
    """Run a block whose backward recomputes all of it."""
    with marked_for_recomputation():
        return type(block).forward(block, *args)


def _reason(error: Exception) -> str:
    """Return torch's reason in one line: the one that a function gives that is not to be compiled, or the first line."""
    said = re.search(r"\(reason: (.*)\)", str(error))
    return said[1] if said else str(error).strip().partition("\n")[0]


@cache  # one object a backend, by which torch knows what it has compiled
def _with_planned_recomputation(backend: Backend) -> Callable[..., Any]:
    return recomputes_marked(compiler_named(backend))

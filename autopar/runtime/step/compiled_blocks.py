"""Blocks under torch.compile, each distinct one compiled once: what the plan recomputes in the backward is recomputed by the
compiled backward, and is not saved; what it offloads or partitions is saved elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from ..compat.compile import BlockBackend, NotOneGraph, compiler_named, reason_of
from ..module import BlockModule, Program
from ..progress import working
from .compile_once import CompileOnce
from .recompute import Recompute

Backend = str | Callable[..., Any]


def compile_blocks(program: Program, backend: Backend) -> None:
    """Compile each block with a backend of torch.compile; collectives of the mesh's `async_tp` run in pieces beside products."""
    left_out, compiler, once = set[type[BlockModule]](), compiler_named(backend), CompileOnce()
    waiting = list(program.blocks())
    for block in program.blocks():
        own = BlockBackend(compiler, every=block.recompute, groups=program.mesh.async_tp, compilations=once)
        if block.recompute or block.selective_recompute:
            compiled: Callable[..., Any] = _RecomputingBlock(block, own, left_out)
        else:
            compiled = torch.compile(block.forward, backend=own)
        block.forward = _FirstCall(block, compiled, waiting, once)


class _FirstCall:
    """The first call of a block, which compiles it and may take long; it then gives its place to the compiled block. The last of
    the `waiting` blocks says how long it took."""

    def __init__(self, block: BlockModule, compiled: Callable[..., Any], waiting: list[BlockModule], once: CompileOnce) -> None:
        self.block, self.compiled, self.waiting, self.once = block, compiled, waiting, once

    def __call__(self, *args: torch.Tensor) -> Any:
        self.block.forward = self.compiled
        with working(f"compiling {type(self.block).__name__}"):
            results = self.compiled(*args)
        self.waiting.pop()
        if not self.waiting:
            self.once.say()
        return results


class _RecomputingBlock:
    """The forward of a block that recomputes, offloads or saves parts. It has to be a single graph, since what is saved is
    decided for a graph: it runs as it is, with a warning, where it calls what torch.compile does not trace. `left_out`: classes
    that did so, of all blocks of the program."""

    def __init__(self, block: BlockModule, backend: Callable[..., Any], left_out: set[type[BlockModule]]) -> None:
        self.kind, self.eager, self.left_out, self.host = type(block), block.forward, left_out, block.mesh.host_memory
        # the class' own code: torch counts what it compiled of each code
        self.compiled = torch.compile(MethodType(type(block).forward, block), backend=backend, fullgraph=True)

    def __call__(self, *args: torch.Tensor) -> Any:
        if self.kind not in self.left_out:
            try:
                with Recompute(self.host) as recompute:
                    results = self.compiled(*args)
                    recompute.save_traced()
                return results
            except NotOneGraph as error:
                self.left_out.add(self.kind)
                warnings.warn(
                    f"not compiled: {self.kind.__name__}, which recomputes and has to be one graph: {reason_of(error)}",
                    stacklevel=3,
                )
        return self.eager(*args)

"""Bases of the generated classes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .later import Later
from .layout import local_shape
from .mesh import MeshHandle
from .rng import Draws, Repeated

OWN = frozenset(
    ("mesh", "prefix", "original", "zero", "recompute", "replays", "draws", "batch_statistics", "specs", "training", "lent")
    + ("blocks", "mesh_axes", "input_placements", "input_shapes", "precision", "micro_batches", "zero_group", "totals", "count")
    + ("later", "chunks", "boundaries", "schedule", "examples", "takes", "loss_dtype", "weight_versions")
    + ("roots", "position", "queue", "everything", "mine", "owners", "actions")
    + ("outputs", "positional", "arguments", "constants", "defaults", "input_dtypes", "noise")
)
"""Attributes of the classes below."""


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer of a block: its path in the block, global shape, master dtype, stored placement per model axis.

    `placements` maps axis names to ``I``, ``S(dim)`` or ``S(dim,parts)``, parts of the global tensor; a missing axis is ``I``.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    placements: Mapping[str, str] = field(default_factory=dict)
    trainable: bool = True
    buffer: bool = False
    persistent: bool = True

    @property
    def attribute(self) -> str:
        """The path with ``_`` for dots, made an identifier that hides nothing of nn.Module; generated text has the same rule."""
        name = re.sub(r"\W", "_", self.path)
        if name[0].isdigit():
            return f"p{name}"
        return f"{name}_" if name in OWN or hasattr(nn.Module, name) else name


def _same_draws() -> tuple[Draws, Repeated]:
    """What torch's checkpoint runs the forward and its repetition in."""
    draws = Draws()
    return draws, draws.repeated


class Block(nn.Module):
    """A piece of the program with its local parameters, on meta until `state.materialize` fills them.

    `recompute`: the backward runs the forward once more, so that only the block's inputs are kept.
    `replays`: it runs some operations once more, or keeps some tensors on the host (`again.Again`).
    `draws`: its operations are random.
    `noise`: random numbers that were captured as they are (stochastic depth, channel dropout), in training.
    `batch_statistics`: written for training (batch norm), and wrong in evaluation.

    `later`: linear maps whose weights' gradients may be computed in an action of their own.

    `names` maps paths to original names where these are not prefix + path (tied parameters, the model's own glue).
    """

    zero: ClassVar[int] = 0
    recompute: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    batch_statistics: ClassVar[bool] = False
    noise: ClassVar[bool] = False
    specs: ClassVar[tuple[Parameter, ...]] = ()
    later: Later = Later()

    def __init__(self, mesh: MeshHandle, prefix: str, names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.prefix = prefix
        dotted = prefix + "." if prefix else ""
        self.original = {spec.path: (names or {}).get(spec.path, dotted + spec.path) for spec in self.specs}
        for spec in self.specs:
            shape = local_shape(spec.shape, spec.placements, mesh)
            empty = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
            if spec.buffer:
                self.register_buffer(spec.attribute, empty, persistent=spec.persistent)
            else:
                self.register_parameter(spec.attribute, nn.Parameter(empty, requires_grad=spec.trainable))
        if self.recompute:
            run = partial(checkpoint, self.forward, use_reentrant=False, preserve_rng_state=False)
            self.forward = partial(run, context_fn=_same_draws) if self.draws else run


class Root(nn.Module):
    """Blocks that share one order of gathers (FSDP2's root): the program, or a chunk of a pipeline.

    `lent`: attributes of blocks that the root holds for several of them, as (own attribute, block, the block's attribute).
    """

    precision: tuple[str, str] = ("float32", "float32")
    position: int = 0
    """Its place in the model's order."""

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__()
        self.mesh = mesh
        self.lent: tuple[tuple[str, Block, str], ...] = ()

    def blocks(self) -> Iterator[Block]:
        """All blocks in the order in which they were made."""
        for module in self.modules():
            if isinstance(module, Block):
                yield module


class Program(Root):
    """The whole step of one rank: `forward` takes this rank's batch and returns the loss, equal on all ranks, and behind it the
    `outputs`, by path in the model's result and placement on each axis.

    `positional` are the names of the model's arguments in order. `arguments` gives the inputs whose paths in the user's arguments
    are not their names; `constants` and `defaults` describe arguments that are no tensors, these may be left out.

    State is cut over `zero_group` neighbours of the data axis, and equal between such groups (0: cut over all of it).
    With several `micro_batches` it takes one of them, and beside it the `totals`: what `count` gives, reduced over all of them.
    """

    mesh_axes: ClassVar[dict[str, int]] = {}
    input_placements: ClassVar[dict[str, dict[str, str]]] = {}
    input_shapes: ClassVar[dict[str, tuple[int | None, ...]]] = {}
    input_dtypes: ClassVar[dict[str, str]] = {}
    positional: ClassVar[tuple[str, ...]] = ()
    arguments: ClassVar[dict[str, str]] = {}
    constants: ClassVar[dict[str, str]] = {}
    defaults: ClassVar[dict[str, str]] = {}
    outputs: ClassVar[dict[str, dict[str, str]]] = {}
    loss_dtype: ClassVar[str] = "float32"
    micro_batches: ClassVar[int] = 1
    zero_group: ClassVar[int] = 0
    totals: ClassVar[dict[str, str]] = {}

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__(mesh)
        mesh.share_state(self.zero_group)

    def count(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """What of this micro-batch the loss needs of the whole batch."""
        return {}

    def roots(self) -> tuple[tuple[Root, ...], ...]:
        """What state is shared out by, of each pipeline rank: the program, or chunks. Those of other ranks stay on meta."""
        return ((self,),)

"""Base classes of the generated program: a parameter's spec, a block, and the program of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from .attribute_names import attribute_of
from .compat.modules import profiling
from .device.mesh import MeshHandle
from .device.rng import RestoredRng, RngRecorder
from .ops.split_backward import SplitBackward
from .state.layout import local_shape


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter or buffer of a block: its path in the block, global shape, master dtype, and stored placement on each model
    axis.

    `placements` maps axis names to ``I``, ``S(dim)`` or ``S(dim,parts)``, with parts of the global tensor; a missing axis is
    ``I``.
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
        """The attribute of the block that has it."""
        return attribute_of(self.path)


def _rng_contexts() -> tuple[RngRecorder, RestoredRng]:
    """The contexts of torch's checkpoint: of the forward, and of its recomputation."""
    recorder = RngRecorder()
    return recorder, recorder.restored


class BlockModule(nn.Module):
    """A block of the model with its local parameters, on meta until `state.materialize` fills them.

    `zero`: the ZeRO stage of its state, 0 to 3.
    `recompute`: full recomputation: the backward runs the whole forward again, and only the block's inputs are saved.
    `selective_recompute`: the backward recomputes some operations, or some saved tensors are offloaded (`step.recompute`).
    `uses_rng`: it has random operations, whose numbers a full recomputation must repeat.
    `training_noise`: it has random numbers of training that were captured as such (stochastic depth, channel dropout).
    `writes_buffers`: its forward writes buffers as in training (statistics of batch norm, counts), which evaluation may not.
    `split_backward`: linear layers whose weight gradients may be computed in an action of their own.

    `names` maps paths to original names where these are not prefix + path (tied parameters, parameters of the model itself).
    """

    zero: ClassVar[int] = 0
    recompute: ClassVar[bool] = False
    selective_recompute: ClassVar[bool] = False
    uses_rng: ClassVar[bool] = False
    writes_buffers: ClassVar[bool] = False
    training_noise: ClassVar[bool] = False
    specs: ClassVar[tuple[ParameterSpec, ...]] = ()
    split_backward: SplitBackward = SplitBackward()

    def __init__(self, mesh: MeshHandle, prefix: str, names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.prefix = prefix
        dotted = prefix + "." if prefix else ""
        self.original_names = {spec.path: (names or {}).get(spec.path, dotted + spec.path) for spec in self.specs}
        for spec in self.specs:
            shape = local_shape(spec.shape, spec.placements, mesh)
            empty = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
            if spec.buffer:
                self.register_buffer(spec.attribute, empty, persistent=spec.persistent)
            else:
                self.register_parameter(spec.attribute, nn.Parameter(empty, requires_grad=spec.trainable))
        if self.recompute:
            run = partial(checkpoint, self.forward, use_reentrant=False, preserve_rng_state=False)
            self.forward = partial(run, context_fn=_rng_contexts) if self.uses_rng else run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, in a profile within a range of its name: of its call, which includes the gathers of its weights."""
        if not profiling():
            return super().__call__(*args, **kwargs)
        with record_function(self.prefix or type(self).__name__):
            return super().__call__(*args, **kwargs)


class RootModule(nn.Module):
    """Blocks under one FSDP2 root: the program, or a model chunk of a pipeline.

    `shared_parameters`: parameters that the root holds for several blocks: (own attribute, block, the block's attribute).
    `reduce_dtype`: of gradients that are summed over the data axis; empty: that of the parameters.
    """

    precision: tuple[str, str] = ("float32", "float32")
    reduce_dtype: str = ""
    position: int = 0
    """The number of this one in the model's order."""

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__()
        self.mesh = mesh
        self.shared_parameters: tuple[tuple[str, BlockModule, str], ...] = ()

    def blocks(self) -> Iterator[BlockModule]:
        """All blocks in the order of their construction."""
        for module in self.modules():
            if isinstance(module, BlockModule):
                yield module


class Program(RootModule):
    """The forward of one rank: it takes this rank's batch and returns the loss, equal on all ranks, followed by the `outputs`,
    which are listed by path in the model's result with their placement on each axis. `output_kinds` says how each comes back:
    ``gradient`` (a full tensor that takes gradients), ``full`` or ``dtensor``. Without `has_loss` the loss is a stand-in.
    Where nothing trains it is `forward_only`: nothing that it returns has a graph.

    `positional`: the names of the model's arguments in order. `arguments`: for inputs whose path in the user's arguments is not
    their name, that path. `batch_dims`: inputs that are passed with the batch at another dimension than 0, where the forward has
    it. `constants` and `defaults`: arguments that are not tensors; the latter may be left out.

    State is sharded over `zero_group` neighbours of the data axis and replicated between such groups (0: over the whole axis).
    `offload_optimizer`: where the optimizer's state lies between steps (``cpu``, ``nvme``; empty: on the device).
    With several `micro_batches` the forward takes one of them, and the `totals`: what `count` returns, reduced over all of them.
    With two `weight_versions` the steps of a pipeline overlap.
    """

    mesh_axes: ClassVar[dict[str, int]] = {}
    input_placements: ClassVar[dict[str, dict[str, str]]] = {}
    input_shapes: ClassVar[dict[str, tuple[int | None, ...]]] = {}
    input_dtypes: ClassVar[dict[str, str]] = {}
    differentiable_inputs: ClassVar[tuple[str, ...]] = ()
    positional: ClassVar[tuple[str, ...]] = ()
    arguments: ClassVar[dict[str, str]] = {}
    batch_dims: ClassVar[dict[str, int]] = {}
    constants: ClassVar[dict[str, str]] = {}
    defaults: ClassVar[dict[str, str]] = {}
    outputs: ClassVar[dict[str, dict[str, str]]] = {}
    output_kinds: ClassVar[dict[str, str]] = {}
    has_loss: ClassVar[bool] = True
    forward_only: ClassVar[bool] = False
    loss_dtype: ClassVar[str] = "float32"
    micro_batches: ClassVar[int] = 1
    weight_versions: ClassVar[int] = 1
    zero_group: ClassVar[int] = 0
    offload_optimizer: ClassVar[str] = ""
    totals: ClassVar[dict[str, str]] = {}

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__(mesh)
        mesh.group_state(self.zero_group)

    def count(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the numbers of this micro-batch whose totals over the whole batch the loss needs (such as the valid targets)."""
        return {}

    @staticmethod
    def takes_batch(B_all: int) -> bool:
        """Return whether the model's forward takes the branches of this program for a global batch of that size."""
        return True

    @property
    def state_program(self) -> Program:
        """The program that holds the weights: this one, unless they are lent (`state.lend`)."""
        holder: Program = self.__dict__.get("state_program", self)
        return holder

    def roots(self) -> tuple[tuple[RootModule, ...], ...]:
        """The FSDP2 roots of each stage: the program, or model chunks. Those of other stages stay on meta."""
        return ((self,),)

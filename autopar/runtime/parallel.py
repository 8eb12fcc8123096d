"""The user's handle on a running program: an nn.Module whose call takes the global batch and returns the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

from .compat import in_backward, save_strided_pieces
from .errors import BatchProblem, RuntimeProblem, StateProblem
from .mesh import DATA_AXIS
from .micro_batches import run
from .module import Program
from .norms import clip
from .state import Source, State, materialize
from .zero import release


class LocalBatch(dict[str, torch.Tensor]):
    """A batch of which each data-parallel rank holds its own part. Made by `Parallel.local_batch`."""


class Container(nn.Module):
    """A node of the tree of original names."""


class Parallel(nn.Module):
    """Runs a program like the model that it was made from. Parameters are DTensors under their original names."""

    program: Program
    state: State

    def __init__(self, program: Program, source: Source, *, compile: bool | str | Callable[..., Any] = False) -> None:
        """`source` gives full tensors by original name. `compile` is a backend of torch.compile, or True for inductor.

        Blocks of one class share their compiled code: each distinct block is compiled once.
        """
        super().__init__()
        save_strided_pieces()
        # FSDP2 warns of in-place writes into views that a block returns; generated code never writes in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        # The generated modules stay out of the registered tree: their parameters are not the canonical ones.
        self.__dict__["program"] = program
        self.__dict__["state"] = materialize(program, source)
        for name, parameter in self.state.parameters.items():
            node, leaf = self._node(name)
            node.register_parameter(leaf, parameter)
        for name, buffer in self.state.buffers.items():
            node, leaf = self._node(name)
            node.register_buffer(leaf, buffer, persistent=self.state.specs[name].persistent)
        if compile:
            self._compile("inductor" if compile is True else compile)

    def _compile(self, backend: str | Callable[..., Any]) -> None:
        """Blocks that run operations again stay as they are: torch.compile decides itself what to keep. So do random ones that
        run again whole: it would not repeat the draws."""
        left = sorted({type(block).__name__ for block in self.program.blocks() if block.replays or block.draws})
        if left:
            warnings.warn(f"not compiled: {', '.join(left)}, whose plan says what is kept for the backward", stacklevel=3)
        for block in self.program.blocks():
            if not (block.replays or block.draws):
                block.forward = torch.compile(block.forward, backend=backend)

    def _node(self, name: str) -> tuple[nn.Module, str]:
        """The container of a dotted name, made where missing, and the last part."""
        *path, leaf = name.split(".")
        node: nn.Module = self
        for part in path:
            if part not in node._modules:
                node.add_module(part, Container())
            node = node.get_submodule(part)
        return node, leaf

    # -- the step

    def forward(self, *args: Any, **batch: Any) -> torch.Tensor:
        """The loss of the global batch, which every rank passes; or of a `local_batch`, its one argument."""
        if not self.training and any(block.batch_statistics for block in self.program.blocks()):
            raise RuntimeProblem(
                "this program normalises by the statistics of the batch and was captured for training: call train(), or evaluate "
                "the original model with parallel.full_state()"
            )
        if len(args) == 1 and isinstance(args[0], LocalBatch):
            inputs = self._inputs((), args[0])
        else:
            inputs = {name: self._mine(name, tensor) for name, tensor in self._inputs(args, batch).items()}
        if not in_backward():
            self.state.buckets.reset()
        several = self.program.micro_batches > 1
        loss: torch.Tensor = run(self.program, self.state, inputs) if several else self.program(**inputs)
        if not torch.is_grad_enabled():
            release(self.program)
        return loss

    def local_batch(self, **batch: torch.Tensor) -> LocalBatch:
        """Marks a batch of which this rank holds its own part: ``parallel(parallel.local_batch(**batch))``."""
        return LocalBatch(batch)

    def sampler(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True) -> DistributedSampler[Any]:
        """A sampler that gives each data-parallel rank its own part of a data set, equal on the ranks of model axes."""
        dp = self.program.mesh.dp
        return DistributedSampler(dataset, dp.size, dp.coordinate, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]

    def _inputs(self, args: tuple[Any, ...], batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The program's inputs by name, on the device. BatchProblem where names do not match."""
        names = tuple(self.program.input_placements)
        given = dict(zip(names, args, strict=False)) | {name: value for name, value in batch.items() if value is not None}
        unknown, missing = sorted(given.keys() - set(names)), [name for name in names if name not in given]
        if unknown or missing or len(args) > len(names):
            problem = f"misses {', '.join(missing)}" if missing else f"has unplanned {', '.join(unknown) or 'arguments'}"
            raise BatchProblem(f"the batch {problem}; this plan takes {', '.join(names)} (plan again with other example inputs)")
        device = self.program.mesh.device
        tensors = {name: torch.as_tensor(given[name]).to(device, non_blocking=True) for name in names}
        for name, planned in self.program.input_shapes.items():
            shape = tuple(tensors[name].shape)
            if len(shape) != len(planned) or any(want not in (None, size) for want, size in zip(planned, shape, strict=True)):
                wanted = ", ".join("batch" if size is None else str(size) for size in planned)
                raise BatchProblem(f"input {name} has shape {shape}, the plan is for ({wanted}): pad it, or plan again")
        return tensors

    def _mine(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a global input. Inputs are cut on the data axis only."""
        text = self.program.input_placements[name].get(DATA_AXIS, "R")
        dp = self.program.mesh.dp
        if not text.startswith("S") or dp.size == 1:
            return tensor
        dim = int(text[2:-1])
        if tensor.dim() <= dim or tensor.shape[dim] % dp.size:
            raise BatchProblem(
                f"input {name} of shape {tuple(tensor.shape)} does not divide over {dp.size} data-parallel ranks; "
                f"pass a batch whose size is a multiple of {dp.size}"
            )
        return tensor.chunk(dp.size, dim)[dp.coordinate]

    # -- what an nn.Module does

    def train(self, mode: bool = True) -> Parallel:
        """Also switches the program, which is not a registered child."""
        super().train(mode)
        self.program.train(mode)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Parallel:
        """``.to(...)`` and the like: allowed where they change nothing."""
        for tensor in (*self.state.parameters.values(), *self.state.buffers.values()):
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            if (after := fn(probe)).dtype != probe.dtype or after.device.type != probe.device.type:
                raise StateProblem("a parallel model keeps its device and dtypes; choose them when planning (device, dtype=)")
        return self

    def __deepcopy__(self, memo: Any) -> Parallel:
        raise StateProblem("a parallel model cannot be copied; save its state with torch.distributed.checkpoint")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips by the norm of all gradients, each element counted once whatever the plan; gives the norm before clipping."""
        return clip(list(self._gradients()), self.program.mesh, max_norm, norm_type)

    def _gradients(self) -> Iterator[DTensor]:
        for parameter in self.state.parameters.values():
            if isinstance(parameter.grad, DTensor):
                yield parameter.grad

    def load_full_state(self, source: Source) -> None:
        """Copies a full state dict (or name -> full tensor) of the original model into the local pieces."""
        self.state.load_full(source)

    def full_state(self) -> dict[str, torch.Tensor]:
        """The state dict of the original model with full tensors, on every rank (all ranks must call)."""
        names = [*self.state.parameters, *(name for name in self.state.buffers if self.state.specs[name].persistent)]
        return {name: self.state.full(name) for name in names}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by original name with full tensors, on every rank (all ranks must call)."""
        found = ((name, parameter.grad) for name, parameter in self.state.parameters.items())
        return {name: self.state.full(name, gradient) for name, gradient in found if gradient is not None}

    def reseed(self, seed: int) -> None:
        """Starts all dropout masks afresh from `seed`; pass the same on every rank."""
        self.program.mesh.reseed(seed)

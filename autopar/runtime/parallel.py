"""The user's handle on a running program: an nn.Module whose call takes the global batch and returns what the model does."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

from .compat import in_backward, save_strided_pieces
from .errors import RuntimeProblem, StateProblem
from .heartbeat import Heartbeat, begin
from .inputs import ByName, checked, inputs_of, mine
from .load import Load, gather, noting
from .micro_batches import Result, apart, run
from .module import Program
from .norms import clip
from .outputs import build, plain, spread
from .pipeline import Pipeline
from .source import Source
from .stages import Stages
from .state import State, materialize
from .versions import Windows
from .zero import release


def steps_of(program: Pipeline, state: State) -> Stages | Windows:
    """What runs the steps of a pipeline."""
    return Windows(program, state) if program.weight_versions > 1 else Stages(program, state)


class LocalBatch(dict[str, Any]):
    """A batch of which each data-parallel rank holds its own part. Made by `Parallel.local_batch`."""


class Container(nn.Module):
    """A node of the tree of original names."""


class Parallel(nn.Module):
    """Runs a program like the model that it was made from. Parameters are DTensors under their original names."""

    program: Program
    state: State
    stages: Stages | Windows | None
    heartbeat: Heartbeat | None
    form: Any

    def __init__(
        self,
        program: Program,
        source: Source,
        *,
        compile: bool | str | Callable[..., Any] = False,
        patience_seconds: float = 60.0,
        form: Any = None,
    ) -> None:
        """`source` gives full tensors by original name. `compile` is a backend of torch.compile, or True for inductor. `form` is
        that of the model's result (`outputs.build`); without it the loss is returned alone, or with the outputs as a namespace.

        Blocks of one class share their compiled code: each distinct block is compiled once. In a pipeline, a rank that dies,
        stops or fails in a step makes the others end with an error that names it, within `patience_seconds`.
        """
        super().__init__()
        save_strided_pieces()
        # FSDP2 warns of in-place writes into views that a block returns; generated code never writes in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        # The generated modules stay out of the registered tree: their parameters are not the canonical ones.
        self.__dict__["program"] = program
        self.__dict__["form"] = form
        self.__dict__["state"] = materialize(program, source)
        staged = isinstance(program, Pipeline)
        self.__dict__["stages"] = steps_of(program, self.state) if isinstance(program, Pipeline) else None
        self.__dict__["heartbeat"] = begin(self, program.mesh.describe, patience_seconds) if staged else None
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

    def forward(self, *args: Any, **batch: Any) -> Any:
        """What the model returns for the global batch, which every rank passes, or for a `local_batch`, its one argument: the
        loss, in the model's own class where the program was made from a model that has one, and the outputs that were asked for,
        as DTensors (in a pipeline on the last stage, None elsewhere). Only the loss takes gradients."""
        if not self.training and any(block.batch_statistics for block in self.program.blocks()):
            raise RuntimeProblem(
                "this program normalises by the statistics of the batch and was captured for training: call train(), or evaluate "
                "the original model with parallel.full_state()"
            )
        if not self.training and any(block.noise for block in self.program.blocks()):
            raise RuntimeProblem(
                "this program draws random numbers as the model did in training (stochastic depth, channel dropout, noise): call "
                "train(), or evaluate the original model with parallel.full_state()"
            )
        if len(args) == 1 and isinstance(args[0], LocalBatch):
            inputs = inputs_of(self.program, (), args[0])
        elif len(args) == 1 and isinstance(args[0], ByName):
            inputs = mine(self.program, checked(self.program, args[0]))
        else:
            inputs = mine(self.program, inputs_of(self.program, args, batch))
        if not in_backward():
            for buckets in (self.state.buckets, *self.state.of_chunks):
                buckets.reset()
        loss, others = self._run(inputs)
        if not torch.is_grad_enabled():
            release(self.program)
        outputs = spread(self.program, others) if self.program.outputs else {}
        return plain(self.program, loss, outputs) if self.form is None else build(self.form, loss, outputs)

    def _run(self, inputs: dict[str, torch.Tensor]) -> Result:
        """The loss, and this rank's part of each output."""
        if self.stages is not None:
            with self._together("the step"):
                return self.stages.run(inputs)
        if self.program.micro_batches > 1:
            return run(self.program, self.state, inputs)
        return apart(self.program(**inputs))

    def flush(self) -> torch.Tensor:
        """With two versions of weights a call gives the loss of the batch before: this gives that of the last one."""
        if not isinstance(self.stages, Windows):
            raise RuntimeProblem("every batch of this plan ends with its own step: flush() is for two versions of weights")
        with self._together("flush"):
            return self.stages.flush()

    def trace(self) -> tuple[str, ...]:
        """What this rank computed in the last step, as actions of the pipeline's schedule (``0F0``); empty without a pipeline."""
        return tuple(self.stages.executor.trace) if self.stages is not None else ()

    def local_batch(self, **batch: Any) -> LocalBatch:
        """Marks a batch of which this rank holds its own part: ``parallel(parallel.local_batch(**batch))``."""
        return LocalBatch(batch)

    def sampler(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True) -> DistributedSampler[Any]:
        """A sampler that gives each data-parallel rank its own part of a data set, equal on the ranks of model axes."""
        dp = self.program.mesh.dp
        return DistributedSampler(dataset, dp.size, dp.coordinate, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]

    # -- what an nn.Module does

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """A pipeline stage that has none gives one without elements: an optimizer takes no empty list."""
        found = list(super().parameters(recurse))
        return iter(found or [nn.Parameter(torch.empty(0, device=self.program.mesh.device))])

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
        mesh, holders = self.program.mesh, self.state.spread.holders
        gradients = {n: p.grad for n, p in self.state.parameters.items() if isinstance(p.grad, DTensor)}
        first = [gradient for name, gradient in gradients.items() if holders[name][0] == mesh.pp.coordinate]
        with self._together("clip_grad_norm_"):
            return clip(list(gradients.values()), first, mesh, max_norm, norm_type)

    def _together(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Around what needs the ranks of all stages."""
        if self.heartbeat is None:
            return contextlib.nullcontext()
        stages = self.stages
        return self.heartbeat.watching(lambda: (stages.executor.doing if stages is not None else "") or doing)

    def load_full_state(self, source: Source) -> None:
        """Copies a full state dict (or name -> full tensor) of the original model into the local pieces."""
        self.state.load_full(source)

    def full_state(self) -> dict[str, torch.Tensor]:
        """The state dict of the original model with full tensors, on every rank (all ranks must call)."""
        specs = self.state.spread.specs
        names = [name for name, spec in specs.items() if not spec.buffer]
        names += [name for name, spec in specs.items() if spec.buffer and spec.persistent]
        with self._together("full_state"):
            return {name: self.state.everywhere(name) for name in names}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by original name with full tensors, on every rank (all ranks must call)."""
        mine = {name: parameter.grad for name, parameter in self.state.parameters.items() if parameter.grad is not None}
        with self._together("full_gradients"):
            return {name: self.state.everywhere(name, mine.get(name)) for name in self.state.anywhere(mine)}

    @contextlib.contextmanager
    def expert_load(self) -> Iterator[list[Load]]:
        """How many copies of tokens each expert and each rank gets in the step that runs inside: a `Load` for each mixture of
        experts in the order of the model, there when the context ends (all ranks must enter it)."""
        if self.stages is not None:
            raise RuntimeProblem("the load of experts is not counted in a pipeline; plan without one (pp=1) to look at it")
        found: list[Load] = []
        with noting() as noted:
            yield found
        found += gather(noted, self.program.mesh.device, self.program.micro_batches)

    def reseed(self, seed: int) -> None:
        """Starts all dropout masks afresh from `seed`; pass the same on every rank."""
        self.program.mesh.reseed(seed)

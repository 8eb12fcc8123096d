"""The user's handle on a running program: an nn.Module whose call takes the global batch and returns the model's result."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

from .comm.heartbeat import Heartbeat, start_heartbeat
from .compat import in_backward, save_strided_shards
from .errors import RuntimeProblem, StateProblem
from .module import Program
from .ops.expert_load import MeasuredExpertLoad, gather_expert_load, recording_copies
from .pipeline.pipeline_step import PipelineStep
from .pipeline.stage_modules import PipelineProgram
from .pipeline.weight_versions import PipeDreamStep
from .state.fsdp import reshard_all
from .state.gradient_norm import clip_gradients
from .state.materialize import State, materialize
from .state.weight_source import WeightSource
from .step.inputs import NamedBatch, bind_arguments, bind_named_batch, local_inputs
from .step.micro_batches import StepResult, run_micro_batches, split_result
from .step.outputs import as_dtensors, build_result, plain_result


def make_pipeline_step(program: PipelineProgram, state: State) -> PipelineStep | PipeDreamStep:
    """The object that runs the steps of a pipeline."""
    return PipeDreamStep(program, state) if program.weight_versions > 1 else PipelineStep(program, state)


class LocalBatch(dict[str, Any]):
    """A batch of which each data-parallel rank passes its own part. Made by `Parallel.local_batch`."""


class Container(nn.Module):
    """A node in the tree of the original parameter names."""


class Parallel(nn.Module):
    """Runs a program like the model that it was made from. Its parameters are DTensors under their original names."""

    program: Program
    state: State
    pipeline_step: PipelineStep | PipeDreamStep | None
    heartbeat: Heartbeat | None
    form: Any

    def __init__(
        self,
        program: Program,
        source: WeightSource,
        *,
        compile: bool | str | Callable[..., Any] = False,
        patience_seconds: float = 60.0,
        form: Any = None,
    ) -> None:
        """`source` gives full tensors by original name. `compile`: a backend of torch.compile, or True for inductor. `form`: the
        structure of the model's result (`outputs.build_result`); without it a call returns the loss, or a namespace of it and the
        outputs.

        Blocks of one class share their compiled code: each distinct block is compiled once. In a pipeline, a rank that dies,
        stops or fails in a step makes the others end with an error that names it, within `patience_seconds`.
        """
        super().__init__()
        save_strided_shards()
        # FSDP2 warns of in-place writes into views that a block returns; generated code never writes in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        # The generated modules are not registered as children: their parameters are not the canonical ones.
        self.__dict__["program"] = program
        self.__dict__["form"] = form
        self.__dict__["state"] = materialize(program, source)
        staged = isinstance(program, PipelineProgram)
        self.__dict__["pipeline_step"] = make_pipeline_step(program, self.state) if isinstance(program, PipelineProgram) else None
        self.__dict__["heartbeat"] = start_heartbeat(self, program.mesh.describe, patience_seconds) if staged else None
        for name, parameter in self.state.parameters.items():
            node, leaf = self._node(name)
            node.register_parameter(leaf, parameter)
        for name, buffer in self.state.buffers.items():
            node, leaf = self._node(name)
            node.register_buffer(leaf, buffer, persistent=self.state.specs[name].persistent)
        if compile:
            self._compile("inductor" if compile is True else compile)

    def _compile(self, backend: str | Callable[..., Any]) -> None:
        """Compiles each block. Blocks with selective recomputation or offloading are left out, since torch.compile decides itself
        what to save; so are random blocks with full recomputation, whose numbers it would not repeat."""
        left = sorted({type(block).__name__ for block in self.program.blocks() if block.selective_recompute or block.uses_rng})
        if left:
            warnings.warn(f"not compiled: {', '.join(left)}, whose plan says what is saved for the backward", stacklevel=3)
        for block in self.program.blocks():
            if not (block.selective_recompute or block.uses_rng):
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
        """The model's result for the global batch, which every rank passes, or for a `local_batch`: the loss and the outputs that
        were asked for, in the model's own result class if it has one. Outputs are DTensors (in a pipeline on the last stage, None
        elsewhere). Only the loss takes gradients."""
        if not self.training and any(block.batch_statistics for block in self.program.blocks()):
            raise RuntimeProblem(
                "this program normalises by the statistics of the batch and was captured for training: call train(), or evaluate "
                "the original model with parallel.full_state()"
            )
        if not self.training and any(block.training_noise for block in self.program.blocks()):
            raise RuntimeProblem(
                "this program draws random numbers as the model did in training (stochastic depth, channel dropout, noise): call "
                "train(), or evaluate the original model with parallel.full_state()"
            )
        if len(args) == 1 and isinstance(args[0], LocalBatch):
            inputs = bind_arguments(self.program, (), args[0])
        elif len(args) == 1 and isinstance(args[0], NamedBatch):
            inputs = local_inputs(self.program, bind_named_batch(self.program, args[0]))
        else:
            inputs = local_inputs(self.program, bind_arguments(self.program, args, batch))
        if not in_backward():
            for buckets in (self.state.buckets, *self.state.chunk_buckets):
                buckets.reset()
        loss, others = self._run(inputs)
        if not torch.is_grad_enabled():
            reshard_all(self.program)
        outputs = as_dtensors(self.program, others) if self.program.outputs else {}
        return plain_result(self.program, loss, outputs) if self.form is None else build_result(self.form, loss, outputs)

    def _run(self, inputs: dict[str, torch.Tensor]) -> StepResult:
        """The loss, and this rank's shard of each output."""
        if self.pipeline_step is not None:
            with self._watched("the step"):
                return self.pipeline_step.run(inputs)
        if self.program.micro_batches > 1:
            return run_micro_batches(self.program, self.state, inputs)
        return split_result(self.program(**inputs))

    def flush(self) -> torch.Tensor:
        """With two weight versions a call returns the loss of the batch before; this returns that of the last batch."""
        if not isinstance(self.pipeline_step, PipeDreamStep):
            raise RuntimeProblem("every batch of this plan ends with its own step: flush() is for two versions of weights")
        with self._watched("flush"):
            return self.pipeline_step.flush()

    def trace(self) -> tuple[str, ...]:
        """The actions of the schedule that this rank computed in the last step (``0F0``); empty without a pipeline."""
        return tuple(self.pipeline_step.executor.trace) if self.pipeline_step is not None else ()

    def local_batch(self, **batch: Any) -> LocalBatch:
        """Marks a batch of which this rank holds its own part: ``parallel(parallel.local_batch(**batch))``."""
        return LocalBatch(batch)

    def sampler(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True) -> DistributedSampler[Any]:
        """A sampler that gives each data-parallel rank its own part of a data set, equal on the ranks of model axes."""
        dp = self.program.mesh.dp
        return DistributedSampler(dataset, dp.size, dp.coordinate, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]

    # -- the interface of nn.Module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """A stage without parameters yields one without elements, since optimizers refuse an empty list."""
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
        """Clips by the norm of all gradients, each element counted once under any plan; returns the norm before clipping."""
        mesh, holders = self.program.mesh, self.state.index.holders
        gradients = {n: p.grad for n, p in self.state.parameters.items() if isinstance(p.grad, DTensor)}
        first = [gradient for name, gradient in gradients.items() if holders[name][0] == mesh.pp.coordinate]
        with self._watched("clip_grad_norm_"):
            return clip_gradients(list(gradients.values()), first, mesh, max_norm, norm_type)

    def _watched(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """A context around work that needs the ranks of all stages."""
        if self.heartbeat is None:
            return contextlib.nullcontext()
        stages = self.pipeline_step
        return self.heartbeat.watching(lambda: (stages.executor.doing if stages is not None else "") or doing)

    def load_full_state(self, source: WeightSource) -> None:
        """Copies a full state dict (or name -> full tensor) of the original model into the local shards."""
        self.state.load_full(source)

    def full_state(self) -> dict[str, torch.Tensor]:
        """The state dict of the original model with full tensors, on every rank (all ranks must call)."""
        specs = self.state.index.specs
        names = [name for name, spec in specs.items() if not spec.buffer]
        names += [name for name, spec in specs.items() if spec.buffer and spec.persistent]
        with self._watched("full_state"):
            return {name: self.state.broadcast_full(name) for name in names}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by original name with full tensors, on every rank (all ranks must call)."""
        mine = {name: parameter.grad for name, parameter in self.state.parameters.items() if parameter.grad is not None}
        with self._watched("full_gradients"):
            return {name: self.state.broadcast_full(name, mine.get(name)) for name in self.state.names_on_any_stage(mine)}

    @contextlib.contextmanager
    def expert_load(self) -> Iterator[list[MeasuredExpertLoad]]:
        """The expert load of the step that runs inside: one `MeasuredExpertLoad` for each mixture of experts in the order of the
        model, filled in when the context ends (all ranks must enter it)."""
        if self.pipeline_step is not None:
            raise RuntimeProblem("the load of experts is not counted in a pipeline; plan without one (pp=1) to look at it")
        found: list[MeasuredExpertLoad] = []
        with recording_copies() as recorded:
            yield found
        found += gather_expert_load(recorded, self.program.mesh.device, self.program.micro_batches)

    def reseed(self, seed: int) -> None:
        """Restarts all random streams from `seed`; pass the same on every rank."""
        self.program.mesh.reseed(seed)

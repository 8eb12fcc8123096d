"""The user's handle on a running program: an nn.Module whose call takes the global batch and returns the model's result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DistributedSampler

from .cached_generation import CacheRecord
from .calls import Calls
from .checkpoint.entry import Checkpoints
from .checkpoint.held import Optimizers, as_optimizers
from .comm.agreement import program_digest
from .comm.heartbeat import PATIENCE_SECONDS, Heartbeat, start_heartbeat
from .compat.autograd import outside_of_inference
from .compat.cuda_graphs import CaptureStream
from .compat.hooks import around_optimizer_steps
from .data.length_sampler import LengthBatchSampler
from .data.packed_sampler import PackedBatchSampler
from .data.samplers import sampler_on_mesh
from .errors import RuntimeProblem, StateError
from .experts.placement import ExpertPlacement
from .experts.rebalancing import ExpertRebalancing, Loads, rebalance_experts
from .generate import generate
from .module import Program
from .ops.expert_load import MeasuredExpertLoad, expert_load
from .patches import apply_patches
from .pipeline.pipeline_step import PipeDreamStep, PipelineStep
from .pipeline.stage_modules import PipelineProgram
from .plain.assignments import Assignments
from .plain.module_tree import MODULE_CONTAINERS, ItemNode, mirror_modules, register_further_names, register_state
from .plain.optimizer_state import refuse_full_states
from .plain.plain_model import PlainModel
from .report.measurement import Measurement, Predict
from .report.step_report import StepReport
from .sharded_module import ShardedModule
from .state.materialize import materialize
from .state.model_state import State
from .state.offload_optimizer import check_offload_device, offload_as_planned
from .state.weight_source import WeightSource, further_names
from .step.compiled_blocks import compile_blocks
from .step.inputs import LocalBatch, arguments_by_name
from .step.out_of_memory import MemoryGuard, WatchedWork
from .step.step_checks import StepChecks
from .step.step_graph import step_graph
from .tensors.copies import share_copies
from .variants import MakeVariant, Variant, Variants


class Parallel(ShardedModule):
    """Runs a program like the model that it was made from. Its parameters are DTensors under their original names.

    It holds the weights (`state`) and the programs (`program`, which is the first one, and `variants`), and delegates: calls to
    `calls`, checkpoints and pretrained weights to their rooms, generation, measuring and expert load to theirs."""

    pipeline_step: PipelineStep | PipeDreamStep | None
    variants: Variants | None
    measurement: Measurement | None
    cache_record: CacheRecord
    compiler: str | bool | Callable[..., Any]
    predicted_step: Predict | None
    expert_prices: Any

    def __init__(
        self,
        program: Program,
        source: WeightSource,
        *,
        compile: bool | str | Callable[..., Any] = False,
        patience_seconds: float = PATIENCE_SECONDS,
        heartbeat: Heartbeat | None = None,
        form: Any = None,
        plain: PlainModel | None = None,
        check_batch_every: int = 100,
        check_every: int = 0,
        make_variant: MakeVariant | None = None,
        plan: Any = None,
        predicted_step: Predict | None = None,
        expert_prices: Any = None,
        cuda_graph: bool = False,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        """`source` gives full tensors by original name. `compile`: a backend of torch.compile, or True for inductor. `form`: the
        structure of the model's result (`results.build_result`); without it a call returns the loss, or a namespace of it and the
        outputs. `plain`: the model that it was made from. Ranks compare checksums of their batches in the first calls and in
        one of `check_batch_every` (`ComparedCalls`). In one of `check_every` steps the loss has to be finite, and copies of
        parameters equal (`StepChecks`). `make_variant` captures and plans what calls in other modes, of other arguments and of
        other sizes compute; without it they are refused. `plan`: that of the program, with its `predicted_step` and
        `expert_prices`. `cuda_graph`: training steps of its batch's sizes are captured and replayed (`StepGraph`).
        `tied`: further names of tied tensors, each with the first, where there is no `plain`; by default those of the `source`.

        Blocks of one class share their compiled code: each distinct block is compiled once. A rank that dies, stops or fails
        makes the others end with an error that names it, within `patience_seconds`. `heartbeat`: one that runs already.
        """
        super().__init__()
        check_offload_device(program.offload_optimizer or "cpu", "it is priced only; plan with offload_optimizer=cpu")
        apply_patches(program.mesh.pp.size > 1)
        mesh, digest = program.mesh, program_digest(program)  # FSDP2 changes the class
        heartbeat = heartbeat or start_heartbeat(mesh.describe, patience_seconds)
        if heartbeat is not None:
            heartbeat.describe = mesh.describe
            heartbeat.stop_with(self)
        memory = MemoryGuard(mesh.device)
        watch = WatchedWork(heartbeat, memory)
        stream = CaptureStream(mesh.device) if cuda_graph else None
        with watch("loading weights"), stream.current() if stream is not None else nullcontext():
            state = memory.state = materialize(program, source)
        around_optimizer_steps(state, before=refuse_full_states)
        offload_as_planned(self, state.parameters.values(), mesh.device, mesh.host_memory, program.offload_optimizer)
        if state.pipeline is not None:
            state.pipeline.heartbeat = heartbeat
        step = _pipeline_step(program, state, memory)
        schedule = step if isinstance(step, PipelineStep) else None
        graph = None if stream is None else step_graph(program, state, stream, schedule)
        first = Variant(program, form, state, step, graph=graph)
        nodes = [] if plain is None else mirror_modules(self, plain)
        if plain is not None:
            if isinstance(plain.skeleton, MODULE_CONTAINERS):
                self.__class__ = ParallelContainer
            plain.complete(state, source if callable(source) else source.__getitem__)
            program.train(plain.training)
        else:
            state.tied.update(further_names(source, state.index.specs) if tied is None else tied)
        register_state(self, state, plain)
        register_further_names(self, state, state.tied if plain is None else plain.names)
        compiler = "inductor" if compile is True else compile
        if compiler:
            compile_blocks(program, compiler)
        variants = None
        if plain is not None and make_variant is not None:
            variants = Variants(first, make_variant, plain, tuple(node.training for node in nodes), compiler)
        experts = ExpertPlacement(state, lambda: [program] if variants is None else variants.different_programs())
        if variants is not None:
            variants.adopt = experts.adopt
        assignments = Assignments(self, state, plain)
        calls = Calls(
            first, variants, watch, StepChecks(program, state, check_every), assignments,
            nodes=nodes, plain=plain, program_digest=digest, check_batch_every=check_batch_every,
        )  # fmt: skip
        # nn.Module would register the program, whose parameters are not the canonical ones, as a child
        vars(self).update(
            program=program, state=state, plain=plain, pipeline_step=step, variants=variants, calls=calls, _watch=watch,
            heartbeat=heartbeat, memory=memory, checkpoints=Checkpoints(), transfers={}, measurement=None,
            cache_record=CacheRecord(), compiler=compiler, plan=plan, predicted_step=predicted_step,
            _expert_placement=experts, expert_prices=expert_prices,
        )  # fmt: skip

    # -- the step

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile(parallel) would trace collectives, autograd functions and what makes programs
    def forward(self, *args: Any, **batch: Any) -> Any:
        """The model's result for the global batch, which every rank passes, or for a `local_batch`: the loss and the outputs that
        were asked for, in the model's own result class if it has one; of a model without a loss its outputs, which take
        gradients. A call in another mode, with other arguments or of other sizes than before has its program made first."""
        return self.calls.run(args, batch, self.training)

    def returning(self, *outputs: str) -> AbstractContextManager[None]:
        """Calls inside return these fields of the model's result beside the loss, as full tensors without gradients, like those
        of ``parallelize(outputs=...)`` but in programs of their own: evaluation has logits, training does not gather them."""
        return self.calls.returning(outputs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the model's own `generate` in evaluation, on every rank, with samples of rank 0's random state
        (all ranks must call, alike). Models of transformers have a key-value cache, sharded by heads, where model and plan allow
        one."""
        return generate(self, *args, **kwargs)

    def flush(self) -> torch.Tensor:
        """Return the loss of the last batch, for plans with two weight versions, whose calls return that of the batch before."""
        return self.calls.flush()

    def trace(self) -> tuple[str, ...]:
        """The actions of the schedule that this rank computed in the last step (``0F0``); empty without a pipeline."""
        return tuple(self.pipeline_step.executor.trace) if self.pipeline_step is not None else ()

    def measure(self, steps: int = 3) -> Measurement:
        """Measure the next `steps` training steps, and one more for its memory, for `report`; also as a context manager."""
        if self.measurement is not None:
            self.measurement.stop()
        self.measurement = Measurement(self, steps)
        return self.measurement

    def report(self) -> StepReport:
        """The measured steps beside the plan's prediction: per block, collective and stage, memory, tokens a second, utilization,
        and what to calibrate (all ranks must call)."""
        with self._watch("the report"):
            return (self.measurement or self.measure()).report()

    def expert_load(self) -> AbstractContextManager[list[MeasuredExpertLoad]]:
        """The expert load of the step that runs inside: one `MeasuredExpertLoad` for each mixture of experts in the order of the
        model, filled in when the context ends (all ranks must enter it)."""
        if self.pipeline_step is not None:
            raise RuntimeProblem("the load of experts is not counted in a pipeline; plan without one (pp=1) to look at it")
        return expert_load(self.program.mesh.device, self.program.micro_batches)

    def rebalance_experts(self, loads: Loads, optimizer: Optimizers = None, *, steps: int | None = 1000) -> ExpertRebalancing:
        """Place the experts of each mixture anew on the ranks of their axis by the `loads`, those of `expert_load` or a list of
        tokens by expert for each mixture, where that is predicted to pay for the move within so many `steps` (None: wherever the
        busiest rank gets less). Their weights, gradients and the state of the optimizer (or of several) move; results, full
        states and checkpoints are as before. Call it between steps, on all ranks."""
        if self.calls.first.overlaps_steps:
            raise RuntimeProblem("experts do not move while steps overlap: plan with weight_versions=1")
        if steps is not None and self.expert_prices is None:
            raise RuntimeProblem("an exported program has no prices: pass steps=None to place experts by their loads alone")
        with self._watch("rebalancing experts"):
            self._expert_placement.know(as_optimizers(optimizer))
            out = rebalance_experts(self._expert_placement, loads, self.expert_prices, steps)
        self._expert_placement.warn_of_copies()
        return out

    def restore_experts(self) -> None:
        """Bring the experts back to where they were before `rebalance_experts`: into the model's order (all ranks must call,
        between steps)."""
        with self._watch("restoring the order of experts"):
            self._expert_placement.restore()
        self._expert_placement.warn_of_copies()
        vars(self)["cache_record"] = CacheRecord()  # a refusal may have been that of places of experts

    # -- batches

    def local_batch(self, *args: Any, **batch: Any) -> LocalBatch:
        """Mark a batch of which this rank holds its own part: ``parallel(parallel.local_batch(x, y))``, with the arguments of the
        model's forward."""
        return LocalBatch(arguments_by_name(self.program, args, batch), self.program.mesh.dp.size)

    @overload
    def sampler(
        self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> DistributedSampler[Any]: ...

    @overload
    def sampler(
        self, dataset: Sized, *, lengths: Iterable[int], batch_size: int | None = None, programs: int = 5,
        multiple: int | None = None, shuffle: bool = True, seed: int = 0, drop_last: bool = True,
    ) -> LengthBatchSampler: ...  # fmt: skip

    @overload
    def sampler(
        self, dataset: Sized, *, lengths: Iterable[int], packed_tokens: int, shuffle: bool = True, seed: int = 0
    ) -> PackedBatchSampler: ...

    def sampler(self, dataset: Sized, **options: Any) -> Any:
        """A sampler that gives each data-parallel rank its own part of a data set, equal on the ranks of model axes.

        With the `lengths` of all examples it is a batch sampler: each global batch of `batch_size` examples (the plan's, if None)
        holds like lengths, and `padded_length` is one of at most `programs`, chosen for the fewest padded tokens. They are
        multiples of `multiple`: by default of 8, and of what the model axes shard a sequence into. With `packed_tokens` each
        batch is one row of that many tokens, whole on every rank, which shards it. All ranks must call then."""
        with self._watch("the comparison of samplers"):
            planned = None if self.plan is None else self.plan.candidate.batch
            return sampler_on_mesh(self.program.mesh, dataset, planned, **options)

    # -- the interface of nn.Module

    def keeps(self, name: str) -> bool:
        """Return whether an attribute is this object's own, and not the model's."""
        own = is_attribute(name)
        if own and self.plain is not None and name in vars(self.plain.skeleton).keys() - vars(nn.Module()).keys():
            raise StateError(
                f"{name} is an attribute of the model, and of the parallel model another one: set it before autopar.parallelize"
            )
        return own or name == "training"

    def train(self, mode: bool = True) -> Parallel:
        """The mode of the model and all its modules: the next call runs, or first makes, the program of that mode."""
        if self.variants is not None:
            super().train(mode)
            for path, own in ({} if self.plain is None else self.plain.modes(mode)).items():
                self.get_submodule(path).training = own
            return self
        if mode and self.plain is not None and not self.plain.right_in(True):
            raise RuntimeProblem(
                "the model was captured in eval mode (of some of its modules), and computes something else in training (dropout, "
                "batch norm, a branch on self.training): call model.train() before autopar.parallelize"
            )
        super().train(mode)
        self.program.train(mode)
        return self

    def __deepcopy__(self, memo: Any) -> Parallel:
        """A parallel model with weights of its own (all ranks must call), which an optimizer that is copied with it has."""
        copy: Parallel | None = memo.get(id(self))
        if copy is None:
            with self._watch("the copy of the model"), outside_of_inference():
                copy = memo[id(self)] = _copied(self)
            share_copies(self, copy, memo)
        return copy


def is_attribute(name: str) -> bool:
    """Return whether a parallel model has an attribute of that name itself, which hides one of its model."""
    return hasattr(Parallel, name) or name in (Parallel.__annotations__ | ShardedModule.__annotations__)


class ParallelContainer(ItemNode, Parallel):
    """A parallel model of an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`, whose items it has."""


def _pipeline_step(program: Program, state: State, memory: MemoryGuard) -> PipelineStep | PipeDreamStep | None:
    """Return the object that runs the steps of a pipeline, whose actions `memory` names; None without one."""
    if not isinstance(program, PipelineProgram):
        return None
    step = PipeDreamStep(program, state) if program.weight_versions > 1 else PipelineStep(program, state)
    memory.detail = lambda: step.executor.doing
    return step


def _copied(parallel: Parallel) -> Parallel:
    """Return another model of the same program on the same mesh, with the same values. All ranks must call."""
    state, heartbeat = parallel.state, parallel.heartbeat
    plain = None if parallel.plain is None else parallel.plain.copied()
    kinds = type(parallel.program).__mro__  # FSDP2 changes the class
    kind: Any = next(kind for kind in kinds if not issubclass(kind, FSDPModule))

    def source(name: str) -> torch.Tensor:
        unused = {} if parallel.plain is None else parallel.plain.unused
        return state.broadcast_full(name) if name in state.index.specs else unused[name]

    if plain is not None:
        plain.training = parallel.training
    out = type(parallel)(
        kind(parallel.program.mesh), source, compile=parallel.compiler, form=parallel.calls.first.form, plain=plain,
        patience_seconds=PATIENCE_SECONDS if heartbeat is None else heartbeat.patience_seconds,
        check_batch_every=parallel.calls.check_batch_every, check_every=parallel.calls.checks.every, plan=parallel.plan,
        expert_prices=parallel.expert_prices, cuda_graph=parallel.calls.first.graph is not None,
        make_variant=None if parallel.variants is None else parallel.variants.make, tied=state.tied,
    )  # fmt: skip
    if parallel.variants is not None and out.variants is not None:
        out.variants.programs.update(
            (key, out.calls.first) for key, each in parallel.variants.programs.items() if each is parallel.calls.first
        )
        for node, other in zip(out.calls.nodes, parallel.calls.nodes, strict=True):
            node.training = other.training
    for name, parameter in state.parameters.items():
        out.state.parameters[name].requires_grad_(parameter.requires_grad)
    parallel._expert_placement.add_copy(out._expert_placement)
    if out.variants is None and out.training != parallel.training:
        out.train(parallel.training)
    return out

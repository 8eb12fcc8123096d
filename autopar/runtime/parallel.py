"""The user's handle on a running program: an nn.Module whose call takes the global batch and returns the model's result."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from .assignments import Assignments
from .checkpoint.entry import Checkpoints
from .comm.agreement import Stated, agree_on_batch, program_digest, refused_together, require_agreement, stated_step
from .comm.heartbeat import Heartbeat, start_heartbeat
from .comm.peer_watch import PATIENCE_SECONDS
from .compat import in_backward, save_strided_shards
from .copies import copied
from .device.autocast import autocast_of, under_autocast
from .device.mesh import MeshHandle
from .errors import BatchError, RuntimeProblem, StateError
from .generate import generate
from .module import Program
from .ops.expert_load import MeasuredExpertLoad, gather_expert_load, recording_copies
from .pipeline.other_stages import further_tensors
from .pipeline.pipeline_step import PipelineStep
from .pipeline.stage_modules import PipelineProgram
from .pipeline.weight_versions import PipeDreamStep
from .report.measurement import Measurement, Predict
from .report.step_report import StepReport
from .sharded_module import ShardedModule
from .state.fsdp import reshard_all
from .state.lend import lend_state
from .state.loss_scale import agree_on_overflow
from .state.materialize import State, materialize
from .state.optimizer_state import refuse_full_states
from .state.plain_model import Container, PlainModel, check_parameters
from .state.weight_source import WeightSource
from .step.inputs import NamedBatch, bind_arguments, bind_named_batch, local_inputs
from .step.micro_batches import StepResult
from .step.out_of_memory import MemoryGuard
from .step.outputs import build_result, plain_result, returned_outputs
from .step.penalties import explain_penalties, with_plain_gradient
from .step.placed_inputs import plain_inputs
from .step.planned_offload import check_planned_offload, offload_as_planned
from .step.same_batch import check_same_batch, is_checked
from .step.step_checks import StepChecks
from .tensors.random_draws import draw_for_stage
from .tensors.torch_functions import mark_result, teach_torch
from .variants import MadeVariant, MakeVariant, Variant, Variants


def make_pipeline_step(program: PipelineProgram, state: State) -> PipelineStep | PipeDreamStep:
    """The object that runs the steps of a pipeline."""
    return PipeDreamStep(program, state) if program.weight_versions > 1 else PipelineStep(program, state)


class LocalBatch(dict[str, Any]):
    """A batch of which each data-parallel rank passes its own part. Made by `Parallel.local_batch`."""


class Parallel(ShardedModule):
    """Runs a program like the model that it was made from. Its parameters are DTensors under their original names."""

    pipeline_step: PipelineStep | PipeDreamStep | None
    checks: StepChecks
    program_digest: str
    compared: bool
    form: Any
    plan: Any = None
    """The plan (an `autopar.Plan`) that `parallelize` followed."""
    predicted_step: Predict | None = None
    measurement: Measurement | None = None
    call_count = 0
    first_variant: Variant
    variants: Variants | None = None
    assignments: Assignments
    mode_modules: Sequence[nn.Module] = ()
    captured_modes: tuple[bool, ...] = ()

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
    ) -> None:
        """`source` gives full tensors by original name. `compile`: a backend of torch.compile, or True for inductor. `form`: the
        structure of the model's result (`outputs.build_result`); without it a call returns the loss, or a namespace of it and the
        outputs. `plain`: the model that it was made from. Ranks compare checksums of their batches in the first calls and then
        in one of `check_batch_every` (0: never). In one of `check_every` steps the loss has to be finite, and copies of
        parameters equal (`StepChecks`). `make_variant` captures and plans what calls in other modes, of other arguments and of
        other sizes compute; without it they are refused.

        Blocks of one class share their compiled code: each distinct block is compiled once. A rank that dies, stops or fails
        makes the others end with an error that names it, within `patience_seconds`. `heartbeat`: one that runs already.
        """
        super().__init__()
        check_planned_offload(program.offload_optimizer)
        save_strided_shards()
        teach_torch()
        explain_penalties()
        agree_on_overflow()
        # FSDP2 warns of in-place writes into views that a block returns; generated code never writes in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        # The generated modules are not registered as children: their parameters are not the canonical ones.
        self.__dict__["program"] = program
        self.__dict__["form"] = form
        self.__dict__["check_batch_every"], self.__dict__["compile_option"] = check_batch_every, compile
        self.__dict__["pipeline_step"], self.__dict__["compared"] = None, False
        self.__dict__["checkpoints"] = Checkpoints()
        self.__dict__["program_digest"] = program_digest(program)  # FSDP2 changes the class
        heartbeat = heartbeat or start_heartbeat(program.mesh.describe, patience_seconds)
        self.__dict__["heartbeat"] = heartbeat
        if heartbeat is not None:
            heartbeat.describe = program.mesh.describe
            heartbeat.stop_with(self)
        self.__dict__["memory"] = MemoryGuard(program.mesh.device)
        with self._watched("loading weights"):
            self.__dict__["state"] = self.memory.state = materialize(program, source)
        self.__dict__["checks"] = StepChecks(program, self.state, check_every)
        refuse_full_states(self.state)
        trained, mesh = self.state.parameters.values(), program.mesh
        offload_as_planned(self, trained, mesh.device, mesh.host_memory, program.offload_optimizer)
        if self.state.stage is not None:
            self.state.stage.heartbeat = heartbeat
            draw_for_stage(self.state.stage)
        if isinstance(program, PipelineProgram):
            made = make_pipeline_step(program, self.state)
            self.__dict__["pipeline_step"] = made
            self.memory.detail = lambda: made.executor.doing
        self.__dict__["first_variant"] = Variant(program, form, self.state, self.pipeline_step)
        if plain is not None:
            self._mirror_modules(plain)
        order = list(self.state.parameters) if plain is None else plain.parameter_names
        unpaired = plain is not None and not set(order) <= self.state.index.specs.keys()
        for name, parameter in sorted(self.state.parameters.items(), key=lambda each: order.index(each[0])):
            parameter.autopar_unpaired = unpaired  # type: ignore[attr-defined]
            node, leaf = self._node(name)
            node.register_parameter(leaf, parameter)
        for name in self.state.index.specs:  # modules of other stages too
            self._node(name)
        for name, buffer in self.state.buffers.items():
            node, leaf = self._node(name)
            saved = self.state.specs[name].persistent and (plain is None or name in plain.names.values())
            node.register_buffer(leaf, buffer, persistent=saved)
        if plain is not None:
            plain.complete(self.state.index.specs, source if callable(source) else source.__getitem__)
            self.__dict__["plain"] = plain
            for name, tensor in further_tensors(self.state, plain.names).items():
                node, leaf = self._node(name)
                node.__dict__.setdefault("further_tensors", {})[leaf] = tensor
            program.train(plain.training)
        self.__dict__["assignments"] = Assignments(self, self.state, plain)
        self.__dict__["compiler"] = "inductor" if compile is True else compile
        if compile:
            self._compile(program)
        if plain is not None and make_variant is not None:
            self.__dict__["variants"] = Variants(self.first_variant, make_variant, self._modes_of, self._load, plain.frozen)

    def _mirror_modules(self, plain: PlainModel) -> None:
        """The tree of the model's modules, each in its mode: ``parallel.encoder.eval()`` and ``isinstance`` work on them."""
        self.training = plain.training
        nodes: list[nn.Module] = []
        for path, module in plain.skeleton.named_modules():
            node: nn.Module = self
            for part in path.split(".") if path else ():
                if part not in node._modules:
                    node._modules[part] = Container()
                child = node._modules[part]
                assert child is not None
                node = child
            if isinstance(node, Container):
                node.stands_for(module)
                node.training = module.training
            nodes.append(node)
        self.__dict__["mode_modules"] = nodes
        self.__dict__["captured_modes"] = tuple(node.training for node in nodes)

    def _modes_of(self, modes: tuple[bool, ...]) -> tuple[tuple[bool, ...], bool]:
        """The modes in which the program of a call is captured, and the one in which it runs: a program without another branch
        in evaluation just leaves dropout out."""
        plain = self.plain  # what it says of modes holds for the attributes of the first program
        alike = plain is not None and modes != self.captured_modes and len(set(modes)) == 1 and not plain.frozen.changed()
        if plain is not None and alike and plain.right_in(modes[0]):
            return self.captured_modes, modes[0]
        return modes, True

    def _load(self, made: MadeVariant, mesh: MeshHandle) -> Variant:
        """The variant with this model's weights."""
        program = made.program(mesh)
        lend_state(program, self.program, self.state)
        step: PipelineStep | None = None
        if isinstance(program, PipelineProgram):
            if not isinstance(self.pipeline_step, PipelineStep):
                raise RuntimeProblem(
                    "with two versions of the weights all calls must be like the first one: take weight_versions=1"
                )
            step = PipelineStep(program, self.state, self.pipeline_step)
        if self.__dict__["compiler"]:
            self._compile(program)
        return Variant(program, made.form, self.state, step, whole_batch=made.whole_batch, fixed_batch=made.fixed_batch)

    def _compile(self, program: Program) -> None:
        """Compiles each block. Blocks with selective recomputation or offloading are left out, since torch.compile decides itself
        what to save; so are random blocks with full recomputation, whose numbers it would not repeat."""
        backend = self.__dict__["compiler"]
        left = sorted({type(block).__name__ for block in program.blocks() if block.selective_recompute or block.uses_rng})
        if left:
            warnings.warn(f"not compiled: {', '.join(left)}, whose plan says what is saved for the backward", stacklevel=3)
        for block in program.blocks():
            if not (block.selective_recompute or block.uses_rng):
                block.forward = torch.compile(block.forward, backend=backend)

    def _node(self, name: str) -> tuple[nn.Module, str]:
        """The container of a dotted name, made where missing, and the last part."""
        *path, leaf = name.split(".")
        node: nn.Module = self
        for part in path:
            child = node._modules.setdefault(part, Container())  # a part may be called like an attribute of this class
            assert child is not None
            node = child
        return node, leaf

    def _equals(self, name: str, value: torch.Tensor) -> bool:
        """Whether this rank's part of a tensor of the model has this value."""
        if self.plain is not None and name in self.plain.unused:
            return torch.equal(self.plain.unused[name], value)
        return self.state.holds(name, value)

    # -- the step

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile(parallel) would trace collectives, autograd functions and what makes programs
    def forward(self, *args: Any, **batch: Any) -> Any:
        """The model's result for the global batch, which every rank passes, or for a `local_batch`: the loss and the outputs that
        were asked for, in the model's own result class if it has one; of a model without a loss its outputs, which take
        gradients. A call in another mode, with other arguments or of other sizes than before has its program made first."""
        if torch.is_inference_mode_enabled():  # what is made in it (programs, gathered weights) could never train
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(*args, **batch)
        device, cast = self.program.mesh.device.type, autocast_of(self.program.mesh.device.type)
        if cast:  # the casts are part of the program
            if self.variants is None:
                raise RuntimeProblem(
                    "this program was exported, with the casts that it was captured with: call it outside of torch.autocast"
                )
            with under_autocast(device, ""):
                return self._call(args, batch, cast)
        return self._call(args, batch)

    def _call(self, args: tuple[Any, ...], batch: dict[str, Any], autocast: str = "") -> Any:
        """The result of a call under that ``torch.autocast``."""
        if self.variants is not None:
            self.variants.autocast = autocast
        with self._refused_together():
            more = self.variants is not None and not isinstance(self.pipeline_step, PipeDreamStep)
            check_parameters(self.state.parameters, lambda name: more or self.state.specs[name].trainable)
            self.assignments.check_tree()
            if self.plain is not None:
                self.plain.check_unchanged(self._equals)
        variant, training = self._variant(args, batch)
        inputs = self._inputs(variant.program, args, batch)
        if not in_backward():
            reshard_all(self.program)  # a call without a backward left weights gathered, which may have changed since
            for buckets in (self.state.buckets, *self.state.chunk_buckets):
                buckets.reset()
        loss, others = self._run(variant, inputs, training)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss = with_plain_gradient(loss, self.program.mesh.pp.size)
        program = variant.program
        if not torch.is_grad_enabled() or program.forward_only:
            reshard_all(self.program)
        outputs = returned_outputs(program, others) if program.outputs else {}
        taking = (output for path, output in outputs.items() if program.output_kinds.get(path) == "gradient")
        for output in (loss, *taking):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                mark_result(output, self.state)
                if self.heartbeat is not None:
                    self.heartbeat.watch_backward(output)
        return plain_result(program, loss, outputs) if variant.form is None else build_result(variant.form, loss, outputs)

    def _variant(self, args: tuple[Any, ...], batch: dict[str, Any]) -> tuple[Variant, bool]:
        """The program of this call, and whether it runs in training mode."""
        given = args[0] if len(args) == 1 else None
        if self.variants is None or isinstance(given, NamedBatch):
            self._check_mode()
            return self.first_variant, self.training
        local = isinstance(given, LocalBatch)
        modes = tuple(node.training for node in self.mode_modules)
        backwards = 0 if self.heartbeat is None else self.heartbeat.backwards
        with self._watched("choosing the program of this call"):
            call = self.variants.call(
                modes,
                () if local else args,
                given if isinstance(given, LocalBatch) else batch,
                self.program.mesh.dp.size if local else 1,
            )
            agreed = self.variants.agree(call, self.program.mesh.describe, backwards)
            if self.heartbeat is not None:
                self.heartbeat.agreed()
            return self.variants.find(agreed)

    def _check_mode(self) -> None:
        """RuntimeProblem where this program does not compute what the model does in evaluation."""
        if self.training:
            return
        if any(block.batch_statistics for block in self.program.blocks()):
            raise RuntimeProblem(
                "this program normalises by the statistics of the batch and was captured for training: call train(), or evaluate "
                "the original model with parallel.full_state()"
            )
        if any(block.training_noise for block in self.program.blocks()):
            raise RuntimeProblem(
                "this program draws random numbers as the model did in training (stochastic depth, channel dropout, noise): call "
                "train(), or evaluate the original model with parallel.full_state()"
            )
        if self.plain is not None and not self.plain.right_in(False):
            raise RuntimeProblem(
                "this program was captured in training, and the model computes something else in evaluation (a branch on "
                "self.training?): call train(), or evaluate the original model with parallel.full_state()"
            )

    def _inputs(self, program: Program, args: tuple[Any, ...], batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """This rank's part of the batch. BatchError where it does not fit, or where ranks passed different ones; before the
        first step all ranks compare the structure of their batches, programs and versions too."""
        first = args[0] if len(args) == 1 else None
        local, checked = isinstance(first, LocalBatch), is_checked(self.call_count, self.__dict__["check_batch_every"])
        self.__dict__["call_count"] = self.call_count + 1
        bound: dict[str, torch.Tensor] | None = None
        stated: dict[str, Stated] = {}
        comparing = None if self.compared else self.heartbeat

        def bind() -> dict[str, torch.Tensor]:
            nonlocal bound
            if isinstance(first, NamedBatch):
                found = bind_named_batch(program, first)
            else:
                found = bind_arguments(program, () if local else args, first if isinstance(first, LocalBatch) else batch)
            inputs = plain_inputs(found) if local else local_inputs(program, found)
            if comparing is not None:
                stated.update(stated_step(self.program.mesh, self.program_digest, found, own_part=local))
            bound = found
            return inputs

        if comparing is not None:
            with comparing.watching(lambda: "comparing the ranks"):
                inputs = agree_on_batch(bind, self.program.mesh.describe)
                require_agreement(stated, self.program.mesh.describe)
            self.__dict__["compared"] = True
        else:
            try:
                inputs = bind()
            except BatchError:
                if checked:
                    with self._watched("the comparison of batches"):
                        check_same_batch(self.program.mesh, None, tuple(program.input_placements), local)
                raise
        if checked:
            with self._watched("the comparison of batches"):
                check_same_batch(self.program.mesh, bound, tuple(program.input_placements), local)
        return inputs

    def _run(self, variant: Variant, inputs: dict[str, torch.Tensor], training: bool) -> StepResult:
        """The loss, and this rank's shard of each output."""
        if torch.is_grad_enabled() and not in_backward():
            self.memory.step += 1
            if self.heartbeat is not None:
                self.heartbeat.step += 1
        if self.variants is None and self.heartbeat is not None:
            self.heartbeat.agreed()
        with self._watched("forward" if torch.is_grad_enabled() else "evaluation"):
            return self.checks.run(variant.program, lambda: variant.run(inputs, training))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own `generate` returns in evaluation, on every rank, with samples of rank 0's random state (all ranks
        must call, alike). Models of transformers have a key-value cache, sharded by heads, where model and plan allow one."""
        return generate(self, *args, **kwargs)

    def flush(self) -> torch.Tensor:
        """With two weight versions a call returns the loss of the batch before; this returns that of the last batch."""
        if not isinstance(self.pipeline_step, PipeDreamStep):
            raise RuntimeProblem("every batch of this plan ends with its own step: flush() is for two versions of weights")
        with self._watched("flush"):
            return self.pipeline_step.flush()

    def trace(self) -> tuple[str, ...]:
        """The actions of the schedule that this rank computed in the last step (``0F0``); empty without a pipeline."""
        return tuple(self.pipeline_step.executor.trace) if self.pipeline_step is not None else ()

    def measure(self, steps: int = 3) -> Measurement:
        """Measures the next `steps` training steps, and one more for its memory, for `report`; also as a context manager."""
        if self.measurement is not None:
            self.measurement.stop()
        self.__dict__["measurement"] = Measurement(self, steps)
        return self.measurement  # type: ignore[return-value]

    def report(self) -> StepReport:
        """The measured steps beside the plan's prediction: per block, collective and stage, memory, tokens a second, utilization,
        and what to calibrate (all ranks must call)."""
        measurement = self.measurement if self.measurement is not None else self.measure()
        with self._watched("the report"):
            return measurement.report()

    def local_batch(self, **batch: Any) -> LocalBatch:
        """Marks a batch of which this rank holds its own part: ``parallel(parallel.local_batch(**batch))``."""
        return LocalBatch(batch)

    def sampler(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True) -> DistributedSampler[Any]:
        """A sampler that gives each data-parallel rank its own part of a data set, equal on the ranks of model axes."""
        dp = self.program.mesh.dp
        return DistributedSampler(dataset, dp.size, dp.coordinate, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]

    # -- the interface of nn.Module

    def keeps(self, name: str) -> bool:
        """Whether an attribute is this object's own, and not the model's."""
        own = hasattr(Parallel, name) or name in (Parallel.__annotations__ | ShardedModule.__annotations__)
        if own and self.plain is not None and name in vars(self.plain.skeleton).keys() - vars(nn.Module()).keys():
            raise StateError(
                f"{name} is an attribute of the model, and of the parallel model another one: set it before autopar.parallelize"
            )
        return own or name == "training"

    def train(self, mode: bool = True) -> Parallel:
        """The mode of the model and all its modules: the next call runs, or first makes, the program of that mode."""
        if self.variants is not None:
            super().train(mode)
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
        """A parallel model with weights of its own (all ranks must call)."""
        found: Parallel | None = memo.get(id(self))
        if found is None:
            with self._watched("the copy of the model"):
                found = memo[id(self)] = copied(self)
        return found

    @contextlib.contextmanager
    def _refused_together(self) -> Iterator[None]:
        """A stage of a pipeline sees only its own parameters: what it refuses in a call that is checked is refused on all."""
        mesh, checked = self.program.mesh, is_checked(self.call_count, self.__dict__["check_batch_every"])
        asked = checked and mesh.pp.size > 1 and self.heartbeat is not None
        with self._watched("the check of parameters"), refused_together(asked, mesh.describe):
            yield

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

    @contextlib.contextmanager
    def returning(self, *outputs: str) -> Iterator[None]:
        """Calls inside return these fields of the model's result beside the loss, as full tensors without gradients, like those
        of ``parallelize(outputs=...)`` but in programs of their own: evaluation has logits, training does not gather them."""
        if self.variants is None:
            raise RuntimeProblem("this program was exported, and returns what it was planned with: pass outputs= when planning")
        before, self.variants.outputs = self.variants.outputs, outputs
        try:
            yield
        finally:
            self.variants.outputs = before

    def _check_steps_ended(self, what: str) -> None:
        """RuntimeProblem while a batch is not ended, whose gradients and weights no checkpoint has."""
        if isinstance(self.pipeline_step, PipeDreamStep) and self.pipeline_step.windows_run:
            raise RuntimeProblem(f"the last batch is not ended: call flush() and optimizer.step() before {what}()")

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        for variant in self.variants.known.values() if self.variants is not None else ():
            variant.program.mesh.reseed(seed)

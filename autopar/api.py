"""The whole system as one function: capture, search, lower, render, load, run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture import current_autocast
from autopar.capture.modes import CapturedModes
from autopar.capture.normalize.batch_norm import LOCAL
from autopar.capture.options import LossFunction
from autopar.capture.results.returned import LOSS
from autopar.capture.state.reads import recorded_reads
from autopar.capture.tracing.data.batch_questions import PADDED_ENCODER
from autopar.capture.tracing.fake_copy import copy_without_data
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import PlanMismatch, StateError
from autopar.explain.run_time import LOGGER, ExpertPrices, memory_answer, say_measuring, say_plan
from autopar.given_plan import (
    batch_dims,
    check_float8,
    check_launch,
    check_options,
    check_plan,
    cluster_of_plan,
    compiler_of,
    planned_async_tp,
)
from autopar.ir.plan_file import plan_file as planfile
from autopar.ir.plan_file.plan_file import Plan
from autopar.ops.opaque import whole_modules
from autopar.ops.quantized import with_plain_storage
from autopar.options import Beside, DocumentLengthsLike, PlanOptions, RuntimeOptions, held_bytes
from autopar.plan_inputs import (
    ExampleInputs,
    cache_folder,
    check_model,
    cluster_named,
    plan_folder,
    register_rule,
    registry,
    split_inputs,
)
from autopar.planning import make_plan, plan, plan_with
from autopar.precision import PrecisionLike, compute_dtype_of
from autopar.program.build import build_program, check_proof
from autopar.report.predicted_step import predicted_step
from autopar.runtime.comm.agreement import on_first_rank, require_agreement, require_equal_models, stated_versions
from autopar.runtime.comm.async_tp import async_tp_groups
from autopar.runtime.comm.heartbeat import PATIENCE_SECONDS, join, watched
from autopar.runtime.compat.autograd import outside_of_inference
from autopar.runtime.compat.modules import forward_of, is_compiled
from autopar.runtime.device.groups import several_ranks
from autopar.runtime.device.mesh import MeshHandle, launched_processes
from autopar.runtime.device.rendezvous import JOIN_SECONDS
from autopar.runtime.errors import MismatchProblem
from autopar.runtime.parallel import Parallel, is_attribute
from autopar.runtime.patches import apply_patches
from autopar.runtime.plain.code_reads import Code, code_of
from autopar.runtime.plain.frozen_reads import FrozenReads, Reads
from autopar.runtime.plain.plain_attributes import own_names
from autopar.runtime.plain.plain_model import PlainModel, hooked_modules, shared_parameter
from autopar.runtime.pretrained.load import pretrained_source
from autopar.runtime.state.weight_source import BroadcastSource, fill_missing, named_state
from autopar.several_models import one_or_several
from autopar.variants.maker import VariantMaker

__all__ = ["Deferred", "check_plan", "make_plan", "parallelize", "plan", "plan_folder", "register_rule"]


@one_or_several
def parallelize(
    model: nn.Module,
    cluster: str | Cluster,
    example_inputs: ExampleInputs | None = None,
    *,
    plan: Plan | str | Path | None = None,
    precision: PrecisionLike | None = None,
    force: str | Mapping[str, int] | None = "",
    constrain: Mapping[str, Mapping[str, Any]] | None = None,
    optimizer: str = "adamw",
    strict: bool = False,
    compile: bool | str | None = None,
    state: Mapping[str, torch.Tensor] | str | os.PathLike[str] | None = None,
    time_limit_seconds: float = 300.0,
    cache: bool = True,
    outputs: Sequence[str] = (),
    batch_norm: str = "global",
    expert_load: float | str = 1.0,
    document_lengths: DocumentLengthsLike = None,
    patience_seconds: float = PATIENCE_SECONDS,
    join_seconds: float = JOIN_SECONDS,
    check_batch_every: int = 100,
    loss_fn: LossFunction | None = None,
    check_every: int = 0,
    memory_margin: float | None = None,
    beside: Beside = (),
    batch_dim: int | Mapping[str, int] | None = None,
    proof: bool = False,
    cuda_graph: bool = False,
    mode: str = "training",
    new_tokens: int = 0,
) -> Parallel:
    """The model as a program for the cluster: an `nn.Module` whose call takes the global batch and returns what the model does.

    Run it under ``torchrun`` with one process per device; rank 0 plans and tells the others. A `cluster` without a number
    (``"local"``, ``"dgx-h100"``) has as many devices as processes were launched. `example_inputs` are the forward's
    keyword arguments (a dict) or arguments (a tuple); without them the first call is the example, and `parameters()` before it
    is a `StateError`. `plan` (a `Plan` or the path of a plan.json) skips the search. `precision` is ``"float32"``,
    ``"bf16"`` or ``"fp16"`` (compute over float32 master shards), ``"fp8"`` (bf16 with linear layers in float8, compiled),
    a `Precision`, or FSDP2's `MixedPrecisionPolicy`; by default the model's own dtype, or dtypes. `force` fixes degrees
    (``"tp=4,zero=3"``). `constrain` pins placements by mesh axis (``{"layers.*.up.weight": {"tp": "S(0)"}, "lm_head": {"tp":
    "R"}}``): of a parameter, of the result of a module or of a source line (``"net.py:12"``); what cannot be is one line. `state`
    gives full tensors by name for a model on the meta device, or is a folder of safetensors files in Hugging Face's layout, of
    which each rank reads its own part. `cache` takes the plan of an equal model, cluster and options from
    ``~/.cache/autopar/plans``, and keeps a new one there. `outputs` are fields of the model's result (``("logits",
    "hidden_states.1")``) that are wanted beside the loss: full tensors without gradients, or as ``"logits:gradient"`` and
    ``"logits:dtensor"`` say; fields that nobody asked for are None, and the plan lists them.
    `batch_norm="local"` takes the statistics of batch norm from each data rank's own examples, as DDP does, and the plan says so;
    by default they are those of the whole batch.
    `expert_load` is how unevenly experts are expected to be loaded, `document_lengths` what packed sequences are made of (see
    `make_plan`). A rank that dies, stops or fails makes all
    others end within `patience_seconds` with an error that names it; one that never joins, within `join_seconds`. Ranks compare
    their batches in the first calls of all, and of each program in training and in evaluation, and in one of `check_batch_every`
    (0: never). In one of `check_every` steps (0: never) a loss that is not finite, and replicas of parameters that have drifted
    apart, are errors that name the place.
    `batch_dim` is where tensors have the batch, if not at dimension 0: all of them, or by argument (``{"src": 1}``).
    `memory_margin` is the share of each device's memory that the plan leaves free (see `make_plan`), `beside` the parallel models
    on the same devices, to which it leaves the peaks of their plans (``beside=[reference]``). With
    `compile` blocks run by torch.compile and are priced so (a text is its backend; None: on GPUs). A checker that knows nothing
    of how the program was made proves it equal to the model before it runs: of a line that is not proven rank 0 warns, and
    with `proof` it is a PlanError. With `cuda_graph` a training step is one CUDA graph from the third of its sizes on, which
    holds the memory of the step for good; what no graph replays (random numbers, values that the host reads) is an error.
    `mode="inference"` is for a model that only generates: the plan is for the prefill of the example inputs and for `new_tokens`
    decoded after them (see `make_plan`), the model is put into evaluation, and its parameters are frozen.

    A model that returns no loss returns what it returns, as full tensors that take gradients: ``criterion(parallel(x), y)`` is
    the loss of one process. Plans of such calls have no pipeline and no micro-batches; `loss_fn` (from the model's result and a
    target to the loss) puts the loss into the program, which then takes the target too: ``loss = parallel(x, target=y)``.

    Several models that share the devices (``policy, reference = parallelize([policy, reference], cluster, [batch, batch])``) are
    planned together, so that each leaves the others what they hold while it runs. A list is then one value for each model, of any
    option.

    Calls of other kinds than the example inputs (another mode, other arguments, lengths or batch sizes) have programs of their
    own, which are captured and planned when they are first met, with the weights where they are.

    Raises `AutoparError`.
    """
    check_model(model)
    model = with_plain_storage(model)
    options = PlanOptions(
        precision=precision, force=force, constrain=constrain, optimizer=optimizer, strict=strict,
        time_limit_seconds=time_limit_seconds, outputs=outputs, batch_norm=batch_norm, expert_load=expert_load, loss_fn=loss_fn,
        document_lengths=document_lengths,
        memory_margin=memory_margin, batch_dim=batch_dim, held_bytes=held_bytes(beside), mode=mode, new_tokens=new_tokens,
        compile=None if compile is None else bool(compile),
    )  # fmt: skip
    run = RuntimeOptions(
        plan=plan, compile=compile, state=state, cache=cache, patience_seconds=patience_seconds, join_seconds=join_seconds,
        check_batch_every=check_batch_every, check_every=check_every, proof=proof,
        cuda_graph=cuda_graph,
    )  # fmt: skip
    if example_inputs is not None:
        split_inputs(example_inputs)
    check_launch(cluster_named(cluster, processes=launched_processes()))
    if options.infers:
        model.eval().requires_grad_(False)
    if example_inputs is None:
        return Deferred(lambda args, batch: _build(model, cluster, _named(model, args, batch), options, run), model.training)
    return _build(model, cluster, example_inputs, options, run)


@outside_of_inference()
def _build(
    model: nn.Module, named: str | Cluster, example_inputs: ExampleInputs, options: PlanOptions, run: RuntimeOptions
) -> Parallel:
    """The parallel model, once there are example inputs. `named` is the cluster as the user says it."""
    cluster = cluster_named(named, processes=launched_processes())  # its size: rank 0 measures it once all processes are there
    apply_patches()
    heartbeat = join(
        cluster.size, {cluster.name: cluster.size}, lambda rank: f"rank {rank}",
        patience_seconds=run.patience_seconds, join_seconds=run.join_seconds,
    )  # fmt: skip
    state, weights = run.state, run.state if isinstance(run.state, (str, os.PathLike)) else None
    tensors = {} if isinstance(state, (str, os.PathLike)) else named_state(model, state)

    def chosen() -> Plan:
        fill_missing(model, tensors)
        if run.plan is None:
            priced = cluster_named(named, cache_folder(), launched_processes(), say_measuring)
            LOGGER.info("planning %s for %s (at most %g s)", type(model).__name__, priced.name, options.time_limit_seconds)
            return plan_with(model, priced, example_inputs, options, cache=plan_folder() if run.cache else None)
        given = check_plan(run.plan, model, cluster, example_inputs, options.outputs, options.loss_fn)
        check_options(given, model, options.precision, options.force, options.constraints, options.held_bytes)
        return given

    try:
        with watched(heartbeat, "comparing the models"):
            _compare_models(model)
            source = BroadcastSource(tensors) if weights is None else pretrained_source(model, weights)
        with watched(heartbeat, "planning"):
            code = code_of(model, options.loss_fn)
            text, reads = on_first_rank(lambda: _with_reads(chosen))
            agreed = planfile.decode_plan(text)
            compiler = compiler_of(agreed, run.compile)
            check_float8(agreed, compiler)
            _warn_of(model, code, compiler)
            frozen = FrozenReads(copy_without_data(model, None), reads, code.names, code.modules, questions=code.questions)
            planned = cluster_of_plan(agreed, cluster)
            maker = _variant_maker(frozen, agreed, planned, example_inputs, options, current_autocast(model), run.proof)
        program = build_program(agreed.graph, agreed.candidate)
        check_proof(agreed, required=run.proof)
        with watched(heartbeat, "making process groups"):
            mesh = MeshHandle(program.Program.mesh_axes)
            mesh.opaque_modules = whole_modules(model)
            mesh.async_tp = async_tp_groups(
                mesh, planned_async_tp(agreed), compiler in (True, "inductor"), planned.overlap.async_tp_by_messages
            )
        form = agreed.graph.interface.returns if agreed.graph.interface else None
        parallel = Parallel(
            program.Program(mesh), source, compile=compiler, form=form, heartbeat=heartbeat,
            plain=PlainModel(
                model, frozen, maker.right_in, agreed.graph.updated_buffers(), slow_path=PADDED_ENCODER in agreed.graph.notes
            ),
            check_batch_every=run.check_batch_every, check_every=run.check_every, make_variant=maker.make,
            plan=agreed, predicted_step=partial(predicted_step, agreed, bool(compiler)),
            expert_prices=ExpertPrices(agreed, bool(compiler)), cuda_graph=run.cuda_graph,
        )  # fmt: skip
        if parallel.variants is not None:
            fixed = 0 if agreed.graph.batch_is_symbolic else agreed.graph.batch
            parallel.variants.learn_first(*split_inputs(example_inputs), fixed)
    except BaseException:
        if heartbeat is not None:
            heartbeat.close()
        raise
    parallel.memory.prediction = partial(memory_answer, agreed)
    if dist.get_rank() == 0:
        say_plan(agreed)
    return parallel


class _UnbuiltError(StateError, AttributeError):
    """An attribute that a parallel model has only once it is built; so ``hasattr`` is False before."""


class Deferred(Parallel):
    """A parallel model that is built by its first call, when it sees a batch. Then it *becomes* that `Parallel`.

    Until then it has a mode and nothing else: what needs weights or programs reaches for them, and ends in `__getattr__`."""

    def __init__(self, build: Callable[[tuple[Any, ...], dict[str, Any]], Parallel], training: bool) -> None:
        nn.Module.__init__(self)
        self.training = training
        vars(self)["build"] = build
        del vars(self)["_parameters"], vars(self)["_buffers"]

    def __getattr__(self, name: str) -> Any:
        raise _UnbuiltError(
            "this model is built by its first call and has no parameters yet: "
            "pass example_inputs=batch to autopar.parallelize, and make the optimizer after that"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **batch: Any) -> Any:
        training = self.training
        built = vars(self)["build"](args, batch)
        self.__class__ = type(built)
        self.__dict__ = built.__dict__
        if self.heartbeat is not None:
            self.heartbeat.stop_with(self)
        if self.training != training:
            self.train(training)
        return self(*args, **batch)

    def train(self, mode: bool = True) -> Self:
        nn.Module.train(self, mode)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(list(super().named_parameters(*args, **kwargs)))  # refused at once, not when the generator is read

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(list(super().parameters(recurse)))


# -- the steps


def _compare_models(model: nn.Module) -> None:
    """PlanMismatch on all ranks where one has another model, or another version of torch or autopar."""
    if not several_ranks():
        return
    try:
        require_agreement(stated_versions(), lambda rank: f"rank {rank}")
        require_equal_models(model, lambda rank: f"rank {rank}")
    except MismatchProblem as problem:
        raise PlanMismatch(str(problem)) from None


def _with_reads(chosen: Callable[[], Plan]) -> tuple[str, Reads]:
    """The text of a plan, and what was read of the model while it was captured for it."""
    with recorded_reads() as record:
        return chosen().to_json(), record.reads


def _variant_maker(
    frozen: FrozenReads,
    agreed: Plan,
    cluster: Cluster,
    example_inputs: ExampleInputs,
    asked: PlanOptions,
    autocast: str,
    proof: bool,
) -> VariantMaker:
    """Return the maker of programs for other calls."""
    args, kwargs = split_inputs(example_inputs)
    said = (text for text in asked.outputs if text.endswith(f":{LOSS}"))
    options: dict[str, Any] = dict(
        compute_dtype=compute_dtype_of(agreed.candidate.precision, frozen.model),
        float8=agreed.candidate.precision.float8,
        outputs=(*(output.asked for output in agreed.graph.outputs if agreed.graph.has_loss), *said),
        batch_norm="local" if LOCAL in agreed.graph.notes else "global",
        loss_fn=asked.loss_fn,
        batch_dim=batch_dims(agreed),
        autocast=autocast,
    )
    modes = CapturedModes(copy_without_data(frozen.model, None), args, kwargs, options, agreed.graph)
    return VariantMaker(frozen, agreed, cluster, registry(), options, modes, proof)


def _warn_of(model: nn.Module, code: Code, compile: bool | str) -> None:
    """Warn, on rank 0, of what a program cannot have of the model as it is."""
    if dist.get_rank():
        return
    if is_compiled(model) and not compile:
        warnings.warn(
            "torch.compile of the model is no part of its parallel program, which is not compiled: pass the model itself, with "
            "autopar.parallelize(..., compile=True)",
            stacklevel=3,
        )
    if hooked := hooked_modules(model):
        warnings.warn(
            "hooks do not run in the parallel program (what they compute of tensors was captured once): those of "
            + ", ".join(hooked),
            stacklevel=3,
        )
    if hidden := [name for name in own_names(model) if is_attribute(name) and name != "generate"]:  # which runs the model's own
        warnings.warn(
            f"{', '.join(hidden)} of {type(model).__name__}: parallel.{hidden[0]} is another thing. Rename what you read or "
            "call, or take modules and tensors from parallel.get_submodule(name), get_parameter(name) and get_buffer(name)",
            stacklevel=3,
        )
    if shared := shared_parameter(model):
        warnings.warn(
            f"{shared} is a parameter of another parallel model too, and each trains a copy of its own: put both models into one "
            "module whose forward calls them",
            stacklevel=3,
        )
    if code.outside:
        warnings.warn(
            f"{code.outside[0]}, which a program does not do again: it has what the forward read when it was captured. Read it "
            "outside of the forward, and pass it in, or set an attribute of the model",
            stacklevel=3,
        )


def _named(model: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> ExampleInputs:
    """A call's arguments as example inputs."""
    if not (args and batch):
        return args or batch
    names = [name for name, each in signature(forward_of(model)).parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    return dict(zip(names, args, strict=False)) | batch

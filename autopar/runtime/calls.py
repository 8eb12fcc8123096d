"""The calls of a parallel model: each is checked, finds its program, gets its part of the batch, runs, and its result is put
together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .comm.agreement import refused_together, require_agreement, stated_step
from .compat.autograd import in_backward, in_transform, outside_of_checkpoint, outside_of_inference
from .device.autocast import autocast_of, under_autocast
from .device.rng import seed_stream
from .errors import BatchError, RuntimeProblem
from .pipeline.pipeline_step import PipeDreamStep
from .plain.assignments import Assignments
from .plain.plain_model import PlainModel, check_parameters
from .state.fsdp import begin_call, reshard_all
from .step.inputs import LocalBatch, NamedBatch, bind_arguments, bind_named_batch, check_branches, local_inputs, plain_inputs
from .step.micro_batches import StepResult
from .step.out_of_memory import WatchedWork
from .step.outputs import returned_outputs
from .step.results import Lacks, build_result, plain_result
from .step.same_batch import ComparedCalls, check_same_batch, check_same_gradients, record_gradient
from .step.step_checks import StepChecks, watch_weights
from .tensors.torch_functions import mark_result, with_plain_gradient
from .variants import Variant, Variants


@dataclass(eq=False)
class Calls:
    """Runs the calls of one parallel model. `variants`: its programs (None for an exported program, which is the `first` one).
    `nodes`: its modules, whose modes are those of a call. `check_batch_every`: of `ComparedCalls`."""

    first: Variant
    variants: Variants | None
    watch: WatchedWork
    checks: StepChecks
    assignments: Assignments
    nodes: list[nn.Module]
    plain: PlainModel | None
    program_digest: str
    check_batch_every: int
    compared: bool = False
    gradients: dict[str, list[float]] = field(default_factory=dict)
    """Two numbers of each gradient that came back in the last step, before a call that is checked."""
    examples: Mapping[str, int] = field(default_factory=dict)
    """The size of the global batch of the last call, by input."""

    def __post_init__(self) -> None:
        self.program, self.state, self.heartbeat = self.first.program, self.first.state, self.watch.heartbeat
        self.compared_calls = ComparedCalls(self.check_batch_every)

    def run(self, args: tuple[Any, ...], batch: dict[str, Any], training: bool) -> Any:
        """Return the result of a call. `training`: the mode of the whole model."""
        if in_transform():
            raise RuntimeProblem(
                "transforms of torch.func (grad, vjp, jacrev, vmap, jvp) and forward-mode derivatives do not reach into a "
                "parallel model: take x.requires_grad_() and torch.autograd.grad or torch.autograd.functional.jacobian, and the "
                "whole batch in place of vmap"
            )
        # the plan says what is recomputed; programs and gathered weights that are made in inference mode could never train
        with outside_of_checkpoint(), outside_of_inference():
            return self._call(args, batch, training)

    def _call(self, args: tuple[Any, ...], batch: dict[str, Any], training: bool) -> Any:
        """Return the result of a call, under autocast or not."""
        device = self.program.mesh.device.type
        if cast := autocast_of(device):  # the casts are part of the program
            if self.variants is None:
                raise RuntimeProblem(
                    "this program was exported, with the casts that it was captured with: call it outside of torch.autocast"
                )
            with under_autocast(device, ""):
                return self._run(args, batch, training, cast)
        return self._run(args, batch, training)

    def _run(self, args: tuple[Any, ...], batch: dict[str, Any], training: bool, autocast: str = "") -> Any:
        """Return the result of a call under that ``torch.autocast``."""
        if self.variants is not None:
            self.variants.autocast = autocast
        # a stage of a pipeline sees only its own parameters: what it refuses in a call that is checked is refused on all
        mesh, checked = self.program.mesh, self.compared_calls.is_regular()
        asked = checked and mesh.pp.size > 1 and self.heartbeat is not None
        with self.watch("the check of parameters"), refused_together(mesh.describe, asked=asked):
            more = self.variants is not None and not self.first.overlaps_steps
            check_parameters(self.state.parameters, lambda name: more or self.state.specs[name].trainable)
            self.assignments.check_tree()
            if self.plain is not None:
                self.plain.check_unchanged(self._equals)
                if not autocast and (self.program.forward_only or not torch.is_grad_enabled()):
                    self.plain.warn_of_slow_path(self.nodes)
        mode = (training, torch.is_grad_enabled())
        variant, training = self._variant(args, batch, training)
        inputs = self._inputs(variant, mode, args, batch)
        drawn = seed_stream.counts() if in_backward() else None
        if drawn is None:
            begin_call(self.program)
            for buckets in (self.state.buckets, *self.state.chunk_buckets):
                buckets.reset()
        with seed_stream.call(mode[0]) if drawn is None else contextlib.nullcontext():
            loss, others = self._step(variant, inputs, training)
        if not self._takes_gradients(inputs):  # FSDP2 and stages of a pipeline give them a graph, whose backward would do nothing
            loss, others = loss.detach(), [each.detach() for each in others]
        if drawn is not None and seed_stream.counts() != drawn:
            raise RuntimeProblem(
                "torch.utils.checkpoint(use_reentrant=True) calls this model once more in the backward, which draws other random "
                "numbers (dropout): leave checkpoint out, since the plan says what is recomputed, or pass use_reentrant=False"
            )
        return self._result(variant, loss, others)

    def _takes_gradients(self, inputs: dict[str, torch.Tensor]) -> bool:
        """Return whether a parameter of any stage trains, or an input takes a gradient."""
        if self.state.trains() or any(each.requires_grad for each in inputs.values()):
            return True
        return self.program.mesh.pp.size > 1 and (self.variants is None or self.variants.trains)

    def _result(self, variant: Variant, loss: Any, others: Any) -> Any:
        """Return the model's result, whose backward is watched."""
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss = with_plain_gradient(loss)
        program = variant.program
        if not torch.is_grad_enabled() or program.forward_only:
            reshard_all(self.program)
        outputs = returned_outputs(program, others) if program.outputs else {}
        taking = {path: output for path, output in outputs.items() if program.output_kinds.get(path) == "gradient"}
        for path, output in {"": loss, **taking}.items():
            if isinstance(output, torch.Tensor) and output.requires_grad:
                self._watch_result(output)
                if self.compared_calls.is_regular():  # the next call compares
                    record_gradient(output, path, self.gradients)
        if variant.form is None:
            return plain_result(program, loss, outputs)
        lacks = self.variants.lacks if self.variants is not None else Lacks()
        return build_result(variant.form, loss, outputs, lacks=lacks, examples=self.examples)

    def _watch_result(self, output: torch.Tensor) -> None:
        """Know a result by its backward, and watch that."""
        mark_result(output, self.state)
        if self.heartbeat is not None:
            self.heartbeat.watch_backward(output)
        if not self.first.overlaps_steps:
            watch_weights(output, self.state)

    def _equals(self, name: str, value: torch.Tensor) -> bool:
        """Return whether this rank's part of a tensor of the model has this value."""
        if self.plain is not None and name in self.plain.unused:
            return torch.equal(self.plain.unused[name], value)
        return self.state.holds(name, value)

    def _variant(self, args: tuple[Any, ...], batch: dict[str, Any], training: bool) -> tuple[Variant, bool]:
        """Return the program of this call, and whether it runs in training mode."""
        whole = args[0] if len(args) == 1 else None
        if self.variants is None or isinstance(whole, NamedBatch):
            if not training:
                self._check_evaluation()
            return self.first, training
        backwards = 0 if self.heartbeat is None else self.heartbeat.backwards
        modes = tuple(node.training for node in self.nodes)
        with self.watch("choosing the program of this call"):
            if isinstance(whole, LocalBatch):
                call = self.variants.call(modes, (), whole, whole.times)
            else:
                call = self.variants.call(modes, args, batch)
            agreed = self.variants.agree(call, self.program.mesh.describe, backwards)
            if self.heartbeat is not None:
                self.heartbeat.agreed()
            return self.variants.find(agreed)

    def _check_evaluation(self) -> None:
        """Raise a RuntimeProblem where this program does not compute what the model does in evaluation, on all stages alike."""
        blocks = [block for roots in self.program.roots() for root in roots for block in root.blocks()]
        if any(block.writes_buffers for block in blocks):
            raise RuntimeProblem(
                "this program was captured in training, where the forward writes buffers (statistics of batch norm, counts): "
                "call train(), or evaluate the original model with parallel.full_state()"
            )
        if any(block.training_noise for block in blocks):
            raise RuntimeProblem(
                "this program draws random numbers as the model did in training (stochastic depth, channel dropout, noise): call "
                "train(), or evaluate the original model with parallel.full_state()"
            )
        if self.plain is not None and not self.plain.right_in(False):
            raise RuntimeProblem(
                "this program was captured in training, and the model computes something else in evaluation (a branch on "
                "self.training?): call train(), or evaluate the original model with parallel.full_state()"
            )

    def _inputs(
        self, variant: Variant, mode: tuple[bool, ...], args: tuple[Any, ...], batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return this rank's part of the batch. BatchError where it does not fit, or where ranks passed different ones; before
        the first step all ranks compare the structure of their batches, programs and versions too."""
        program, first = variant.program, args[0] if len(args) == 1 else None
        local = isinstance(first, LocalBatch)
        checked = self.compared_calls.compares((*mode, local), variant.calls_by_mode)
        comparing = self.heartbeat is not None and not self.compared
        asked, mesh, words = comparing or checked, self.program.mesh, " was given another batch than this rank"
        with self.watch("comparing the ranks") if asked else contextlib.nullcontext():
            with refused_together(mesh.describe, asked=asked, problem=BatchError, words=words):
                if isinstance(first, NamedBatch):
                    whole = bind_named_batch(program, first)
                else:
                    whole = bind_arguments(program, () if local else args, first if isinstance(first, LocalBatch) else batch)
                inputs = plain_inputs(whole) if local else local_inputs(program, whole)
                times = first.times if isinstance(first, LocalBatch) else 1
                if self.variants is None:
                    check_branches(program, whole, times)
                self.examples = {name: tensor.shape[0] * times for name, tensor in whole.items() if tensor.dim()}
            if comparing:
                require_agreement(stated_step(mesh, self.program_digest, whole, own_part=local), mesh.describe)
                self.compared = True
        if checked:
            with self.watch("the comparison of batches"):
                shapes = program.input_shapes.items()
                check_same_batch(mesh, whole, local, {name for name, shape in shapes if shape[:1] != (None,)})
                check_same_gradients(mesh, self.gradients)
                self.gradients.clear()
        return inputs

    def _step(self, variant: Variant, inputs: dict[str, torch.Tensor], training: bool) -> StepResult:
        """Return the loss, and this rank's shard of each output."""
        if torch.is_grad_enabled() and not in_backward():
            self.watch.memory.step += 1
            if self.heartbeat is not None:
                self.heartbeat.step += 1
        if self.variants is None and self.heartbeat is not None:
            self.heartbeat.agreed()
        with self.watch("forward" if torch.is_grad_enabled() else "evaluation"):
            return self.checks.run(variant.program, lambda: variant.run(inputs, training))

    def returning(self, outputs: tuple[str, ...]) -> contextlib.AbstractContextManager[None]:
        """A context in which calls return these fields beside the loss."""
        if self.variants is None:
            raise RuntimeProblem("this program was exported, and returns what it was planned with: pass outputs= when planning")
        return self.variants.returning(outputs)

    def flush(self) -> torch.Tensor:
        """Return the loss of the last batch, where steps overlap."""
        if not isinstance(self.first.step, PipeDreamStep):
            raise RuntimeProblem("every batch of this plan ends with its own step: flush() is for two versions of weights")
        with self.watch("flush"):
            loss = with_plain_gradient(self.first.step.flush())
        self._watch_result(loss)
        return loss

    def check_steps_ended(self, action: str) -> None:
        """Raise a RuntimeProblem while a batch is not ended, whose gradients and weights no checkpoint has."""
        if isinstance(self.first.step, PipeDreamStep) and self.first.step.windows_run:
            raise RuntimeProblem(f"the last batch is not ended: call flush() and optimizer.step() before {action}()")

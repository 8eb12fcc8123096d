"""Training steps as one CUDA graph: the forwards and backwards of a batch, with their collectives and the messages between the
stages of a pipeline, are captured once, and every further step is one launch.

A replay works on the addresses of the capture. The batch is copied to where that of the capture lay, weights are changed in place
by any optimizer, and losses, outputs and gradients are copies of what lies where those of the capture were. Where weights lie
elsewhere since (loaded, moved, frozen), the step is captured anew. A batch of other sizes, and a step that somebody looks into
(one that is checked, measured, or of `detect_anomaly`), run without a graph. The first sizes that three steps have are captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..compat.cuda_graphs import CaptureProblem, CaptureStream, Replay, capture_check
from ..compat.dtensor import local_of
from ..compat.modules import forget_steps
from ..errors import RuntimeProblem
from ..module import BlockModule, Program
from ..ops.functions import held_constants
from ..state.gradient import local_gradient
from ..state.model_state import State
from .micro_batches import Batch, ComputedStep, StepResult, compute_step, deliver_gradients, run_micro_batches

_STEPS_BEFORE = 2
"""Steps of equal sizes before the capture: the first compiles, the second is checked."""


class Steps(Protocol):
    """The steps of a pipeline."""

    def run(self, inputs: Batch) -> StepResult: ...

    def compute(self, inputs: Batch) -> ComputedStep: ...


class StepGraph:
    """The training steps of a program."""

    def __init__(self, program: Program, state: State, stream: CaptureStream, steps: Steps | None) -> None:
        self.program, self.state, self.stream = program, state, stream
        self.run_once: Callable[[Batch], StepResult] = steps.run if steps else partial(run_micro_batches, program, state)
        self.compute_once: Callable[[Batch], ComputedStep] = steps.compute if steps else partial(compute_step, program, state)
        self.hooks = _count_hooks(program)
        self.sizes: Any = None
        self.addresses: Any = None
        self.problem: CaptureProblem | None = None
        self.steps = Counter[Any]()
        self.inputs: Batch = {}
        self.constants: list[torch.Tensor] = []
        self.computed: ComputedStep | None = None
        self.replay: Replay | None = None
        self.reached: dict[Any, list[str]] = {}

    def takes(self, inputs: Batch) -> bool:
        """Return whether this step is replayed, or comes before a capture. CaptureProblem where one was refused before."""
        if self.problem is not None:
            raise self.problem
        if self.hooks != _count_hooks(self.program) or torch.is_anomaly_enabled():
            return False
        return self.replay is None or _sizes(inputs) == self.sizes

    def run(self, inputs: Batch) -> StepResult:
        """The loss of this rank's batch, whose backward hands the gradients out, and the outputs."""
        sizes, addresses = _sizes(inputs), list(_addresses(self.state))
        if addresses != self.addresses:
            self._drop()
        self.sizes, self.addresses = sizes, addresses
        try:
            return self._replayed(inputs) if self.steps[sizes] == _STEPS_BEFORE else self._before(inputs)
        except BaseException as error:
            self._drop()
            self.problem = error if isinstance(error, CaptureProblem) else None
            raise

    def _before(self, inputs: Batch) -> StepResult:
        """Return the result of a step before the capture, on its stream."""
        with ExitStack() as stack:
            stack.enter_context(self.stream.current())
            if self.steps[self.sizes] == _STEPS_BEFORE - 1:
                stack.enter_context(capture_check(self.program.mesh.device, _block_of))
            result = self.run_once(inputs)
        self.steps[self.sizes] += 1
        return result

    def _replayed(self, inputs: Batch) -> StepResult:
        if self.replay is None:
            self.inputs = {name: x.clone() for name, x in inputs.items()}
            forget_steps(self.program)
            with held_constants() as self.constants:
                self.replay = self.stream.capture(self._compute)
        for name, x in self.inputs.items():
            x.copy_(inputs[name])
        self.replay()
        assert self.computed is not None
        loss, gradients, outputs = self.computed
        copies = {parameter: local_gradient(parameter, local_of(each).clone()) for parameter, each in gradients.items()}
        return deliver_gradients(self.state, loss.clone(), copies, self.reached), [each.clone() for each in outputs]

    def _compute(self) -> None:
        self.computed = self.compute_once(self.inputs)

    def _drop(self) -> None:
        """Forget the graph, with the memory that it holds."""
        self.steps.clear()
        self.inputs, self.constants, self.computed, self.replay = {}, [], None, None


def step_graph(program: Program, state: State, stream: CaptureStream, steps: Steps | None) -> StepGraph:
    """Return the graph of a program's steps. RuntimeProblem where they are not of one graph."""
    overlaps = program.weight_versions > 1
    problems = (
        (program.forward_only, "captures training steps, and this program only runs forwards: leave it out"),
        (overlaps, "captures whole steps, and those of this plan overlap: plan with weight_versions=1, or leave it out"),
        (not program.has_loss, "needs the loss in the program: pass loss_fn=, or leave it out"),
        (bool(program.differentiable_inputs), "captures no gradients of inputs: detach them, or leave it out"),
        ("gradient" in program.output_kinds.values(), "hands out no outputs with gradients: leave it out"),
        (state.loss_scale.half, "captures no loss scale, which float16 needs: take precision='bf16', or leave it out"),
    )
    for holds, problem in problems:
        if holds:
            raise RuntimeProblem(f"cuda_graph=True {problem}")
    return StepGraph(program, state, stream, steps)


def _sizes(inputs: Batch) -> tuple[Any, ...]:
    return tuple((name, x.shape, x.dtype) for name, x in inputs.items())


def _addresses(state: State) -> Iterator[tuple[int, bool]]:
    """Yield where the weights and buffers of this rank lie, and which train."""
    parameters: Iterator[nn.Parameter] = iter(state.parameters.values())
    for parameter in parameters:
        yield local_of(parameter).data_ptr(), parameter.requires_grad
    for buffer in state.buffers.values():
        yield buffer.data_ptr(), False


def _count_hooks(program: Program) -> int:
    """Return how many hooks see the forwards of this rank's blocks, FSDP2's own among them."""
    roots = program.roots()[program.mesh.pp.coordinate]
    return sum(len(block._forward_hooks) + len(block._forward_pre_hooks) for root in roots for block in root.blocks())


def _block_of(frame: Any) -> str:
    """The path of the block whose forward runs in a frame; empty where it is none."""
    block = frame.f_locals.get("self")
    return (block.prefix or type(block).__name__) if isinstance(block, BlockModule) else ""

"""The split backward of linear layers: the gradient of the input at once, those of weight and bias later (zero-bubble schedules).

A block writes ``self.split_backward.linear(x, weight, bias)``. In micro-batches whose backward the schedule splits (actions I and
W), the backward queues (x, gradient), and W computes and delivers the gradients of weight and bias. Otherwise it is ``F.linear``
itself.

A gradient is delivered to the graph where the weight came out of it (`torch.autograd.graph.get_gradient_edge`): through casts and
conversions to the parameter, whose hooks run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..compat.autograd import apply
from ..compat.unread_outputs import is_of_compiled_code
from .functions import linear_kn

Plain = Callable[..., torch.Tensor]


class _PendingWeightGrad(NamedTuple):
    """The weight gradient of one linear layer in one micro-batch. `transposed`: the weight is ``[k, n]``."""

    x: torch.Tensor
    gradient: torch.Tensor
    weight: GradientEdge
    bias: GradientEdge | None
    transposed: bool

    def deliver(self) -> None:
        x, gradient = self.x.flatten(0, -2), self.gradient.flatten(0, -2)
        weight = x.t() @ gradient if self.transposed else gradient.t() @ x
        edges, gradients = [self.weight], [weight]
        if self.bias is not None:
            edges.append(self.bias)
            gradients.append(gradient.sum(0))
        torch.autograd.backward(edges, gradients)


class WeightGradQueue:
    """The pending weight gradients of a model chunk, by micro-batch and block. `micro_batch`: the current one, if its backward is
    split."""

    def __init__(self) -> None:
        self.micro_batch: int | None = None
        self.pending: dict[int, dict[SplitBackward, list[_PendingWeightGrad]]] = {}
        self.unsplit: set[str] = set()
        """Classes of blocks whose backward is not split: their weight gradients come with those of the inputs."""

    def for_block(self, block: object) -> SplitBackward:
        """The linear layers of one block."""
        return SplitBackward(self, type(block).__name__, block)

    def compute(self, micro_batch: int, done: Callable[[object], None]) -> None:
        """Compute and deliver the weight gradients of a micro-batch in the order of the backward; call `done` with each
        block."""
        for layers, entries in self.pending.pop(micro_batch, {}).items():
            while entries:
                entries.pop(0).deliver()
            done(layers.block)


class SplitBackward:
    """The linear layers of one block. Without a queue they are the plain functions."""

    def __init__(self, queue: WeightGradQueue | None = None, name: str = "", block: object = None) -> None:
        self.queue, self.name, self.block = queue, name, block

    @torch.compiler.disable(reason="weight gradients have actions of their own")  # type: ignore[untyped-decorator]
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``F.linear``."""
        return self._run(F.linear, x, weight, bias, False)

    @torch.compiler.disable(reason="weight gradients have actions of their own")  # type: ignore[untyped-decorator]
    def linear_kn(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `functions.linear_kn`: the weight is ``[k, n]``."""
        return self._run(linear_kn, x, weight, bias, True)

    def _run(
        self, plain: Plain, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
    ) -> torch.Tensor:
        queue = self.queue
        if queue is None or queue.micro_batch is None or not weight.requires_grad or not torch.is_grad_enabled():
            return plain(x, weight, bias)
        both = [each for each in (weight, bias) if each is not None]
        if any(map(is_of_compiled_code, both)):
            self._warn_unsplit(queue)
            return plain(x, weight, bias)
        edges = [get_gradient_edge(each) if each.requires_grad else None for each in both]
        leaves = [each.detach() for each in both]
        leaves[0].requires_grad_()  # so that the result has a graph even if `x` has none
        result: torch.Tensor = apply(_Linear, plain, self, edges, transposed, x, *leaves)
        return result

    def _warn_unsplit(self, queue: WeightGradQueue) -> None:
        """Warn that the backward is not split: compiled code made the weight, and the backward of that runs once."""
        if self.name not in queue.unsplit:
            queue.unsplit.add(self.name)
            warnings.warn(
                f"the backward of {self.name} is not split: compiled code casts or converts its weights, so their gradients come "
                "with those of its inputs (give compute and stored weights one dtype, shard the state, or do not compile)",
                stacklevel=4,
            )

    def enqueue(self, pending: _PendingWeightGrad) -> None:
        """Queue a weight gradient, in the backward."""
        assert self.queue is not None and self.queue.micro_batch is not None
        self.queue.pending.setdefault(self.queue.micro_batch, {}).setdefault(self, []).append(pending)


class _Linear(torch.autograd.Function):
    """Returns no gradients for its weights: they are queued."""

    @staticmethod
    def forward(
        ctx: Any,
        plain: Plain,
        layers: SplitBackward,
        edges: list[GradientEdge | None],
        transposed: bool,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ctx.split_backward, ctx.edges, ctx.transposed = layers, edges, transposed
        ctx.save_for_backward(x, weight)
        return plain(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        bias = ctx.edges[1] if len(ctx.edges) > 1 else None
        ctx.split_backward.enqueue(_PendingWeightGrad(x.detach(), gradient, ctx.edges[0], bias, ctx.transposed))
        inputs = None
        if ctx.needs_input_grad[4]:
            inputs = torch.matmul(gradient, weight.t() if ctx.transposed else weight)
        return (None, None, None, None, inputs) + (None,) * len(ctx.edges)

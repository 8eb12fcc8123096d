"""Drawn functions of views and in-place operations: what is taken apart node by node computes what the function does."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.export import export

from autopar.capture.tracing.decomposition.nodes import decomposed_graph
from autopar.capture.tracing.decomposition.writes import NotLocal


def _no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = (x.reshape(-1) * 2).relu_().view(-1, 1)
    return y.detach()  # a graph says of its operations that they are under no_grad, which nobody reads here


MAKES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x * 2, torch.sin, lambda x: x.clone(), lambda x: F.dropout(x, 0.5, False), lambda x: x.to(torch.float64),
    lambda x: x.contiguous(), lambda x: x.reshape(-1), lambda x: x.flatten(), lambda x: x.unsqueeze(0),
    lambda x: x.transpose(0, -1), lambda x: x.chunk(2, -1)[0], lambda x: x.split(1, 0)[0], lambda x: x[..., :1],
    lambda x: x.detach(), lambda x: x.expand_as(x), lambda x: x.squeeze(), lambda x: x.mT if x.dim() > 1 else x,
    lambda x: F.dropout(x, 0.5, False, inplace=True), _no_grad, lambda x: x[0] if x.dim() else x, lambda x: x[..., 1:],
    lambda x: x[1:] if x.dim() else x, lambda x: x[-1:][..., :2],
)  # fmt: skip
WRITES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.add_(1.0), lambda x: x.mul_(0.5), lambda x: x.relu_(), lambda x: x.fill_(2.0), lambda x: x.clamp_(-1.0, 1.0),
    lambda x: x.add_(x.detach()), lambda x: x.masked_fill_(x > 1.0, 0.5), lambda x: x.detach_(), lambda x: x.unsqueeze_(0),
)  # fmt: skip
LINES = st.lists(st.tuples(st.booleans(), st.integers(0, len(MAKES) - 1), st.integers(0, 5)), min_size=2, max_size=9)


class Drawn(nn.Module):
    """Each line makes a tensor of one of those before, or writes it in place; the result is of all."""

    def __init__(self, lines: list[tuple[bool, int, int]]) -> None:
        super().__init__()
        self.lines = lines

    def forward(self, x: Tensor) -> Tensor:
        tensors = [x * 1.5]
        for writes, function, operand in self.lines:
            at = tensors[operand % len(tensors)]
            tensors.append(WRITES[function % len(WRITES)](at) if writes else MAKES[function](at))
        return torch.stack([(number + 1) * each.cos().sum() for number, each in enumerate(tensors)]).sum()


def run(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The result for one input, and its gradient."""
    x = torch.linspace(-2.0, 2.0, 24, dtype=torch.float64).view(4, 6).requires_grad_()
    result = function(x)
    return result.detach(), torch.autograd.grad(result, x)[0]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(lines=LINES)
def test_it_computes_what_the_function_does(lines: list[tuple[bool, int, int]]) -> None:
    model = Drawn(lines)
    try:
        expected = run(model)
    except RuntimeError:  # autograd refuses some writes
        assume(False)
    program = export(model, (torch.zeros(4, 6, dtype=torch.float64),), strict=False)
    try:
        graph, _ = decomposed_graph(program, {})
    except NotLocal:
        assume(False)
    for found, wanted in zip(
        run(lambda x: fx.Interpreter(fx.GraphModule(program.graph_module, graph)).run(x)[0]), expected, strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)

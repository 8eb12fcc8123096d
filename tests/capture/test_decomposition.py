"""Composite operations that are taken apart node by node: the graph that torch's `run_decompositions` traces."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models.small_models import make
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from autopar.capture.normalize.batch_norm import batch_norms
from autopar.capture.normalize.loss_functions import loss_functions
from autopar.capture.normalize.recurrent import recurrent_nets
from autopar.capture.tracing import trace
from autopar.capture.tracing.decomposition.nodes import decomposed_graph
from autopar.capture.tracing.decomposition.program import retraced, statistics
from autopar.capture.tracing.decomposition.writes import NotLocal
from autopar.capture.tracing.guards import NO_GRAD_MARK
from autopar.capture.tracing.places import is_assertion

pytestmark = pytest.mark.filterwarnings("ignore:Raw SymInt")  # those of torch, which a capture does not show
HOST = ("device", "layout", "pin_memory")
NUMBERS = (torch.SymInt, torch.SymFloat)


class Lines(nn.Module):
    """One linear, and a function of its result and of what it read."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.run = nn.Linear(8, 12), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.linear(x), x).float().sum()


def under_no_grad(y: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.reshape(-1).abs().mean()
        with torch.enable_grad():
            scale = scale * y.chunk(3, -1)[1].sum()
    return y * scale + y.detach()


LINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "views": lambda y, x: y.reshape(-1, 12).flatten(0, 1).unflatten(0, (-1, 4)),
    "a view of gaps": lambda y, x: y.unflatten(-1, (3, 4)).transpose(1, 2).flatten(2).reshape(y.shape[0], 3, -1),
    "copies": lambda y, x: y.transpose(1, 2).reshape(-1, 12) + y.transpose(1, 2).contiguous().view(-1, 12),
    "nothing to do": lambda y, x: y.to(y.dtype).contiguous().flatten(1, 1).to(y.device).type_as(y),
    "casts": lambda y, x: y.to(torch.bfloat16).double() + x.sum().to(y),
    "uneven parts": lambda y, x: y.chunk(5, -1)[1] + y.chunk(5, 2)[3] + y.tensor_split(5, -1)[0],
    "parts of the batch": lambda y, x: torch.cat([part * 2 for part in y.chunk(1, 0)]),
    "no gradients": under_no_grad,
    "sizes": lambda y, x: y.new_zeros(y.shape[0] * 2, y.shape[1] + 1).sum() + y / y.numel() + y.mT.sum(),
    "dropout": lambda y, x: F.dropout(y, 0.5, training=False) + F.dropout(y, 0.0),
    "a constant": lambda y, x: y * torch.tensor([1.0, 2.0, 3.0]).sum(),
    "other names": lambda y, x: torch.concat([y, y.multiply(x.sum()).negative()]).clip(-1.0, 1.0).subtract(1).absolute(),
    "comparisons": lambda y, x: torch.concatenate([y * y.greater(0.0), y * y.less_equal(y + 1).not_equal(False)], -1),
    "in place": lambda y, x: _written(y.mul(2), lambda z: z.add_(x.sum()).relu_().mul_(2.0)),
    "in place, then a view": lambda y, x: torch.zeros(12).fill_(2.0).view(3, 4).sum() + y.add(1).mul_(y).reshape(-1, 12),
    "in place under no_grad": lambda y, x: y + _counted(x),
    "in place, seen under another name": lambda y, x: _seen(y.mul(2), lambda z: z.contiguous()),
    "masked in place": lambda y, x: y.clone().masked_fill_(y > 0, 0.0).clamp_(-1.0, 1.0),
    "a part is written": lambda y, x: _written(y.mul(2), lambda z: z[..., :3].add_(1.0)),
    "a part of a part": lambda y, x: _written(y.mul(2), lambda z: z[1:, 0][..., 2:6].mul_(x.sum())),
    "parts read after another was written": lambda y, x: _parts(y.mul(2)),
    "the labels, shifted": lambda y, x: _shifted(x),
    "statistics": lambda y, x: torch.cat([*torch.std_mean(y, 1, correction=1), *torch.var_mean(y, 1, correction=0)], 1),
    "losses": lambda y, x: F.mse_loss(y, y * 2) + F.nll_loss(y[:, 0].log_softmax(1), y[:, 1].argmax(1)),
    "class weights": lambda y, x: F.cross_entropy(y[:, 0], y[:, 1].argmax(1), weight=y[0, 0].detach().abs(), label_smoothing=0.1),
}
"""The tensors are [4, 2, 8] and [4, 2, 12]."""
WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a composite part is written": lambda y, x: _written(y.mul(2), lambda z: z.narrow(-1, 2, 4).add_(1.0)),
    "a view sees what is written": lambda y, x: _seen(y.mul(2), lambda z: z.view(-1, 12)),
    "so does a composite one": lambda y, x: _seen(y.mul(2), lambda z: z.reshape(-1, 12)),
    "a view is written": lambda y, x: _written(y.mul(2), lambda z: z.view(-1, 12).relu_()),
    "dropout that drops nothing is its operand": lambda y, x: _written(y.mul(2), lambda z: F.dropout(z, 0.5, False).relu_()),
    "it sees what is written": lambda y, x: _seen(y.mul(2), lambda z: F.dropout(z, 0.5, False)),
    "composite in place": lambda y, x: F.dropout(y.mul(2), 0.5, False, inplace=True) * y,
    "a narrower tensor is written": lambda y, x: y.mul(2).add_(y.double().sum(0)),
    "it ends gradients": lambda y, x: _written(y.mul(2), lambda z: z.detach_()) * y,
    "a branch": lambda y, x: torch.cond(x.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (y,)),
}


def _written(x: Tensor, write: Callable[[Tensor], Tensor]) -> Tensor:
    write(x)
    return x


def _seen(x: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    found = view(x)
    x.add_(1.0)
    return found * 2


def _parts(x: Tensor) -> Tensor:
    part, row = x[..., 1:5], x[0]
    whole = part.sum() + x.relu()
    part[1:] = 3.0
    row *= part[2].sum()
    x[:, 1] += 1.0
    return whole * row * part.sum() + x


def _shifted(x: Tensor) -> Tensor:
    """As T5 and BART make the decoder's tokens."""
    y = x.new_zeros(x.shape)
    y[:, 1:] = x[:, :-1].clone()
    y[:, 0] = 0.5
    return y.masked_fill_(y > 0.75, 1.0)


@torch.no_grad()
def _counted(x: Tensor) -> Tensor:
    total = x.abs().sum()
    total += 1
    return total


def text(arg: Any, numbers: dict[fx.Node, int]) -> str:
    """An argument, whose tensors have the numbers of their nodes, and sizes their expressions."""
    if isinstance(arg, fx.Node):
        return f"%{numbers[arg]}" if arg in numbers else text(arg.meta.get("val"), numbers)
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join(text(each, numbers) for each in arg)}]"
    if isinstance(arg, Tensor):
        return f"{arg.dtype}{text(tuple(arg.shape), numbers)}"
    return str(arg.node.expr) if isinstance(arg, NUMBERS) else repr(arg)


def listing(graph: fx.Graph) -> list[str]:
    """Each node that gives tensors: operation, arguments, shapes, module, line, and whether it is under no_grad."""
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        val = node.meta.get("val")
        if node.op in ("placeholder", "output"):
            lines.append(f"{node.name if node.op == 'placeholder' else 'output'} {text(node.args, numbers)} {text(val, numbers)}")
        elif is_assertion(node) or not isinstance(val, (Tensor, tuple, list)):
            continue
        else:
            kwargs = [f"{key}={text(arg, numbers)}" for key, arg in sorted(node.kwargs.items()) if key not in HOST]
            modules = list((node.meta.get("nn_module_stack") or {}).values())
            no_grad = NO_GRAD_MARK in (node.meta.get("custom") or {})
            # torch's operations of a region have lost theirs (`guards.mark_no_grad`)
            source = [] if no_grad else (node.meta.get("stack_trace") or "").splitlines()[-2:]
            place = "" if node.target is operator.getitem else f"{modules[-1:]} {source} {no_grad}"
            lines.append(f"{node.target} {text(node.args, numbers)} {kwargs} {text(val, numbers)} {place}")
        numbers[node] = len(numbers)
    return lines


class Counters(nn.Module):
    """Batch norms, and buffers that are written, whole and in part, and read before and after."""

    def __init__(self, run: Callable[[Counters, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.run = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), run
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.conv(x)).sum()


def _row(model: Counters, y: Tensor) -> Tensor:
    rows = model.rows.sum()
    with torch.no_grad():
        mean = y.mean((0, 2))
    model.rows[:, 0] = mean
    model.rows[1].mul_(2.0)
    return y + rows + model.rows[2].sum()


def _counted_twice(model: Counters, y: Tensor) -> Tensor:
    model.steps += 1
    y = y * model.steps
    model.steps.mul_(2.0)
    return y + model.steps


COUNTERS: dict[str, Callable[[Counters, Tensor], Tensor]] = {
    "batch norm": lambda model, y: model.norm(y).relu_(),
    "batch norm, twice": lambda model, y: model.norm(model.norm(y) * 2.0),
    "batch norm that does not count": lambda model, y: F.batch_norm(
        y, model.norm.running_mean, model.norm.running_var, training=True
    ),
    "batch norm in evaluation": lambda model, y: F.batch_norm(y, model.norm.running_mean, model.norm.running_var),
    "batch norm of the batch": lambda model, y: F.batch_norm(y, None, None, training=True),
    "rows": _row,
    "steps": _counted_twice,
}

TABLES = [{**batch_norms(local), **loss_functions(), **recurrent_nets(), **statistics()} for local in (False, True)]
"""Batch norms are taken apart in two ways."""


class AllOf(nn.Module):
    """The sum of several models of one input: one program, in which each stands as it would alone."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([model(x).double() for model in self.models]).sum()


def exported(model: nn.Module, args: Any, kwargs: Any, outlined: bool = False) -> ExportedProgram:
    """The program that a capture takes apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "decomposed", lambda program, *_: program)
        return trace.trace(model, args, kwargs, outlined=outlined).program


def compare(program: ExportedProgram) -> None:
    """Taken apart node by node it is what torch traces."""
    normalizes = any("batch_norm" in str(node.target) for node in program.graph.nodes)
    for table in TABLES[: 1 + normalizes]:
        theirs = listing(retraced(program, table, torch.device("cpu")).graph)
        assert listing(decomposed_graph(program, table)[0]) == theirs


def test_lines_are_as_torch_traces_them() -> None:
    compare(exported(AllOf(map(Lines, LINES.values())), (torch.rand(4, 2, 8),), {}))


def test_buffers_are_written_as_torch_writes_them() -> None:
    compare(exported(AllOf(map(Counters, COUNTERS.values())), (torch.rand(4, 2, 8),), {}))


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_traced_whole(name: str) -> None:
    with pytest.raises(NotLocal):
        decomposed_graph(exported(Lines(WHOLE[name]), (torch.rand(4, 2, 8),), {}), TABLES[0])


@pytest.mark.parametrize("name", ("gpt2", "llama", "bert", "vit", "convnet", "encoder_decoder"))
def test_models_are_as_torch_traces_them(name: str) -> None:
    model, batch = make(name)
    compare(exported(model, (), batch, outlined=True))

"""Norms and activations that a model writes out: recovered where they are torch's own, and left where they are nearly so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.normalize.mathematics import recover as rewrite
from autopar.capture.normalize.mathematics.recover import recover
from autopar.capture.normalize.mathematics.regions import MOST_NODES
from autopar.runtime.ops.functions import rotary_embedding

WIDTH = 8
Written = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A function of (x, weight, bias) between two linear layers."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.written(self.first(x), self.weight, self.bias)).sum()


class Models(nn.Module):
    """The sum of a model of each function: one program, in which each stands as it would alone."""

    def __init__(self, functions: Iterable[Written]) -> None:
        super().__init__()
        self.count = 0
        for written in functions:
            self.add_module(f"model{self.count}", Model(written))
            self.count += 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.get_submodule(f"model{number}")(x) for number in range(self.count)]).sum()


def operations_of_each(functions: Mapping[str, Written], dtype: str | None) -> dict[str, list[str]]:
    """The operations of each function, and those of its linear layers."""
    graph = capture(Models(functions.values()), (torch.rand(4, 3, WIDTH),), compute_dtype=dtype)
    nodes = [node for block in graph.blocks for node in block.nodes]
    found = {
        name: [node.op for node in nodes if node.module.split(".")[0] == f"model{number}"]
        for number, name in enumerate(functions)
    }
    assert all(ops.count("aten.linear") == 2 for ops in found.values())
    return found


def operations(written: Written, dtype: str | None = None) -> list[str]:
    """The operations after the first linear layer."""
    graph = capture(Model(written), (torch.rand(4, 3, WIDTH),), compute_dtype=dtype)
    ops = [node.op for block in graph.blocks for node in block.nodes]
    return ops[ops.index("aten.linear") + 1 :]


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(mean(x.pow(2)) + eps)


def centered(x: Tensor, eps: float = 1e-6, correction: int = 0) -> Tensor:
    return (x - mean(x)) / torch.sqrt(x.var(-1, correction=correction, keepdim=True) + eps)


def tanh_gelu(x: Tensor, cubic: float = 0.044715) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + cubic * x**3)))


def softplus(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x))


def halves(x: Tensor) -> Tensor:
    return torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rotated(one: Tensor, two: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return one * cos - two * sin, two * cos + one * sin


ROTATED: dict[str, tuple[str | None, Written]] = {
    "Llama": (None, lambda x, w, b: x * w + halves(x) * b),
    "GPT-J": ("interleaved", lambda x, w, b: x * w + neighbours(x) * b),
    "ModernBERT": (None, lambda x, w, b: (x.float() * w + halves(x.float()) * b).to(x.dtype)),
    "tables of half the length": (None, lambda x, w, b: torch.cat(rotated(*x.chunk(2, -1), w[:4], b[:4]), -1)),
    "torchtune": ("interleaved", lambda x, w, b: torch.stack(rotated(x[..., ::2], x[..., 1::2], w[:4], b[4:]), -1).flatten(-2)),
    "DeepSeek": ("interleaved to halves", lambda x, w, b: torch.cat(rotated(x[..., ::2], x[..., 1::2], w[:4], b[:4]), -1)),
}


RECOVERED: dict[str, tuple[str, Written]] = {
    "Llama": ("aten.rms_norm", lambda x, w, b: w * rms(x.float()).to(x.dtype)),
    "T5": ("aten.rms_norm", lambda x, w, b: w * (x * torch.rsqrt(mean(x.float().pow(2)) + 1e-6)).to(x.dtype)),
    "Gemma": ("aten.rms_norm", lambda x, w, b: (rms(x.float()) * (1.0 + w.float())).to(x.dtype)),
    "division by a root": ("aten.rms_norm", lambda x, w, b: x / (mean(x * x) + 1e-5).sqrt() * w),
    "power and sum": ("aten.rms_norm", lambda x, w, b: x * (x.square().sum(-1, keepdim=True) / WIDTH + 1e-5) ** -0.5),
    "layer norm": ("aten.layer_norm", lambda x, w, b: w * centered(x) + b),
    "layer norm without bias": ("aten.layer_norm", lambda x, w, b: centered(x, 1e-12) * w),
    "layer norm by moments": ("aten.layer_norm", lambda x, w, b: (x - mean(x)) * torch.rsqrt(mean((x - mean(x)) ** 2) + 1e-5)),
    "gelu by tanh": ("aten.gelu", lambda x, w, b: tanh_gelu(x)),
    "gelu by tanh, in factors": (
        "aten.gelu",
        lambda x, w, b: 0.5 * x * (1 + torch.tanh(x * 0.7978845608028654 * (1 + 0.044715 * x * x))),
    ),
    "gelu by erf": ("aten.gelu", lambda x, w, b: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "silu": ("aten.silu", lambda x, w, b: x * torch.sigmoid(x)),
    "silu by exp": ("aten.silu", lambda x, w, b: x / (1 + torch.exp(-x))),
    "mish": ("aten.mish", lambda x, w, b: x * torch.tanh(softplus(x))),
}
LEFT: dict[str, Written] = {
    "mean over another dimension": lambda x, w, b: w * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    "mean over two dimensions": lambda x, w, b: w * x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6),
    "epsilon outside of the root": lambda x, w, b: w * x / (mean(x.pow(2)).sqrt() + 1e-6),
    "epsilon within the mean": lambda x, w, b: w * x * torch.rsqrt(mean(x.pow(2) + 0.5) + 1e-6),
    "sum for mean": lambda x, w, b: w * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
    "mean of magnitudes": lambda x, w, b: w * x / (mean(x.abs()) + 1e-6).sqrt(),
    "unbiased variance": lambda x, w, b: w * centered(x, correction=1) + b,
    "detached scale": lambda x, w, b: w * x * torch.rsqrt(mean(x.pow(2)) + 1e-6).detach(),
    "scale that is read again": lambda x, w, b: rms(x) * w + torch.rsqrt(mean(x.pow(2)) + 1e-6),
    "a root without epsilon": lambda x, w, b: w * x * torch.rsqrt(mean(x.pow(2))),
    "another cubic": lambda x, w, b: tanh_gelu(x, 0.044),
    "quick gelu": lambda x, w, b: x * torch.sigmoid(1.702 * x),
    "erf of another width": lambda x, w, b: x * 0.5 * (1.0 + torch.erf(x / 1.4)),
    "tanh of sigmoid": lambda x, w, b: x * torch.tanh(torch.sigmoid(x)),
    "cast to an integer": lambda x, w, b: x * torch.sigmoid(x.long().to(x.dtype)),
    "a tiny epsilon outside of the root": lambda x, w, b: w * x / (mean(x.pow(2)).sqrt() + 1e-30),
    "rotation by the other sign": lambda x, w, b: x * w - halves(x) * b,
    "rotation of other pairs": lambda x, w, b: x * w + neighbours(halves(x)) * b,
    "rotation along another dimension": lambda x, w, b: x * w + torch.cat((-x[:, 2:], x[:, :2]), 1) * b,
    "rotation without a sign": lambda x, w, b: x * w + x.roll(WIDTH // 2, -1) * b,
    "rotation by unequal tables": lambda x, w, b: torch.cat(
        (x[..., :4] * w[:4] - x[..., 4:] * b[:4], x[..., 4:] * w[4:] + x[..., :4] * b[:4]), -1
    ),
    "gate of another": lambda x, w, b: x * torch.sigmoid(x.flip(-1)),
}
KINDS = {"ap.rotary_embedding", "aten.rms_norm", "aten.layer_norm", "aten.gelu", "aten.silu", "aten.mish"}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_recovered(dtype: str | None) -> None:
    for name, ops in operations_of_each({name: written for name, (_, written) in RECOVERED.items()}, dtype).items():
        op, _ = RECOVERED[name]
        assert ops.count(op) == 1 and KINDS.isdisjoint(set(ops) - {op}), name
        if name == "Gemma" and dtype:  # its weight has more digits than x
            assert ops.count("aten.to.dtype") == 3
        else:
            assert ops.count("aten.to.dtype") == ops.count("aten.mul.Tensor") == 0, name


@pytest.mark.parametrize("name", ROTATED)
def test_rotary_embeddings(name: str) -> None:
    layout, written = ROTATED[name]
    graph = capture(Model(written), (torch.rand(4, 3, WIDTH),), compute_dtype="bfloat16")
    (node,) = (node for block in graph.blocks for node in block.nodes if node.op == "ap.rotary_embedding")
    assert node.args[3:] == ((layout,) if layout else ())
    assert {"aten.mul.Tensor", "aten.cat", "aten.stack", "aten.neg"}.isdisjoint(operations(written))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(ROTATED.keys() - {"ModernBERT"}))
def test_rotary_embeddings_round_as_they_were_written(name: str, dtype: torch.dtype) -> None:
    layout, written = ROTATED[name]
    x, w, b = (torch.randn(shape, dtype=dtype) for shape in ((4, 3, WIDTH), (WIDTH,), (WIDTH,)))
    tables = (w, b), (w[:4], b[:4]), (w[:4], b[4:])
    assert any(torch.equal(rotary_embedding(x, *each, layout or "halves"), written(x, w, b)) for each in tables)


class Doubled(nn.Module):
    """Casts its weight, and what it computes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return (y.double() * self.weight.double()).to(x.dtype) + (y.double() ** 2).to(x.dtype)


def test_casts_of_a_module_are_one_and_those_of_its_calls_stay() -> None:
    double = Doubled().requires_grad_(False)
    ops = operations(lambda x, w, b: double(double(x)))
    assert ops.count("aten.to.dtype") == 2 * 4


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_nearly_so(dtype: str | None) -> None:
    for name, ops in operations_of_each(LEFT, dtype).items():
        if name == "scale that is read again":  # what reads it computes it
            assert "aten.rsqrt" in ops
        else:
            assert KINDS.isdisjoint(ops), name


@pytest.mark.parametrize(
    "mode", [torch.device("meta"), torch.inference_mode(), torch.no_grad()], ids=["meta", "inference", "no_grad"]
)
def test_the_proof_runs_in_any_mode(mode: AbstractContextManager[Any]) -> None:
    def rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return w * rms(x)

    recover.cache_clear()
    with mode:
        assert "aten.rms_norm" in operations(rows)


def test_regions_of_a_chain_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain of pointwise operations has many of them, none of which grows with its length."""
    sizes: list[int] = []
    monkeypatch.setattr(rewrite, "recover", lambda region: sizes.append(len(region.nodes)))

    def chain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        for _ in range(60):
            x = torch.tanh(x) * 1.5 + torch.exp(-x)
        return x

    assert len(operations(chain)) > 240
    assert max(sizes) <= MOST_NODES and len(sizes) < 300 * MOST_NODES


def test_rounding_to_less_is_kept() -> None:
    """A model in float64 that computes its norm in float32 does so."""
    ops = operations(lambda x, w, b: w * rms(x.float()).to(x.dtype), "float64")
    assert ops.count("aten.rms_norm") == 1 and ops.count("aten.to.dtype") == 2


def test_a_recovered_operation_is_of_the_module_that_wrote_it() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * rms(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_norm, self.last = Norm(), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.input_norm(x)).sum()

    graph = capture(Net(), (torch.rand(4, 3, WIDTH),))
    (node,) = [node for block in graph.blocks for node in block.nodes if node.op == "aten.rms_norm"]
    assert (node.name, node.module) == ("input_norm", "input_norm")


def test_a_candidate_that_takes_other_sizes_is_none() -> None:
    """The alpha of a radiance field: rows times a concatenation, of which one part has one element."""

    def alpha(x: Tensor, *_: Tensor) -> Tensor:
        steps = torch.cat([x[..., 1:] - x[..., :-1], torch.full_like(x[..., :1], 1e2)], -1)
        return 1 - torch.exp(-x * steps)

    assert "aten.cat" in operations(alpha)

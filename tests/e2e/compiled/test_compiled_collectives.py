"""Collectives in compiled blocks: where a compiled backward starts and awaits them."""

from __future__ import annotations

import re

import torch
from support.harness.rank_pool import RankPool
from torch._inductor.utils import run_and_get_code

from autopar.runtime import collectives as C
from autopar.runtime.compat.compile import BlockBackend, compiler_named
from autopar.runtime.device.mesh import MeshHandle

TRACED = re.compile(r"extern_kernels\.(mm)|_c10d_functional\.(all_reduce|wait_tensor)\w*(?:\.default)?\(")


def traced_calls() -> tuple[list[str], list[str], bool]:
    """On a rank: products and collectives of the forward and of the backward of two column-parallel products, in the order of
    inductor's code; and whether the gradients are those without compilation."""
    tp = MeshHandle({"tp": 2}).tp
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def forward(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = C.convert(x, tp, "I -> R")
        return shared @ gate, shared @ up

    def gradients(function) -> list[torch.Tensor]:
        results = function(x, *weights)
        return list(torch.autograd.grad(results, [x, *weights], [torch.ones_like(each) for each in results]))

    compiled = torch.compile(forward, backend=BlockBackend(compiler_named("inductor")), fullgraph=True)
    found, codes = run_and_get_code(lambda: gradients(compiled))
    equal = all(torch.equal(a, b) for a, b in zip(found, gradients(forward), strict=True))
    order = [[one or other for one, other in TRACED.findall(code[code.index("def call") :])] for code in codes]
    return order[0], order[1], equal


def test_gradients_of_weights_hide_the_collective_that_completes_the_inputs(ranks: RankPool) -> None:
    for forward, backward, equal in ranks.run(traced_calls, world=2, timeout=240):
        assert forward == ["mm"] * 2 and equal
        started, awaited = backward.index("all_reduce"), backward.index("wait_tensor")
        assert backward[started:awaited].count("mm") == 2, backward

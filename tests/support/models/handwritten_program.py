"""A program as the compiler would write it, by hand, and the model that it stands for, on one process.

It has an embedding tied to the head, two column/row-parallel layers with a fused, strided matrix, a 0-d parameter, a frozen one,
and a buffer that is updated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from autopar.runtime import collectives as C
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.module import BlockModule, ParameterSpec, Program

V, H, INNER = 24, 8, 12
DTYPE = "float64"


class Layer(nn.Module):
    """Gated: the rows of `fused` are the gate's, then the value's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.fused = nn.Linear(H, 2 * INNER)
        self.down = nn.Linear(INNER, H)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.zeros(1))  # not 0-d: dynamo 2.13.0 drops writes to 0-d float64 buffers
        self.norm.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        gate, value = self.fused(self.norm(x)).chunk(2, -1)
        return x + self.scale * self.down(gate.tanh() * value)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).reshape(-1, V), labels.reshape(-1))


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def state() -> dict[str, torch.Tensor]:
    """The tensors of the model, the tied matrix once."""
    return {name: value.clone() for name, value in model().state_dict().items() if name != "head.weight"}


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(V, (8, 5), generator=generator) for name in ("ids", "labels")}


class Embed(BlockModule):
    specs = (ParameterSpec("embed.weight", (V, H), DTYPE),)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tp = self.mesh.tp
        return C.convert(F.embedding(ids, C.convert(self.embed_weight, tp, "I -> R")), tp, "R -> I")


class ParallelLayer(BlockModule):
    specs = (
        ParameterSpec("norm.weight", (H,), DTYPE),
        ParameterSpec("norm.bias", (H,), DTYPE, trainable=False),
        ParameterSpec("fused.weight", (2 * INNER, H), DTYPE, {"tp": "S(0,2)"}),
        ParameterSpec("fused.bias", (2 * INNER,), DTYPE, {"tp": "S(0,2)"}),
        ParameterSpec("down.weight", (H, INNER), DTYPE, {"tp": "S(1)"}),
        ParameterSpec("down.bias", (H,), DTYPE),
        ParameterSpec("scale", (), DTYPE),
        ParameterSpec("steps", (1,), DTYPE, buffer=True),
    )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tp = self.mesh.tp
        dtype = hidden.dtype
        if self.training:
            with torch.no_grad():
                self.steps.copy_(self.steps + 1)
        x = F.layer_norm(hidden, (H,), self.norm_weight.to(dtype), self.norm_bias.to(dtype))
        x = C.convert(x, tp, "I -> R")
        x = F.linear(x, self.fused_weight.to(dtype), self.fused_bias.to(dtype))
        gate, value = x.chunk(2, -1)
        x = F.linear(gate.tanh() * value, self.down_weight.to(dtype))
        x = C.convert(x, tp, "P -> I") + self.down_bias.to(dtype)
        return hidden + self.scale.to(dtype) * x


class Head(BlockModule):
    specs = (ParameterSpec("head.weight", (V, H), DTYPE),)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        dp, tp = self.mesh.dp, self.mesh.tp
        weight = C.convert(self.head_weight.to(hidden.dtype), tp, "I -> S(0)")
        logits = F.linear(C.convert(hidden, tp, "I -> R"), weight)
        total = C.cross_entropy_sharded(logits, labels, -100, 0.0, tp)
        return C.convert(total, dp, "P -> I") / C.convert(C.count_valid(labels), dp, "P -> R")


class Tiny(Program):
    input_placements = {"ids": {"dp": "S(0)"}, "labels": {"dp": "S(0)"}}
    precision = (DTYPE, DTYPE)

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__(mesh)
        self.embed = Embed(mesh, "")
        self.layers = nn.ModuleList(ParallelLayer(mesh, f"layers.{i}") for i in range(2))
        self.head = Head(mesh, "", {"head.weight": "embed.weight"})

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden.to(getattr(torch, self.precision[0]))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden, labels)


def make(axes: dict[str, int], zero: int, precision: tuple[str, str] | None = None) -> Tiny:
    """The program on a mesh with one state sharding for all blocks. ``state`` among the axes is how many neighbours share one."""
    neighbours = axes.get("state", 0)
    program = Tiny(MeshHandle({name: size for name, size in axes.items() if name != "state"}))
    program.mesh.group_state(neighbours)
    if precision:
        program.precision = precision
    for block in program.blocks():
        block.zero = zero
    return program

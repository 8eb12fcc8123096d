"""The model of the habits: small, with what models have (tied and unused parameters, a non-persistent buffer, attributes,
methods), and a batch of it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

WIDTH, WORDS, BATCH = 16, 24, 16
Batch = dict[str, Tensor]
SETTINGS = {"factor": 1.25}
"""What layers of the kind ``reads`` read of this module."""


class Layer(nn.Module):
    """Normalisation and two linears; what varies between the models below."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch_norm" else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5 if kind == "dropout" else 0.0)
        self.alpha, self.settings = 0.5, SimpleNamespace(gains=[1.0, 1.5])

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(torch.relu(self.up(self.norm(x))))
        if self.kind == "constant_dropout":
            h = nn.functional.dropout(h, 0.5)
        if self.kind == "branch" and self.training:
            h = h * 0.5
        if self.kind == "reads":
            h = h * self.alpha * self.settings.gains[1] * SETTINGS["factor"]
        return x + self.down(h)  # type: ignore[no-any-return]


class Net(nn.Module):
    """With tied and unused parameters, a non-persistent buffer, and attributes."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.config = SimpleNamespace(width=WIDTH, kind=kind)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def reset_parameters(self) -> None:
        """Computes the buffer; in this model that is all."""
        self.scale.fill_(0.5)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for _, parameter in self.named_parameters()) - self.words.weight.numel()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = x * self.scale + self.words(ids)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h), ids.roll(1, 1).flatten() if ids.dim() > 1 else (ids + 1) % WORDS)


def net(kind: str = "") -> Net:
    torch.manual_seed(0)
    return Net(kind).double()


def net_of(kind: str) -> Net:
    """`kind`: what varies in its layers, or a mode: ``dropout eval``, ``frozen 0 1`` (the layers that are)."""
    words = kind.split()
    model = net(words[0] if words and words[0] not in ("eval", "frozen") else "")
    if "eval" in words:
        model.eval()
    for number in words[1:] if words[:1] == ["frozen"] else ():
        model.layers[int(number)].requires_grad_(False)
    return model


def batch(seed: int = 0, size: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "ids": torch.randint(0, WORDS, (size,), generator=generator)}

"""DLRM as its authors wrote it (github.com/facebookresearch/dlrm, dlrm_s_pytorch.py): lists of offsets and ids, sparse bags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TABLES = (20, 30, 25)
"""Rows of each table."""


class DLRM_Net(nn.Module):
    """The methods and names of the public code."""

    def __init__(self, m_spa: int = 8, mode: str = "sum") -> None:
        super().__init__()
        self.bot_l = self.create_mlp((4, 16, m_spa), -1)
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, m_spa, mode=mode, sparse=mode != "max") for rows in TABLES)
        self.top_l = self.create_mlp((m_spa + 6, 16, 1), 1)

    def create_mlp(self, ln: Sequence[int], sigmoid_layer: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for i in range(len(ln) - 1):
            layers += [nn.Linear(ln[i], ln[i + 1]), nn.Sigmoid() if i == sigmoid_layer else nn.ReLU()]
        return nn.Sequential(*layers)

    def apply_emb(self, lS_o: Any, lS_i: Any, emb_l: nn.ModuleList) -> list[Tensor]:
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            ly.append(emb_l[k](sparse_index_group_batch, lS_o[k]))
        return ly

    def interact_features(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        batch_size, _ = x.shape
        T = torch.cat([x] + ly, dim=1).view((batch_size, -1, x.shape[1]))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x] + [Z[:, li, lj]], dim=1)

    def forward(self, dense_x: Tensor, lS_o: Any, lS_i: Any) -> Tensor:
        z = self.interact_features(self.bot_l(dense_x), self.apply_emb(lS_o, lS_i, self.emb_l))
        return self.top_l(z)  # type: ignore[no-any-return]


class WithLoss(nn.Module):
    """The public script's step: binary cross entropy of the click probability."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.dlrm = DLRM_Net(mode=mode)

    def forward(self, dense_x: Tensor, lS_o: Any, lS_i: Any, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(self.dlrm(dense_x, lS_o, lS_i), y)


def dlrm(layout: str, mode: str = "sum", batch: int = 8) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model in float64 and a batch. `layout`: ``even`` bags of 2, 3 and 1 ids, ``ragged`` ones of 0 to 3, ``stacked``:
    ragged, with the offsets as one tensor [tables, batch], as the public data loader collates them."""
    torch.manual_seed(0)
    model = WithLoss(mode).double()
    lengths = [torch.full((batch,), number) if layout == "even" else torch.randint(0, 4, (batch,)) for number in (2, 3, 1)]
    ids = [torch.randint(0, rows, (int(each.sum()),)) for rows, each in zip(TABLES, lengths, strict=True)]
    offsets: Any = [each.cumsum(0) - each for each in lengths]
    offsets = torch.stack(offsets) if layout == "stacked" else offsets
    dense, y = torch.randn(batch, 4).double(), torch.rand(batch, 1).double()
    return model, {"dense_x": dense, "lS_o": offsets, "lS_i": ids, "y": y}

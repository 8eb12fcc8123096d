"""Activation partition (ZeRO-R, arXiv 1910.02054, section 6.1): a tensor that all ranks of a mesh axis hold is saved in parts,
one on each rank, and all-gathered in the backward."""

from __future__ import annotations

import torch

from ..compat.collectives import all_gather, wait_tensor
from ..device.axis import AxisHandle
from ..device.offload import storage_span


class PartitionedTensor:
    """The part of a storage that a tensor spans, which all ranks of `axis` hold alike. When autograd first saves a view of it,
    this rank copies its share of the bytes; when the backward first needs one, the shares are gathered. The backward is the same
    on all ranks, so the collectives match."""

    def __init__(self, x: torch.Tensor, axis: AxisHandle) -> None:
        self.axis, self.dtype = axis, x.dtype
        self.start, self.end = storage_span(x)
        self.whole: torch.Tensor | None = x.detach().as_strided((self.end - self.start,), (1,), self.start)
        self.share: torch.Tensor | None = None

    def covers(self, x: torch.Tensor) -> bool:
        start, end = storage_span(x)
        return self.dtype == x.dtype and self.start <= start and end <= self.end

    def store(self) -> None:
        """Copies this rank's share, if that is not done; nothing here refers to the whole tensor then."""
        if self.share is None and self.whole is not None:
            flat, self.whole = self.whole.view(torch.uint8), None
            each = -(-flat.numel() // self.axis.size)
            own = flat[self.axis.coordinate * each : (self.axis.coordinate + 1) * each]
            self.share = torch.cat((own, flat.new_zeros(each - own.numel())))

    def result(self, _: int) -> torch.Tensor:
        """The part as one flat tensor, gathered once."""
        if self.whole is None:
            assert self.share is not None
            flat = wait_tensor(all_gather(self.share, self.axis.size, self.axis.group_name))
            size = (self.end - self.start) * self.dtype.itemsize
            self.whole, self.share = flat.view(-1)[:size].view(self.dtype), None
        return self.whole

"""Host memory in a dry run: nothing is there, so that what waits on it does not count as the device's."""

from __future__ import annotations

import torch

from autopar.runtime.host import Host


class Elsewhere(Host):
    """Keeps shapes. `bytes` wait now, `most` were the most. The program lets go of a tensor at once and takes it back when it is
    needed, as on a CPU; a GPU holds it until the copy has ended, and takes the one before it back ahead of time."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.bytes = self.most = 0

    def send(self, x: torch.Tensor) -> torch.Tensor:
        self.bytes += x.numel() * x.element_size()
        self.most = max(self.most, self.bytes)
        return torch.empty(1, dtype=x.dtype).expand(x.shape)

    def bring(self, there: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, None]:
        self.bytes -= there.numel() * there.element_size()
        return torch.empty(there.shape, dtype=there.dtype, device=device), None

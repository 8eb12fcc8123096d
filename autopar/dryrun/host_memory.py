"""Host memory in a dry run: it holds no data, so that offloaded tensors do not count as device memory."""

from __future__ import annotations

import torch

from autopar.runtime.device.offload import HostMemory


class FakeHostMemory(HostMemory):
    """Holds shapes only. `bytes` are offloaded now, `peak_bytes` were the most. The program frees a tensor at once when it is
    offloaded, and allocates it when it is needed, as on a CPU; a GPU holds it until the copy has ended, and prefetches the one
    before."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.bytes = self.peak_bytes = 0

    def copy_to_host(self, x: torch.Tensor) -> torch.Tensor:
        self.bytes += x.numel() * x.element_size()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return torch.empty(1, dtype=x.dtype).expand(x.shape)

    def copy_to_device(self, on_host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, None]:
        self.bytes -= on_host.numel() * on_host.element_size()
        return torch.empty(on_host.shape, dtype=on_host.dtype, device=device), None

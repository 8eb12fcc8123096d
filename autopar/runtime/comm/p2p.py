"""Point-to-point messages between pipeline stages: sends that do not block, and receives that are posted ahead of use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..compat.cuda_graphs import is_capturing
from ..device.groups import shared_group
from ..device.mesh import MeshHandle


@dataclass
class PendingReceive:
    """Posted receives of several tensors."""

    tensors: list[torch.Tensor]
    works: list[dist.Work]

    def wait(self) -> list[torch.Tensor]:
        """Waits; the received tensors."""
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass
class PendingSend:
    """Sends in flight; they hold their tensors."""

    key: object
    works: list[dist.Work]
    tensors: list[torch.Tensor]

    def completed(self) -> bool:
        """Return whether all are complete, as far as is known without waiting."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Wait until the peer has them (gloo tells completion only to those who wait)."""
        for work in self.works:
            work.wait()


@dataclass
class PointToPoint:
    """Point-to-point communication between this rank and the ranks at the same coordinates in other stages.

    NCCL runs the operations of one communicator in order, so each ordered pair of stages has its own; messages of a pair are
    received in the order in which they are sent. Other backends match messages by tag.
    """

    mesh: MeshHandle
    groups: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    pending_sends: list[PendingSend] = field(default_factory=list)

    @classmethod
    def connect(cls, mesh: MeshHandle, chunk_stages: Sequence[int], *, overlapping: bool = False) -> PointToPoint:
        """Connect the stages of consecutive model chunks. All ranks must call. `overlapping`: messages are in flight between two
        calls, where another model may send its own."""
        pairs = {pair for pair in zip(chunk_stages, chunk_stages[1:], strict=False) if pair[0] != pair[1]}
        pairs |= {(after, before) for before, after in pairs}
        if not pairs:
            return cls(mesh)
        if mesh.device.type != "cuda":
            whole = _own_pipeline_group(mesh) if overlapping else mesh.group(mesh.pp.name)
            return cls(mesh, dict.fromkeys(pairs, whole))
        groups = {}
        for source, target in sorted(pairs):
            for ranks in mesh.pipeline_groups:
                ends = [ranks[source], ranks[target]]
                group = dist.new_group(ends) if overlapping else shared_group(f"stage {source} to {target}", ends)
                if dist.get_rank() in ranks and mesh.pp.coordinate in (source, target):
                    groups[source, target] = group
        p2p = cls(mesh, groups)
        p2p._warm_up()
        return p2p

    def _warm_up(self) -> None:
        """Make NCCL's communicators before the first step. NCCL makes one when both ends first use it, and the first end waits
        for the other: within a step that may deadlock."""
        token, here = torch.zeros(1, device=self.mesh.device), self.mesh.pp.coordinate
        for source, target in sorted(self.groups):
            if here == source:
                self.send([token], target, 0, None)
            else:
                self.receive([token], source, 0).wait()
        self.wait_all_sent()

    def send(self, tensors: Iterable[torch.Tensor], stage: int, tag: int, key: object) -> None:
        """Post sends. Tensors must not be written to afterwards; they live until they are sent, or until `wait_sent` of their
        key."""
        if not is_capturing(self.mesh.device):  # what a graph sends is complete when it has run
            self.pending_sends = [sent for sent in self.pending_sends if not sent.completed()]
        group, target = self.groups[self.mesh.pp.coordinate, stage], self.mesh.rank_in_stage(stage)
        ready = [tensor.contiguous() for tensor in tensors]
        works = [_posted(dist.isend(tensor, target, group, tag + index)) for index, tensor in enumerate(ready)]
        self.pending_sends.append(PendingSend(key, works, ready))

    def receive(self, tensors: list[torch.Tensor], stage: int, tag: int) -> PendingReceive:
        """Post receives into `tensors`."""
        group, source = self.groups[stage, self.mesh.pp.coordinate], self.mesh.rank_in_stage(stage)
        return PendingReceive(tensors, [_posted(dist.irecv(t, source, group, tag + index)) for index, t in enumerate(tensors)])

    def wait_sent(self, key: object) -> None:
        """Complete the sends under `key`, which the peer has received."""
        for sent in self.pending_sends:
            if sent.key == key:
                sent.wait()
        self.pending_sends = [sent for sent in self.pending_sends if sent.key != key]

    def wait_all_sent(self) -> None:
        """Wait for all sends."""
        for sent in self.pending_sends:
            sent.wait()
        self.pending_sends = []


def _own_pipeline_group(mesh: MeshHandle) -> dist.ProcessGroup:
    groups: list[tuple[list[int], dist.ProcessGroup]] = [(ranks, dist.new_group(ranks)) for ranks in mesh.pipeline_groups]
    return next(group for ranks, group in groups if dist.get_rank() in ranks)


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work

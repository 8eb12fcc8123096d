"""Tensors from one stage to another: sends that do not wait, and receives that are posted before they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .mesh import MeshHandle


@dataclass
class Arriving:
    """Tensors on their way to this rank."""

    tensors: list[torch.Tensor]
    works: list[dist.Work]

    def get(self) -> list[torch.Tensor]:
        """The tensors, arrived."""
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass
class Sent:
    """Tensors on their way from this rank."""

    key: object
    works: list[dist.Work]
    tensors: list[torch.Tensor]

    def done(self) -> bool:
        """Whether they have arrived, as far as is known without waiting."""
        return all(work.is_completed() for work in self.works)


@dataclass
class Links:
    """Point to point between this rank and its places in other stages.

    NCCL runs what one communicator is given in order, so each ordered pair of stages has its own; messages of a pair are received
    in the order in which they are sent. Elsewhere a tag names each message.
    """

    mesh: MeshHandle
    groups: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)

    @classmethod
    def between(cls, mesh: MeshHandle, owners: Sequence[int]) -> Links:
        """For chunks that lie on `owners`. All ranks must call."""
        pairs = {pair for pair in zip(owners, owners[1:], strict=False) if pair[0] != pair[1]}
        pairs |= {(after, before) for before, after in pairs}
        if not pairs:
            return cls(mesh)
        if mesh.device.type != "cuda":
            return cls(mesh, {pair: mesh.group(mesh.pp.name) for pair in pairs})
        groups = {}
        for source, target in sorted(pairs):
            for column in mesh.columns:
                group = dist.new_group([column[source], column[target]])
                if dist.get_rank() in column and mesh.pp.coordinate in (source, target):
                    groups[source, target] = group
        links = cls(mesh, groups)
        links._meet()
        return links

    def _meet(self) -> None:
        """NCCL makes a communicator when both ends first use it, and the first to come waits for the other: not within a step,
        where it may wait for what this rank has not sent yet."""
        token, here = torch.zeros(1, device=self.mesh.device), self.mesh.pp.coordinate
        for source, target in sorted(self.groups):
            if here == source:
                self.send([token], target, 0, None)
            else:
                self.receive([token], source, 0).get()
        self.finish()

    def send(self, tensors: Iterable[torch.Tensor], stage: int, tag: int, key: object) -> None:
        """Tensors must not be written to afterwards; they live until they are sent, or until `release` of their key."""
        self.sent = [sent for sent in self.sent if not sent.done()]
        group, target = self.groups[self.mesh.pp.coordinate, stage], self.mesh.global_rank(stage)
        ready = [tensor.contiguous() for tensor in tensors]
        works = [_sure(dist.isend(tensor, target, group, tag + index)) for index, tensor in enumerate(ready)]
        self.sent.append(Sent(key, works, ready))

    def receive(self, tensors: list[torch.Tensor], stage: int, tag: int) -> Arriving:
        """Posts the receive into `tensors`."""
        group, source = self.groups[stage, self.mesh.pp.coordinate], self.mesh.global_rank(stage)
        return Arriving(tensors, [_sure(dist.irecv(t, source, group, tag + index)) for index, t in enumerate(tensors)])

    def release(self, key: object) -> None:
        """What was sent under `key` is known to have arrived (gloo says so only to who waits)."""
        for sent in self.sent:
            if sent.key == key:
                for work in sent.works:
                    work.wait()
        self.sent = [sent for sent in self.sent if sent.key != key]

    def finish(self) -> None:
        """Waits until all is sent."""
        for sent in self.sent:
            for work in sent.works:
                work.wait()
        self.sent = []


def _sure(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work

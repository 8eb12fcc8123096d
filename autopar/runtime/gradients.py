"""How gradients of local parameters reach the canonical ones: reduced in buckets behind the backward, then moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .compat import at_end_of_backward, sole_holder


def deliver(canonical: nn.Parameter, local: torch.Tensor) -> None:
    """Adds a local gradient to ``canonical.grad``, taking the tensor over where there is none yet."""
    data = canonical.data
    assert isinstance(data, DTensor)
    with torch.no_grad():
        if canonical.grad is None:
            canonical.grad = DTensor.from_local(
                local, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
            )
        else:
            assert isinstance(canonical.grad, DTensor)
            canonical.grad.to_local().add_(local)


def forward_sharded(parameter: nn.Parameter, canonical: nn.Parameter) -> None:
    """Moves the gradient that FSDP2 leaves on its sharded parameter. FSDP2 itself calls these hooks after its reduction."""

    def move(sharded: torch.Tensor) -> None:
        gradient, sharded.grad = sharded.grad, None
        assert isinstance(gradient, DTensor)
        with torch.no_grad():
            deliver(canonical, gradient.to_local())

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(move)


@dataclass(eq=False)
class Bucket:
    """Replicated parameters of one block and dtype: one all-reduce, begun as soon as the last gradient is there. `reuse` keeps
    its flat tensor on CPUs."""

    members: dict[nn.Parameter, nn.Parameter]
    ready: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    flat: torch.Tensor | None = None
    spare: torch.Tensor | None = None
    reuse: bool = True
    work: dist.Work | None = None

    def begin(self, group: dist.ProcessGroup | None) -> None:
        """Starts the sum over `group`."""
        members = [parameter for parameter in self.members if parameter in self.ready]
        self.flat = self._joined([self.ready[parameter].reshape(-1) for parameter in members])
        self.ready = {parameter: parameter for parameter in members}
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def _joined(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """One flat tensor. On the CPU the one of the step before is taken again where nobody holds its gradients any more: fresh
        pages cost as much as the copy."""
        if len(pieces) == 1:
            return pieces[0]
        if pieces[0].device.type != "cpu":
            return torch.cat(pieces)
        spare, self.spare = self.spare, None
        if spare is not None and spare.numel() == sum(piece.numel() for piece in pieces) and sole_holder(spare):
            return torch.cat(pieces, out=spare)
        return torch.cat(pieces)

    def finish(self) -> None:
        """Waits and hands the sums out."""
        assert self.flat is not None and self.work is not None
        self.work.wait()
        offset = 0
        for parameter in self.ready:
            piece = self.flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
            offset += parameter.numel()
            deliver(self.members[parameter], piece)
            del piece
        flat = self.flat
        self.clear()
        self.spare = flat if self.reuse and flat.device.type == "cpu" and len(self.members) > 1 else None

    def clear(self) -> None:
        """Forgets what a backward that failed left behind."""
        self.ready, self.flat, self.work = {}, None, None


def _taken(parameter: nn.Parameter) -> torch.Tensor:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    return gradient


class Buckets:
    """All buckets of a program, or of a chunk of it. `group` is the data axis's, None where it has one rank.

    `lasting`: sums may be on their way when the backward ends, until `finish` is called.
    """

    def __init__(
        self, groups: Sequence[dict[nn.Parameter, nn.Parameter]], group: dist.ProcessGroup | None, *, lasting: bool = False
    ) -> None:
        self.group, self.lasting = group, lasting
        self.begun: list[Bucket] = []
        self.queued = False
        self.hold = False
        """Gradients add up where they are: another micro-batch follows."""
        self.buckets: list[Bucket] = []
        for members in groups:
            for dtype in dict.fromkeys(parameter.dtype for parameter in members):
                self._add({p: c for p, c in members.items() if p.dtype == dtype and p.requires_grad})

    def _add(self, members: dict[nn.Parameter, nn.Parameter]) -> None:
        if not members:
            return
        bucket = Bucket(members)
        self.buckets.append(bucket)
        for parameter in members:
            parameter.register_post_accumulate_grad_hook(lambda parameter: self._arrived(bucket, parameter))

    def _arrived(self, bucket: Bucket, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:  # compiled code has a hook called where it gives no gradient
            return
        if self.group is None:
            deliver(bucket.members[parameter], _taken(parameter))
            return
        if self.hold:
            return
        if not self.queued and not self.lasting:
            self.queued = True
            at_end_of_backward(self._finish)
        bucket.ready[parameter] = _taken(parameter)
        if len(bucket.ready) == len(bucket.members):
            bucket.begin(self.group)
            self.begun.append(bucket)

    def launch(self) -> None:
        """Begins all sums that are not begun, also of what is incomplete: parameters that this backward did not reach, on all
        ranks alike, and those that only an earlier micro-batch reached."""
        for bucket in self.buckets:
            if bucket.flat is None:
                left = [parameter for parameter in bucket.members if parameter.grad is not None]
                bucket.ready |= {parameter: _taken(parameter) for parameter in left}
            if bucket.ready and bucket.flat is None:
                bucket.begin(self.group)
                self.begun.append(bucket)

    def _finish(self) -> None:
        self.launch()
        self.finish_begun()

    def finish_begun(self) -> None:
        """Waits for the sums that are begun, and hands them out."""
        for bucket in self.begun:
            bucket.finish()
        self.begun, self.queued = [], False

    def reset(self) -> None:
        """Before a forward: a backward that raised may have left half of its work."""
        for bucket in self.begun if self.queued or self.lasting else ():
            bucket.clear()
        self.begun, self.queued, self.hold = [], False, False

    def finish(self) -> None:
        """After the last micro-batch, which may have reached no replicated parameter at all."""
        if self.group is not None:
            self._finish()

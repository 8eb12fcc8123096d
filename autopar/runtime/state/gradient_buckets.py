"""Gradient buckets: gradients of replicated parameters are all-reduced bucket by bucket during the backward, and then handed to
the canonical parameters (the user's DTensors)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.autograd import at_end_of_backward, sole_holder
from ..compat.dtensor import local_of
from .gradient import gradient_of, local_gradient


def accumulate_gradient(canonical: nn.Parameter, local: torch.Tensor) -> None:
    """Add a local gradient to ``canonical.grad``; take the tensor itself if there is none yet. A parameter that was frozen
    since gets none."""
    if not canonical.requires_grad:
        return
    if canonical.grad is None:
        canonical.grad = local_gradient(canonical, local)
        return
    with torch.no_grad():
        data = canonical.data
        assert isinstance(canonical.grad, DTensor) and isinstance(data, DTensor)
        if canonical.grad.placements != data.placements:  # of a penalty that the user has added
            canonical.grad = gradient_of(canonical, canonical.grad.redistribute(placements=data.placements))
        canonical.grad.to_local().add_(local)


def redirect_gradients(parameter: nn.Parameter, canonical: nn.Parameter) -> None:
    """Move the gradient from an FSDP2 parameter to its canonical one. FSDP2 itself calls these hooks after its reduction."""

    def move(sharded: torch.Tensor) -> None:
        gradient, sharded.grad = sharded.grad, None
        assert isinstance(gradient, DTensor)
        accumulate_gradient(canonical, local_of(gradient))

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(move)


@dataclass(eq=False)
class GradientBucket:
    """Replicated parameters of one block and dtype: one all-reduce, started when the last gradient is computed. `dtype`: that of
    the all-reduce; None: the gradients'. `ready`: gradients by position; `in_flat`: the positions of those in `flat`.
    `reuse_flat`: on CPUs the flat tensor is kept for the next step."""

    members: list[tuple[nn.Parameter, nn.Parameter]]
    dtype: torch.dtype | None = None
    ready: dict[int, torch.Tensor] = field(default_factory=dict)
    in_flat: list[int] = field(default_factory=list)
    flat: torch.Tensor | None = None
    spare_flat: torch.Tensor | None = None
    reuse_flat: bool = True
    work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup | None) -> None:
        """Start the all-reduce over `group`."""
        self.in_flat = sorted(self.ready)  # the same order on all ranks
        self.flat = self._flatten([self.ready[position].reshape(-1) for position in self.in_flat])
        self.ready = {}
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def _flatten(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return one flat tensor. On CPUs that of the step before is reused if nobody holds its gradients any more: page faults
        of a new one cost as much as the copy."""
        first, dtype = gradients[0], self.dtype or gradients[0].dtype
        if len(gradients) == 1:
            return first.to(dtype)
        spare, self.spare_flat = self.spare_flat, None
        size = sum(part.numel() for part in gradients)
        if spare is not None and spare.numel() == size and sole_holder(spare):
            return torch.cat(gradients, out=spare)
        return torch.cat(gradients, out=first.new_empty(size, dtype=dtype))

    def finish(self) -> None:
        """Waits, and hands out the sums."""
        assert self.flat is not None and self.work is not None
        self.work.wait()
        members = [self.members[position] for position in self.in_flat]
        parts = list(self.flat.split([parameter.numel() for parameter, _ in members]))
        for (parameter, canonical), part in zip(members, parts, strict=True):
            accumulate_gradient(canonical, part.view(parameter.shape).to(parameter.dtype))
        flat = self.flat
        self.clear()
        self.spare_flat = flat if self.reuse_flat and flat.device.type == "cpu" and len(self.members) > 1 else None

    def clear(self) -> None:
        """Drop what a failed backward left."""
        self.ready, self.in_flat, self.flat, self.work = {}, [], None, None


def _take_gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    return gradient


class GradientBuckets:
    """All buckets of a program, or of a model chunk. `group`: the process group of the data axis, None if it has one rank.

    `outlives_backward`: all-reduces may still be in flight when the backward ends, until `finish` is called. `dtype`: the one in
    which gradients are summed; None: their own.
    """

    def __init__(
        self,
        groups: Sequence[dict[nn.Parameter, nn.Parameter]],
        group: dist.ProcessGroup | None,
        *,
        outlives_backward: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self.outlives_backward, self.dtype = group, outlives_backward, dtype
        self.started: list[GradientBucket] = []
        self.queued = False
        self.accumulating = False
        """Gradients accumulate unreduced: another micro-batch follows."""
        self.buckets: list[GradientBucket] = []
        for members in groups:
            for dtype in dict.fromkeys(parameter.dtype for parameter in members):
                self.add({p: c for p, c in members.items() if p.dtype == dtype and p.requires_grad})

    def add(self, members: dict[nn.Parameter, nn.Parameter]) -> None:
        """Add one more bucket, of replicated parameters of one dtype that train."""
        if not members:
            return
        bucket = GradientBucket(list(members.items()), self.dtype)
        self.buckets.append(bucket)
        # Autograd holds hooks in C++, where Python's collector sees no cycle: parameter, hook, bucket, parameter would live on.
        me, its = weakref.ref(self), weakref.ref(bucket)

        def arrived(position: int, parameter: torch.Tensor) -> None:
            buckets, bucket = me(), its()
            if buckets is not None and bucket is not None:
                buckets._arrived(bucket, position, parameter)

        for position, parameter in enumerate(members):
            parameter.register_post_accumulate_grad_hook(partial(arrived, position))

    def _arrived(self, bucket: GradientBucket, position: int, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # compiled code has a hook called where it gives no gradient
            return
        if self.group is None:
            accumulate_gradient(bucket.members[position][1], _take_gradient(parameter))
            return
        if self.accumulating:
            return
        if not self.queued and not self.outlives_backward:
            self.queued = True
            at_end_of_backward(self._finish)
        bucket.ready[position] = _take_gradient(parameter)
        if len(bucket.ready) == len(bucket.members):
            bucket.start(self.group)
            self.started.append(bucket)

    def start_all(self) -> None:
        """Start all reductions that are not started, also of incomplete buckets: of parameters that this backward did not reach
        (on all ranks alike), and that only an earlier micro-batch reached."""
        for bucket in self.buckets:
            if bucket.flat is None:
                left = [(at, parameter) for at, (parameter, _) in enumerate(bucket.members) if parameter.grad is not None]
                bucket.ready |= {at: _take_gradient(parameter) for at, parameter in left}
            if bucket.ready and bucket.flat is None:
                bucket.start(self.group)
                self.started.append(bucket)

    def _finish(self) -> None:
        self.start_all()
        self.finish_started()

    def finish_started(self) -> None:
        """Wait for the reductions that are started, and hand out the sums."""
        for bucket in self.started:
            bucket.finish()
        self.started, self.queued = [], False

    def reset(self) -> None:
        """Begin a forward: drops what a backward that raised left, in buckets that it filled in part too, and gradients of its
        earlier micro-batches. What outlives a backward may be of the window before."""
        for bucket in self.started if self.outlives_backward else self.buckets:
            bucket.clear()
            for parameter, _ in () if self.outlives_backward else bucket.members:
                parameter.grad = None
        self.started, self.queued, self.accumulating = [], False, False

    def finish(self) -> None:
        """Reduce what is left after the last micro-batch, which may have reached no replicated parameter at all."""
        if self.group is not None:
            self._finish()

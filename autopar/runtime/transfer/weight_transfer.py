"""The transfer of weights from a job that trains to one that generates, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby, product
from types import MappingProxyType
from typing import Any

import torch

from ..checkpoint.rounds import Rounds
from ..errors import TransferProblem
from .connection import Connection, Endpoint, connect, offer
from .transfer_plan import Send, TensorSlice, TransferPlan, plan_transfer
from .vllm_layout import VllmLayout
from .weight_layout import WeightLayout

JOIN_SECONDS = 300.0
BUFFER_BYTES = 2**28


class WeightTransfer:
    """One rank's end of the transfers between two jobs, which connect in the first of them.

    Buffers lie in host memory and go over gloo, whatever the devices of the weights are."""

    connection: Connection | None = None
    plan: TransferPlan | None = None
    store: Any = None

    def __init__(
        self, end: Endpoint, layout: Callable[[WeightLayout], WeightLayout], memory_bytes: int, rounds: Rounds,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`layout`: of the sender's own weights, or of the receiver's from the sender's. `rounds`: the ranks of this job.
        `options` are what the user asked for."""
        self.end, self.layout, self.memory_bytes, self.rounds, self.options = end, layout, memory_bytes, rounds, options

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise TransferProblem where a later call asks for others: the other job follows the plan of the first one."""
        for name, value in options.items():
            if value != self.options[name]:
                raise TransferProblem(
                    f"both jobs are connected at {self.end.address} with {name}={self.options[name]}, not {value}: pass the same "
                    "in each call, or another address in both jobs"
                )

    def run(self, tensors: Mapping[str, torch.Tensor]) -> TransferPlan:
        """Send this rank's tensors, or fill them, and return the plan that was followed. All ranks of both jobs call it together.
        TransferProblem where one of them is lost, after which both jobs can connect again."""
        try:
            if self.connection is None:
                self.connection = self._connect(tensors)
            connection, end = self.connection, self.end
            if self.plan is None:
                self.plan = plan_transfer(connection.source, connection.target, connection.memory_bytes, connection.hosts)
            layout = connection.source if end.sends else connection.target
            with torch.no_grad():
                _exchange(connection.group, self.plan, end, layout.views(end.rank, tensors, sends=end.sends), layout)
        except BaseException:
            self.connection = self.plan = self.store = None  # the store ends with what holds it
            raise
        return self.plan

    def _connect(self, tensors: Mapping[str, torch.Tensor]) -> Connection:
        def check(layout: WeightLayout) -> None:
            layout.views(self.end.rank, tensors, sends=self.end.sends)

        if self.end.sends:
            with self.rounds.together(TransferProblem):
                if self.end.rank == 0:
                    self.store = offer(self.end, self.layout(WeightLayout({}, {})), self.memory_bytes)
        with self.rounds.together(TransferProblem):
            self.store = self.store or self.end.store()
            return connect(self.end, self.store, self.layout, check)


def _exchange(group: Any, plan: TransferPlan, end: Endpoint, views: Mapping[str, torch.Tensor], layout: WeightLayout) -> None:
    """Send or receive this rank's part of all rounds, one message to each peer in each."""
    for number, sends in enumerate(plan.rounds):
        own = sorted(
            (each for each in sends if (each.source if end.sends else each.target) == end.rank), key=partial(_order, end, layout)
        )
        messages = {peer: list(each) for peer, each in groupby(own, key=partial(_peer, end))}
        buffers = {peer: torch.empty(sum(each.nbytes for each in parts), dtype=torch.uint8) for peer, parts in messages.items()}
        try:
            if end.sends:
                for peer, parts in messages.items():
                    _copy(parts, buffers[peer], views, layout, pack=True)
                works = [group.send([buffer], plan.sizes[0] + peer, number) for peer, buffer in buffers.items()]
            else:
                works = [group.recv([buffer], peer, number) for peer, buffer in buffers.items()]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise _lost(end, f"in round {number + 1} of {len(plan.rounds)}") from error
        if not end.sends:
            for peer, parts in messages.items():
                _copy(parts, buffers[peer], views, layout, pack=False)
    try:
        group.barrier().wait()
    except RuntimeError as error:
        raise _lost(end, "after the last round") from error


def _lost(end: Endpoint, when: str) -> TransferProblem:
    return TransferProblem(
        f"the weight transfer at {end.address} was broken off {when}: a rank of either job ended, or did not answer within "
        f"{end.join_seconds:g} s; see its own output, and call send_weights and receive_weights again"
    )


def _peer(end: Endpoint, send: Send) -> int:
    return send.target if end.sends else send.source


def _order(end: Endpoint, layout: WeightLayout, send: Send) -> tuple[int, int]:
    """Return the key by which both ends sort: peers, and long elements first, so that all are aligned."""
    return _peer(end, send), -layout.tensors[send.part.name].itemsize


def _copy(
    parts: list[Send], buffer: torch.Tensor, views: Mapping[str, torch.Tensor], layout: WeightLayout, *, pack: bool
) -> None:
    """Copy slices from the tensors to the buffer, or back."""
    start = 0
    for send in parts:
        dtype: torch.dtype = getattr(torch, layout.tensors[send.part.name].dtype)
        flat = buffer[start : start + send.nbytes].view(dtype).view(send.part.shape)
        for own, inside in _boxes(send.part, 0 if pack else 1):
            tensor, travelling = views[send.part.name], flat
            for dim, ((begin, length), position) in enumerate(zip(own, inside, strict=True)):
                tensor, travelling = tensor.narrow(dim, begin, length), travelling.narrow(dim, position, length)
            travelling.copy_(tensor) if pack else tensor.copy_(travelling)
        start += send.nbytes


def _boxes(part: TensorSlice, side: int) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
    """Yield for each box of a slice where it is in the tensor of one end, and where in the slice."""
    dims = []
    for overlaps in part.overlaps:
        position, boxes = 0, []
        for overlap in overlaps:
            boxes.append(((overlap[side], overlap[2]), position))
            position += overlap[2]
        dims.append(boxes)
    for box in product(*dims):
        yield [own for own, _ in box], [position for _, position in box]


def receive_weights(
    address: str,
    tensors: Mapping[str, torch.Tensor],
    layout: VllmLayout,
    *,
    rank: int,
    join_seconds: float = JOIN_SECONDS,
) -> WeightTransfer:
    """Fill the tensors of one rank of another engine (``dict(model.named_parameters())`` of a worker of vLLM), in place, with
    what `send_weights` sends at the address. All its ranks call it together; ``.run(tensors)`` of the result receives the next.

    TransferProblem, on all ranks of both jobs, names who never came, or a tensor that does not fit."""
    if not isinstance(layout, VllmLayout):
        raise TransferProblem(f"layout={layout!r:.40}: pass autopar.VllmLayout(tp=..., kv_heads=...) of the engine that receives")
    if type(rank) is not int or not 0 <= rank < layout.tp:
        raise TransferProblem(f"rank {rank} is none of the {layout.tp} ranks of {layout}: pass that of tensor parallelism")
    alone = Rounds(None, str)
    transfer = WeightTransfer(Endpoint(address, False, rank, layout.tp, join_seconds), layout.of, BUFFER_BYTES, alone)
    transfer.run(tensors)
    return transfer

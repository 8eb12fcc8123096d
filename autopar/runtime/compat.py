"""Every private torch call of the runtime, each with the version that it was tried on. tests/runtime/test_compat.py tests
each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef

# -- functional collectives: torch.ops._c10d_functional, seen on 2.13.0. They return while in flight; `wait_tensor` waits.
# On gloo 2.13.0 all of them work, bfloat16 sums, int64, bool gathers, reduce_scatter and all_to_all included.


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``; torch's own is untyped."""
    return function.apply(*args)


def all_reduce(flat: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """`op` is sum, max or min."""
    result: torch.Tensor = torch.ops._c10d_functional.all_reduce(flat, op, group)
    return result


def all_gather(flat: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """``[k] -> [size * k]``."""
    result: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(flat, size, group)
    return result


def reduce_scatter(flat: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    """``[size * k] -> [k]``."""
    result: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(flat, op, size, group)
    return result


def all_to_all(flat: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """``[size * k] -> [size * k]``, k elements to each rank."""
    splits = [flat.shape[0] // size] * size
    result: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(flat, splits, splits, group)
    return result


def all_to_all_rows(rows: torch.Tensor, receive: list[int], send: list[int], group: str) -> torch.Tensor:
    """``[sum(send), ...] -> [sum(receive), ...]``: so many rows to and from each rank, or none. Seen on 2.13.0, on gloo too."""
    result: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(rows, receive, send, group)
    return result


def has_data(x: torch.Tensor) -> bool:
    """Whether the tensor has values: fake tensors (dry run) and meta tensors have only shapes. Seen on 2.13.0."""
    return not (x.is_meta or isinstance(x, FakeTensor))


@contextmanager
def autograd_in_kernel() -> Iterator[None]:
    """Enables autograd inside the kernel of a custom operator, where dispatch leaves it out. Seen on 2.13.0."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, name))
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)
    with guard, torch.enable_grad():
        yield


def wait_tensor(raw: torch.Tensor) -> torch.Tensor:
    """Waits for a functional collective; the tensor."""
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(raw)
    return result


def alias(x: torch.Tensor) -> torch.Tensor:
    """A new tensor over the same data, for the result of an autograd.Function.

    Compiled code that returns a view of another of its results rebuilds the view outside of the graph, which loses the function's
    backward. Seen on 2.13.0; what ``_unsafe_view`` makes has no base.
    """
    if not torch.compiler.is_compiling():
        return x.view_as(x)
    result: torch.Tensor = torch.ops.aten._unsafe_view(x, x.shape)
    return result


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` when the backward that is running now ends. Seen on 2.13.0 (FSDP2 and DDP use the same)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_GRADIENTS: list[Callable[..., Any]] = []


def gradients_by(function: Callable[..., Any]) -> None:
    """``torch.autograd.grad`` asks `function` first, with the engine and its arguments (results, their gradients, whether to
    retain and to create a graph, inputs, whether some may be unused); NotImplemented goes on as usual. Needs
    `translate_backward_errors`. Seen on 2.13.0."""
    if function not in _GRADIENTS:
        _GRADIENTS.append(function)


def graph_of(results: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes that a backward of the results may run. Seen on 2.13.0."""
    waiting = [each.grad_fn for each in results if each.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        further = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= further
        waiting += further


_BACKWARD_TRANSLATORS: list[Callable[[Exception], Exception | None]] = []


def translate_backward_errors(translate: Callable[[Exception], Exception | None], *, first: bool = False) -> None:
    """An error that ends any backward of this process is passed to each translation, and what that returns goes on in its place.
    Seen on 2.13.0: Tensor.backward, torch.autograd.backward and torch.autograd.grad all go through this function."""
    if translate in _BACKWARD_TRANSLATORS:
        return
    _BACKWARD_TRANSLATORS.insert(0 if first else len(_BACKWARD_TRANSLATORS), translate)
    outer: Any = torch.autograd
    original = outer._engine_run_backward
    if getattr(original, "autopar", False):
        return

    def run(*args: Any, **options: Any) -> Any:
        try:
            for function in _GRADIENTS if options.get("accumulate_grad") is False else ():
                if (gradients := function(original, *args)) is not NotImplemented:
                    return gradients
            return original(*args, **options)
        except Exception as error:
            other: Exception = error
            for each in _BACKWARD_TRANSLATORS:
                other = each(other) or other
            if other is error:
                raise
            raise other from error

    run.autopar = True  # type: ignore[attr-defined]
    outer._engine_run_backward = run


def in_backward() -> bool:
    """Whether this thread runs inside a backward. Seen on 2.13.0."""
    return bool(torch._C._current_graph_task_id() != -1)


def sole_holder(tensor: torch.Tensor) -> bool:
    """Whether no other tensor has this one's storage. Seen on 2.13.0: one count is the tensor's, one is `untyped_storage()`'s."""
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2)


def storage_key(tensor: torch.Tensor) -> object:
    """A key that is equal exactly for tensors of one storage, as long as the key lives. Seen on 2.13.0: a weak reference, which
    keeps the address of a freed storage from being reused."""
    return StorageWeakRef(tensor.untyped_storage())


def clear_forward_order(root: Any) -> None:
    """Clears the order of forwards by which FSDP2 prefetches in the backward. It does so itself only after a last backward
    (``set_is_last_backward``). Before the first forward there is none. Seen on 2.13.0."""
    order: list[Any] = getattr(root._get_fsdp_state()._comm_ctx, "post_forward_order", [])
    for group in order:
        group._post_forward_indices.clear()
    order.clear()


def reduce_gradients(module: Any) -> None:
    """Runs FSDP2's post-backward reduction of a module's gradients at once. Seen on 2.13.0 (2.11 has one group a module).

    FSDP2 refuses a reduction where only some gradients were accumulated before in the reduction's dtype; here all are made so.
    """
    for group in _param_groups(module._get_fsdp_state()):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
        group.post_backward()


def _param_groups(state: Any) -> list[Any]:
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def train_more(root: nn.Module) -> None:
    """Tells FSDP2's modules in `root` that further parameters of theirs train, whose dtypes they took down at the first forward.
    Seen on 2.13.0."""
    for module in root.modules():
        for group in _param_groups(module._get_fsdp_state()) if isinstance(module, FSDPModule) else ():
            group._init_mp_dtypes()


def finish_backward(root: Any) -> None:
    """Runs FSDP2's end of a backward of `root`: reduces the gradients of each module that were not reduced yet, then waits as
    ``set_is_last_backward`` says. Seen on 2.13.0."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def strided_shard(dim: int, parts: int) -> Any:
    """DTensor's placement that reads `dim` as (parts, rest) and shards the rest. Seen on 2.13.0."""
    return _StridedShard(dim, split_factor=parts)


def is_strided(placement: Any) -> bool:
    """Whether `placement` came from `strided_shard`."""
    return isinstance(placement, _StridedShard)


def over_local(kind: type[Any], value: DTensor, local: torch.Tensor | None = None) -> Any:
    """An instance of `kind`, a subclass of DTensor, over the data of `value`, or over `local` placed as `value` is. (A
    ``DTensor.from_local`` for each gradient of a step takes ten times as long.) Seen on 2.13.0."""
    return torch.Tensor._dtensor__new__(kind, value._local_tensor if local is None else local, value._spec, requires_grad=False)


def operations_of_shards() -> dict[Any, Callable[[Any, Any, Any], Any]]:
    """What DTensor calls for an operation in place of its own dispatch, with the operation, its arguments and its keywords; to be
    added to. Seen on 2.13.0."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def random_operations() -> list[Any]:
    """Torch's operations that draw random numbers, by their tag, but for those that only kernels call (of attention, recurrences
    on a device). Seen on 2.13.0; takes 0.1 s, since ``dir(torch.ops.aten)`` has only those that were used."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        if full.startswith("aten::") and (not name.startswith("_") or name in _RANDOM_KERNELS):
            op = getattr(getattr(torch.ops.aten, name), overload or "default", None)
            if op is not None and torch.Tag.nondeterministic_seeded in op.tags:
                found.append(op)
    return sorted(found, key=str)


_RANDOM_KERNELS = frozenset(("_standard_gamma", "_sample_dirichlet", "_fused_dropout"))
"""Kernels that functions for users call directly."""


def collective_operations() -> list[Any]:
    """The operations of torch.distributed's own functions (``dist.all_reduce``). Seen on 2.13.0."""
    names = {full.split("::")[1].split(".")[0] for full in torch._C._dispatch_get_all_op_names() if full.startswith("c10d::")}
    return [getattr(torch.ops.c10d, name).default for name in sorted(names)]


def before_full_states(check: Callable[[list[torch.Tensor]], None]) -> None:
    """`check` is called with the parameters before torch.distributed.checkpoint makes a full state dict (of a model or of its
    optimizer). Seen on 2.13.0: both go through this function."""
    outer: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
    original = outer._maybe_full_or_cpu_state_dict
    if getattr(original, "autopar", False):
        return

    def make(state: Any, info: Any) -> Any:
        if info.full_state_dict:
            check([each for each in info.fqn_param_mapping if isinstance(each, torch.Tensor)])
        return original(state, info)

    make.autopar = True  # type: ignore[attr-defined]
    outer._maybe_full_or_cpu_state_dict = make


def local_of(value: DTensor) -> torch.Tensor:
    """This rank's part, without a node of autograd. Seen on 2.13.0."""
    local: torch.Tensor = value._local_tensor
    return local


def own_part(like: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is placed as `like` is, in memory of its own where it is a part."""
    part = whole
    for dim in range(like.dim()):
        indices = _indices(like, dim)
        if len(indices) < like.shape[dim]:
            part = part.index_select(dim, indices.to(whole.device))
    return part


def whole_items(watching: Callable[[str], AbstractContextManager[None]]) -> None:
    """Teaches DTensor that ``.item()`` of a partial number (a norm, a sum) is that of the whole tensor: on 2.13.0 it is this
    rank's part, without a word. All ranks of the mesh must ask, here and for ``.full_tensor()``: both run in a context of
    `watching`, which is told what they are."""
    usual: Any = DTensor.full_tensor

    def item(op: Any, args: Any, kwargs: Any) -> Any:
        with watching(".item() of a sharded tensor"):
            return op(whole(args[0]).to_local(), *args[1:], **kwargs)

    def full_tensor(self: Any, *args: Any, **kwargs: Any) -> Any:
        with watching(".full_tensor()"):
            return usual(self, *args, **kwargs)

    operations_of_shards()[torch.ops.aten._local_scalar_dense.default] = item
    if usual.__module__ != __name__:
        DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


def usual_operation(op: Any, args: Any, kwargs: Any) -> Any:
    """What DTensor does without an entry in `operations_of_shards`."""
    handlers = operations_of_shards()
    own = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if own is not None:
            handlers[op] = own


def data_by_values() -> None:
    """Lets ``parameter.data = values`` fill a DTensor that says how (``autopar_values``). On 2.13.0 a DTensor keeps the shard
    that it had, without a word."""
    usual: Any = torch.Tensor.data
    if "data" in vars(DTensor):
        return

    def put(self: Any, value: torch.Tensor) -> None:
        values = self.__dict__.get("autopar_values")
        if values is None:
            usual.__set__(self, value)
        else:
            values.fill(value)

    DTensor.data = property(usual.__get__, put)  # type: ignore[assignment]


def further_operations() -> None:
    """Teaches DTensor ``x[mask] = number`` where the mask is placed like `x` (in `torch.optim.Rprop`): 2.13.0 has no rule."""

    def put(op: Any, args: Any, kwargs: Any) -> Any:
        x, indices, value, *more = args
        mask: Any = indices[0] if len(indices) == 1 else None
        alike = isinstance(mask, DTensor) and mask.dtype == torch.bool and mask.placements == x.placements
        if alike and not more and not kwargs and not value.dim() and not any(each.is_partial() for each in x.placements):
            x._local_tensor.masked_fill_(mask._local_tensor, value.to_local() if isinstance(value, DTensor) else value)
            return x
        return usual_operation(op, args, kwargs)

    operations_of_shards()[torch.ops.aten.index_put_.default] = put


def whole(value: DTensor) -> DTensor:
    """`value` with its partial placements reduced."""
    if not any(placement.is_partial() for placement in value.placements):
        return value
    return value.redistribute(placements=[Replicate() if each.is_partial() else each for each in value.placements])


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was applied to the model or a part of it. Seen on 2.13.0: a wrapper, or ``module.compile()``, which
    sets an attribute of the module."""
    wrapper = torch._dynamo.OptimizedModule
    return any(isinstance(module, wrapper) or module._compiled_call_impl is not None for module in model.modules())


def profiling() -> bool:
    """Whether a profiler runs in this thread; takes 40 ns. Seen on 2.13.0."""
    return bool(torch._C._autograd._profiler_enabled())


def after_unscaling(agree: Callable[[torch.optim.Optimizer, dict[torch.device, torch.Tensor], torch.Tensor], None]) -> None:
    """`agree` is called whenever a `torch.amp.GradScaler` has looked at the gradients of an optimizer, with what it found by
    device (in place) and a 0. Seen on 2.13.0: `unscale_`, and `step` without it, go through this method."""
    original = torch.amp.GradScaler._unscale_grads_
    if getattr(original, "autopar", False):
        return

    def unscale(self: Any, optimizer: Any, inverse: torch.Tensor, zero: torch.Tensor, *options: Any) -> Any:
        none = zero.clone()
        found = original(self, optimizer, inverse, zero, *options)
        agree(optimizer, found, none)
        return found

    unscale.autopar = True  # type: ignore[attr-defined]
    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[assignment, method-assign]


def own_store() -> Any:
    """The default group's store over a new connection, for another thread. Seen on 2.13.0."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def group_name(device_mesh: Any, axis: str) -> str:
    """The name under which functional collectives know the group of a mesh axis. Seen on 2.13.0."""
    name: str = device_mesh.get_group(axis).group_name
    return name


def save_strided_shards() -> None:
    """Teaches torch.distributed.checkpoint that the local shard of a DTensor may be several separate boxes of the full tensor.

    On 2.13.0 DTensor names one box (the first offset, the local size) even for `_StridedShard`, whose elements lie apart: a fused
    query-key-value matrix sharded by heads would be saved at wrong offsets without an error. Shards of one box are untouched.
    """
    if getattr(DTensor.__create_chunk_list__, "autopar", False):
        return
    original: Any = DTensor
    chunk_list = original.__create_chunk_list__
    write_items = original.__create_write_items__
    shard_of = original.__get_tensor_shard__

    def create_chunk_list(self: Any) -> list[Any]:
        boxes = _boxes(self)
        return chunk_list(self) if len(boxes) == 1 else [ChunkStorageMetadata(p.offsets, p.sizes) for p in boxes]

    def create_write_items(self: Any, fqn: str, tensor: Any) -> list[Any]:
        boxes = _boxes(self)
        if len(boxes) == 1:
            return write_items(self, fqn, tensor)  # type: ignore[no-any-return]
        properties = TensorProperties.create_from_tensor(tensor.to_local())
        chunks = [TensorWriteData(ChunkStorageMetadata(p.offsets, p.sizes), properties, tensor.size()) for p in boxes]
        return [WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data) for data in chunks]

    def get_tensor_shard(self: Any, index: Any) -> torch.Tensor:
        boxes = _boxes(self)
        if len(boxes) == 1:
            return shard_of(self, index)  # type: ignore[no-any-return]
        box = next(p for p in boxes if p.offsets == torch.Size(index.offset))
        local = self.to_local()
        for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local  # type: ignore[no-any-return]

    create_chunk_list.autopar = True  # type: ignore[attr-defined]
    patched: Any = DTensor
    patched.__create_chunk_list__ = create_chunk_list
    patched.__create_write_items__ = create_write_items
    patched.__get_tensor_shard__ = get_tensor_shard


class _Box(NamedTuple):
    """A box of `sizes` elements of the full tensor at `offsets`, which lies at `starts` in the local tensor."""

    offsets: torch.Size
    sizes: torch.Size
    starts: tuple[int, ...]


def _boxes(tensor: DTensor) -> list[_Box]:
    """The boxes of the full tensor that a DTensor's local shard consists of; one empty box for an empty shard."""
    runs = [_runs(tensor, dim) for dim in range(tensor.dim())]
    if not any(is_strided(placement) for placement in tensor.placements) or not all(runs):
        zeros = (0,) * tensor.dim()
        return [_Box(torch.Size(zeros), tensor._local_tensor.shape, zeros)]
    return [
        _Box(torch.Size(offset for offset, _, _ in box), torch.Size(size for _, size, _ in box), tuple(at for _, _, at in box))
        for box in product(*runs)
    ]


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """(offset in the full tensor, length, start in the local tensor) of each run of consecutive indices along `dim`."""
    indices = _indices(tensor, dim)
    breaks = (indices[1:] != indices[:-1] + 1).nonzero().flatten().tolist()
    starts = [0, *(at + 1 for at in breaks)] if len(indices) else []
    ends = [*starts[1:], len(indices)]
    return [(int(indices[start]), end - start, start) for start, end in zip(starts, ends, strict=False)]


def _indices(tensor: DTensor, dim: int) -> torch.Tensor:
    """The indices along `dim` of the full tensor that this rank has."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    indices = torch.arange(tensor.shape[dim])
    for axis, placement in enumerate(tensor.placements):
        size, coordinate = tensor.device_mesh.size(axis), coordinates[axis]
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            indices = indices.view(int(placement.split_factor), size, -1)[:, coordinate].reshape(-1)
        elif isinstance(placement, Shard) and placement.dim == dim:
            chunks = indices.chunk(size)
            indices = chunks[coordinate] if coordinate < len(chunks) else indices[:0]
    return indices

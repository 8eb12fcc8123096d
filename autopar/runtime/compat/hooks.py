"""Hooks that torch 2.13.0 does not offer: each replaces a function of torch for as long as its context lasts. And torch's own of
all optimizers, for as long as an object lives."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from .dtensor import (
    gathered,
    local_of,
    on_whole_tensors,
    operations_of_shards,
    own_part,
    replace_local,
    usual_operation,
    whole,
)

_Owner = TypeVar("_Owner")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put `value` in the place of an attribute of a class, module or object, inside the context. What another library has put
    there since stays."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name) is value:
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)


StepHook = Callable[[_Owner, Optimizer, Any, Any], None]
"""Takes the owner, the optimizer, and the arguments of its step."""


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``torch.compile(optimizer.step)`` call a function as it is."""
    result: Callable[..., Any] = torch.compiler.disable(function)
    return result


def around_optimizer_steps(
    owner: _Owner, *, before: StepHook[_Owner] | None = None, after: StepHook[_Owner] | None = None
) -> list[RemovableHandle]:
    """Call these with each step of any optimizer of this process, as long as `owner` lives, which the hooks do not hold. Then
    they do nothing, and stay: torch may walk through its hooks when an owner is collected, and would fail where one goes."""
    alive = weakref.ref(owner)

    def calling(function: StepHook[_Owner]) -> Callable[[Optimizer, Any, Any], None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (own := alive()) is not None:
                function(own, optimizer, args, kwargs)

        return _untraced(hook)

    handles = []
    if before is not None:
        handles.append(register_optimizer_step_pre_hook(calling(before)))
    if after is not None:
        handles.append(register_optimizer_step_post_hook(calling(after)))
    return handles


@contextmanager
def shard_operations(handlers: Mapping[Any, Callable[[Any, Any, Any], Any]]) -> Iterator[None]:
    """Let DTensor call these for their operations, with the operation, its arguments and its keywords, in place of its own
    dispatch."""
    table = operations_of_shards()
    before = {op: table[op] for op in handlers if op in table}
    table.update(handlers)
    try:
        yield
    finally:
        for op in handlers:
            table.pop(op, None)
        table.update(before)


def whole_items(watching: Callable[[str], AbstractContextManager[None]]) -> ExitStack:
    """Let ``.item()`` of a partial number of a DTensor (a sum) be that of the whole tensor: on 2.13.0 it is this rank's part,
    without a word. ``.numpy()``, ``.tolist()`` and ``f"{x:.3f}"``, which 2.13.0 refuses, are of the whole tensor too. All ranks
    of the mesh must ask, here, for ``.full_tensor()`` and for ``.redistribute()``: they run in a context of `watching`, which is
    told what they are. A tensor whose dimension 0 is in another order, `autopar_order`, is put into its own."""
    usual: Any = DTensor.full_tensor
    redistributed: Any = DTensor.redistribute

    def item(op: Any, args: Any, kwargs: Any) -> Any:
        with watching(".item() of a sharded tensor"):
            return op(whole(args[0]).to_local(), *args[1:], **kwargs)

    def full_tensor(self: Any, *args: Any, **kwargs: Any) -> Any:
        order = self.__dict__.get("autopar_order")
        with watching(".full_tensor()"):
            full = usual(self, *args, **kwargs)
        return full if order is None else full.index_select(0, order.argsort())

    def redistribute(self: Any, *args: Any, **kwargs: Any) -> Any:
        with watching(".redistribute()"):
            return redistributed(self, *args, **kwargs)

    def numpy(self: Any, **options: Any) -> Any:
        array = self.full_tensor().numpy(**options)
        array.flags.writeable = False  # a write would not reach the tensor
        return array

    def text(self: Any, style: str) -> str:
        return object.__format__(self, style) if self.dim() or self.is_meta else format(self.detach().item(), style)

    hooks = ExitStack()
    hooks.enter_context(shard_operations({torch.ops.aten._local_scalar_dense.default: item}))
    hooks.enter_context(replaced(DTensor, "__format__", text))
    hooks.enter_context(replaced(DTensor, "full_tensor", full_tensor))
    hooks.enter_context(replaced(DTensor, "redistribute", redistribute))
    hooks.enter_context(replaced(DTensor, "tolist", lambda self: self.full_tensor().tolist()))
    hooks.enter_context(replaced(DTensor, "numpy", numpy))
    return hooks


def data_by_values() -> AbstractContextManager[None]:
    """Let ``parameter.data = values`` fill a DTensor that says how (``autopar_values``), and any other one take the memory of a
    DTensor of its shape and dtype (of a plain tensor: a TypeError). On 2.13.0 it keeps the shard that it had, without a word."""
    usual: Any = torch.Tensor.data

    def put(self: Any, value: torch.Tensor) -> None:
        values = self.__dict__.get("autopar_values")
        if values is not None:
            values.fill(value)
        elif (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            usual.__set__(self, value)
        elif isinstance(value, DTensor):
            replace_local(self, local_of(value.redistribute(self.device_mesh, self.placements)))
        else:
            raise TypeError(f"the .data of a DTensor {tuple(self.shape)} was set to a plain tensor: compute it of the DTensor's")

    return replaced(DTensor, "data", property(usual.__get__, put))


def masked_items() -> AbstractContextManager[None]:
    """Let DTensor read and write ``x[mask]``, and do what else 2.13.0 has no right rule for, of whole tensors; ``x[mask] =
    number`` is of the parts where the mask is placed like `x` (in `torch.optim.Rprop`)."""
    aten = torch.ops.aten

    def get(op: Any, args: Any, kwargs: Any) -> Any:
        return (on_whole_tensors if any(map(_is_mask, args[1])) else usual_operation)(op, args, kwargs)

    def put(op: Any, args: Any, kwargs: Any) -> Any:
        x, indices, value, *more = args
        if not any(map(_is_mask, indices)) or not isinstance(x, DTensor) or any(each.is_partial() for each in x.placements):
            return usual_operation(op, args, kwargs)
        mask = indices[0]
        if len(indices) == 1 and isinstance(mask, DTensor) and mask.placements == x.placements and not value.dim() and not more:
            x._local_tensor.masked_fill_(mask._local_tensor, value.to_local() if isinstance(value, DTensor) else value)
        else:
            full = op(gathered(x).clone(), *tree_map_only(DTensor, gathered, args[1:]), **kwargs)
            x._local_tensor.copy_(own_part(x, full))
        return x

    def convolve(op: Any, args: Any, kwargs: Any) -> Any:  # of others the rule is that of same padding
        places = {place for each in args if isinstance(each, DTensor) for place in each.placements}
        return (usual_operation if places <= {Replicate(), Shard(0)} else on_whole_tensors)(op, args, kwargs)

    convolutions = dict.fromkeys((aten.convolution.default, aten.convolution_backward.default), convolve)
    # 2.13.0 gives the shape of the first topk to those of other k
    names = ("index_put", "masked_select", "nonzero", "renorm", "topk", "allclose")
    gets = dict.fromkeys((getattr(aten, name).default for name in names), on_whole_tensors)
    gets |= {aten.index.Tensor: get, aten.index_put_.default: put}
    return shard_operations({**gets, **convolutions})


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def fused_updates() -> AbstractContextManager[None]:
    """Let DTensor do the fused updates of SGD and Adagrad, each on this rank's part: 2.13.0 has rules for those of Adam alone."""

    def part(tensor: torch.Tensor, parameter: DTensor) -> torch.Tensor:
        return local_of(tensor.redistribute(placements=parameter.placements) if isinstance(tensor, DTensor) else tensor)

    def put(op: Any, args: Any, kwargs: Any) -> Any:
        # a list is empty where there is no momentum
        parts = [[part(*both) for both in zip(group, args[0], strict=False)] for group in args]
        return op(*parts, **tree_map_only(DTensor, DTensor.full_tensor, kwargs))

    names = (torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_)
    return shard_operations({getattr(name, overload): put for name in names for overload in name.overloads()})


@contextmanager
def foreach_kind(kind: type[torch.Tensor]) -> Iterator[None]:
    """Let optimizers and ``torch.nn.utils.clip_grad_norm_`` take tensors of this class by ``torch._foreach_norm`` and the like,
    as DTensors, in place of one by one. Seen on 2.13.0: they ask two lists of classes."""
    modules = (importlib.import_module(name) for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"))
    lists: list[list[type[torch.Tensor]]] = [module._foreach_supported_types for module in modules]
    for types in lists:
        types.append(kind)
    try:
        yield
    finally:
        for types in lists:
            types.remove(kind)


Updates = Iterator[list[DTensor]]


def muon_updates(
    batches_of: Callable[[list[torch.Tensor], list[torch.Tensor]], list[list[int]]],
    is_elsewhere: Callable[[torch.Tensor], bool],
    orthogonalize: Callable[[Updates, Callable[[torch.Tensor], torch.Tensor]], Updates],
) -> AbstractContextManager[None]:
    """Let `torch.optim.Muon` ask others for the orthogonal updates of many matrices at once.

    `batches_of` divides the positions of parameters (with their gradients) into batches, and leaves out those that torch is to
    update, or other ranks, which `is_elsewhere` says. `orthogonalize` takes the momenta of batch after batch, and torch's
    function of one whole matrix. Seen on 2.13.0: `Muon.step` calls `muon` with the lists of each group, and that calls
    `_zeropower_via_newtonschulz` for each matrix, which works in the dtype of its result. Momentum and weight decay stay torch's,
    which adds zeros here where the updates follow."""
    outer: Any = importlib.import_module("torch.optim._muon")
    usual = outer.muon

    def muon(params: Any, grads: Any, momenta: Any, **options: Any) -> None:
        newton_schulz = outer._zeropower_via_newtonschulz

        def run(positions: list[int]) -> None:
            usual(*([each[at] for at in positions] for each in (params, grads, momenta)), **options)

        def function(matrix: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = newton_schulz(matrix, options["ns_coefficients"], options["ns_steps"], options["eps"])
            return result

        def record(positions: list[int]) -> list[DTensor]:
            updates: list[DTensor] = []

            def note(update: DTensor, *_: Any) -> Any:
                updates.append(update)
                return torch.zeros_like(update)

            with replaced(outer, "_zeropower_via_newtonschulz", note):
                run(positions)
            return updates

        # of a momentum in bfloat16 torch takes no copy, and changes it
        changed = not options["nesterov"] and any(each.dtype == torch.bfloat16 for each in momenta)
        batches = [] if changed else batches_of(params, grads)
        apart = {at for batch in batches for at in batch}
        run([at for at in range(len(params)) if at not in apart and not is_elsewhere(params[at])])
        for positions, updates in zip(batches, orthogonalize(map(record, batches), function), strict=True):
            for at, update in zip(positions, updates, strict=True):
                rate = outer._adjust_lr(outer._to_scalar(options["lr"]), options["adjust_lr_fn"], params[at].shape)
                params[at].add_(update, alpha=-rate)

    return replaced(outer, "muon", _untraced(muon))


def engine_calls(
    gradients: Callable[..., Any], translations: tuple[Callable[[Exception], Exception | None], ...]
) -> AbstractContextManager[None]:
    """Stand before the engine of every backward of this process.

    ``torch.autograd.grad``, and a backward of some `inputs` or with ``create_graph=True``, ask `gradients` first, with the engine
    and its arguments (results, their gradients, whether to retain and to create a graph, inputs, whether some may be unused,
    whether to add to ``.grad``); NotImplemented goes on as usual. An error that ends a backward is passed to each translation in
    turn, and what that returns goes on in its place. Seen on 2.13.0: Tensor.backward, torch.autograd.backward and
    torch.autograd.grad all go through this function."""
    outer: Any = torch.autograd
    usual = outer._engine_run_backward

    def run(*args: Any, **options: Any) -> Any:
        try:
            some = len(args) > 4 and (args[4] or args[3])
            unused, accumulate = args[5] if args[5:] else True, options.get("accumulate_grad", True)
            if some and (own := gradients(usual, *args[:5], unused, accumulate)) is not NotImplemented:
                return own
            return usual(*args, **options)
        except Exception as error:
            other: Exception = error
            for translate in translations:
                other = translate(other) or other
            if other is error:
                raise
            raise other from error

    return replaced(outer, "_engine_run_backward", run)


def after_unscaling(
    agree: Callable[[torch.optim.Optimizer, dict[torch.device, torch.Tensor], torch.Tensor], None],
) -> AbstractContextManager[None]:
    """Call `agree` whenever a `torch.amp.GradScaler` has looked at the gradients of an optimizer, with its flags by device (to be
    changed in place) and a 0. Seen on 2.13.0: `unscale_`, and `step` without it, go through this method."""
    usual: Any = torch.amp.GradScaler._unscale_grads_

    def unscale(self: Any, optimizer: Any, inverse: torch.Tensor, zero: torch.Tensor, *options: Any) -> Any:
        none = zero.clone()
        flags = usual(self, optimizer, inverse, zero, *options)
        agree(optimizer, flags, none)
        return flags

    return replaced(torch.amp.GradScaler, "_unscale_grads_", unscale)

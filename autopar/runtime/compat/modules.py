"""FSDP2's modules and their parameter groups, compiled modules, and whether a profiler looks at them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

from .hooks import replaced


def clear_forward_order(root: Any) -> None:
    """Clear the order of forwards by which FSDP2 prefetches in the backward. It does so itself only after a last backward
    (``set_is_last_backward``). Before the first forward there is none. Seen on 2.13.0."""
    order: list[Any] = getattr(root._get_fsdp_state()._comm_ctx, "post_forward_order", [])
    for group in order:
        group._post_forward_indices.clear()
    order.clear()


def none_through_blocks() -> AbstractContextManager[None]:
    """Let FSDP2 pass None on where nothing reads an output of the block before: it passes zeros, which parameters of a branch
    that no loss reads would get as gradients. Seen on 2.13.0 (before ``setup_context`` came, its forward takes the context)."""
    own = vars(RegisterPostBackwardFunction)
    name = "setup_context" if "setup_context" in own else "forward"
    usual = getattr(RegisterPostBackwardFunction, name)

    def begin(context: Any, *args: Any) -> Any:
        context.set_materialize_grads(False)
        return usual(context, *args)

    return replaced(RegisterPostBackwardFunction, name, staticmethod(begin))


def reduce_gradients(module: Any) -> None:
    """Run FSDP2's post-backward reduction of a module's gradients at once. Seen on 2.13.0 (2.11 has one group a module).

    FSDP2 refuses a reduction where only some gradients were accumulated before in the reduction's dtype; here all are made so.
    """
    for group in _param_groups(module._get_fsdp_state()):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
        group.post_backward()


def sharded_modules(root: nn.Module) -> list[Any]:
    """FSDP2's modules in `root`, itself included, in order; untyped, as their state is."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def forget_steps(root: nn.Module) -> None:
    """Wait for what FSDP2's modules in `root` have in flight, and forget it: a capture of a CUDA graph may not wait for an event
    of before it. Between steps. Seen on 2.13.0."""
    for module in sharded_modules(root):
        if module._get_fsdp_state()._is_root:
            module.reset_iter_state()


def drop_failed_step(root: nn.Module) -> None:
    """Drop what FSDP2's modules in `root` keep of a forward or backward that raised. Seen on 2.13.0.

    Of a forward: weights that are gathered, or on their way, which the next one would take as they are. Of a backward: its end
    stays queued, so that no later one would reduce gradients, and those that it did not reduce would be added to the next ones,
    which ``reset_iter_state`` leaves."""
    for module in sharded_modules(root):
        state = module._get_fsdp_state()
        if state._is_root and state._state_ctx.post_backward_final_callback_queued:
            module.reset_iter_state()
        for group in _param_groups(state):
            if group._training_state is TrainingState.FORWARD or group._all_gather_result is not None:
                group._reset_iter_state()
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = parameter.unsharded_accumulated_grad = None


def _param_groups(state: Any) -> list[Any]:
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def train_more(root: nn.Module) -> None:
    """Tell FSDP2's modules in `root` that further parameters of theirs train, whose dtypes they took down at the first forward.
    Seen on 2.13.0."""
    for module in sharded_modules(root):
        for group in _param_groups(module._get_fsdp_state()):
            group._init_mp_dtypes()


def finish_backward(root: Any) -> None:
    """Run FSDP2's end of a backward of `root`: reduces the gradients of each module that were not reduced yet, then wait as
    ``set_is_last_backward`` says. Seen on 2.13.0."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile was applied to the model or a part of it. Seen on 2.13.0: a wrapper, or ``module.compile()``,
    which sets an attribute of the module."""
    wrapper = torch._dynamo.OptimizedModule
    return any(isinstance(module, wrapper) or module._compiled_call_impl is not None for module in model.modules())


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """Return the forward that says what a call takes: torch.compile's wrapper has that of the module inside. Seen on 2.13.0."""
    while isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    return model.forward


def profiling() -> bool:
    """Return whether a profiler runs in this thread; takes 40 ns. Seen on 2.13.0."""
    return bool(torch._C._autograd._profiler_enabled())

"""Everything that autopar changes in torch and in this process: `apply_patches` does it once, `undo_patches` takes it back.

Hooks that end with an object (of optimizers' steps, of a loss) are not here: they stand beside it.
"""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import TracebackType

import torch

from .comm.ending import end_in_time
from .comm.heartbeat import ends_by, glancing, report_failed_backward, report_uncaught
from .compat.checkpoints import boxes_in_checkpoints
from .compat.generator_states import on_generator_states
from .compat.hooks import (
    after_unscaling,
    data_by_values,
    engine_calls,
    foreach_kind,
    fused_updates,
    masked_items,
    muon_updates,
    replaced,
    whole_items,
)
from .compat.modules import none_through_blocks
from .device.rng import seed_stream
from .plain.sharded_state_dict import refuse_parts_of_states, warn_of_shards
from .state.gradient import Gradient
from .state.loss_scale import agree_on_overflow
from .state.owned_matrices import batches_of, updates_by_owners
from .state.stage_tensors import Holders, OnAnotherStage
from .step.out_of_memory import latest_answer
from .tensors.mixed_operations import mix_whole_tensors
from .tensors.random_draws import draw_whole_tensors
from .tensors.reductions import reduce_rightly
from .tensors.stage_operations import follow_stages
from .tensors.torch_functions import (
    explain_penalty,
    parameter_gradients,
    refuse_collectives,
)
from .tensors.view_writes import write_through_views

_FSDP2_WARNING = "FSDP2-wrapped module"
"""The warning of FSDP2 about in-place writes into views that a block returns; generated code never writes in place."""


def apply_patches(pipeline: bool = False) -> None:
    """Change torch and this process as parallel models need it, and a `pipeline` besides; only the first call does anything."""
    _patches()
    if pipeline:
        _patches_of_pipelines()
    warnings.filterwarnings("ignore", message=_FSDP2_WARNING)  # again: a script's catch_warnings takes it back


def undo_patches() -> None:
    """Take all of it back. Parallel models that are still there must not be used any more."""
    for patches in (_patches_of_pipelines, _patches):
        if patches.cache_info().currsize:
            patches().close()
            patches.cache_clear()
    warnings.filters[:] = [each for each in warnings.filters if _FSDP2_WARNING not in str(each)]  # type: ignore[index]


@cache
def _patches() -> ExitStack:
    patches = ExitStack()
    for patch in (
        boxes_in_checkpoints,
        # DTensor is right, or refuses in a line
        lambda: whole_items(glancing),
        data_by_values,
        masked_items,
        fused_updates,
        draw_whole_tensors,
        reduce_rightly,
        mix_whole_tensors,
        write_through_views,  # calls the handlers above
        refuse_collectives,
        refuse_parts_of_states,
        warn_of_shards,
        lambda: muon_updates(batches_of, lambda each: isinstance(each, OnAnotherStage), updates_by_owners),
        # gradients
        none_through_blocks,
        lambda: foreach_kind(Gradient),
        lambda: engine_calls(parameter_gradients, (latest_answer, explain_penalty, report_failed_backward)),
        lambda: after_unscaling(agree_on_overflow),
        lambda: on_generator_states(seed_stream.count_manual_seed, seed_stream.place_of_script, seed_stream.move),
        # the end of the process
        _uncaught_exceptions,
        _end,
    ):
        patches.enter_context(patch())
    return patches


@cache
def _patches_of_pipelines() -> ExitStack:
    """Change DTensor's operations for pipelines: other models leave most of them to its own dispatch, which is faster."""
    patches = follow_stages()
    patches.enter_context(foreach_kind(OnAnotherStage))
    patches.enter_context(torch.serialization.safe_globals([Holders, OnAnotherStage]))  # in the state of an optimizer
    return patches


@contextmanager
def _uncaught_exceptions() -> Iterator[None]:
    """Tell the other ranks of an exception that ends this process, and answer a failed allocation, after its traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report_uncaught(before, kind, error, trace)
        if problem := latest_answer(error):
            print(f"autopar: {problem}", file=sys.stderr, flush=True)

    with replaced(sys, "excepthook", hook):
        yield


@contextmanager
def _end() -> Iterator[None]:
    """End the process in time once one of its ranks has failed."""

    def ending() -> None:
        end_in_time(ends_by())

    atexit.register(ending)
    try:
        yield
    finally:
        atexit.unregister(ending)

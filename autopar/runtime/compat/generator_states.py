"""The states of torch's generators, as scripts ask for them and put them back. The place of a program's random streams goes with
them, since its draws leave torch's generators where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import c_uint32
from typing import Any

import torch

from .hooks import replaced

_UNREAD = 28
"""Seen on 2.13.0: the CPU's state has the 624 numbers of 32 bits as numbers of 64 bits from byte 24 on, and torch reads the lower
halves. So the place is in files, copies and messages too, and a plain process reads the state as ever."""


def _unread(state: torch.Tensor) -> c_uint32:
    return c_uint32.from_address(state.data_ptr() + _UNREAD)


@contextmanager
def on_generator_states(seeded: Callable[[], None], place: Callable[[], int], moved: Callable[[int], None]) -> Iterator[None]:
    """Call `seeded` after ``torch.manual_seed``, and `moved` after ``set_rng_state`` (of the CPU or of CUDA), with the `place` at
    the ``get_rng_state``; a state from before all of this has place 0."""
    seed, get, put = torch.manual_seed, torch.get_rng_state, torch.set_rng_state
    get_cuda, put_cuda = torch.cuda.get_rng_state, torch.cuda.set_rng_state

    def manual_seed(*args: Any, **kwargs: Any) -> torch.Generator:
        generator = seed(*args, **kwargs)
        seeded()
        return generator

    def get_rng_state() -> torch.Tensor:
        state = get()
        if number := place():
            _unread(state).value = number
        return state

    def set_rng_state(new_state: torch.Tensor) -> None:
        put(new_state)
        moved(_unread(new_state).value)

    def get_rng_state_of_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
        state = get_cuda(*args, **kwargs)
        state.autopar_place = place()  # type: ignore[attr-defined]  # of its 16 bytes torch reads all; torch.save keeps it
        return state

    def set_rng_state_of_cuda(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        put_cuda(new_state, *args, **kwargs)
        if (number := getattr(new_state, "autopar_place", None)) is not None:  # DTensor's draws set states of their own
            moved(number)

    functions = (manual_seed, get_rng_state, set_rng_state)
    with ExitStack() as stack:
        for owner in (torch, torch.random):
            for each in functions:
                stack.enter_context(replaced(owner, each.__name__, each))
        for owner in (torch.cuda, torch.cuda.random):
            stack.enter_context(replaced(owner, "get_rng_state", get_rng_state_of_cuda))
            stack.enter_context(replaced(owner, "set_rng_state", set_rng_state_of_cuda))
        yield

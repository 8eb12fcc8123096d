"""What an asynchronous save takes from the steps beside it."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from autopar.runtime.checkpoint.saving import HostCopies, yield_to_others


def test_memory_is_kept() -> None:
    """From one save to the next, and made anew where the tensors are others."""
    copies, weight = HostCopies(), torch.arange(12.0).view(3, 4)
    first = copies.of([weight.T, torch.tensor(1.0)])
    places = [each.data_ptr() for each in first]
    assert first[0].is_contiguous() and first[0].equal(weight.T)
    weight += 1
    assert not first[0].equal(weight.T)
    again = copies.of([weight.T, torch.tensor(2.0)])
    assert [each.data_ptr() for each in again] == places and again[0].equal(weight.T) and again[1] == 2
    other = copies.of([weight.T.double()])
    assert len(other) == 1 and other[0].dtype == torch.float64 and other[0].equal(weight.T.double())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_only_the_thread_that_writes_yields() -> None:
    before, told = os.getpriority(os.PRIO_PROCESS, 0), []

    def write() -> None:
        yield_to_others()
        told.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert told == [min(19, before + 15)] and os.getpriority(os.PRIO_PROCESS, 0) == before

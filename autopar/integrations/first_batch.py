"""The first batch of a loader, which a plan is made for before the script reads anything: afterwards the loader gives what it
would have given without that."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.random_state import generators, set_generators


def first_batch(loader: Any) -> Any:
    """Return the first batch of a loader, prepared by accelerate or not. Random states are afterwards what they were, and a data
    set that does not start again for each iterator gives the examples of that batch once more."""
    plain: DataLoader[Any] = getattr(loader, "base_dataloader", loader)
    with preserved_rng(), _preserved_samplers(plain):
        # workers read from copies of the data set
        if isinstance(plain.dataset, IterableDataset) and not plain.num_workers:
            return _batch_of_stream(plain)
        for batch in plain:
            return batch
    raise _no_batch()


@contextmanager
def preserved_rng() -> Iterator[None]:
    """The global random state is afterwards what it was before."""
    host = torch.device("cpu")
    states = generators(host)
    try:
        yield
    finally:
        set_generators(states, host)


def _no_batch() -> AutoparError:
    return AutoparError("the data loader is empty, and the plan needs a batch: give it data, or pass example_inputs")


@contextmanager
def _preserved_samplers(loader: DataLoader[Any]) -> Iterator[None]:
    """The attributes of samplers, and the random generators of samplers, of a data set of rows and of a collate function are
    afterwards what they were before."""
    samplers = [loader.sampler, *([loader.batch_sampler] if loader.batch_sampler is not None else [])]
    own = [(vars(each), dict(vars(each))) for each in samplers if hasattr(each, "__dict__")]
    rows = [] if isinstance(loader.dataset, IterableDataset) else [loader.dataset]
    restore = list(_restorers([loader.generator, *samplers, *rows, loader.collate_fn], set()))
    try:
        yield
    finally:
        for attributes, before in own:
            attributes.clear()
            attributes.update(before)
        for each in restore:
            each()


def _restorers(objects: list[Any], seen: set[int]) -> Iterator[Callable[[], object]]:
    """Yield what sets each generator of these objects, and of their attributes, to its state of now."""
    for each in objects:
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Generator):
            yield partial(each.set_state, each.get_state())
        elif isinstance(each, random.Random):
            yield partial(each.setstate, each.getstate())
        elif isinstance(each, numpy.random.RandomState):
            yield partial(each.set_state, each.get_state())
        elif isinstance(each, numpy.random.Generator):
            yield partial(setattr, each.bit_generator, "state", each.bit_generator.state)
        elif isinstance(own := getattr(each, "__dict__", None), dict):
            yield from _restorers(list(own.values()), seen)


def _batch_of_stream(loader: DataLoader[Any]) -> Any:
    """Return the first batch of an iterable data set that is read in this process. Where reading changed it (a socket, an
    iterator, a count of epochs), its next iterator is this one from the beginning."""
    stream: Any = loader.dataset
    before = _state_of(stream)
    examples = iter(stream)
    read = list(islice(examples, loader.batch_size or 1))
    if not read or loader.drop_last and len(read) < (loader.batch_size or 1):
        raise _no_batch()
    # collate functions of transformers take fields out of their examples
    batch = loader.collate_fn(copy.deepcopy(read if loader.batch_size else read[0]))
    if not hasattr(stream, "set_epoch") and (before is None or before != _state_of(stream)):
        _put_back(stream, read, examples)
    return batch


def _state_of(stream: Any) -> bytes | None:
    """Return a digest of all that a data set holds; None where it holds what cannot be saved, as a generator or a file."""
    digest = _Digest()
    try:
        torch.save(stream, digest)  # type: ignore[arg-type]  # a file of which it asks for no more
    except Exception:  # classes raise what they like
        return None
    return digest.hash.digest()


class _Digest:
    """A file that keeps a hash of what is written."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b()

    def write(self, text: Any) -> int:
        self.hash.update(text)
        return memoryview(text).nbytes

    def flush(self) -> None:
        """Do nothing: nothing is kept back."""


def _put_back(stream: Any, read: list[Any], rest: Iterator[Any]) -> None:
    """Let the next iterator of a data set begin with the examples that were read of it; later ones are its own."""
    kind = type(stream)

    def put_back(self: Any) -> Iterator[Any]:
        self.__class__ = kind
        return _continued(read, rest)

    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__iter__": put_back}
    try:
        stream.__class__ = type(kind.__name__, (kind,), body)
    except TypeError:
        raise AutoparError(
            f"the plan needs a batch, and {kind.__name__} does not give the examples of it again: pass example_inputs"
        ) from None


def _continued(read: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    yield from read
    yield from rest

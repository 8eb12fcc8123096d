"""Exports of models that an earlier test made, for tests whose subject is not the capture.

An export takes 1 to 3 s of the processor, and the rooms of the command line, the search and the reports exported the same few
bundled models hundreds of times. Nothing changes an export, so one serves all. It is kept under everything that it reads: the
pickle of model, inputs, options and of the globals that the code of the forward names, and the very classes and functions in it.
Parameters, buffers and inputs count as their shapes, since an export runs on copies without data; other tensors, which become
constants of the graph, with their values. What cannot be pickled, or warned, is exported anew.
A call with another batch has the graph that the product itself takes for it, where the batch stayed a symbol (`Export.graph_at`,
which tests/capture/test_lengths.py compares with captures).

The graphs are files too (`support.export_files`), for the other processes of the run: most tests plan here what ranks run.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.capture import export as exports
from autopar.capture.bind import batch_of, bind_inputs
from autopar.capture.export import Export
from autopar.capture.options import CaptureOptions
from autopar.capture.state.reads import _recorded, recorded_reads
from autopar.runtime.plain.code_reads import code_of
from autopar.runtime.plain.frozen_reads import Reads
from support import export_files

_MOST_BYTES = 2**24
"""Of a tensor whose values are read for the key."""
_EXPORTS: dict[tuple[Any, ...], _CachedExport] = {}
_ANY_BATCH: dict[tuple[Any, ...], _CachedExport] = {}
"""Those whose batch is a symbol, under what remains without it."""


class _CachedExport(NamedTuple):
    """An export, and what its forward read."""

    export: Export
    reads: Reads


@contextmanager
def capture_cache() -> Iterator[None]:
    """Within, a plan and a program of another call take the export of an equal model of before."""
    with patch("autopar.capture.Export", _export), patch("autopar.variants.maker.Export", _export):
        yield


def _export(*given: Any) -> Export:
    try:
        key, of_any_batch = _key(*given), _key(*given, any_batch=True)
    except Exception:  # whatever the objects of a model raise where they are pickled
        return exports.Export(*given)
    cached = _EXPORTS.get(key)
    if cached is None:
        file = export_files.file_of(key)
        if file is not None and file.exists():
            cached = _EXPORTS[key] = _CachedExport(*export_files.read(file, given))
        elif cached := _at_batch(_ANY_BATCH.get(of_any_batch), given):
            _keep(key, cached, file)
    if cached is not None:
        for record in _recorded.get():
            record.add(cached.reads)
        export = cached.export
        return export.of_call(given) if isinstance(export, export_files.SharedExport) else export
    with warnings.catch_warnings(record=True) as caught, recorded_reads() as record:
        warnings.simplefilter("always")
        exported = exports.Export(*given)
    for each in caught:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if not caught:
        cached = _CachedExport(exported, record.reads)
        _keep(key, cached, file)
        if exported.is_open and not exported.lengths:
            _ANY_BATCH.setdefault(of_any_batch, cached)
    return exported


def _keep(key: tuple[Any, ...], cached: _CachedExport, file: Path | None) -> None:
    _EXPORTS[key] = cached
    if file is not None:
        export_files.write(file, *cached)


def _at_batch(cached: _CachedExport | None, given: tuple[Any, ...]) -> _CachedExport | None:
    """The export of another batch, with the graph for these inputs; None where it does not hold for them."""
    if cached is None:
        return None
    model, args, kwargs, options, *_ = given
    bound = bind_inputs(model, args, kwargs, loss_fn=options.loss_fn, batch_dim=options.batch_dim)
    graph = cached.export.graph_at(bound.tensors)
    if graph is None:
        return None
    return _CachedExport(export_files.SharedExport(given, graph, symbolic=True, origin=cached.export), cached.reads)


def _key(
    model: nn.Module, args: Any, kwargs: Any, options: CaptureOptions, *more: Any, any_batch: bool = False
) -> tuple[Any, ...]:
    text = io.BytesIO()
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    pickler = _KeyPickler(text, {id(each) for each in (*model.parameters(), *model.buffers(), *inputs)})
    # A plan says where the batch is, which its first capture found by itself.
    bound = bind_inputs(model, args, kwargs, loss_fn=options.loss_fn, batch_dim=options.batch_dim)
    if any_batch:
        batch = batch_of(bound.tensors)
        pickler.batched = {id(each) for each in inputs if each.dim() and each.shape[0] == batch}
    pickler.dump((model, args, kwargs, replace(options, batch_dim=bound.interface.said_batch_dims), more))
    names = [(each.place, each.name, each.at.get(each.name, None)) for each in code_of(model, options.loss_fn).names]
    outside = _KeyPickler(text, set())  # a parameter of which a closure has hold is a constant
    outside.tensors = pickler.tensors
    outside.dump(names)
    definitions = tuple(map(_content, (*pickler.definitions, *outside.definitions)))
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    return text.getvalue(), definitions, torch.get_default_dtype(), torch.is_grad_enabled(), autocast


def _content(value: Any) -> tuple[Any, ...]:
    """A function with its code, or a class with its attributes: a test may have replaced those of an earlier one."""
    if isinstance(value, FunctionType):
        return value, value.__code__, _Identity(value.__defaults__)
    kinds = [kind for kind in value.__mro__ if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
    return value, *((name, _Identity(each)) for kind in kinds for name, each in vars(kind).items())


class _Identity:
    """An object that equals itself alone, whatever its class says."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _KeyPickler(pickle.Pickler):
    """Writes tensors as what they are and hold, those in `empty` as what they are, and collects classes and functions, which
    pickle knows by name alone."""

    def __init__(self, text: io.BytesIO, empty: set[int]) -> None:
        super().__init__(text, protocol=5)
        self.definitions, self.tensors, self.empty = list[Any](), dict[int, int](), empty
        self.batched = set[int]()
        """Inputs whose first size does not count."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType):
            self.definitions.append(value)
        return NotImplemented

    def persistent_id(self, value: Any) -> Any:
        if type(value) is str:  # pickle writes a string again that is equal, but another object
            return sys.intern(value)
        if not isinstance(value, Tensor):
            return None
        hooks = value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)
        if type(value) not in (Tensor, nn.Parameter) or hooks:
            raise pickle.PicklingError("a tensor with more to it than its values")
        number = self.tensors.setdefault(id(value), len(self.tensors))  # one that is tied has one number
        shape = ("batch", *value.shape[1:]) if id(value) in self.batched else tuple(value.shape)
        kind = (type(value), value.dtype, str(value.device), shape, value.stride(), value.requires_grad)
        return number, kind, b"" if id(value) in self.empty else _digest(value), value.grad_fn is None, vars(value)


def _digest(tensor: Tensor) -> bytes:
    """The digest of its values; those on the meta device have none."""
    if tensor.is_meta:
        return b""
    if tensor.nbytes > _MOST_BYTES:
        raise pickle.PicklingError("a tensor too large to read")
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).digest()

"""`parallel.save_pretrained`: the weights of a parallel model as files of the Hub's layout. Tensors are gathered one after the
other, large ones in slices, and each file is written by one rank: none ever holds more than one whole tensor."""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint.rounds import Failed, Rounds, noted_failure
from ..checkpoint.tensor_file import FileWriter, dtype_name, header_bytes
from ..errors import CheckpointProblem
from ..plain.plain_model import PlainModel
from ..progress import advance, working
from ..state.layout import shard_specs
from ..state.model_state import Slice, State
from .conversions import hub_tensors
from .layout import ExportedTensor, Part, aside, byte_count, discard, divide, file_names, finish
from .load import saved_names

LOGGER = logging.getLogger("autopar")

SLICE_BYTES = 2**28
"""The most bytes of a tensor that are gathered at once, where it has a dimension that nothing shards."""


def save_pretrained(
    state: State,
    plain: PlainModel | None,
    rounds: Rounds,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
) -> Path:
    """Write the weights, and return their folder. All ranks call it together; CheckpointProblem on all of them where one cannot
    write."""
    folder, most = Path(path).absolute(), byte_count(max_shard_size)
    tensors, names = _Tensors(state, plain, dtype), saved_names(state, plain)
    listed, hub_names = _as_on_the_hub(plain, tensors.listed(names), names, rounds.rank)
    files = divide(listed, most)
    by_name = dict(zip(file_names(len(files)), files, strict=True))
    metadata = {"format": "pt"} | {hub_names.get(a, a): hub_names.get(b, b) for a, b in names.items() if a != b}
    with rounds.together():
        folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, FileWriter] = {}
    failures: list[Failed] = []  # on this rank: all go on gathering until the end
    with working(f"writing weights to {folder}", len(listed)):
        for number, (name, file) in enumerate(by_name.items()):
            writer = number % rounds.size
            if writer == rounds.rank and not failures:
                with noted_failure(failures):
                    inside = {each.name for each in file}
                    aliases = {key: name_there for key, name_there in metadata.items() if key == "format" or name_there in inside}
                    writers[name] = _opened(folder / aside(name), header_bytes([each[:3] for each in file], aliases)[0])
            for each in file:
                full = tensors.written(each, writer, rounds.rank)
                if full is not None and name in writers and not failures:
                    with noted_failure(failures):
                        writers[name].write_tensor(full)
                advance()
                del full
    for file_writer in writers.values():
        with noted_failure(failures):
            file_writer.close()
    try:
        rounds.raise_first(failures)
        rounds.on_first(lambda: _finish(folder, by_name, plain))
    except CheckpointProblem as problem:
        discard(folder, list(writers))
        raise CheckpointProblem(f"cannot write weights to {folder}: {problem}: make room, or name another folder") from None
    return folder


def _opened(path: Path, header: bytes) -> FileWriter:
    """Return a new file that begins with the header."""
    path.unlink(missing_ok=True)  # what a run left that was killed
    file = FileWriter(path, hashed=False)
    file.write(header)
    return file


def _as_on_the_hub(
    plain: PlainModel | None, tensors: list[ExportedTensor], names: Mapping[str, str], rank: int
) -> tuple[list[ExportedTensor], dict[str, str]]:
    """The tensors as the files of a model of transformers have them, and the names of those (and of tied ones) that are one
    tensor there too."""
    if plain is None:
        return tensors, {}
    by_name = {each.name: each for each in tensors}
    parts_of = hub_tensors(plain.skeleton, {each.name: each.shape for each in tensors})
    if parts_of is None:
        if rank == 0:
            LOGGER.warning("weights are written under the names of %s, not the Hub's", type(plain.skeleton).__name__)
        return tensors, {}
    out = []
    for name, parts in parts_of.items():
        whole = by_name[name]
        for each in parts:
            out.append(ExportedTensor(each.name, whole.dtype, each.shape, Part(whole, each.start, each.size)))
    tied = hub_tensors(plain.skeleton, {key: by_name[name].shape for key, name in names.items() if name in by_name}) or {}
    return out, {key: each[0].name for key, each in {**tied, **parts_of}.items() if len(each) == 1}


def _finish(folder: Path, files: Mapping[str, list[ExportedTensor]], plain: PlainModel | None) -> None:
    """Finish the folder on rank 0: configurations, then the names of the files."""
    for name in files:
        if not (folder / aside(name)).is_file():
            raise CheckpointProblem(
                f"rank 0 does not see {folder / aside(name)}, which another rank wrote: name a folder that all share"
            )
    every = [each for file in files.values() for each in file if each.dtype.is_floating_point]
    sizes: Counter[torch.dtype] = Counter()
    for each in every:
        sizes[each.dtype] += each.size
    if plain is not None:
        _save_configurations(folder, plain, sizes.most_common(1)[0][0] if sizes else None)
        if odd := [key for key, value in plain.extra.items() if not isinstance(value, torch.Tensor)]:
            LOGGER.warning("%s is no tensor, and safetensors files have it not: parallel.save keeps it", ", ".join(odd)[:300])
    finish(folder, files)


def _save_configurations(folder: Path, plain: PlainModel, dtype: torch.dtype | None) -> None:
    """Write ``config.json`` and ``generation_config.json``, as the configurations of a model of transformers write themselves."""
    for attribute in ("config", "generation_config"):
        config: Any = copy.deepcopy(plain.skeleton.__dict__.get(attribute))
        if not callable(getattr(config, "save_pretrained", None)):
            continue
        if attribute == "config":
            config.architectures = [type(plain.skeleton).__name__]
            if dtype is not None:
                config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(str(folder))


class _Tensors:
    """The tensors of a parallel model as they are exported: floating-point ones in `dtype`, unless that is None."""

    def __init__(self, state: State, plain: PlainModel | None, dtype: torch.dtype | None) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
            raise CheckpointProblem(
                f"dtype={str(dtype)[:40]} is none to export in: pass torch.bfloat16, torch.float16 or torch.float32"
            )
        self.state, self.dtype = state, dtype
        extra = {} if plain is None else {key: each for key, each in plain.extra.items() if isinstance(each, torch.Tensor)}
        self.others: dict[str, torch.Tensor] = {} if plain is None else {**plain.unused, **extra}
        self.extra = extra
        self._open: tuple[ExportedTensor, int, torch.Tensor | None] | None = None

    def listed(self, names: Mapping[str, str]) -> list[ExportedTensor]:
        """All tensors in the model's order, tied ones once, under their first names."""
        out = []
        for name in dict.fromkeys([*names.values(), *self.extra]):
            if name in self.others:
                shape, dtype = tuple(self.others[name].shape), self.others[name].dtype
            else:
                spec = self.state.index.specs[name]
                shape, dtype = tuple(spec.shape), getattr(torch, spec.dtype)
            dtype_name(dtype)
            out.append(ExportedTensor(name, self._exported(dtype), shape))
        return out

    def _exported(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype

    def written(self, tensor: ExportedTensor, writer: int, rank: int) -> torch.Tensor | None:
        """A tensor of a file on the rank that writes it; all ranks call it together. Parts of one tensor follow each other, so it
        is gathered once in a file."""
        if tensor.part is None:
            self._open = None
            return self.whole(tensor, writer, rank)
        whole = tensor.part.whole
        if self._open is None or self._open[:2] != (whole, writer):
            self._open = None
            self._open = whole, writer, self.whole(whole, writer, rank)
        full = self._open[2]
        if full is None:
            return None
        for dim, (start, count) in enumerate(zip(tensor.part.start, tensor.part.size, strict=True)):
            full = full.narrow(dim, start, count)
        return full.reshape(tensor.shape)

    def whole(self, tensor: ExportedTensor, writer: int, rank: int) -> torch.Tensor | None:
        """The whole tensor on the rank that writes it; all ranks call it together."""
        if tensor.name in self.others:
            return self.others[tensor.name].to(tensor.dtype) if writer == rank else None
        dim = self._free_dim(tensor) if tensor.size > SLICE_BYTES else None
        if dim is None:
            full = self._gathered(tensor, writer)
            return full if writer == rank else None
        step = max(1, SLICE_BYTES * tensor.shape[dim] // tensor.size)
        out = torch.empty(tensor.shape, dtype=tensor.dtype) if writer == rank else None
        for start in range(0, tensor.shape[dim], step):
            place = Slice(dim, start, min(step, tensor.shape[dim] - start))
            part = self._gathered(tensor, writer, place)
            if out is not None and part is not None:
                out.narrow(*place).copy_(part)
        return out

    def _free_dim(self, tensor: ExportedTensor) -> int | None:
        """Return the first dimension that nothing shards, on any stage."""
        state, spec = self.state, self.state.index.specs[tensor.name]
        sharded: set[int | None] = {each.dim for each in shard_specs(spec.shape, spec.placements, state.mesh)}
        sharded.add(state.zero_dims.get(tensor.name))  # a buffer has none
        return next((dim for dim in range(len(spec.shape)) if dim not in sharded and spec.shape[dim] > 1), None)

    def _gathered(self, tensor: ExportedTensor, writer: int, part: Slice | None = None) -> torch.Tensor | None:
        """Return the tensor, or a slice of it, on all ranks of its stage and on the one that writes it."""
        state, pp = self.state, self.state.mesh.pp
        if pp.size > 1 and writer in dist.get_process_group_ranks(state.mesh.group(pp.name)):
            return state.broadcast_full(tensor.name, dtype=tensor.dtype, part=part)
        here = pp.coordinate == state.index.holders[tensor.name][0]
        return state.full(tensor.name, dtype=tensor.dtype, part=part) if here else None

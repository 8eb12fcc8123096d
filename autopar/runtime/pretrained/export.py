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

from ..checkpoint.held import local_tensor
from ..checkpoint.rounds import Failed, Rounds, attempt
from ..checkpoint.tensor_file import dtype_name
from ..errors import CheckpointProblem
from ..plain.plain_model import PlainModel
from ..state.layout import gather_full, shard_specs
from ..state.materialize import State
from .conversions import hub_tensors
from .header import WeightFileWriter, header_bytes
from .layout import ExportedTensor, Part, aside, byte_count, discard, divide, file_names, finish
from .load import saved_names

LOGGER = logging.getLogger("autopar")

SLICE_BYTES = 2**28
"""Of a tensor at most so many bytes are gathered at once, where it has a dimension that nothing shards."""


def save_pretrained(
    state: State,
    plain: PlainModel | None,
    rounds: Rounds,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
) -> Path:
    """Its folder. All ranks call it together; CheckpointProblem on all of them where one cannot write."""
    folder, most = Path(path).absolute(), byte_count(max_shard_size)
    tensors, names = _Tensors(state, plain, dtype), saved_names(state, plain)
    listed, hub_names = _as_on_the_hub(plain, tensors.listed(names), names, rounds.rank)
    files = divide(listed, most)
    by_name = dict(zip(file_names(len(files)), files, strict=True))
    metadata = {"format": "pt"} | {hub_names.get(a, a): hub_names.get(b, b) for a, b in names.items() if a != b}
    rounds.raise_together(attempt(lambda: folder.mkdir(parents=True, exist_ok=True)))
    mine: list[tuple[str, WeightFileWriter]] = []
    failed: Failed | None = None
    for number, (name, file) in enumerate(by_name.items()):
        writer = number % rounds.size
        made: Any = None
        if writer == rounds.rank and failed is None:
            inside = {each.name for each in file}
            aliases = {key: said for key, said in metadata.items() if key == "format" or said in inside}
            header = header_bytes([each[:3] for each in file], aliases)
            made = attempt(lambda n=name, h=header: WeightFileWriter(folder / aside(n), h))  # type: ignore[misc]
            failed = made if isinstance(made, Failed) else None
        for each in file:
            full = tensors.written(each, writer, rounds.rank)
            if writer == rounds.rank and failed is None and full is not None:
                written = attempt(lambda m=made, f=full: m.write(f))  # type: ignore[misc]
                failed = written if isinstance(written, Failed) else None
            del full
        if isinstance(made, WeightFileWriter):
            mine.append((name, made))
    for _, each_made in mine:
        closed = attempt(each_made.close)
        failed = failed or (closed if isinstance(closed, Failed) else None)
    problem = rounds.first_failure(rounds.gather_all(failed))
    if problem is None:
        outcome = attempt(lambda: _finish(folder, by_name, plain)) if rounds.rank == 0 else None
        problem = rounds.broadcast(outcome)
    if isinstance(problem, Failed):
        discard(folder, [name for name, _ in mine])
        raise CheckpointProblem(f"cannot write weights to {folder}: {problem.text}: make room, or name another folder")
    return folder


def _as_on_the_hub(
    plain: PlainModel | None, tensors: list[ExportedTensor], names: Mapping[str, str], rank: int
) -> tuple[list[ExportedTensor], dict[str, str]]:
    """The tensors as the files of a model of transformers have them, and the names of those (and of tied ones) that are one
    tensor there too."""
    if plain is None:
        return tensors, {}
    by_name = {each.name: each for each in tensors}
    found = hub_tensors(plain.skeleton, {each.name: each.shape for each in tensors})
    if found is None:
        if rank == 0:
            LOGGER.warning("weights are written under the names of %s, not the Hub's", type(plain.skeleton).__name__)
        return tensors, {}
    out = []
    for name, parts in found.items():
        whole = by_name[name]
        for each in parts:
            out.append(ExportedTensor(each.name, whole.dtype, each.shape, Part(whole, each.start, each.size)))
    tied = hub_tensors(plain.skeleton, {key: by_name[name].shape for key, name in names.items() if name in by_name}) or {}
    return out, {key: each[0].name for key, each in {**tied, **found}.items() if len(each) == 1}


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
    """``config.json`` and ``generation_config.json``, as the configurations of a model of transformers write themselves."""
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
            full = self._gathered(tensor, writer, None, 0, 0)
            return full if writer == rank else None
        step = max(1, SLICE_BYTES * tensor.shape[dim] // tensor.size)
        out = torch.empty(tensor.shape, dtype=tensor.dtype) if writer == rank else None
        for start in range(0, tensor.shape[dim], step):
            count = min(step, tensor.shape[dim] - start)
            part = self._gathered(tensor, writer, dim, start, count)
            if out is not None and part is not None:
                out.narrow(dim, start, count).copy_(part)
        return out

    def _free_dim(self, tensor: ExportedTensor) -> int | None:
        """The first dimension that nothing shards, on any stage."""
        state, spec = self.state, self.state.index.specs[tensor.name]
        taken = {each.dim for each in shard_specs(spec.shape, spec.placements, state.mesh)}
        if not spec.buffer:
            taken.add(-1 if (zero := self._zero_dim(tensor.name)) is None else zero)
        return next((dim for dim in range(len(spec.shape)) if dim not in taken and spec.shape[dim] > 1), None)

    def _zero_dim(self, name: str) -> int | None:
        """The dimension that ZeRO shards, told by the stage that has the parameter."""
        mesh, holder = self.state.mesh, self.state.index.holders[name][0]
        if mesh.pp.size == 1:
            return self.state.zero_dims[name]
        known = self.state.zero_dims[name] if mesh.pp.coordinate == holder else None
        said = torch.tensor(-1 if known is None else known, device=mesh.device)
        dist.broadcast(said, mesh.rank_in_stage(holder), mesh.group(mesh.pp.name))
        return None if int(said) < 0 else int(said)

    def _gathered(self, tensor: ExportedTensor, writer: int, dim: int | None, start: int, count: int) -> torch.Tensor | None:
        """The tensor, or a slice of a dimension that nothing shards, on all ranks of its stage and on the one that writes it."""
        state, mesh, spec = self.state, self.state.mesh, self.state.index.specs[tensor.name]
        pp, holder = mesh.pp, state.index.holders[tensor.name][0]
        shape = list(spec.shape)
        if dim is not None:
            shape[dim] = count
        full: torch.Tensor | None = None
        if pp.coordinate == holder:
            held = state.buffers[tensor.name] if spec.buffer else local_tensor(state.parameters[tensor.name])
            held = held if dim is None else held.narrow(dim, start, count)
            held = held.detach().to(tensor.dtype).contiguous()
            full = held if spec.buffer else gather_full(
                held, shape, spec.placements, mesh, state.zero_dims[tensor.name]
            )  # fmt: skip
        if pp.size == 1 or writer not in dist.get_process_group_ranks(mesh.group(pp.name)):
            return full
        if full is None:
            full = torch.empty(shape, dtype=tensor.dtype, device=mesh.device)
        dist.broadcast(full, mesh.rank_in_stage(holder), mesh.group(pp.name))
        return full

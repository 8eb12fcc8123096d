"""A folder of weights as the Hugging Face Hub has them: one ``model.safetensors``, or parts with an index; and the weights of it
by the names of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from ..checkpoint.rounds import Rounds
from ..checkpoint.tensor_file import DTYPES
from ..errors import CheckpointProblem, DamagedCheckpoint
from ..state.weight_source import Weight, whole_weight
from .conversions import converted, transforms_of
from .stacked import FileWeight, StoredWeight, opened

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the format."""
_BY_NAME: dict[str, torch.dtype] = {stored: getattr(torch, name) for name, stored in DTYPES.items()}


class WeightFiles(NamedTuple):
    """The weights of a folder. `sizes`: bytes by file name. `weights`: by their names in the files."""

    folder: Path
    sizes: Mapping[str, int]
    weights: Mapping[str, StoredWeight]


def list_files(path: Path) -> WeightFiles:
    """The weights of a folder or of one file, from their headers. CheckpointProblem where there are none, DamagedCheckpoint where
    a file is not whole."""
    indexed: dict[str, str] = {}
    folder, names = path, [SINGLE]
    if path.is_file():
        folder, names = path.parent, [path.name]
        if path.suffix != ".safetensors":
            raise CheckpointProblem(
                f"{path} is no safetensors file: convert it with safetensors.torch.save_file; no pickle is read"
            )
    elif (path / INDEX).is_file() and not (path / SINGLE).is_file():  # transformers prefers the single file too
        indexed = _indexed(path / INDEX)
        names = sorted(set(indexed.values()))
    elif not path.is_dir():
        raise CheckpointProblem(f"there is no folder {path}: download the model first (`hf download`), and name its folder")
    elif not (path / SINGLE).is_file():
        single = sorted(path.glob("*.safetensors"))
        pickled = next(iter(sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])), None)
        if len(single) != 1:
            other = f" ({pickled.name} is pickled, which is not read: save it with safe_serialization)" if pickled else ""
            raise CheckpointProblem(f"{path} has no {SINGLE} and no {INDEX}{other}: name a folder that save_pretrained wrote")
        names = [single[0].name]
    sizes: dict[str, int] = {}
    weights: dict[str, StoredWeight] = {}
    for name in names:
        stored, sizes[name] = read_header(folder / name)
        twice = next(iter(stored.keys() & weights.keys()), None)
        if twice is not None:
            raise DamagedCheckpoint(f"{folder / name} has {twice!r}, which {weights[twice].file} has too: export it anew")
        weights |= stored
    for weight, name in indexed.items():
        if weight not in weights or weights[weight].file != name:
            raise DamagedCheckpoint(f"{folder / name} has no {weight!r}, which {INDEX} says: download or export it anew")
    return WeightFiles(folder, sizes, weights)


def _indexed(path: Path) -> dict[str, str]:
    """File by weight, as an index says. The files lie beside it."""
    try:
        if path.stat().st_size > LONGEST_HEADER:
            raise ValueError
        by_weight = json.loads(path.read_bytes())["weight_map"]
        plain = all(Path(name).name == name and name.endswith(".safetensors") for name in by_weight.values())
        if not plain or not by_weight or "\\" in "".join(set(by_weight.values())):
            raise ValueError
    except OSError as error:
        raise CheckpointProblem(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedCheckpoint(f"{path} has no weight_map of safetensors files beside it: download or export it anew") from None
    return dict(by_weight)


def read_header(path: Path) -> tuple[dict[str, StoredWeight], int]:
    """The tensors of a file by name, and its length in bytes. DamagedCheckpoint where it is cut or no safetensors file."""

    def damaged(what: str) -> NoReturn:
        raise DamagedCheckpoint(f"{path} {what}: it is cut or no safetensors file; download or export it anew")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or not 2 <= length <= min(size - 8, LONGEST_HEADER):
                damaged(f"has {size} bytes and says that its header has {length}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointProblem(f"cannot read {path}: {error.strerror}: name a folder that all nodes share") from None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        damaged("has a header that is no JSON object")
    header.pop("__metadata__", None)
    out: dict[str, StoredWeight] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        weight, span = _stored(path, name, entry, 8 + length)
        if span[1] - span[0] != weight.size:
            damaged(f"has {span[1] - span[0]} bytes for {name!r}, which needs {weight.size}")
        out[name] = weight
        spans.append(span)
    end = 0
    for begin, after in sorted(spans):
        if begin != end:
            damaged("has tensors that overlap, or gaps between them")
        end = after
    if 8 + length + end != size:
        damaged(f"has {size} bytes, and its header says {8 + length + end}")
    return out, size


def _stored(path: Path, name: str, entry: Any, base: int) -> tuple[StoredWeight, tuple[int, int]]:
    """An entry of a header. CheckpointProblem for a dtype that torch has not, DamagedCheckpoint for anything else that is odd."""
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = fields.get("shape"), fields.get("data_offsets"), fields.get("dtype")
    fits = isinstance(shape, list) and len(shape) <= 64 and isinstance(offsets, list) and len(offsets) == 2
    numbers: list[Any] = [*shape, *offsets] if fits else []  # type: ignore[misc]
    if not fits or not all(type(n) is int and 0 <= n < 2**62 for n in numbers) or not isinstance(dtype, str):
        raise DamagedCheckpoint(f"{path} does not say dtype, shape and place of {name[:200]!r}: download or export it anew")
    if dtype not in _BY_NAME:
        raise CheckpointProblem(
            f"{path} has {name[:200]!r} in {dtype[:20]}, which is quantised or unknown: load weights in {', '.join(_BY_NAME)}"
        )
    *sizes, begin, end = numbers
    return StoredWeight(path.name, _BY_NAME[dtype], tuple(sizes), base + begin), (begin, end)


class PretrainedWeights(Mapping[str, Weight]):
    """Full tensors by the first names of a model's, each a map of its bytes on disk, or read from several in parts.
    `unexpected`: names in the files that the model has not."""

    def __init__(self, files: WeightFiles, places: Mapping[str, FileWeight], unexpected: Sequence[str]) -> None:
        self.files, self.places, self.unexpected = files, places, unexpected

    def __getitem__(self, name: str) -> Weight:
        return opened(self.files.folder, self.places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def open_weights(path: Path, rounds: Rounds, names: Mapping[str, str], model: nn.Module | None) -> PretrainedWeights:
    """The weights of a folder for a model. All ranks call it together; CheckpointProblem on all of them where one cannot read it.

    `names`: each key of the model's state dict with the first name of that tensor; tied names need one of them in the files.
    Of a `model` of transformers files may have names with the prefix of its body or without it (``transformer.h.0`` and ``h.0``),
    and its conversions are made (`conversions`)."""
    files = rounds.on_first(lambda: list_files(path))
    prefix = body if isinstance(body := getattr(model, "base_model_prefix", ""), str) else ""
    by_name = converted(transforms_of(model), files.weights, lambda name: _name_in(names, name, prefix) is not None)
    stored = {key: name for key in names if (name := _name_in(by_name, key, prefix)) is not None}
    places: dict[str, FileWeight] = {}
    twice: list[tuple[str, str]] = []
    for key, name in stored.items():
        if by_name[name] != places.setdefault(names[key], by_name[name]):
            twice.append((names[key], name))
    used = set(stored.values())
    weights = PretrainedWeights(files, places, [name for name in by_name if name not in used])

    with rounds.together():
        for file, size in files.sizes.items():
            try:
                if (files.folder / file).stat().st_size != size:
                    raise DamagedCheckpoint(
                        f"{files.folder / file} has another length than on rank 0: name a folder that all share"
                    )
            except OSError as error:
                raise CheckpointProblem(
                    f"cannot read {files.folder / file}: {error.strerror}: name a folder that all nodes share"
                ) from None
        for first, other in twice if rounds.rank == 0 else ():
            if not torch.equal(whole_weight(opened(files.folder, by_name[other])), whole_weight(weights[first])):
                raise CheckpointProblem(
                    f"{other} in {files.folder} is another tensor than {first}, to which the model ties it: build the model "
                    "without that tie (tie_word_embeddings=False)"
                )
    return weights


def _name_in(weights: Mapping[str, object], key: str, prefix: str) -> str | None:
    """The name of a tensor in the files."""
    if key in weights or not prefix:
        return key if key in weights else None
    other = key.removeprefix(f"{prefix}.") if key.startswith(f"{prefix}.") else f"{prefix}.{key}"
    return other if other in weights else None


def misfit(name: str, weight: FileWeight, shape: Sequence[int], dtype: torch.dtype, *, narrowing: bool) -> str:
    """Return why a weight of a file cannot be loaded into a tensor of the model; empty where it can. `narrowing`: a
    floating-point number may be rounded to a shorter type."""
    if weight.shape != tuple(shape):
        return f"{name} has shape {weight.shape} in {weight.file}, and {tuple(shape)} in the model: build that file's model"
    if weight.dtype == dtype:
        return ""
    difference = f"{name} is {_short(weight.dtype)} in {weight.file}, and {_short(dtype)} in the model"
    if not (weight.dtype.is_floating_point and dtype.is_floating_point) or weight.dtype.itemsize == 1 or dtype.itemsize == 1:
        return f"{difference}: build the model in {_short(weight.dtype)}, or convert the file"
    if not narrowing and torch.promote_types(weight.dtype, dtype) != dtype:
        return f"{difference}, which would round it: build the model in {_short(weight.dtype)}, or pass strict=False"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The names of the Hub's files and those of a model of transformers, which renames, stacks and concatenates weights when it loads
them: as transformers (5) says it itself, in data (`transformers.conversion_mapping`). Other conversions are not made."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from .header import StoredWeight
from .stacked import StackedWeight, Weight, stacked


class Operations(NamedTuple):
    """The operations of a conversion: each list of weights is stacked along `stack`, and the results are concatenated."""

    stack: int | None
    concatenate: int | None


def transforms_of(model: object, *, saving: bool = False) -> list[Any]:
    """Return what transformers does with weights of this model when it loads them, or undoes when it saves them, in loading's
    order; none of other models and of earlier versions. They are made anew, for one use."""
    known = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if known is None or not isinstance(model, known):
        return []
    try:
        module = importlib.import_module("transformers.conversion_mapping")
        found: Any = module.get_model_conversion_mapping(model, add_legacy=not saving)
    except (ImportError, AttributeError, TypeError):  # a version that does not say it, or otherwise
        return []
    if saving:  # as transformers, which does not know whether an earlier file had a prefix
        found = [each for each in found if type(each).__name__ != "PrefixChange"]
    return list(found)


def operations_of(converter: Any) -> Operations | None:
    """None where it does something else."""
    found = [(type(each).__name__, vars(each)) for each in converter.operations]
    names = [name for name, _ in found]
    if names not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"]):
        return None
    if len(converter.target_patterns) != 1 or any(set(said) - {"dim", "num_shards_attribute"} for _, said in found):
        return None
    if any(said.get("num_shards_attribute") is not None for _, said in found):
        return None
    dims = {name: said["dim"] for name, said in found}
    stack, sources = dims.get("MergeModulelist"), len(converter.source_patterns)
    if (stack is not None and stack < 0) or ("Concatenate" not in dims and sources != 1):
        return None
    return Operations(stack, dims.get("Concatenate"))


def converted(
    transforms: Sequence[Any], weights: Mapping[str, StoredWeight], fits: Callable[[str], bool]
) -> Mapping[str, Weight]:
    """The weights of files under the names of a model. `fits`: whether the model has one of that name; what it has not, or what
    needs another conversion, stays as it is."""
    if not transforms:
        return weights
    renamings = [each for each in transforms if not hasattr(each, "operations")]
    converters = [each for each in transforms if hasattr(each, "operations")]
    out: dict[str, Weight] = {}
    lists: dict[tuple[str, int], dict[str, list[str]]] = {}
    for name in sorted(weights, key=_natural):
        new = _renamed(name, renamings)
        new, number, pattern = _matched(new, converters)
        if not fits(new) or (pattern is None and (new in out or (new != name and new in weights))):
            out[name] = weights[name]
        elif pattern is None:
            out[new] = weights[name]
        else:
            lists.setdefault((new, number), {}).setdefault(pattern, []).append(name)
    for (new, number), by_pattern in lists.items():
        made, wanted = None, operations_of(converters[number])
        sources: list[str] = converters[number].source_patterns
        if wanted is not None and new not in out and new not in weights and all(each in by_pattern for each in sources):
            made = stacked([[weights[name] for name in by_pattern[each]] for each in sources], *wanted)
        if made is not None:
            out[new] = made
        else:
            out |= {name: weights[name] for names in by_pattern.values() for name in names}
    return out


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for each in renamings:
        name = each.rename_source_key(name)[0]
    return name


def _matched(name: str, converters: Sequence[Any]) -> tuple[str, int, str | None]:
    """The name that the first converter gives that has it, which one, and by which of its patterns."""
    for number, each in enumerate(converters):
        new, pattern = each.rename_source_key(name)
        if pattern is not None:
            return new, number, pattern
    return name, -1, None


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Numbers in their order: that in which transformers stacks."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


# -- export


class HubTensor(NamedTuple):
    """A tensor of the files: its name there, and which box of the model's it is."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]


def hub_tensors(model: object, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[HubTensor]] | None:
    """The tensors of files by the name of the model's, from its shapes. None where a conversion is not one of these, or where
    loading what would be written does not give the model's: then all names stay."""
    transforms = transforms_of(model, saving=True)
    try:
        backward = [each.reverse_transform() for each in reversed(transforms)]
    except (ValueError, NotImplementedError):  # one that loads only
        return None
    renamings = [each for each in backward if not hasattr(each, "operations")]
    converters = [each for each in backward if hasattr(each, "operations")]
    forward = [each for each in reversed(transforms) if hasattr(each, "operations")]
    out: dict[str, list[HubTensor]] = {}
    for name, shape in shapes.items():
        new, number, pattern = _matched(name, converters)
        if pattern is None:
            bare = tuple(shape)
            out[name] = [HubTensor(_renamed(name, renamings), bare, (0,) * len(bare), bare)]
            continue
        wanted = operations_of(forward[number])
        parts = None if wanted is None else _parts(new, converters[number].target_patterns, tuple(shape), wanted)
        if parts is None:
            return None
        out[name] = [part._replace(name=_renamed(part.name, renamings)) for part in parts]
    return out if _comes_back(transforms_of(model), shapes, out) else None


def _parts(name: str, patterns: Sequence[str], shape: tuple[int, ...], wanted: Operations) -> list[HubTensor] | None:
    """Return the parts of a stacked tensor. `name`: with the first of the patterns in it, whose ``*`` is a number."""
    before, found, after = name.partition(patterns[0])
    joined = None if wanted.concatenate is None else wanted.concatenate % len(shape)
    if not found or (joined is not None and shape[joined] % len(patterns)) or joined == wanted.stack:
        return None
    if wanted.stack is not None and (wanted.stack >= len(shape) or any("*" not in each for each in patterns)):
        return None
    size = list(shape)
    if joined is not None:
        size[joined] //= len(patterns)
    numbers = 1
    if wanted.stack is not None:
        numbers, size[wanted.stack] = shape[wanted.stack], 1
    out = []
    for number in range(numbers):
        for which, pattern in enumerate(patterns):
            start = [0] * len(shape)
            if wanted.stack is not None:
                start[wanted.stack] = number
            if joined is not None:
                start[joined] = which * size[joined]
            own = tuple(n for dim, n in enumerate(size) if dim != wanted.stack)
            out.append(HubTensor(before + pattern.replace("*", str(number)) + after, own, tuple(start), tuple(size)))
    return out


def _comes_back(transforms: Sequence[Any], shapes: Mapping[str, Sequence[int]], parts: Mapping[str, list[HubTensor]]) -> bool:
    """Whether loading these names gives each box of each tensor its place."""
    numbers, weights = count(), {}
    expected: dict[str, set[tuple[Any, ...]]] = {}
    for name, each in parts.items():
        for part in each:
            number = next(numbers)
            if part.name in weights:
                return False
            weights[part.name] = StoredWeight("", torch.float32, part.shape, number)
            expected.setdefault(name, set()).add((number, part.start, part.size))
    found = converted(transforms, weights, lambda name: name in shapes)
    if found.keys() != shapes.keys():
        return False
    for name, weight in found.items():
        if isinstance(weight, StackedWeight):
            got = {(tile.weight.start, tile.start, tile.size) for tile in weight.tiles}
        else:
            got = {(weight.start, (0,) * len(weight.shape), weight.shape)}
        if got != expected[name] or weight.shape != tuple(shapes[name]):
            return False
    return True

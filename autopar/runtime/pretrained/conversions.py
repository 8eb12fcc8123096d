"""The names of the Hub's files and those of a model of transformers, which renames, stacks and concatenates weights when it loads
them: as transformers (5) says it itself, in data (`transformers.conversion_mapping`). Other conversions are not made."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .stacked import FileWeight, StoredWeight, stacked


class Operations(NamedTuple):
    """The operations of a conversion: each list of weights is stacked along `stack`, and the results are concatenated."""

    stack: int | None
    concatenate: int | None


def transforms_of(model: object, *, saving: bool = False) -> list[Any]:
    """Return what transformers does with weights of this model when it loads them, or undoes when it saves them, in loading's
    order; none of other models and of earlier versions. They are made anew, for one use."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None or not isinstance(model, kind):
        return []
    try:
        module = importlib.import_module("transformers.conversion_mapping")
        transforms: Any = module.get_model_conversion_mapping(model, add_legacy=not saving)
    except (ImportError, AttributeError, TypeError):  # a version that does not say it, or otherwise
        return []
    if saving:  # as transformers, which does not know whether an earlier file had a prefix
        transforms = [each for each in transforms if type(each).__name__ != "PrefixChange"]
    return list(transforms)


def operations_of(converter: Any) -> Operations | None:
    """Return the operations of a conversion; None where it does something else."""
    operations = [(type(each).__name__, vars(each)) for each in converter.operations]
    names = [name for name, _ in operations]
    if names not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"]):
        return None
    if len(converter.target_patterns) != 1 or any(set(options) - {"dim", "num_shards_attribute"} for _, options in operations):
        return None
    if any(options.get("num_shards_attribute") is not None for _, options in operations):
        return None
    dims = {name: options["dim"] for name, options in operations}
    stack, sources = dims.get("MergeModulelist"), len(converter.source_patterns)
    if (stack is not None and stack < 0) or ("Concatenate" not in dims and sources != 1):
        return None
    return Operations(stack, dims.get("Concatenate"))


def converted(
    transforms: Sequence[Any], weights: Mapping[str, StoredWeight], fits: Callable[[str], bool]
) -> Mapping[str, FileWeight]:
    """The weights of files under the names of a model. `fits`: whether the model has one of that name; what it has not, or what
    needs another conversion, stays as it is."""
    if not transforms:
        return weights
    renamings = [each for each in transforms if not hasattr(each, "operations")]
    converters = [each for each in transforms if hasattr(each, "operations")]
    out: dict[str, FileWeight] = {}
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
        stack, wanted = None, operations_of(converters[number])
        sources: list[str] = converters[number].source_patterns
        if wanted is not None and new not in out and new not in weights and all(each in by_pattern for each in sources):
            stack = stacked([[weights[name] for name in by_pattern[each]] for each in sources], *wanted)
        if stack is not None:
            out[new] = stack
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
    """Return a key that sorts numbers in their order: that in which transformers stacks."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


# -- export


class HubTensor(NamedTuple):
    """A tensor of the files: its name there, and which box of the model's it is."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]


def hub_tensors(model: object, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[HubTensor]] | None:
    """Return the tensors of files by the name of the model's, from its shapes: those from which loading makes the model's. None
    where a conversion is not one of these, or where loading makes something else of them: then all names stay."""
    transforms = transforms_of(model, saving=True)
    try:
        backward = [each.reverse_transform() for each in reversed(transforms)]
    except (ValueError, NotImplementedError):  # one that loads only
        return None
    renamings = [each for each in backward if not hasattr(each, "operations")]
    converters = [each for each in backward if hasattr(each, "operations")]
    forward = [each for each in reversed(transforms) if hasattr(each, "operations")]
    weights: dict[str, StoredWeight] = {}  # `start` is the number of each
    for name, shape in shapes.items():
        new, number, pattern = _matched(name, converters)
        sources = [(name, tuple(shape))]
        if pattern is not None:
            wanted = operations_of(forward[number])
            sources = _sources(new, converters[number].target_patterns, shape, wanted) if wanted is not None else []
        for source, extents in sources:
            weights[_renamed(source, renamings)] = StoredWeight("", torch.float32, extents, len(weights))
    loaded, names = converted(transforms_of(model), weights, lambda name: name in shapes), list(weights)
    if loaded.keys() != shapes.keys() or any(loaded[name].shape != tuple(shape) for name, shape in shapes.items()):
        return None
    return {
        name: [HubTensor(names[each.weight.start], each.weight.shape, each.start, each.size) for each in loaded[name].tiles]
        for name in shapes
    }


def _sources(name: str, patterns: Sequence[str], shape: Sequence[int], wanted: Operations) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of the weights that a stacked tensor is made of; none where its shape does not divide. `name`: with
    the first of the patterns in it, whose ``*`` is a number."""
    before, place, after = name.partition(patterns[0])
    joined = None if wanted.concatenate is None else wanted.concatenate % len(shape)
    if not place or (joined is not None and shape[joined] % len(patterns)) or joined == wanted.stack:
        return []
    if wanted.stack is not None and (wanted.stack >= len(shape) or any("*" not in each for each in patterns)):
        return []
    size, count = list(shape), 1
    if joined is not None:
        size[joined] //= len(patterns)
    if wanted.stack is not None:
        count = size.pop(wanted.stack)
    return [(before + each.replace("*", str(number)) + after, tuple(size)) for number in range(count) for each in patterns]

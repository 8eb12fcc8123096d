"""What export densified comes back: causal and absent masks, grouped query heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from autopar.capture.evaluate import evaluate_constant
from autopar.capture.flat import Flat, rewrite_nodes
from autopar.ir.dims import values as sizes
from autopar.ir.graph import Arg, Node, Ref

SDPA = "aten.scaled_dot_product_attention"
_LIMIT = 1 << 29
_BATCH = 2


def full_arguments(node: Node) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """(q, k, v, mask, dropout_p, is_causal) and the keyword arguments, defaults filled in."""
    defaults: tuple[tuple[str, Arg], ...] = (("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False))
    kwargs = dict(node.kwargs)
    args = list(node.args)
    for name, default in defaults[len(args) - 3 :]:
        args.append(kwargs.pop(name, default))
    return tuple(args), kwargs


def mask_recovery(flat: Flat) -> Flat:
    """A mask that no input decides is evaluated: all true vanishes, triangular becomes ``is_causal``; others stay, noted."""
    verdicts: dict[str, str] = {}
    notes: list[str] = []
    known = flat.values()

    def verdict(name: str, q: str) -> str:
        if name not in verdicts:
            shape = sizes(known[name].shape, _BATCH)
            if len(shape) < 2 or shape[-1] * shape[-2] * _BATCH > _LIMIT:
                verdicts[name] = "kept"
            else:
                mask = evaluate_constant(flat, name, _BATCH)
                verdicts[name] = "kept" if mask is None else classify(mask, known[q].shape[-2] == known[name].shape[-1])
            if verdicts[name] == "kept":
                notes.append(f"attention keeps an explicit mask {known[name].shape}: no flash attention there")
        return verdicts[name]

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        if node.op != SDPA:
            return None
        args, kwargs = full_arguments(node)
        mask, q = args[3], args[0]
        if isinstance(mask, Ref) and isinstance(q, Ref):
            found = verdict(mask.name, q.name)
            if found != "kept":
                args = (*args[:3], None, args[4], args[5] if found == "absent" else True)
        return (replace(node, args=args, kwargs=tuple(kwargs.items())),), {}

    flat = rewrite_nodes(flat, step)
    return replace(flat, notes=(*flat.notes, *notes))


def classify(mask: Tensor, square: bool) -> str:
    """``absent``, ``causal`` or ``kept``. A float mask is added to the scores: 0 allows, the lowest numbers forbid."""
    if mask.dtype != torch.bool:
        if not bool(((mask == 0) | (mask <= -1e4)).all()):
            return "kept"
        mask = mask == 0
    if bool(mask.all()):
        return "absent"
    rows, columns = mask.shape[-2:]
    if not square or rows != columns:
        return "kept"
    lower = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if all(torch.equal(one, lower) for one in mask.reshape(-1, rows, columns)) else "kept"


def grouped_heads(flat: Flat) -> Flat:
    """Keys and values repeated for each group of query heads are handed over unrepeated, with ``enable_gqa``."""
    values, producers = flat.values(), flat.producers()

    def unrepeated(name: str) -> str | None:
        shape, chain = values[name].shape, []
        for op in ("aten.reshape", "aten.expand", "aten.unsqueeze"):
            producer = producers.get(name)
            if producer is None or producer.op != op:
                return None
            chain.append(values[name].shape)
            name = producer.operands()[0]
        source = values[name].shape
        if len(source) != 4 or len(chain[1]) != 5 or chain[2] != (*source[:2], 1, *source[2:]):
            return None
        expected = (source[0], source[1] * chain[1][2], *source[2:])  # type: ignore[operator]
        return name if shape == expected and chain[1] == (*source[:2], chain[1][2], *source[2:]) else None

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        if node.op != SDPA:
            return None
        args, kwargs = full_arguments(node)
        assert isinstance(args[1], Ref) and isinstance(args[2], Ref)
        k, v = unrepeated(args[1].name), unrepeated(args[2].name)
        if k is None or v is None or values[k].shape[1] != values[v].shape[1]:
            return None
        args = (args[0], Ref(k), Ref(v), *args[3:])
        return (replace(node, args=args, kwargs=tuple((kwargs | {"enable_gqa": True}).items())),), {}

    return rewrite_nodes(flat, step)

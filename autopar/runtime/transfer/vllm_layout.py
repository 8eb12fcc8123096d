"""The layout that vLLM gives the weights of a decoder for a degree of tensor parallelism, as a table of parameter kinds.

The facts are those of vLLM's ``model_executor/layers``: column parallel layers cut their outputs, row parallel ones their
inputs; the projections of queries, keys and values are one tensor, and so are those of gate and up; a rank has the heads of
keys and values whole, so that several have the same ones where there are fewer heads than ranks; the vocabulary is padded to a
multiple of 64.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import TransferProblem
from .weight_layout import AxisShard, TensorLayout, WeightLayout

_COLUMN, _HEADS, _ROW, _VOCABULARY, _REPLICATED = "column", "heads", "row", "vocabulary", "replicated"

_KINDS = {
    "q_proj": (_COLUMN, "qkv_proj"),
    "k_proj": (_HEADS, "qkv_proj"),
    "v_proj": (_HEADS, "qkv_proj"),
    "gate_proj": (_COLUMN, "gate_up_proj"),
    "up_proj": (_COLUMN, "gate_up_proj"),
    "o_proj": (_ROW, ""),
    "down_proj": (_ROW, ""),
    "embed_tokens": (_VOCABULARY, ""),
    "lm_head": (_VOCABULARY, ""),
}
"""Module -> kind of its parameters, and the fused module, whose parts come in the order of this table."""

_PADDING = 64


class VllmLayout(NamedTuple):
    """vLLM's layout for `tp` ranks of a model with so many heads of keys and values (``config.num_key_value_heads``). Its names
    are those of transformers."""

    tp: int
    kv_heads: int

    def of(self, source: WeightLayout) -> WeightLayout:
        """Return the layout of the tensors of `source`. TransferProblem names one that the table has no kind for, or that does
        not divide."""
        if not all(type(count) is int and count > 0 for count in self):
            raise TransferProblem(f"{self}: write the number of ranks, and that of heads of keys and values, each 1 or more")
        order = list(_KINDS)
        modules = {name: name.split(".")[-2:-1] for name in source.tensors}
        listed = [name for name, tensor in source.tensors.items() if not tensor.buffer]  # vLLM makes its own
        names = sorted(listed, key=lambda name: order.index(modules[name][0]) if modules[name][0] in order else -1)
        return WeightLayout({"tp": self.tp}, {name: self._tensor(name, source.tensors[name]) for name in names})

    def _tensor(self, name: str, tensor: TensorLayout) -> TensorLayout:
        *prefix, module, attribute = ["", *name.split(".")]
        if module not in _KINDS and "norm" not in module:
            raise TransferProblem(
                f"{name} is of no kind that autopar knows of vLLM's layout ({', '.join(_KINDS)}, norms): plan without it"
            )
        kind, fused = _KINDS.get(module, (_REPLICATED, ""))
        whole = ".".join((*prefix[1:], fused, attribute)) if fused else ""
        return TensorLayout(tensor.dtype, tensor.shape, self._shards(kind, name, tensor.shape), fused=whole)

    def _shards(self, kind: str, name: str, shape: tuple[int, ...]) -> tuple[AxisShard, ...]:
        dim, copies = (1 if kind == _ROW else 0), 1
        if kind == _REPLICATED or dim >= len(shape):  # the bias of a row parallel layer is whole
            return ()
        if kind == _VOCABULARY:
            padded = -(-shape[0] // _PADDING) * _PADDING
            if padded % self.tp:
                raise TransferProblem(
                    f"the padded vocabulary {padded} of {name} does not divide by tp={self.tp}, in vLLM neither"
                )
            return (AxisShard("tp", 0, width=padded // self.tp),)
        ranks = self.tp
        if kind == _HEADS:
            ranks = min(self.tp, self.kv_heads)
            if self.tp % ranks or self.kv_heads % ranks:
                raise TransferProblem(f"{self.kv_heads} heads of keys and values do not divide by tp={self.tp}, in vLLM neither")
            copies = self.tp // ranks
        if shape[dim] % ranks:
            raise TransferProblem(f"{name} {shape} does not divide by tp={self.tp}, in vLLM neither")
        return (AxisShard("tp", dim, copies=copies),)

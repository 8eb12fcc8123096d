"""``varlen_attn`` becomes attention within documents, equal to one document at a time; what it cannot be is refused in a line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.varlen_models import Documents, VarlenModel, packed_tokens
from support.oracles.interpret_graph import check_captured
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from autopar.capture import capture
from autopar.capture.tracing.data.varlen import VarlenAttention, one_at_a_time
from autopar.errors import BatchError, CaptureError
from autopar.ir.graph import Graph
from autopar.runtime.ops.attention.documents import document_numbers

ROWS = (5, 16, 21, 21, 0, 1, 20)
"""Documents that end where rows of 21 tokens do."""
FORMS = {"rows": (4, 21), "one row": (1, 84), "tokens": (84,)}


def within_documents(graph: Graph) -> list[Any]:
    nodes = [node for block in graph.blocks for node in block.nodes if "attention" in node.op]
    return [dict(node.kwargs).get("window") for node in nodes if node.op == "ap.attention_documents"]


WINDOWS: dict[tuple[int, int], Any] = {
    (-1, 0): None, (-1, -1): None, (3, 0): (3, 0), (0, 0): (0, 0), (2, 3): "mask", (2, -1): "mask"
}  # fmt: skip
"""Keys before and after a query, and how they are known; a window on both sides stays a mask."""
CASES = [("rows", each) for each in WINDOWS] + [(form, each) for form in ("one row", "tokens") for each in ((3, 0), (2, 3))]


@pytest.mark.parametrize(("form", "window"), CASES)
def test_equals_one_document_at_a_time(form: str, window: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = VarlenModel(window, 0.3, layers=1).double()
    batch = packed_tokens(ROWS if form == "rows" else (5, 43, 0, 36), FORMS[form])
    graph = capture(model, (), batch)
    assert within_documents(graph) == [each for each in (WINDOWS[window],) if each != "mask"]
    check_captured(graph, model, batch, eager=VarlenAttention(one_at_a_time))


def test_what_the_kernel_takes_may_be_a_tuple() -> None:
    """Two inputs say where documents end, which are compared when the program runs."""
    batch: dict[str, Any] = packed_tokens(ROWS, (4, 21))
    ends = batch.pop("cu_seqlens")
    graph = capture(VarlenModel(), (), batch | {"documents": Documents(ends, ends, 24, 24)})
    assert graph.batch == 4 and [value.shape for value in graph.inputs] == [("B", 21), ("B", 21), (8,), (8,)]
    assert within_documents(graph) == [None]


class Refused(VarlenModel):
    def __init__(self, kind: str) -> None:
        super().__init__(layers=1)
        self.layers[0].attend = getattr(self, kind)  # type: ignore[assignment]

    def sums(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Any:
        return varlen_attn(q, k, v, *documents, enable_gqa=True, return_aux=AuxRequest(lse=True))[0]

    def cache(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Any:
        return varlen_attn(q, k, v, *documents, enable_gqa=True, seqused_k=documents.cu_seq_k.diff())

    def other_documents(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Any:
        return varlen_attn(q, k, v, documents.cu_seq_q, documents.cu_seq_k[1:], 24, 24, enable_gqa=True)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("sums", "return_aux"), ("cache", "seqused_k"), ("other_documents", r"document\[q\] == document\[k\]")],
)
def test_what_documents_cannot_be_is_refused(kind: str, said: str) -> None:
    with pytest.raises(CaptureError, match=rf"^[^\n]*test_varlen.py:\d+: varlen_attn [^\n]*{said}[^\n]*$"):
        capture(Refused(kind), (), packed_tokens(ROWS, (4, 21)))


@pytest.mark.parametrize(
    ("ends", "others", "rows", "said"),
    [
        ((0, 5, 10), None, 1, "end at 10, of 12 tokens"),
        ((0, 5, 14), None, 1, "end at 14"),
        ((3, 5, 12), None, 1, "begin at 0"),
        ((0, 7, 5, 12), None, 1, "not decrease"),
        ((), None, 1, "empty"),
        ((0, 5, 12), (0, 6, 12), 1, "cu_seq_q and cu_seq_k say different documents"),
        ((0, 6, 12), None, 3, r"reaches over token 4, .* one row \(1, 12\)"),
    ],
)
def test_lengths_that_do_not_fit_are_one_line(ends: Any, others: Any, rows: int, said: str) -> None:
    given = [torch.tensor(each, dtype=torch.int32) for each in (ends, ends if others is None else others)]
    with pytest.raises(BatchError, match=rf"^[^\n]*{said}[^\n]*$"):
        document_numbers(*given, 12, rows)


def test_empty_documents_have_no_tokens() -> None:
    ends = torch.tensor([0, 0, 2, 2, 5, 5], dtype=torch.int32)
    assert document_numbers(ends, ends, 5, 1).tolist() == [1, 1, 3, 3, 3]

"""Losses: cross entropy of logits, and elementwise losses with a reduction."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.ir.placement import Invariant
from autopar.operations.notation.line_text import line_text
from autopar.operations.notation.rule import Derive, DerivedLine, NamedFunction, OperationCollective, argument
from autopar.operations.notation.spelling import function
from autopar.operations.operation import Operation, several
from autopar.operations.pointwise import broadcast_terms, elementwise_rule
from autopar.operations.reductions_and_scans import sum_dtype


def pointwise_loss_rule(position: int) -> Derive:
    """Writes the line of an elementwise loss with a reduction; argument `position` is ``reduction`` (0 none, 1 mean, 2 sum)."""

    def derive(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
        reduction = argument(node, position, "reduction", 1)
        if reduction == 0:
            return elementwise_rule(node, shapes)
        if reduction != 2 or shapes[0] != shapes[1]:
            return None
        summed = ([term + "+" if term.isalpha() else term for term in broadcast_terms(shape, shapes[0])] for shape in shapes)
        return DerivedLine(line_text(summed, [[]]), addends=())  # class weights are factors of every summand

    return derive


def cross_entropy_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """All-reduces of one maximum and of three sums per token, in the dtype of the loss (float32 for half precision)."""
    tokens, dtype = shapes[0][:-1], sum_dtype(node)
    return OperationCollective("all_reduce", tokens, dtype), OperationCollective("all_reduce", (3, *tokens), dtype)


CROSS_ENTROPY, PUBLISHED_IN_PLACE = "ap.cross_entropy_sum", "ap.cross_entropy_in_place"
TOKEN_LOG_PROBS = "ap.token_log_probs"
"""``log_softmax(logits, -1).gather(-1, index)`` without the logarithms of all classes."""
IN_CHUNKS = {"": "ap.linear_cross_entropy_sum", "ap.cross_entropy_sharded": "ap.linear_cross_entropy_sharded"}
"""For a function that computes the loss of logits (empty: the operation itself) the one that computes it from the operands of the
head, `CHUNK_TOKENS` at a time."""
WITHIN_LOSS = "ap.within_loss"
"""The function of the operations before that loss, the head and casts of its result, which it computes with each chunk."""
CHUNK_TOKENS = 1024
"""Rows at which a product with a large weight is bound by its arithmetic, and no longer by reading the weight: an H100 computes
300 operations of 16 bits in the time of one byte."""


def runs_in_chunks(function: str) -> bool:
    """Return whether a plan's function is one of a loss in chunks of tokens."""
    return function == WITHIN_LOSS or function in IN_CHUNKS.values()


_CROSS_ENTROPY = "...+ v+, ...+ -> ()"
_IN_CLASSES = NamedFunction("v", "", Invariant(), cross_entropy_collectives, at=(0, -1), uneven=True)
_SHARDED = (
    # the loss is equal on all ranks of the axis, and each rank computes the gradient of its own logits: Invariant
    replace(_IN_CLASSES, name="ap.cross_entropy_sharded", in_place=True),
    # of no strategy of the rule: `rules.loss_chunks` adds them where the logits are a head's
    replace(_IN_CLASSES, name=IN_CHUNKS["ap.cross_entropy_sharded"]),
    NamedFunction("", IN_CHUNKS[""]),
)

OPERATIONS = (
    Operation(CROSS_ENTROPY, _CROSS_ENTROPY, functions=_SHARDED, loss=True, transcendental=True, spelling=function("C")),
    Operation(PUBLISHED_IN_PLACE, _CROSS_ENTROPY, functions=_SHARDED[:1], loss=True, in_place=True, published=True),
    Operation("ap.cross_entropy_sharded", loss=True, spelling=function("C")),
    Operation(
        TOKEN_LOG_PROBS, "... v!, ... 1 -> ... 1", transcendental=True, spelling=function("C"),
        functions=(replace(_IN_CLASSES, name="ap.token_log_probs_sharded"),),
    ),
    Operation("ap.count_valid", "...+ -> ()", spelling=function("C")),
    Operation("ap.ctc_losses", "t! b c!, b u!, b, b -> b", spelling=function("C")),
    *several(Operation("aten", pointwise_loss_rule(2)), "mse_loss l1_loss smooth_l1_loss huber_loss kl_div"),
    Operation("aten.binary_cross_entropy", pointwise_loss_rule(3)),
    Operation("aten.binary_cross_entropy_with_logits", pointwise_loss_rule(4)),
)

"""Conversions of placements, which passes insert: whole, in buckets, or started early and waited for."""

from __future__ import annotations

from autopar.operations.notation.spelling import OperationCall, function
from autopar.operations.operation import Operation

CONVERT, CONVERT_MANY, START, WAIT = "ap.convert", "ap.convert_many", "ap.start", "ap.wait"


def _expression(call: OperationCall) -> str:
    axis, change = (str(dict(call.node.kwargs)[name]) for name in ("axis", "conversion"))
    count = dict(call.node.kwargs).get("micro_batches")
    return f'C.{call.packet}({call.args[0]}, {axis}, "{change}"{f", micro_batches={count}" if count else ""})'


OPERATIONS = (
    Operation(CONVERT, may_share=True, spelling=_expression),
    Operation(CONVERT_MANY, gives_tuple=True, spelling=_expression),
    Operation(START, spelling=_expression),
    Operation(WAIT, spelling=function("C")),
)

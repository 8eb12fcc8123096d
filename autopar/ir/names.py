"""The texts of graphs and plans as types, which msgspec checks where a plan file is read.

A plan is data from anywhere, and some of its strings become the text of a program: each field says what its string is.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    + ("float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "uint16", "uint32", "uint64")
)
LONGEST = 500

NAME = r"\w+"
OP = r"[A-Za-z_][A-Za-z0-9_]*(?:(?:::|\.)[A-Za-z0-9_]+)+"
LINE = r"[^\x00-\x1f\x7f\u0085\u2028\u2029]*"

Name = Annotated[str, Meta(pattern=rf"\A{NAME}\Z", max_length=LONGEST)]
"""The name of a value, block, node, argument or mesh axis; those of nn.Sequential may begin with a digit: "0_bias"."""
Path = Annotated[str, Meta(pattern=rf"\A{LINE}\Z", max_length=LONGEST)]
"""The path of a module, parameter or buffer; the model's own is empty."""
Op = Annotated[str, Meta(pattern=rf"\A{OP}\Z", max_length=LONGEST)]
Function = Annotated[str, Meta(pattern=rf"\A(?:{OP})?\Z", max_length=LONGEST)]
"""An operation, or none."""
Line = Annotated[str, Meta(pattern=rf"\A{LINE}\Z", max_length=LONGEST)]
"""One line, for people."""
Dtype = Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(sorted(DTYPES))})\Z")]
ScheduleName = Annotated[str, Meta(pattern=r"\A[a-z0-9_-]+\Z", max_length=LONGEST)]
Actions = Annotated[str, Meta(pattern=r"\A[0-9A-Z_ \n]*\Z", max_length=10_000_000)]
"""The text of a schedule."""

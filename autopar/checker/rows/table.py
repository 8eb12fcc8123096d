"""The table of operations: `row` finds how one carries types. Also the spellings of programs, and arguments that are sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.checker.captured import CapturedOperation
from autopar.checker.rows import elements, images, indexing, products, views
from autopar.checker.rows.carry import OperationRow
from autopar.checker.rows.elements import redundant as redundant
from autopar.checker.rows.lemmas import SAME as SAME
from autopar.checker.rows.operation_call import WholeCall, bind
from autopar.checker.shards import words_of

ROWS = {**elements.ROWS, **views.ROWS, **products.ROWS, **indexing.ROWS, **images.ROWS}
DETERMINISTIC = frozenset(("ap.constant", "ap.linear_float8_dynamic"))
ASSUMED = {
    "ap.linear_float8_dynamic": "shards are scaled by their own maxima, so that float8 rounds them otherwise than the whole",
    **dict.fromkeys(("ap.moe_experts_owned", "ap.moe_experts_dispatched", "ap.moe_experts_start"), (
        "the experts of each rank get equally many copies of tokens (memory only)")),
    "ap.local_mean": "statistics are those of each data rank's own examples, as was asked for",
}
"""Operations that are not equal on shards, but in what somebody asked for."""
SPELLINGS = frozenset(
    {
        ("aten.sub", "aten.rsub"), ("aten.pad", "aten.constant_pad_nd"), ("aten.max_pool2d", "aten.max_pool2d_with_indices"),
    }
)  # fmt: skip
"""(operation of the text, captured one) of other names."""
_SIZES: dict[str, tuple[str, ...]] = {
    "aten.reshape": ("shape", "size"), "aten.expand": ("size", "implicit"), "aten.zeros": ("size",), "aten.ones": ("size",),
    "aten.full": ("size",), "aten.empty": ("size",), "aten.new_zeros": ("size",), "aten.new_ones": ("size",),
    "aten.new_full": ("size",), "aten.new_empty": ("size",), "aten.group_norm": ("num_groups", "cudnn_enabled"),
    "aten.layer_norm": ("cudnn_enable",), "aten.conv1d": ("groups",), "aten.conv2d": ("groups",), "aten.conv3d": ("groups",),
    "aten.convolution": ("groups",), "aten.repeat_interleave": ("output_size",),
    "bitsandbytes.dequantize_4bit": ("shape", "4"),
    **dict.fromkeys((op for op in ROWS if op.startswith("aten.upsample_")), ("output_size",)),
    "aten.softmax": ("half_to_float", "dtype"), "aten.log_softmax": ("half_to_float", "dtype"),
}  # fmt: skip
_FACTORIES = frozenset(
    f"aten.{name}"
    for name in words_of("""zeros ones full empty new_zeros new_ones new_full new_empty arange scalar_tensor eye
    linspace logspace tril_indices triu_indices hann_window hamming_window blackman_window bartlett_window kaiser_window
    fft_fftfreq fft_rfftfreq range full_like zeros_like ones_like empty_like""")
)
"""Operations that the text tells the dtype of their results, which is compared there."""
_IGNORED = ("layout", "device", "pin_memory", "memory_format", "sharded_axes", "mode_of_draw", "axis", "non_blocking", "copy")


def row(call: WholeCall) -> OperationRow | None:
    """The row of an operation; None where the table has none."""
    make = ROWS.get(call.op)
    return None if make is None else make(call)


def exempt(op: str) -> tuple[str, ...]:
    """The arguments that are sizes of shards, which follow from shapes, and those that change no number."""
    made = ("dtype",) if op in _FACTORIES else ()
    return (*_IGNORED, *made, *_SIZES.get(op, ()), *(("mode",) if op in ("ap.dropout", "ap.random") else ()))


def bound(operation: CapturedOperation, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a line by the names that the captured operation has for them."""
    captured = operation.node.op
    if op == "aten.sub" and captured.startswith("aten.rsub"):
        args = args[::-1]
    own = {name: each for name, each in kwargs.items() if name not in ("sharded_axes",)}
    if op.endswith("softmax"):
        args, own = (*args[:2],), {name: each for name, each in own.items() if name != "dtype"}
        if captured.split(".")[1][0] == "_":
            args = (*args, operation.call.arguments.get("half_to_float"))
    if captured.startswith("ap.") and op == "ap.random":
        own = {name: each for name, each in own.items() if name != "dtype"}
    if captured == "ap.moe_experts":
        args = (*args, *(None,) * (7 - len(args)), *(own.pop(name, None) for name in ("activation", "layout", "capacity")))
    return bind(captured, args, own)

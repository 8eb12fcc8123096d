"""Rows and lemmas of operations on images ``[n, c, ...]``: convolutions, pools, interpolation.

Windows that do not overlap read rows of one run alone, and cut runs of whole windows are cut in the result. Where they overlap, a
function of the runtime fetches the rows that the neighbours have: a lemma, which says how many these may be.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.checker.rows.carry import Dim, Dims, OperationRow
from autopar.checker.rows.elements import Rows, aten
from autopar.checker.rows.operation_call import TensorName, WholeCall
from autopar.checker.shards import Shape


@dataclass(frozen=True, slots=True)
class Windows:
    """How results read rows along one dimension: each a window of ``reach + 1`` rows, `stride` apart, the first beginning
    `padding` rows before the image; or (`larger`) each row makes a window of results."""

    reach: int
    stride: int
    padding: int
    larger: bool = False

    @property
    def halo(self) -> tuple[int, int]:
        """The rows before and after its own that a rank reads."""
        if self.larger:
            return (self.reach - self.padding) // self.stride, -(-self.padding // self.stride)
        return self.padding, max(0, self.reach + 1 - self.stride - self.padding)

    def matches(self, rows: int, results: int) -> bool:
        """Whether equal shards of the rows make equal shards of the results."""
        if self.larger:
            return results == rows * self.stride and self.stride <= self.reach + 1 and self.padding <= self.reach
        return results * self.stride == rows


def _number(call: WholeCall, name: str, at: int, default: int) -> int:
    """An argument of one dimension of space."""
    found = call.get(name)
    if not isinstance(found, tuple):
        return default if found is None else int(found)
    return default if not found else int(found[0] if len(found) == 1 else found[at])


def windows(call: WholeCall, dim: int) -> Windows | None:
    """Return the windows along a dimension of space; None where an operation reads another number of rows for each result."""
    kind, at = call.op.removeprefix("aten.").rstrip("123d"), dim - 2
    if kind in ("conv", "conv_transpose") and len(call.shapes[0]) == len(call.shapes[1]):
        reach = _number(call, "dilation", at, 1) * (call.shapes[1][dim] - 1)
        given = call.get("padding")
        padding = (reach // 2 if given == "same" else 0) if isinstance(given, str) else _number(call, "padding", at, 0)
        return Windows(reach, _number(call, "stride", at, 1), padding, kind == "conv_transpose")
    if kind in ("max_pool", "avg_pool") and not call.get("ceil_mode", False) and len(call.results) == 1:
        kernel, padding = _number(call, "kernel_size", at, 1), _number(call, "padding", at, 0)
        counts = kind == "max_pool" or (call.get("count_include_pad", True) is True and call.get("divisor_override") is None)
        if counts or not any(_number(call, "padding", each, 0) for each in range(len(call.shapes[0]) - 2)):
            return Windows(_number(call, "dilation", at, 1) * (kernel - 1), _number(call, "stride", at, kernel), padding)
    if kind == "upsample_nearest" and call.results[0][dim] % call.shapes[0][dim] == 0:
        times = call.results[0][dim] // call.shapes[0][dim]
        scales = call.get("scale_factors")
        if "scale_factors" in call.arguments and (scales is None or scales[at] == times):
            return Windows(times - 1, times, 0, larger=True)
    return None


def _space(call: WholeCall, first: int) -> tuple[Dims, Dims]:
    """The dimensions of space of operand and result."""
    sides: tuple[list[Dim], list[Dim]] = [], []
    for dim in range(first, len(call.shapes[0])):
        rows, results = call.shapes[0][dim], call.results[0][dim]
        found = windows(call, dim) if first == 2 else None
        if found is None or any(found.halo) or not found.matches(rows, results):
            dims: tuple[Dim, Dim] = (("", rows),), (("", results),)
        else:
            own = f"s{dim}", min(rows, results)
            dims = (own, ("", rows // own[1])), (own, ("", results // own[1]))
        for side, each in zip(sides, dims, strict=True):
            side.append(each)
    return tuple(sides[0]), tuple(sides[1])


def convolution(call: WholeCall) -> OperationRow:
    """``conv2d convolution``: examples, output channels, groups, and input channels of one group, which are summed."""
    x, weight = call.shapes[:2]
    groups, turned = int(call.get("groups", 1)), bool(call.get("transposed", "transpose" in call.op))
    lead = len(x) - len(weight) + 1
    out = call.results[0][lead]
    space = _space(call, lead + 1)

    def channels(count: int, name: str) -> Dim:
        """Channels as groups, each of which has all of its own on one rank."""
        return (("g", groups), ("", count // groups)) if groups > 1 else ((name, count),)

    def image(shape: Shape, name: str, dims: Dims) -> Dims:
        return (*((("n", size),) for size in shape[:lead]), channels(shape[lead], name), *dims)

    within: Dim = (("" if groups > 1 else "o" if turned else "c", weight[1]),)
    outermost = channels(x[lead], "c") if turned else channels(out, "o")
    kernel = (outermost, within, *((("", size),) for size in weight[2:]))
    bias = tuple((channels(shape[0], "o"),) for shape in call.shapes[2:])
    operands, results = (image(x, "c", space[0]), kernel, *bias), (image(call.results[0], "o", space[1]),)
    return OperationRow(operands, results, {} if groups > 1 else {"c": "sum"}, (), (2,) if bias and groups == 1 else ())


def image(call: WholeCall) -> OperationRow:
    """Pools and interpolation ``_2d``: all but the last two dimensions, and of these such as windows do not share."""
    digits = [int(each) for each in call.op if each.isdigit()]
    lead = len(call.shapes[0]) - (digits[-1] if digits else len(call.shapes[0]))
    space = _space(call, lead)
    outer: Dims = tuple(((f"d{i}", size),) for i, size in enumerate(call.shapes[0][:lead]))
    whole = tuple((*outer, *((("", size),) for size in shape[lead:])) for shape in call.results[1:])
    others = tuple(tuple((("", size),) for size in shape) for shape in call.shapes[1:])
    return OperationRow(((*outer, *space[0]), *others), ((*outer, *space[1]), *whole))


def halo_fits(call: WholeCall, dim: int, size: int) -> bool:
    """Whether each of `size` ranks finds the rows that it reads in its shard and those beside it."""
    rows, results = call.shapes[0][dim], call.results[0][dim]
    if "linear" in call.op:
        scales = call.get("scale_factors")
        if "scale_factors" not in call.arguments or (scales is not None and scales[dim - 2] * rows != results):
            return False
        return len(call.shapes[0]) == int(call.op[-2]) + 2 and results % rows == 0 and rows % size == 0
    found = windows(call, dim)
    if found is None or not found.matches(rows, results) or min(rows, results) % size or min(found.halo) < 0:
        return False
    return max(found.halo) <= rows // size and len(call.shapes[0]) == int(call.op[-2]) + 2


def without_running(call: WholeCall) -> bool:
    """Whether a norm of each image takes its own statistics."""
    return call.get("use_input_stats", True) is True and not isinstance(call.get("running_mean"), TensorName)


ROWS: Rows = {
    **aten("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d", convolution),
    **{f"aten.{kind}_pool{n}d": image for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)},
    **aten(
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d "
        "upsample_linear1d upsample_trilinear3d",
        image,
    ),
}

"""Rows of operations that read or write elements by index."""

from __future__ import annotations

from collections.abc import Callable

from autopar.checker.rows.carry import OperationRow, plain
from autopar.checker.rows.elements import Rows, aten, letters, redundant
from autopar.checker.rows.operation_call import TensorName, WholeCall
from autopar.checker.rows.products import named


def gather(call: WholeCall) -> OperationRow:
    x, index = call.shapes
    dim = call.dim()
    same = [i != dim and x[i] == index[i] for i in range(len(x))]
    left = plain([f"d{i}" if same[i] else "" for i in range(len(x))], x)
    right = plain([f"d{i}" if same[i] or i == dim else "" for i in range(len(x))], index)
    return OperationRow((left, right), (right,), linear=((0,),))


def index_select(call: WholeCall) -> OperationRow:
    dim = call.dim()
    index = ((("i", call.shapes[1][0]),),) if call.shapes[1] else ()
    result = [(("i", size),) if i == dim else ((f"d{i}", size),) for i, size in enumerate(call.results[0])]
    return OperationRow((letters(call.shapes[0], without=(dim,)), index), (tuple(result),), linear=((0,),))


def indexed(call: WholeCall) -> OperationRow:
    """``x[:, i, j]`` with adjacent tensors."""
    given = call.get("indices", ())
    dims = [i for i, each in enumerate(given) if isinstance(each, TensorName)]
    x, result = call.shapes[0], call.results[0]
    many = len(result) - (len(x) - len(dims))
    adjacent = bool(dims) and dims == list(range(dims[0], dims[-1] + 1))
    if not adjacent or any(len(shape) > many for shape in call.shapes[1:]) or call.dtypes[1:2] == ("bool",):
        return redundant(call)
    first = dims[0]
    names = [f"d{i}" if i < first or i >= first + many else f"i{i - first}" for i in range(len(result))]
    outer = iter([name for name in names if name[0] == "d"])
    left = plain(["" if i in dims else next(outer) for i in range(len(x))], x)
    extent = result[first : first + many]
    others = [plain([f"i{many - len(s) + i}" if size == extent[many - len(s) + i] else "" for i, size in enumerate(s)], s)
              for s in call.shapes[1:]]  # fmt: skip
    return OperationRow((left, *others), (named(names, result),), linear=((0,),))


def index_put(call: WholeCall) -> OperationRow:
    given = call.get("indices", ())
    dims = [i for i, each in enumerate(given) if isinstance(each, TensorName)]
    x, values = call.shapes[0], call.shapes[-1]
    if dims != list(range(len(dims))) or "bool" in call.dtypes[1:-1]:
        return redundant(call)
    whole = letters(x, without=dims)
    own = ["" for _ in values]
    for back in range(1, len(x) - len(dims) + 1):
        if len(values) >= back and values[-back] == x[-back]:
            own[-back] = f"d{len(x) - back}"
    return OperationRow((whole, *(plain([""] * len(s), s) for s in call.shapes[1:-1]), plain(own, values)), (whole,))


def written(call: WholeCall) -> OperationRow:
    """``slice_scatter select_scatter(x, part, dim)``."""
    dim = call.dim(default=0)
    dims = letters(call.shapes[0], without=(dim,))
    part = dims[:dim] + dims[dim + 1 :]
    if len(call.shapes[1]) == len(dims):
        part = (*dims[:dim], (("", call.shapes[1][dim]),), *dims[dim + 1 :])
    return OperationRow((dims, part), (dims,), linear=((0, 1),))


def scatter(added: bool) -> Callable[[WholeCall], OperationRow]:
    def row(call: WholeCall) -> OperationRow:
        x, index = call.shapes[:2]
        dim = call.dim(default=0)
        same = [i != dim and all(shape[i] == x[i] for shape in call.shapes) for i in range(len(x))]
        along_dim = "z" if added and all(shape[dim] == index[dim] for shape in call.shapes[1:]) else ""
        whole = plain([f"d{i}" if same[i] else "" for i in range(len(x))], x)
        parts = [
            plain([f"d{i}" if same[i] else along_dim if i == dim else "" for i in range(len(x))], s) for s in call.shapes[1:]
        ]
        return OperationRow((whole, *parts), (whole,), {"z": "sum"} if along_dim else {}, (), (0,) if along_dim else ())

    return row


def index_add(call: WholeCall) -> OperationRow:
    dim = call.dim(default=0)
    whole = letters(call.shapes[0], without=(dim,))
    source = plain(["z" if i == dim else f"d{i}" for i in range(len(whole))], call.shapes[2])
    scaled = call.get("alpha", 1) != 1
    return OperationRow((whole, ((("z", call.shapes[1][0]),),) if call.shapes[1] else (), source), (whole,), {"z": "sum"}, (),
               (0,)) if not scaled else redundant(call)  # fmt: skip


ROWS: Rows = {
    "aten.gather": gather,
    "aten.index_select": index_select,
    "aten.index": indexed,
    **aten("index_put _unsafe_index_put", index_put),
    **aten("slice_scatter select_scatter", written),
    **dict.fromkeys(("aten.scatter", "aten.scatter_reduce"), scatter(added=False)),
    "aten.scatter_add": scatter(added=True),
    "aten.index_add": index_add,
}

"""Arguments that are no tensors: those of the text must be the model's, and where a dimension is cut, their share of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from autopar.checker.reader import END, PlacedTensor
from autopar.checker.rows.operation_call import TensorName, WholeCall, same_argument
from autopar.checker.shards import Axes, Kinds


@dataclass(frozen=True, slots=True)
class LocalArguments:
    """The arguments of one line (`given`) beside those of the captured operation."""

    axes: Axes
    call: WholeCall
    given: Mapping[str, Any]
    tensors: Sequence[PlacedTensor]
    kinds: Sequence[Kinds]

    def check(self, sizes: Collection[str]) -> None:
        """ValueError where an argument is another one. `sizes` are those that follow from shapes, which are compared."""
        special = {
            "aten.slice": self._slice, "aten.split": self._split, "aten.chunk": self._whole_parts,
            "aten.split_with_sizes": self._split, "aten.group_norm": self._groups,
        }.get(self.call.op, self._groups if "groups" in self.call.arguments else None)  # fmt: skip
        skipped = set(sizes)
        if special is not None:
            skipped |= special()
        for name, whole in self.call.arguments.items():
            if name in skipped or self._has_tensor(whole):
                continue
            own = self.given.get(name)
            whole = _as_written(whole) if self.call.op in ("ap.cond", "ap.while_loop") else whole
            if name in ("dim", "dim0", "dim1", "dims") and self._same_dims(own, whole):
                continue
            if not same_argument(own, whole):
                raise ValueError(f"{name} of {self.call.op} is {own!r}, and {whole!r} in the model")
        for name in set(self.given) - set(self.call.arguments) - skipped:
            if self.given[name] is not None:
                raise ValueError(f"{self.call.op} has no argument {name} in the model")

    def _has_tensor(self, value: Any) -> bool:
        return isinstance(value, TensorName) or (isinstance(value, tuple) and any(map(self._has_tensor, value)))

    def _same_dims(self, own: Any, whole: Any) -> bool:
        """A dimension may be counted from the end."""
        if self.call.op in ("aten.unsqueeze", "aten.stack") or not self.call.shapes or own is None or whole is None:
            return same_argument(own, whole)
        rank = max(1, len(self.call.shapes[0]))

        def plain(value: Any) -> Any:
            return tuple(map(plain, value)) if isinstance(value, tuple) else value % rank if type(value) is int else value

        return same_argument(plain(own), plain(whole))

    def _ranks(self, dim: int) -> int:
        return self.axes.ranks(self.tensors[0].kinds, dim)

    def _whole_runs(self, dim: int, place: int) -> None:
        """ValueError where a part of a cut dimension does not end where runs of all ranks do."""
        for inner, size in self.axes.digits(self.tensors[0].kinds, dim):
            if place % (inner * size):
                raise ValueError(f"a part ends at {place}, within the runs of {inner} elements that {size} ranks hold")

    def _slice(self) -> set[str]:
        dim = self.call.dim(default=0)
        extent, ranks = self.call.shapes[0][dim], self._ranks(dim)

        def bounds(given: Mapping[str, Any], size: int) -> tuple[int, int]:
            start, end = given.get("start") or 0, given.get("end")
            ends = [min(size, max(0, each + size if each < 0 else each)) for each in (start, END if end is None else end)]
            return ends[0], ends[1]

        start, end = bounds(self.call.arguments, extent)
        if ranks > 1:
            for place in (start, end):
                self._whole_runs(dim, place)
        own = bounds(self.given, extent // ranks)
        if own != (start // ranks, end // ranks):
            raise ValueError(f"ranks take elements {own[0]} to {own[1]}, the model {start} to {end} of {extent} on {ranks} ranks")
        return {"start", "end"}

    def _groups(self) -> set[str]:
        """Groups of channels: of those that a rank has."""
        name = "num_groups" if "num_groups" in self.call.arguments else "groups"
        whole, tensor = int(self.call.arguments[name]), self.tensors[0 if name == "num_groups" else 1]
        dim = 1 if name == "num_groups" else 0
        ranks = self.axes.ranks(tensor.kinds, dim) if whole > 1 else 1
        if whole % ranks or self.given.get(name) != whole // ranks:
            raise ValueError(f"{self.given.get(name)} groups on a rank, {whole} on {ranks} ranks in the model")
        return {name}

    def _whole_parts(self) -> set[str]:
        dim = self.call.dim(default=0)
        for place in accumulate(shape[dim] for shape in self.call.results):
            self._whole_runs(dim, place)
        return set()

    def _split(self) -> set[str]:
        dim = self.call.dim(default=0)
        ranks, sizes = self._ranks(dim), [shape[dim] for shape in self.call.results]
        for place in accumulate(sizes):
            self._whole_runs(dim, place)
        names = ("split_size", "split_sizes", "indices_or_sections")
        own = next((self.given[name] for name in names if name in self.given), None)
        local = self.tensors[0].local.shape[dim]
        parts = list(own) if isinstance(own, tuple) else [min(own, local - at) for at in range(0, local, own)] if own else []
        if parts != [size // ranks for size in sizes]:
            raise ValueError(f"ranks split {parts}, the model {sizes} on {ranks} ranks")
        return set(names)


def _as_written(region: Any) -> Any:
    """The body of a branch as programs have it: statements without the shapes and dtypes of their results."""
    if isinstance(region, tuple) and len(region) == 3 and isinstance(region[1], tuple):
        names, statements, results = region
        if all(isinstance(each, tuple) and len(each) == 5 for each in statements):
            written = ((made, op, tuple(map(_as_written, args)), kwargs) for made, op, args, kwargs, _ in statements)
            return names, tuple(written), results
    return region

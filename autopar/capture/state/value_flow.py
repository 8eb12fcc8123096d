"""The operations that tensors are made by, recorded while they run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tag, Tensor, dtype
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.capture.state.python_state import Leaf
from autopar.capture.tracing.places import user_line

SAME_VALUES = frozenset(("clone", "detach", "alias", "_to_copy", "lift_fresh", "view", "_unsafe_view"))


@dataclass(eq=False, slots=True)
class Origin:
    """An operation that ran in the call with this number, at a line. `varies`: its values depend on those of the batch, of
    weights or of random numbers. `constants`: its operands that are no tensors, and the positions of those that are inputs."""

    name: str
    inputs: tuple[Origin, ...]
    varies: bool
    number: int = 0
    line: str = ""
    constants: tuple[str, ...] = ()


class ValueFlow(TorchDispatchMode):
    """Records the operations that made each tensor, by its memory."""

    supports_higher_order_operators = True

    def __init__(self, varying: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, list[Origin]] = {}
        self._memory: list[Any] = []  # its addresses are not used again
        self.number = 1
        for number, tensor in enumerate(varying):
            self.add(tensor, Origin(f"input {number}", (), True))

    def origins(self, *tensors: Tensor) -> list[Origin]:
        """The operations that wrote into the memory of tensors, in order."""
        return [each for tensor in tensors for each in self._origins.get(address(tensor), ())]

    def add(self, tensor: Tensor, origin: Origin) -> None:
        """Note that an operation wrote into a tensor."""
        self._memory.append(tensor)
        self._origins.setdefault(address(tensor), []).append(origin)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
        leaves = tree_leaves((args, kwargs))
        given = [each for each in leaves if isinstance(each, Tensor)]
        results = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        of_sizes = name.startswith("new_") or name.endswith("_like")
        inputs = () if of_sizes else tuple(dict.fromkeys(self.origins(*given)))
        draws = Tag.nondeterministic_seeded in getattr(func, "tags", ())
        constants = [str(each) for each in leaves if isinstance(each, (bool, int, float, complex, str, dtype))]
        constants += [each.name for each in inputs if each.name.startswith("input")]
        varies = draws or any(each.varies for each in inputs)
        origin = Origin(name, inputs, varies, self.number, user_line(), tuple(constants))
        if getattr(getattr(func, "_schema", None), "is_mutable", False):
            results = results or given  # lists in place
        else:  # a view has the origins of what it is of
            before = set(map(address, given))
            results = [each for each in results if address(each) not in before]
        for tensor in results:
            self.add(tensor, origin)
        return result

    def copies(self, leaf: Leaf) -> list[Origin]:
        """Put copies in the place of the tensors of a leaf, and return the operations that stand for them."""
        out: list[Origin] = []

        def copy(x: Tensor) -> Tensor:
            made = x.clone()
            out.append(Origin("copy", (), False))
            self.add(made, out[-1])
            return made

        if leaf.tensors:
            leaf.put(tree_map_only(Tensor, copy, leaf.value))
        return out

    def ancestors(self, tensors: Iterable[Tensor]) -> set[Origin]:
        """The operations that these tensors are made by, directly or not."""
        seen, todo = set[Origin](), self.origins(*tensors)
        while todo:
            if (origin := todo.pop()) not in seen:
                seen.add(origin)
                todo += origin.inputs
        return seen

    def has_values_of(self, tensor: Tensor, copies: Collection[Origin]) -> bool:
        """Return whether a tensor has the values of a copy, perhaps in another dtype."""
        made = self.origins(tensor)
        while len(made) == 1 and made[0] not in copies and made[0].name in SAME_VALUES:
            made = list(made[0].inputs)
        return any(each in copies for each in made)


def address(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # a sparse one
        return id(tensor)

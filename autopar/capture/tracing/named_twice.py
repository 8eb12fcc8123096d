"""Parameters and buffers that a module also keeps in a plain dictionary or list: export puts what it traces in the place of the
registered ones only, so these containers read from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

Home = tuple[nn.Module, str]
"""A module, and the attribute that a parameter or buffer of it is."""


def read_from_modules(model: nn.Module) -> None:
    """The containers of `model`, in place: what they hold of its parameters and buffers is read from the modules."""
    homes: dict[int, Home] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                homes.setdefault(id(tensor), (module, name))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in vars(nn.Module()) and type(value) in (dict, list):
                vars(module)[name] = _live(value, homes)


def _live(value: Any, homes: Mapping[int, Home]) -> Any:
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    own = {key: homes[id(each)] for key, each in pairs if isinstance(each, Tensor) and id(each) in homes}
    if not own:
        return value
    made = _LiveDict(value) if isinstance(value, dict) else _LiveList(value)
    made.homes = own
    return made


class _LiveDict(dict[Any, Any]):
    homes: Mapping[Any, Home]

    def __getitem__(self, key: Any) -> Any:
        return getattr(*self.homes[key]) if key in self.homes else super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (it is what get is)

    def values(self) -> Any:
        return {key: self[key] for key in self}.values()

    def items(self) -> Any:
        return {key: self[key] for key in self}.items()


class _LiveList(list[Any]):
    homes: Mapping[int, Home]

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[Any]:
        for index, each in enumerate(super().__iter__()):
            yield getattr(*self.homes[index]) if index in self.homes else each

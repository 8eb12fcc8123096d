"""Python objects of a checkpoint: numbers, text, tensors, lists and dictionaries. Read by torch's restricted unpickler alone
(``weights_only``), which makes nothing else; what it would not read back is refused when it is saved."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointProblem, DamagedCheckpoint

_KIND = re.compile(r"GLOBAL (\S+)")


def to_bytes(value: Any) -> bytes:
    """A value as torch.save writes it, its tensors on the CPU."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(content: bytes, where: object) -> Any:
    """The inverse, on the CPU. DamagedCheckpoint, which names `where`, for what is no such value."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # of damaged bytes, torch raises many kinds
        raise DamagedCheckpoint(f"{where} cannot be read: {_reason(error)}") from None


def check_plain(values: Mapping[str, Any], name: str) -> None:
    """Raise a CheckpointProblem for an entry of `values` that would not be read back; `name` stands for `values`."""
    for key, value in values.items():
        try:
            torch.load(io.BytesIO(to_bytes(value)), weights_only=True)
        except Exception as error:
            raise CheckpointProblem(
                f"{name}[{key!r}] cannot be saved ({_reason(error)}): a checkpoint holds numbers, text, tensors, lists and "
                "dictionaries of them; save its state_dict()"
            ) from None


def _reason(error: Exception) -> str:
    kind = _KIND.search(str(error))
    return f"it has a {kind[1].rstrip('.')}" if kind else str(error).strip().partition("\n")[0][:200]

"""Lines and modules of the user's code, of a frame that runs or a node of an exported program; and what kind of node that is."""

from __future__ import annotations

import random
import re
import sys
from types import FrameType

import torch
from torch import fx

from autopar.capture.layers import CALL_MARK

TORCH_ROOT = torch.__file__.rsplit("/", 1)[0]
_LIBRARIES = (TORCH_ROOT, random.__file__, "/autopar/capture/", "/autopar/ops/", "/numpy/", "/einops/", "/contextlib.py", "<")
_TYPED = ("<stdin>", "<ipython-input")
_FRAME = re.compile(r'^ *File "([^"]*)", line (\d+)', re.M)


def is_users(file: str) -> bool:
    """Return whether a file of code is the user's, also a cell of a notebook and what comes from the standard input."""
    return file.startswith(_TYPED) or not any(part in file for part in _LIBRARIES)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is the user's, of a frame and those that called it."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_asks() -> bool:
    """Return whether the user's code, rather than torch's or ours, calls the function that a mode handles."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # of the modes around it
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def user_line() -> str:
    """``file.py:line`` of the innermost frame that is the user's."""
    frame = user_frame(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown line"


HOST_ARGUMENTS = frozenset(("device", "layout", "memory_format", "pin_memory", "non_blocking"))
"""Keyword arguments of operations that say where and how a tensor lies, which ranks decide for themselves."""
_ASSERTS = ("_assert", "sym_constrain", "_guards")


def is_assertion(node: fx.Node) -> bool:
    """Return whether a node checks something, and computes nothing."""
    return any(word in str(node.target) for word in _ASSERTS)


def reads_number(node: fx.Node) -> bool:
    """Return whether a node makes a number of Python of a tensor."""
    return str(node.target).startswith(("aten.item.", "aten._local_scalar_dense."))


def source_place(node: fx.Node) -> str:
    """The source line of a node, and its module."""
    line, module = source_line(node), module_of(node)
    return f"{line} (module {module})" if line and module else line or module


def module_of(node: fx.Node) -> str:
    """The module path of a node, relative to the user's model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    path = path.removeprefix("module").removeprefix(".")
    return "" if path.startswith("_empty_nn_module") else path


def called_module_of(node: fx.Node) -> str:
    """`module_of` with the number of the call of each module that is called several times, from the second call on."""
    path = module_of(node)
    stack = node.meta.get("nn_module_stack") or {}
    if not path or not any("@" in key for key in stack):
        return path
    parts = path.split(".")
    for key, (module, *_) in stack.items():
        _, _, number = key.rpartition("@")
        depth = len(str(module).removeprefix("module").removeprefix(".").split("."))
        if "@" in key and number.isdigit() and depth <= len(parts):
            parts[depth - 1] += f"{CALL_MARK}{number}"
    return ".".join(parts)


def source_line(node: fx.Node, stack_trace: str | None = None) -> str:
    """``file.py:line`` of the innermost frame of a node's stack trace that is the user's."""
    frames = _FRAME.findall(stack_trace or node.meta.get("stack_trace") or "")
    return next((f"{file.rsplit('/', 1)[-1]}:{number}" for file, number in reversed(frames) if is_users(file)), "")

"""The user's line and module of a node of an exported program."""

from __future__ import annotations

from torch import fx

from autopar.capture.layers import CALL_MARK

_NOT_THE_USERS = ("/torch/", "/autopar/capture/", "/autopar/ops/", "/einops/", "<eval_with_key>")


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
    """``file.py:line`` of the innermost frame of a node's stack trace that is outside of torch and of capture."""
    found = ""
    lines = (stack_trace or node.meta.get("stack_trace") or "").splitlines()
    for line in lines:
        line = line.strip()
        if line.startswith('File "') and not any(part in line for part in _NOT_THE_USERS):
            file, number = line.split('"')[1], line.split(", line ")[1].split(",")[0]
            found = f"{file.rsplit('/', 1)[-1]}:{number}"
    return found

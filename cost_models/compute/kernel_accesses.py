"""Memory traffic of a block whose neighbouring streaming (pointwise, reduction) operations a compiler fuses into kernels.

Matrix products, lookups and losses are kernels of their own and divide the others: a streaming operation belongs to the kernel of
those of its operands that come after equally many products. Within a kernel values are in registers, and each tensor is read from
memory once. A value that nothing but streaming operations reads is not written, unless it is made of many tensors; a later kernel
computes it again, from what is in memory. So is what the backward needs of the forward (torch's min-cut partitioning saves the
same: `fusion`).

Gradients likewise: each product that reads a value writes a gradient of its own, and the kernel that adds them reads them all.
The gradient of a sum is that of its addends, the same memory. The gradient of a norm's weight, a sum over rows, is made by the
kernel that makes the input's (inductor's mix-order reductions, for Triton; its code for CPUs reads all a second time). That of a
bias is not counted.

Held against what inductor's kernels read and write (tests/e2e/compiled/test_memory_accesses.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cost_models.compute.fusion import is_streaming, values_in_registers
from autopar.cost_models.compute.operations import Profile
from autopar.cost_models.tensors.saved_tensors import saved_tensors
from autopar.cost_models.tensors.sizes import value_bytes
from autopar.ir.graph import Block, Node
from autopar.operations.notation.rule import argument
from autopar.operations.table import operation

FIELDS = "forward_operands", "forward_results", "backward_operands", "backward_results"
_MOST_READS = 4
"""Tensors from which a kernel computes a value again: what is made of more, and read twice, is written (inductor's
`realize_reads_threshold`). Else the n-th sum of a residual stream would be n reads."""
Access = tuple[str, str, int]
"""A node, one of `FIELDS`, and the number of the operand or result."""


def kernel_accesses(block: Block, batch: int) -> dict[Access, float]:
    """Return how often the kernels of streaming operations read or write the bytes of operands and results; those that are not
    in it they do not."""
    tally = _Tally(block, batch)
    tally.forward()
    _Gradients(tally).backward()
    return tally.accesses()


def fused_profile(node: Node, known: Profile, accesses: dict[Access, float]) -> Profile:
    """Return the profile of a node in a compiled block."""
    if operation(node.op).attention and argument(node, 4, "dropout_p", 0.0):
        # the backward computes it again, from its seed (`runtime.ops.attention.dropout`)
        known = replace(known, backward_flops=known.backward_flops + known.forward_flops)
    counts = [[accesses.get((node.name, field, index), 0.0) for index in range(len(getattr(known, field)))] for field in FIELDS]
    kernels = known.kernels
    if is_streaming(node):
        kernels = min(kernels[0], any(map(any, counts[:2]))), min(kernels[1], any(map(any, counts[2:])))
    else:
        counts = [list(map(float.__add__, getattr(known, field), each)) for field, each in zip(FIELDS, counts, strict=True)]
    forward_operands, forward_results, backward_operands, backward_results = map(tuple, counts)
    return replace(
        known,
        forward_operands=forward_operands,
        forward_results=forward_results,
        backward_operands=backward_operands,
        backward_results=backward_results,
        kernels=kernels,
    )


class _Tally:
    """Bytes that each node reads and writes, with what each kernel has read."""

    def __init__(self, block: Block, batch: int) -> None:
        self.block, self.values = block, block.values()
        self.sizes = {name: value_bytes(value, batch) for name, value in self.values.items()}
        self.registers = set(values_in_registers(block))
        self.makers: dict[str, Node] = {}
        self.views: dict[str, Node] = {}
        self._viewed: dict[str, str] = {}
        self._unread: dict[tuple[str, int, str], float] = {}
        self._bytes: dict[Access, float] = {}

    def root(self, name: str) -> str:
        """Return the value that a view views, any other itself."""
        return self._viewed.get(name, name)

    def charge(self, access: Access, size_bytes: float) -> None:
        """Count bytes at a node."""
        if size_bytes:
            self._bytes[access] = self._bytes.get(access, 0.0) + size_bytes

    def read(self, pass_: str, level: int, name: str) -> float:
        """Return the bytes that a kernel reads to have a value that its own operations do not make: of each tensor in memory no
        more than it has."""
        size_bytes, asked = 0.0, [name]
        while asked:  # not recursive: blocks have chains of thousands of operations
            name = asked.pop()
            root = self.root(name)
            unread = self._unread.setdefault((pass_, level, root), self.sizes[root])
            if root not in self.registers:
                size_bytes += min(self.sizes[name], unread)
                self._unread[pass_, level, root] = max(0.0, unread - self.sizes[name])
            elif unread:
                self._unread[pass_, level, root] = 0.0
                asked += self.makers[root].operands()
        return size_bytes

    def forward(self) -> None:
        """Tally the forward: kernels by how many products come before them."""
        levels: dict[str, int] = {}
        uses, sources = Counter[str](), dict[str, frozenset[str]]()
        for node in self.block.nodes:
            operands = node.operands()
            if operation(node.op).view and operands:
                self._viewed.update((value.name, self.root(operands[0])) for value in node.outputs)
                self.views.setdefault(self.root(operands[0]), node)
            else:
                uses.update({self.root(name) for name in operands})
        for node in self.block.nodes:
            operands = node.operands()
            if operation(node.op).view and operands:
                continue
            level = max((levels.get(self.root(name), 0) for name in operands), default=0)
            streaming = is_streaming(node)
            for index, name in enumerate(operands if streaming else ()):
                root = self.root(name)
                if root not in self.makers or levels[root] < level:
                    self.charge((node.name, "forward_operands", index), self.read("forward", level, name))
            roots = {self.root(name) for name in operands}
            read = frozenset[str]().union(*(sources[root] if root in self.registers else (root,) for root in roots))
            for index, value in enumerate(node.outputs):
                sources[value.name] = read
                if len(read) > _MOST_READS and uses[value.name] > 1:
                    self.registers.discard(value.name)
                levels[value.name] = level if streaming else level + 1
                if streaming:
                    self.makers[value.name] = node
                    if value.name not in self.registers:
                        self.charge((node.name, "forward_results", index), self.sizes[value.name])

    def accesses(self) -> dict[Access, float]:
        """Return bytes over the bytes of the operand or result."""
        nodes = {node.name: node for node in self.block.nodes}
        out = {}
        for (name, field, index), size in self._bytes.items():
            node = nodes[name]
            of = node.operands()[index] if field.endswith("operands") else node.outputs[index].name
            if self.sizes[of]:
                out[name, field, index] = size / self.sizes[of]
        return out


@dataclass(slots=True)
class _Gradient:
    """A gradient: its bytes, the kernel that makes it (None: it is in memory as it comes), and who writes it where that is
    asked for."""

    name: str
    size_bytes: float
    level: int
    kernel: int | None = None
    writer: Access | None = None
    written: bool = False


@dataclass(frozen=True, slots=True)
class _Term:
    """One addend of a gradient: that of a reader, an operand of a node; None: of what reads the block's output. `gradient`: it is
    the same memory as the gradient of a sum. `in_registers`: a streaming operation's backward makes it."""

    level: int
    reader: Access | None
    size_bytes: float
    gradient: _Gradient | None = None
    in_registers: bool = False


class _Gradients:
    """The kernels of the backward: by how many products come before them there."""

    def __init__(self, tally: _Tally) -> None:
        self._tally = tally
        self._terms: dict[str, list[_Term]] = {}
        self._readers: set[tuple[int, str]] = set()
        for name in tally.block.outputs:
            if tally.values[name].differentiable:
                self._terms.setdefault(tally.root(name), []).append(_Term(0, None, tally.sizes[name]))

    def backward(self) -> None:
        """Tally the backward."""
        tally = self._tally
        for node in reversed(tally.block.nodes):
            if operation(node.op).view and node.operands():
                continue
            found = [(index, self._sum(value.name, node)) for index, value in enumerate(node.outputs)]
            gradients = [(index, each) for index, each in found if each is not None]
            needed = [tally.values[name].differentiable and not node.no_grad for name in node.operands()]
            if not gradients or not any(needed):
                continue
            level = max(gradient.level for _, gradient in gradients)
            if is_streaming(node):
                self._stream(node, level, gradients, needed)
            else:
                for _, gradient in gradients:
                    self._write(gradient)
                for access, name in self._operands(node, needed):
                    self._add(name, _Term(level + 1, access, tally.sizes[name]))
        for name in list(self._terms):
            asked = self._sum(name, None)
            if asked is not None:
                self._write(asked)

    def _operands(self, node: Node, needed: list[bool]) -> Iterator[tuple[Access, str]]:
        for index, name in enumerate(node.operands()):
            if needed[index]:
                yield (node.name, "backward_operands", index), name

    def _add(self, name: str, term: _Term) -> None:
        self._terms.setdefault(self._tally.root(name), []).append(term)

    def _stream(self, node: Node, level: int, gradients: list[tuple[int, _Gradient]], needed: list[bool]) -> None:
        """A streaming operation reads its result's gradients and what it saves; its operands' stay in registers until another
        kernel asks for them."""
        tally, passes = self._tally, operation(node.op).sum
        (_, own), *_ = gradients
        if not passes or any(tally.sizes[name] != own.size_bytes for _, name in self._operands(node, needed)):
            for index, gradient in gradients:
                tally.charge((node.name, "backward_results", index), self._read(gradient, level))
        saved = saved_tensors(node, tally.values)
        for index, name in enumerate(node.operands()):
            # what an operation saves beside operands and results (a norm in steps: its input in float32) is computed again
            if saved.operands[index] or (saved.extra_ratio and tally.values[name].differentiable):
                tally.charge((node.name, "backward_operands", index), tally.read("backward", level, name))
        for index, value in enumerate(node.outputs):
            if saved.results[index]:
                tally.charge((node.name, "backward_results", index), tally.read("backward", level, value.name))
        for access, name in self._operands(node, needed):
            if passes and tally.sizes[name] == own.size_bytes:
                self._add(name, _Term(level, access, own.size_bytes, own))
            else:
                self._add(name, _Term(level, access, tally.sizes[name], in_registers=True))

    def _sum(self, name: str, maker: Node | None) -> _Gradient | None:
        """Return the gradient of a value, all of whose readers have been seen; None where it has none."""
        terms = self._terms.pop(name, ())
        if not terms:
            return None
        tally, level = self._tally, max(term.level for term in terms)
        size = tally.sizes[name]
        if len(terms) == 1:
            (term,) = terms
            if term.gradient is not None:
                return term.gradient
            if not term.in_registers:
                return _Gradient(name, size, level, written=True)
            return _Gradient(name, size, level, level, term.reader)
        payer = self._payer(name, maker, terms)
        for term in terms:
            if term.gradient is not None:
                tally.charge(payer, self._read(term.gradient, level))
            elif not term.in_registers:
                tally.charge(payer, term.size_bytes)
            elif term.level < level and term.reader is not None:
                tally.charge(term.reader, term.size_bytes)
                tally.charge(payer, term.size_bytes)
        return _Gradient(name, size, level, level, payer)

    def _payer(self, name: str, maker: Node | None, terms: list[_Term]) -> Access:
        """Return at which node the sum of a gradient's terms is counted: where the value is made, else at a streaming reader or
        a view (what is counted at a product may be hidden behind its arithmetic)."""
        if maker is not None and is_streaming(maker):
            return maker.name, "backward_results", next(i for i, value in enumerate(maker.outputs) if value.name == name)
        streaming = [term.reader for term in terms if term.in_registers or term.gradient is not None]
        if not streaming and name in self._tally.views:
            return self._tally.views[name].name, "backward_operands", 0
        return next(reader for reader in (*streaming, *(term.reader for term in terms)) if reader is not None)

    def _read(self, gradient: _Gradient, level: int) -> float:
        """Return the bytes that a kernel of the backward reads of a gradient."""
        if gradient.kernel == level:
            return 0.0
        self._write(gradient)
        kernel = level, gradient.name
        if kernel in self._readers:
            return 0.0
        self._readers.add(kernel)
        return gradient.size_bytes

    def _write(self, gradient: _Gradient) -> None:
        if not gradient.written:
            gradient.written = True
            if gradient.writer is not None:
                self._tally.charge(gradient.writer, gradient.size_bytes)

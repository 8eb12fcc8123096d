"""Tensors that are made of numbers: factories, constants, random draws."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.notation.line_text import fixed, letter, line_text
from autopar.operations.notation.rule import DerivedLine
from autopar.operations.notation.spelling import OperationCall, factory, function, new_factory, operator_factory
from autopar.operations.operation import Operation, several
from autopar.operations.pointwise import elementwise_rule

CONSTANT, DROPOUT, RANDOM = "ap.constant", "ap.dropout", "ap.random"
ARANGE, FULL, SCALAR, STRIDED = "aten.arange.start_step", "aten.full", "aten.scalar_tensor", "aten.as_strided"


def factory_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Constants of a given shape (``zeros full new_ones``): shards every dimension; operands only lend their dtype."""
    names = [letter(i) for i in range(len(node.outputs[0].shape))]
    return DerivedLine(line_text((map(fixed, shape) for shape in shapes), [names]))


def whole_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Every rank makes it whole: small ones, and those of which each result reads everything."""
    return DerivedLine(line_text((map(fixed, shape) for shape in shapes), (map(fixed, value.shape) for value in node.outputs)))


def _expression(call: OperationCall) -> str:
    """``C.dropout(x, 0.1, self.training, self.mesh, ())``; tensors made of numbers have their dtype instead of the mode."""
    made = "self.training" if call.node.op == DROPOUT else f"torch.{call.node.outputs[0].dtype}"
    axes = [] if call.node.op == CONSTANT else [call.kwargs.get("sharded_axes", "()")]
    return f"C.{call.packet}({', '.join([*call.args, made, 'self.mesh', *axes])})"


OPERATIONS = (
    *several(Operation("aten", factory_rule, sizes_at=0, factory=True, spelling=factory), "zeros ones full empty"),
    *several(Operation("aten", factory_rule, sizes_at=1, spelling=new_factory), "new_zeros new_ones new_full new_empty"),
    *several(
        Operation("aten", whole_rule, factory=True, spelling=factory),
        "arange scalar_tensor eye linspace logspace tril_indices triu_indices "
        "hann_window hamming_window blackman_window bartlett_window kaiser_window",
    ),
    *several(Operation("aten", whole_rule, factory=True, spelling=operator_factory), "fft_fftfreq fft_rfftfreq range"),
    *several(Operation("aten", factory=True, spelling=factory), "rand randn"),
    *several(
        Operation("aten", whole_rule),
        "as_strided _pdist_forward masked_scatter affine_grid_generator native_group_norm _embedding_bag",
    ),
    Operation("aten.embedding_bag", whole_rule, lookup=True, bag=True),
    Operation("ap.document_numbers", whole_rule, spelling=function("C")),
    Operation(CONSTANT, whole_rule, spelling=_expression),
    Operation(DROPOUT, elementwise_rule, transcendental=True, layer=True, spelling=_expression),
    Operation(RANDOM, elementwise_rule, transcendental=True, spelling=_expression),
)

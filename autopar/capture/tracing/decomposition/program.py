"""Operations that export keeps whole and that are made of others: they are taken apart, so that rules need not know them. Batch
norms and losses are taken apart into sums over the batch (`normalize.batch_norm`, `normalize.loss_functions`).

Torch's `run_decompositions` traces a program twice more, which took more than half of a capture. Each operation is taken apart
where it stands; a graph where that cannot be is traced (`writes.NotLocal`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._export import utils
from torch._export.utils import _get_decomp_for_cia
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument

from autopar.capture.normalize.batch_norm import batch_norms
from autopar.capture.normalize.loss_functions import loss_functions
from autopar.capture.normalize.recurrent import recurrent_nets
from autopar.capture.tracing.data.checks import drop_checks
from autopar.capture.tracing.decomposition.nodes import Table, decomposed_graph
from autopar.capture.tracing.decomposition.unseen_writes import keep_gradients
from autopar.capture.tracing.decomposition.writes import NotLocal
from autopar.capture.tracing.guards import NO_GRAD_MARK

COMPOSITE = """
concat concatenate tile meshgrid hstack vstack dstack column_stack row_stack atleast_1d atleast_2d atleast_3d swapaxes
swapdims movedim moveaxis outer ger inner tensordot kron chain_matmul absolute arccos arccosh arcsin arcsinh arctan
arctan2 arctanh clip diag diagflat linalg_diagonal divide fix float_power greater greater_equal less less_equal multiply
negative not_equal subtract std_mean var_mean prelu pairwise_distance cosine_similarity cosine_embedding_loss
triplet_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss pdist fft_fft fft_fft2 fft_fftn
fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
fft_hfft fft_ihfft linalg_norm linalg_matrix_norm frobenius_norm nuclear_norm norm_except_dim stft istft unflatten ravel
take_along_dim flatten cov corrcoef trapz trapezoid special_expit special_logsumexp special_softmax special_log_softmax
special_xlogy special_exp2 special_expm1 special_log1p special_round msort fliplr flipud view_as reshape_as logdet
pinverse vander combinations cartesian_prod block_diag cumulative_trapezoid real imag linalg_cross cross nanmean
linalg_matmul linalg_multi_dot softmin conj_physical gradient
"""
"""Packets that are decomposed where they are composite."""
TABLED = """
affine_grid_generator addr logaddexp logaddexp2 aminmax count_nonzero pixel_shuffle pixel_unshuffle channel_shuffle
heaviside deg2rad rad2deg frac sinc special_entr soft_margin_loss rot90 trace nansum unsafe_chunk unsafe_split
narrow_copy diag_embed addmv index_copy eye _weight_norm_interface _reshape_alias mvlgamma block_diag
"""
"""Packets that torch's table of decompositions takes apart, without loss of gradients."""


def decompositions(graph: fx.Graph) -> dict[Any, Callable[..., Any]]:
    """Return the operations that `run_decompositions` takes apart in this graph."""
    out: dict[Any, Callable[..., Any]] = {}
    for node in graph.nodes:
        op = node.target
        if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or op in out:
            continue
        packet = op.overloadpacket.__name__
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd)
        if packet in COMPOSITE.split() and composite:
            out[op] = _get_decomp_for_cia(op)
        elif packet in TABLED.split() and op in decomposition_table:
            out[op] = decomposition_table[op]
    return out


def decomposed(program: ExportedProgram, device: torch.device, local_batch_norm: bool) -> ExportedProgram:
    """The functional program, whose composite operations are taken apart. What they are made of may be composite again."""
    _fuse_nll_losses(program)
    keep_gradients(program)
    table = {**batch_norms(local_batch_norm), **loss_functions(), **recurrent_nets(), **statistics()}
    try:
        if torch.is_autocast_enabled(device.type):
            raise NotLocal("casts of autocast")
        graph, buffers = decomposed_graph(program, table)
        if further := decompositions(graph):
            raise NotLocal(str(list(further)))
    except NotLocal:
        program = retraced(program, table, device)
    else:
        program.graph_module.graph = graph
        program.graph_signature.output_specs[:0] = [
            OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(node.name), buffer) for buffer, node in buffers.items()
        ]
    drop_checks(program)
    return program


def retraced(program: ExportedProgram, table: Table, device: torch.device) -> ExportedProgram:
    """Return the program as torch traces it with these decompositions and all of `decompositions`."""
    taken = {**table, **decompositions(program.graph)}
    with overrides_of(device):
        program = program.run_decompositions(taken)
        for _ in range(3):
            further = {op: function for op, function in decompositions(program.graph).items() if op not in taken}
            if not further:
                break
            taken |= further
            program = program.run_decompositions(taken)
    for node in program.graph.nodes:
        # a view that is made again, after a write to what it is of, is marked like its first reader (seen on torch 2.13.0)
        if node.meta.get("is_functional_regenerated"):
            node.meta["custom"] = {key: value for key, value in node.meta.get("custom", {}).items() if key != NO_GRAD_MARK}
    return program


def _fuse_nll_losses(program: ExportedProgram) -> None:
    """``nll_loss(log_softmax(x))`` becomes the cross entropy of x that it is."""
    aten = torch.ops.aten
    for node in list(program.graph.nodes):
        logs = node.args[0] if node.target is aten.nll_loss_nd.default else None
        if logs is None or logs.target is not aten.log_softmax.int or len(logs.users) > 1:
            continue
        x, dim, *dtype = logs.args
        rank = x.meta["val"].dim()
        if dtype[:1] not in ([], [None]) or logs.kwargs or dim % rank != min(1, rank - 1):
            continue
        with program.graph.inserting_before(node):
            loss = program.graph.call_function(aten.cross_entropy_loss.default, (x, *node.args[1:]), node.kwargs)
        loss.meta = dict(node.meta)
        node.replace_all_uses_with(loss)
        program.graph.erase_node(node)
        program.graph.erase_node(logs)


@contextmanager
def overrides_of(device: torch.device) -> Iterator[None]:
    """Let `run_decompositions` override composite operations on this device, the CPU and meta alone, and list them once.

    It overrides 525 of them on 21 keys, and lists them for each namespace of operations anew: a sixth of a small capture."""
    kept = {f"{prefix}{name}" for prefix in ("", "Autograd") for name in ("CPU", "Meta", device.type.upper())}
    with ExitStack() as stack:
        for name in ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE"):
            keys = [key for key in getattr(exported_program, name) if key.name in kept]
            stack.enter_context(patch.object(exported_program, name, keys))
        stack.enter_context(patch.object(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops)))
        yield


Dims = list[int] | None


def statistics() -> Mapping[Any, Callable[..., Any]]:
    """Return operations of torch that have two results, each with the function that takes its place: torch's own decomposition
    is made of ``prims``, which have no rules."""
    return {torch.ops.aten.std_mean.correction: std_mean, torch.ops.aten.var_mean.correction: var_mean}


def std_mean(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``torch.std_mean``."""
    return x.std(dim, correction=correction, keepdim=keepdim), x.mean(dim, keepdim=keepdim)


def var_mean(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``torch.var_mean``."""
    return x.var(dim, correction=correction, keepdim=keepdim), x.mean(dim, keepdim=keepdim)

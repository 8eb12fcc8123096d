"""Asynchronous tensor parallelism of torch: all-gathers in pieces with the products that read them, products in pieces with the
reduce-scatters of their results, over symmetric memory, or by operators of our own. Seen on 2.13.0: private parts of inductor and
of torch.distributed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from .hooks import replaced

_LEAST_CAPABILITY = (9, 0)
_PROBE_BYTES = 1 << 20


class AsyncTpGroup(NamedTuple):
    """A process group whose collectives run in pieces, of whole tensors of at least so many elements. With `symmetric` memory
    its ranks copy from each other, else they send messages."""

    name: str
    least_elements: int
    symmetric: bool


Groups = frozenset[AsyncTpGroup]


def async_tp_settings(groups: Groups) -> Mapping[str, Any]:
    """Return the settings of inductor with which products beside collectives of the groups run in pieces."""
    # importing it takes seconds, and only programs that are compiled need it
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

    class AsyncTensorParallelPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            fuse(graph, groups)

        def uuid(self) -> str:
            return f"autopar asynchronous tensor parallelism {sorted(groups)}"

    others = get_custom_graph_passes(config.post_grad_custom_post_pass)
    return {"post_grad_custom_post_pass": (*others, AsyncTensorParallelPass())}


def fuse(graph: fx.Graph, groups: Groups) -> None:
    """Fuse products and collectives in a graph of inductor. Its own pass (`_micro_pipeline_tp`) also leaves out each collective
    beside which any product of another chain could run, and counts each gradient of a weight for one of them, though the first
    collective takes all that are ready; this one leaves out those that complete the gradient of a product's operand."""
    from torch._inductor.fx_passes import micro_pipeline_tp as passes
    from torch.distributed import _symmetric_memory as symmetric

    least = {each.name: each.least_elements for each in groups}
    sending = {each.name for each in groups if not each.symmetric}
    # its functions look for symmetric memory and NCCL, which messages do without
    with symmetric._test_mode(set(least)), replaced(dist, "is_nccl_available", lambda: True):
        # reduce-scatters first: a product that has both is priced so; messages have no products in float8
        for scatter in passes.find_reduce_scatter_patterns(graph):
            whole = scatter.input_node
            if _fits(whole, scatter.scatter_dim, least.get(scatter.group_name)) and not _is_gradient(whole):
                product = passes._find_producer_matmul(whole)
                if scatter.group_name not in sending or type(product) is passes._Matmul:
                    passes.fuse_matmul_reduce_scatter(scatter)
        for gather in passes.find_all_gather_patterns(graph):
            if _fits(gather.res_node, gather.gather_dim, least.get(gather.group_name)):
                products = passes._find_consumer_matmuls(gather.res_node)
                if gather.group_name not in sending or {*map(type, products)} == {passes._Matmul}:
                    passes.fuse_all_gather_matmul(gather)
    by_messages = {
        torch.ops.symm_mem.fused_all_gather_matmul.default: torch.ops.autopar.all_gather_products.default,
        torch.ops.symm_mem.fused_matmul_reduce_scatter.default: torch.ops.autopar.product_reduce_scatter.default,
    }
    for node in graph.nodes:
        if node.target in by_messages and node.args[-1] in sending:
            node.target, node.kwargs = by_messages[node.target], {}


def _fits(whole: fx.Node, dim: int, least_elements: int | None) -> bool:
    """Return whether a tensor is large enough, cut along another dimension than its last, and of the same size in all calls."""
    value = whole.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    static = all(type(size) is int for size in sizes)
    return least_elements is not None and static and 0 <= dim < len(sizes) - 1 and prod(sizes) >= least_elements


def _is_gradient(result: fx.Node) -> bool:
    """Return whether a product is the gradient of another's operand: that of the weight reads what it reads, transposed."""
    product = result.args[0] if result.target is torch.ops.aten.reshape.default else result
    rows = product.args[0] if isinstance(product, fx.Node) and product.target is torch.ops.aten.mm.default else None
    return isinstance(rows, fx.Node) and any(user.target is torch.ops.aten.permute.default for user in rows.users)


def symmetric_memory_problem(device: torch.device) -> str:
    """Return why a device has no symmetric memory with the others of its node; empty where it may have."""
    if device.type != "cuda" or torch.version.cuda is None or not dist.is_nccl_available():
        return "symmetric memory takes CUDA devices and NCCL"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Hopper"
    others = (each for each in range(torch.cuda.device_count()) if each != device.index)
    if not all(torch.cuda.can_device_access_peer(device, each) for each in others):
        return "devices of a node do not reach each other's memory"
    return ""


def set_up_symmetric_memory(group: Any) -> str:
    """Give a group symmetric memory, which all its ranks must call; return why it has none, else an empty text."""
    from torch.distributed import _symmetric_memory as symmetric

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # deprecated, and the pass still asks which groups it was called for
            symmetric.enable_symm_mem_for_group(group)
        symmetric.get_symm_mem_workspace(group, _PROBE_BYTES)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""

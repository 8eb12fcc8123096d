"""Text generation with a parallel model.

A model of Hugging Face transformers generates by the library's own `generate`, of which only the forward is replaced: it calls
the parallel model, with a key-value cache where the model and the plan allow one (`cached_generation`). Without one inputs are
padded on the right to a multiple of 64, so that few lengths occur (each length has a program of its own); of a causal
model this changes no logit before the padding. A model with a `generate` of its own class runs that, with the parallel model in
place of itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .cached_generation import CachedGeneration, log_no_cache, padded_length, same_on_all_ranks, why_no_cache
from .device.groups import several_ranks
from .errors import RuntimeProblem
from .plain.plain_model import preserved_modes

_LIBRARY = "transformers"
_TAKEN = ("input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache", "return_dict")


def generate(parallel: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of the plain model's own `generate` in evaluation, on every rank. RuntimeProblem for a model
    without one.

    All ranks call it with the same arguments. Samples are drawn with rank 0's random state, on all ranks alike.
    """
    kind = type(parallel.plain.skeleton) if parallel.plain is not None else nn.Module
    owner = next((each for each in kind.__mro__ if "generate" in each.__dict__), None)
    own = inspect.getattr_static(kind, "generate", None)
    if owner is None or not isinstance(own, FunctionType):
        raise RuntimeProblem(
            f"{kind.__name__} has no method generate: call the parallel model in your own loop, or load parallel.full_state() "
            "into a plain model"
        )
    method: Callable[..., Any] = own
    with preserved_modes(parallel), torch.no_grad(), same_random_numbers(parallel.program.mesh.device):
        parallel.eval()
        if owner.__module__.split(".")[0] == _LIBRARY:
            cache = _cache(parallel, kind, args, kwargs)
            return method(_generator(parallel, kind, cache), *args, **{**kwargs, "use_cache": False})
        return method(parallel, *args, **kwargs)


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Give all ranks rank 0's state of the global random generator. Ranks that had it before go on as rank 0 does; the others
    have their own state again afterwards."""
    if not several_ranks():
        yield
        return
    library: Any = torch if device.type == "cpu" else getattr(torch, device.type)
    own = library.get_rng_state()
    first = own.to(device, copy=True)
    dist.broadcast(first, 0)
    first = first.cpu()
    different = not torch.equal(own, first)
    if different:
        library.set_rng_state(first)
    try:
        yield
    finally:
        if different:
            library.set_rng_state(own)


def _cache(parallel: Any, kind: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CachedGeneration | None:
    """The cache of this call; None with ``use_cache=False``, and where the model or the plan allows none."""
    if kwargs.get("use_cache") is False:
        return None
    if reason := why_no_cache(parallel, inspect.signature(kind.forward).parameters):
        log_no_cache(parallel, reason)
        return None
    return CachedGeneration(parallel, _positions(parallel.plain.skeleton.config), _expected(args, kwargs))


def _expected(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The length that is asked for; 0 where the call does not say it."""
    prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    new, total = kwargs.get("max_new_tokens"), kwargs.get("max_length")
    if isinstance(new, int) and isinstance(prompt, torch.Tensor) and prompt.dim() == 2:
        return prompt.shape[1] + new
    return total if isinstance(total, int) else 0


def _positions(config: Any) -> int | None:
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions


def _generator(parallel: Any, kind: type[nn.Module], cache: CachedGeneration | None) -> Any:
    """A model of the library's class without weights, whose forward is the parallel model's."""
    assert parallel.plain is not None
    skeleton = parallel.plain.skeleton
    parameters = inspect.signature(kind.forward).parameters
    config: Any = skeleton.config
    if config.is_encoder_decoder or not {"input_ids", "attention_mask"} <= set(parameters):
        raise RuntimeProblem(
            f"{kind.__name__} is not a decoder of token ids with an attention mask, of which alone a parallel model generates: "
            "load parallel.full_state() into a plain model"
        )
    positions = "position_ids" in parameters
    own = {"_parallel": parallel, "_key_values": cache, "_takes_positions": positions, "forward": _signed(kind)}
    generator: Any = kind.__new__(type(kind.__name__, (_Generator, kind), own))
    generator.__dict__.update(skeleton.__dict__)
    generator.training = False
    return generator


def _signed(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward, with the signature of the plain model's, which the library reads."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(kind.forward).bind(self, *args, **kwargs).arguments
        named = {key: value for key, value in bound.items() if key not in ("self", "kwargs")} | bound.get("kwargs", {})
        return _forward(self, named)

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward


class _Generator(nn.Module):
    """A model without weights that asks a parallel one, with properties of that one's parameters."""

    _parallel: Any
    _key_values: CachedGeneration | None
    _takes_positions: bool

    @property
    def device(self) -> torch.device:
        return self._parallel.program.mesh.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self._parallel.parameters() if p.is_floating_point())  # type: ignore[no-any-return]


def _forward(generator: Any, arguments: Mapping[str, Any]) -> Any:
    """The logits of the tokens, of which the library takes the last ones."""
    cache: CachedGeneration | None = generator._key_values
    refused = sorted(name for name, value in arguments.items() if name not in _TAKEN and value is not None and value is not False)
    if refused:
        raise RuntimeProblem(
            f"generation with {refused[0]} is not there on a parallel model: load full_state() into a plain model"
        )
    ids, keep = arguments["input_ids"], arguments.get("logits_to_keep") or 0
    length = ids.shape[1]
    mask = arguments.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.dtype)
    batch = {"input_ids": ids, "attention_mask": mask}
    if generator._takes_positions:
        positions = arguments.get("position_ids")
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0) if positions is None else positions.expand(ids.shape)
    plain = mask.shape == ids.shape and isinstance(keep, int) and keep == 1
    if cache is not None and plain and (last := cache.logits(batch)) is not None:
        return SimpleLogits(logits=last)
    wanted = padded_length(length, _positions(generator.config))
    padded = {name: nn.functional.pad(tensor, (0, wanted - length)) for name, tensor in batch.items()}
    logits = generator._parallel(**padded, use_cache=False).logits[:, :length]
    return SimpleLogits(logits=same_on_all_ranks(logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]))


class SimpleLogits(SimpleNamespace):
    """The result of the forward; it is asked for caches by name."""

    logits: torch.Tensor

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def get(self, name: str, default: Any = None) -> Any:
        return self.__dict__.get(name, default)

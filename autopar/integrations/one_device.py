"""The common part of the integrations: all processes look like one device to accelerate, which wraps no model and divides no
batch. Checkpoints of a framework's run have weights as the plain model has them, and optimizer state by parameter name for any
plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, find_batch_size
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from autopar.errors import AutoparError, StateError
from autopar.runtime.parallel import Parallel


def present_as_one_device() -> None:
    """Make accelerate count one process. The process index stays the rank, so that rank 0 alone writes files and logs; so does
    the process group, which autopar uses."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state:
            state.update(num_processes=1, distributed_type=DistributedType.NO)


def read_on_every_rank(accelerator: Any) -> None:
    """Let every rank read its loaders, those of an IterableDataset too: accelerate's dispatcher would read on rank 0 alone, and
    sends nothing to the others where it counts one process. As the dispatcher does, they say how many examples the last batch
    has, by which `gather_for_metrics` cuts what is repeated for each example of a batch."""
    accelerator.dataloader_config.dispatch_batches = False
    prepare = accelerator.prepare_data_loader

    def prepare_data_loader(*args: Any, **keywords: Any) -> Any:
        loader = prepare(*args, **keywords)
        if type(loader) is DataLoaderShard and isinstance(loader.dataset, IterableDataset):
            # its own __class__ is a property, which shows the class of the loader inside
            vars(object)["__class__"].__set__(loader, StreamLoader)
        return loader

    accelerator.prepare_data_loader = prepare_data_loader


class StreamLoader(DataLoaderShard):  # type: ignore[misc, unused-ignore]
    """A loader of accelerate that sets its `remainder` to the size of the last batch, where its data set has no length."""

    remainder: int

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self.end_of_dataloader:
                self.remainder = find_batch_size(batch) or self.remainder
            yield batch


def on_ranks(condition: str) -> Callable[..., Any]:
    """A method that decorates functions which run where the property `condition` is true. Accelerate's own run them everywhere
    where it counts one process."""

    def decorator(self: Any, function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
        if function is None:
            return partial(decorator, self)
        return function if getattr(self, condition) else lambda *args, **kwargs: None

    return decorator


def first_on_ranks(condition: str) -> Callable[[Any], AbstractContextManager[None]]:
    """A method whose context the ranks where the property `condition` is true leave before others enter it."""

    @contextmanager
    def goes_first(self: Any) -> Iterator[None]:
        if not getattr(self, condition):
            wait_for_all()
        yield
        if getattr(self, condition):
            wait_for_all()

    return goes_first


class MovedOptimizer:
    """The parameters of a plain model by identity, taken before it is parallelized: afterwards an optimizer that was made from
    them gets those of the parallel model."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}

    def move(self, optimizer: Optimizer, parallel: Parallel) -> None:
        """Replace the parameters in place; those of other pipeline stages are left out."""
        if optimizer.state:
            raise AutoparError(
                f"this {type(optimizer).__name__} has made steps before the model was parallelized: make a new one, and load its "
                "state afterwards"
            )
        own = dict(parallel.named_parameters())
        for group in optimizer.param_groups:
            unknown = [tuple(each.shape) for each in group["params"] if id(each) not in self.names]
            if unknown:
                raise AutoparError(f"the optimizer has a parameter of shape {unknown[0]} that the model has not")
            names = [self.names[id(each)] for each in group["params"]]
            group["params"] = [own[name] for name in names if name in own]


def inner_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside of accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


def loss_scaler(accelerator: Any) -> torch.amp.GradScaler:
    """The scaler of an accelerator whose parallel models compute in fp16, as its `GradScalerKwargs` say. accelerate scales the
    loss and steps with it; autocast around the model is left out, since the plan has the precision."""
    handler = accelerator.scaler_handler
    return torch.amp.GradScaler(accelerator.device.type, **(handler.to_kwargs() if handler is not None else {}))


def wait_for_all() -> None:
    """A barrier: files that rank 0 has written are there for all."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def refuse(settings: Mapping[str, tuple[object, str]]) -> None:
    """Raise an AutoparError for the first setting that is on, with its remedy."""
    for name, (value, remedy) in settings.items():
        if value:
            raise AutoparError(f"{name} is not for a parallel model: {remedy}")


OPTIMIZER_FOLDER = "optimizer"

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_optimizer(folder: str, parallel: Parallel, optimizer: Optimizer) -> None:
    """Save the optimizer's state, of which each rank writes its shards (all ranks must call)."""
    state = get_optimizer_state_dict(parallel, optimizer, options=_FLAT)
    save({"optimizer": state}, checkpoint_id=str(Path(folder, OPTIMIZER_FOLDER)))
    wait_for_all()


def load_optimizer(folder: str, parallel: Parallel, optimizer: Optimizer) -> None:
    """Load what a run under this plan or another one wrote (all ranks must call)."""
    path = Path(folder, OPTIMIZER_FOLDER)
    if not path.is_dir():
        raise StateError(f"{folder} has no folder {OPTIMIZER_FOLDER}, so it was not saved by autopar: pass its model only")
    state = get_optimizer_state_dict(parallel, optimizer, options=_FLAT)
    load({"optimizer": state}, checkpoint_id=str(path))
    set_optimizer_state_dict(parallel, optimizer, optim_state_dict=state, options=_FLAT)


def load_weights(folder: str, parallel: Parallel) -> None:
    """Load what transformers has written into the parallel model (all ranks must call). StateError where weights are missing; of
    tied names one is enough."""
    result = parallel.load_pretrained(folder, strict=False)
    extra = parallel.plain.extra if parallel.plain is not None else {}
    unexpected = [key for key in result.unexpected_keys if key not in extra]
    if result.missing_keys or unexpected:
        what = f"misses {result.missing_keys[0]}" if result.missing_keys else f"has {unexpected[0]}, which the model has not"
        raise StateError(f"the checkpoint {folder} {what}: resume from one of this model")

"""Models by name: bundled configurations (random weights), a Hugging Face config.json, or a factory in a Python file.

transformers is imported on use only. Attention masks are left out and labels are given, so that every model returns its loss.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.files import read_json
from autopar.model_configs import all_configs

CLASSES = 10
IMAGE = 16
FEATURES = 256
MOST_CONFIG_BYTES = 2**24
MOST = ((("layer", "block", "depth", "stage"), 4096), (("expert", "head", "label"), 10**6))
"""The largest numbers of a configuration, by words in their keys: modules, and lists, of so many are made."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and example inputs: keyword arguments of its forward, or a tuple where the user's factory gives one."""

    model: nn.Module
    example_inputs: dict[str, Any] | tuple[Any, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Bundled:
    """A configuration of a Hugging Face model, of `seq` tokens, or (`build`) a plain module."""

    description: str
    seq: int = 1024
    config: Mapping[str, Any] | None = None
    build: Callable[[], nn.Module] | None = None


class Mlp(nn.Module):
    """``x[B, 256], target[B]`` -> cross entropy over 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 1024), nn.GELU(), nn.Linear(1024, FEATURES), nn.GELU())
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), target)


class ConvNet(nn.Module):
    """``x[B, 3, 16, 16], target[B]`` -> cross entropy over 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(64 * (IMAGE // 4) ** 2, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.features(x).flatten(1)), target)


def bundled_models() -> dict[str, Bundled]:
    """Every bundled model by name."""
    models = {
        "gpt2": Bundled("GPT-2 small, 124 M"),
        "gpt2-xl": Bundled("GPT-2 XL, 1.6 B"),
        "llama3-8b": Bundled("Llama 3 8B", 8192),
        "llama3-70b": Bundled("Llama 3 70B", 8192),
        "llama3-405b": Bundled("Llama 3.1 405B", 8192),
        "qwen3-8b": Bundled("Qwen3 8B", 4096),
        "mixtral-8x22b": Bundled("Mixtral 8x22B, 141 B", 4096),
        "deepseek-v3": Bundled("DeepSeek-V3 without multi-token prediction, 671 B", 4096),
        "bert-large": Bundled("BERT large, masked language model", 512),
        "vit-huge": Bundled("ViT huge, 14 x 14 patches of 224 x 224"),
        "mlp": Bundled("a small multilayer perceptron", build=Mlp),
        "convnet": Bundled("a small convolutional network with batch norm", build=ConvNet),
        "gpt2-tiny": Bundled("GPT-2 for tests", 16),
        "llama-tiny": Bundled("Llama for tests", 16),
        "mixtral-tiny": Bundled("Mixtral for tests", 16),
        "qwen3-tiny": Bundled("Qwen3 for tests", 16),
        "bert-tiny": Bundled("BERT for tests", 16),
        "vit-tiny": Bundled("ViT for tests"),
    }
    return {name: model if model.build else replace(model, config=all_configs()[name]) for name, model in models.items()}


def load_model(
    source: str, batch: int | None = None, seq: int | None = None, dtype: str | None = None, device: str = "meta"
) -> LoadedModel:
    """The model that `source` names, on `device`, with a batch of `batch` examples (default 8) of `seq` tokens.

    `source` is a bundled name, the path of a Hugging Face ``config.json``, or ``file.py:factory``. Raises CaptureError.
    """
    known = bundled_models()
    wanted = getattr(torch, dtype) if dtype else torch.float32
    if batch is not None and batch < 1:
        raise CaptureError(f"a batch of {batch} is no batch: write 1 or more")
    if source in known:
        entry = known[source]
        if entry.build is not None:
            with torch.device(device):
                plain = entry.build().to(wanted)
            return LoadedModel(plain, _plain_inputs(plain, batch or 8, wanted, device), source)
        assert entry.config is not None
        return _hugging_face(entry.config, source, batch or 8, seq or entry.seq, wanted, device)
    if source.endswith(".json"):
        return _from_config_file(Path(source), batch or 8, seq, wanted, device)
    if ".py" in source:
        return _from_factory(source, batch, seq, wanted if dtype else None, device)
    raise CaptureError(
        f"there is no model {source!r}: write one of {', '.join(known)}, the path of a config.json, or file.py:factory"
    )


def _plain_inputs(model: nn.Module, batch: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    shape = (batch, FEATURES) if isinstance(model, Mlp) else (batch, 3, IMAGE, IMAGE)
    return {"x": _floats(shape, dtype, device), "target": _integers((batch,), CLASSES, device)}


def _floats(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device) if device == "meta" else torch.randn(shape, dtype=dtype, device=device)


def _integers(shape: tuple[int, ...], high: int, device: str) -> Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    return torch.randint(high, shape, device=device)


def _from_config_file(path: Path, batch: int, seq: int | None, dtype: torch.dtype, device: str) -> LoadedModel:
    config = read_json(path, CaptureError, "the configuration", MOST_CONFIG_BYTES)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CaptureError(f"{path} names no model_type: give the config.json of a Hugging Face model")
    _check_numbers(config, str(path))
    longest = config.get("max_position_embeddings") or config.get("n_positions")
    tokens = longest if isinstance(longest, int) and longest > 0 else 1024
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return _hugging_face(config, name, batch, seq or min(1024, tokens), dtype, device)


def _check_numbers(config: Any, where: str) -> None:
    """CaptureError where a number is larger than any model has: building it would not end."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        if isinstance(value, dict | list):
            _check_numbers(value, f"{where}, {key}")
        elif isinstance(value, int):
            most = next((most for words, most in MOST if any(word in str(key) for word in words)), 2**40)
            if not -most <= value <= most:
                raise CaptureError(f"{where}: {key} is {str(value)[:30]}, more than any model has (at most {most})")


def _hugging_face(given: Mapping[str, Any], name: str, batch: int, seq: int, dtype: torch.dtype, device: str) -> LoadedModel:
    """A model of a registered type with its loss: causal or masked language model, or image classifier."""
    kind = given["model_type"]
    try:
        import transformers
    except ImportError:
        raise CaptureError(f"{name} needs transformers: pip install 'autopar[models]'") from None
    try:
        config = transformers.AutoConfig.for_model(**_without_loaders(given))
    except Exception as error:  # whatever transformers says of what a file may hold
        raise CaptureError(f"{name}: transformers {transformers.__version__} has no such configuration: {_line(error)}") from None
    config.use_cache = False
    autos: tuple[Any, ...] = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForImageClassification,
    )
    if kind == "bert":  # registered as both; it is a masked model
        autos = autos[1:]
    auto = next((each for each in autos if type(config) in each._model_mapping), None)
    if auto is None:
        raise CaptureError(f"{name}: {kind!r} is neither a language model nor an image classifier: use file.py:factory")
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and longest and seq > longest and auto is not autos[-1]:
        raise CaptureError(f"{name} takes sequences of at most {longest} tokens, not {seq}: lower --seq")
    try:
        with torch.device(device):
            model: nn.Module = auto.from_config(config, dtype=dtype)
    except Exception as error:
        raise CaptureError(f"{name}: the model cannot be built from its configuration: {_line(error)}") from None
    try:
        return LoadedModel(model, _token_or_image_inputs(config, auto is autos[-1], (batch, seq), dtype, device), name)
    except Exception as error:
        raise CaptureError(f"{name}: a batch of {batch} examples cannot be made: {_line(error)}") from None


_LEFT_OUT = ("transformers_version", "architectures", "torch_dtype", "dtype", "auto_map")


def _without_loaders(given: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what says where code comes from: transformers would fetch attention kernels that a file names."""
    return {
        key: _without_loaders(value) if isinstance(value, dict) else value
        for key, value in given.items()
        if key not in _LEFT_OUT and not key.startswith("_") and not key.endswith("_implementation")
    }


def _token_or_image_inputs(
    config: Any, images: bool, batch_and_seq: tuple[int, int], dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    if images:
        batch = batch_and_seq[0]
        size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
        pixels = _floats((batch, config.num_channels, *size), dtype, device)
        return {"pixel_values": pixels, "labels": _integers((batch,), config.num_labels or 2, device)}
    ids = _integers(batch_and_seq, config.vocab_size, device)
    return {"input_ids": ids, "labels": ids.clone()}


def _line(error: BaseException) -> str:
    try:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    except Exception:
        return type(error).__name__


def factory_of(source: str) -> Callable[..., Any]:
    """The function that ``file.py:factory`` names. Raises CaptureError."""
    file, colon, name = source.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise CaptureError(f"{source!r} is not file.py:factory: name the function after a colon")
    path = Path(file)
    if not path.is_file():
        raise CaptureError(f"there is no file {file}: check the path before the colon")
    factory = getattr(_module(path), name, None)
    if not callable(factory):
        raise CaptureError(f"{file} has no function {name!r}: name one that returns a model, or a model and example inputs")
    return cast(Callable[..., Any], factory)


def _from_factory(source: str, batch: int | None, seq: int | None, dtype: torch.dtype | None, device: str) -> LoadedModel:
    """Calls ``factory`` of the file with those of ``batch`` and ``seq`` that it takes. Where it reads numbers of tensors (rates
    of ``torch.linspace``), which the meta device has not, it runs on the CPU."""
    factory = factory_of(source)
    try:
        takes = inspect.signature(factory).parameters
        given = {key: value for key, value in (("batch", batch), ("seq", seq)) if key in takes and value is not None}
        try:
            with torch.device(device):
                made = factory(**given)
        except (RuntimeError, NotImplementedError) as error:
            if device != "meta" or "meta" not in str(error):
                raise
            warnings.warn(f"{source} reads numbers of tensors: its weights are made on the CPU", stacklevel=2)
            made = factory(**given)
    except (Exception, SystemExit) as error:
        raise CaptureError(f"{source} failed: {type(error).__name__}: {_line(error)}") from error
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise CaptureError(f"{source} returned {type(model).__name__}: return an nn.Module, or (module, example inputs)")
    if isinstance(example, Tensor):
        example = (example,)
    if not isinstance(example, (dict, tuple)):
        raise CaptureError(f"{source} gives no example inputs: return (model, dict of keyword arguments) or (model, tuple)")
    if isinstance(example, dict) and not all(isinstance(key, str) for key in example):
        raise CaptureError(f"{source} gives example inputs whose keys are no names: return a dict of keyword arguments")
    return LoadedModel(model.to(dtype) if dtype is not None else model, example, source.rpartition(":")[2])


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"autopar_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CaptureError(f"{path} cannot be imported: {type(error).__name__}: {_line(error)}") from error
    return module

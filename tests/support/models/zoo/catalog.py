"""All models of the zoo with one batch each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from support.models.zoo import generative, sequences, tables_and_graphs, vision


@dataclass(frozen=True, slots=True)
class Specimen:
    """`build` makes the model, `batch` the inputs of a global batch, `floating` in float64; `batch_dims` where it is not 0."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]


def _images(*size: int, classes: int = 8) -> Callable[[int], dict[str, Tensor]]:
    return lambda b: {"x": torch.randn(b, *size), "y": torch.randint(0, classes, (b,))}


def _words(first: bool = False) -> Callable[[int], dict[str, Tensor]]:
    def make(b: int) -> dict[str, Tensor]:
        shape = (6, b) if first else (b, 6)
        return {name: torch.randint(0, sequences.WORDS, shape) for name in ("tokens", "targets")}

    return make


def _lazy() -> nn.Module:
    model = vision.WeightNormNet()
    model(torch.randn(2, 3, 8), torch.zeros(2, dtype=torch.long))
    return model


def zoo() -> dict[str, Specimen]:
    """Every model by name."""
    v, g, s, t = vision, generative, sequences, tables_and_graphs
    r, n = torch.randint, torch.randn
    return {
        "convnext": Specimen(v.ConvNext, _images(3, 8, 8)),
        "unet": Specimen(v.UNet, lambda b: {"x": n(b, 3, 8, 8), "y": r(0, 4, (b, 8, 8))}),
        "deeplab": Specimen(v.DeepLab, lambda b: {"image": n(b, 3, 8, 8), "mask": r(0, 4, (b, 8, 8))}),
        "siamese": Specimen(v.Siamese, lambda b: {"one": n(b, 1, 8, 8), "two": n(b, 1, 8, 8), "same": r(0, 2, (b,)).float()}),
        "detection": Specimen(
            v.DetectionHead, lambda b: {"image": n(b, 3, 8, 8), "labels": r(0, 4, (b, 8)), "boxes": n(b, 8, 4)}
        ),
        "weight_norm": Specimen(_lazy, _images(3, 8, classes=4)),
        "spatial_transformer": Specimen(v.SpatialTransformer, _images(1, 8, 8, classes=4)),
        "mobilenet": Specimen(v.MobileNet, _images(3, 8, 8, classes=4)),
        "prototypes": Specimen(v.PrototypeNet, _images(8, classes=4)),
        "dcgan": Specimen(g.DcganPair, lambda b: {"real": n(b, 3, 16, 16).tanh(), "noise": n(b, 8, 1, 1)}),
        "vae": Specimen(g.VariationalAutoencoder, lambda b: {"x": torch.rand(b, 1, 8, 8), "eps": n(b, 8)}),
        "tied_autoencoder": Specimen(g.TiedAutoencoder, lambda b: {"x": n(b, 16)}),
        "mae": Specimen(g.MaskedAutoencoder, lambda b: {"image": n(b, 3, 16, 16), "noise": torch.rand(b, 16)}),
        "dit": Specimen(
            g.DiffusionTransformer,
            lambda b: {"image": n(b, 3, 16, 16), "t": r(0, 10, (b,)), "label": r(0, 5, (b,)), "noise": n(b, 3, 16, 16)},
        ),
        "nerf": Specimen(g.RadianceField, lambda b: {"origins": n(b, 3), "directions": n(b, 3), "target": torch.rand(b, 3)}),
        "vq_vae": Specimen(g.VectorQuantizer, lambda b: {"x": n(b, 4, 8)}),
        "lstm": Specimen(s.RecurrentLanguageModel, _words(first=True)),
        "gru": Specimen(lambda: s.RecurrentLanguageModel("GRU"), _words(first=True)),
        "sequence_first": Specimen(s.SequenceFirstTransformer, _words(first=True)),
        "wavenet": Specimen(s.WaveNet, lambda b: {"x": n(b, 1, 16), "y": r(0, 16, (b, 16))}),
        "conformer": Specimen(
            s.Conformer, lambda b: {"x": n(b, 10, 16), "lengths": r(5, 11, (b,)), "y": r(0, 6, (b, 10))}
        ),
        "patch_tst": Specimen(s.PatchTst, lambda b: {"x": n(b, 32, 3), "y": n(b, 4, 3)}),
        "n_beats": Specimen(s.NBeats, lambda b: {"x": n(b, 16), "y": n(b, 4)}),
        "mamba": Specimen(s.SelectiveScan, _words()),
        "fno": Specimen(s.FourierOperator, lambda b: {"x": n(b, 12, 2), "y": n(b, 12, 1)}),
        "complex_llama": Specimen(s.ComplexRotaryLlama, _words()),
        "custom_functions": Specimen(
            s.CustomFunctions, lambda b: {"x": n(b, 16), "y": r(0, 4, (b,)), "domain": r(0, 2, (b,))}
        ),
        "clip": Specimen(s.ClipText, lambda b: {"text": r(0, sequences.WORDS, (b, 8)), "image": n(b, 12)}),
        "dlrm": Specimen(
            t.Dlrm, lambda b: {"dense_x": n(b, 4), "lS_i": r(0, 20, (3, b, 2)), "y": torch.rand(b, 1)}
        ),
        "tab_transformer": Specimen(
            t.TabTransformer, lambda b: {"categories": r(0, 4, (b, 3)), "numbers": n(b, 3), "y": r(0, 2, (b,)).float()}
        ),
        "gat": Specimen(
            t.GraphAttention,
            lambda b: {"x": n(b, 5, 6), "adjacency": (torch.rand(b, 5, 5) < 0.5).float(), "y": r(0, 4, (b,))},
        ),
        "deep_fm": Specimen(
            t.FactorizationMachine, lambda b: {"cat": r(0, 30, (b, 4)), "mean": n(b, 4), "linear": torch.rand(b)}
        ),
        "point_net": Specimen(t.PointNet, lambda b: {"x": n(b, 3, 10), "y": r(0, 4, (b,))}),
        "autocast": Specimen(t.Autocast, lambda b: {"x": n(b, 8), "y": n(b, 1)}),
        "slots": Specimen(t.TopicModel, lambda b: {"x": n(b, 6), "where": r(0, 4, (b,)), "y": n(b, 8)}),
    }  # fmt: skip


def drawing() -> dict[str, Specimen]:
    """Those that draw random numbers, which only equal one process under the same draws."""
    v, g, s = vision, generative, sequences
    every = zoo()
    return {
        "convnext_drop": Specimen(lambda: v.ConvNext(0.2), every["convnext"].batch),
        "deeplab_dropout": Specimen(lambda: v.DeepLab(0.3), every["deeplab"].batch),
        "vae_draws": Specimen(lambda: g.VariationalAutoencoder(draws=True), every["vae"].batch),
        "lstm_dropout": Specimen(lambda: s.RecurrentLanguageModel(dropout=0.2), every["lstm"].batch),
        "gru_dropout": Specimen(lambda: s.RecurrentLanguageModel("GRU", dropout=0.2), every["gru"].batch),
    }


def specimen(name: str, batch: int = 8, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in float64 and one batch."""
    torch.manual_seed(seed)
    case = (zoo() | drawing())[name]
    model = case.build().double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in case.batch(batch).items()}
    return model, inputs

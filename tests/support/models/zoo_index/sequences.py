"""Sequences: language, speech, time series, state spaces, recurrent nets, sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from support.models.zoo_index.specimen import Fitted, FittedPair, IndexSpecimen, first, regression, squares, tokens, words


def _decoder() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=32, max_seq_len=16, attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True)
    )


def _t5_bias() -> Any:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, rel_pos_bias=True, ff_glu=True, use_rmsnorm=True)
    return TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers)


def _mamba() -> Any:
    from mambapy.mamba import Mamba, MambaConfig

    config = MambaConfig(d_model=16, n_layers=2, d_state=4, pscan=False)
    return nn.Sequential(nn.Embedding(32, 16), Mamba(config), nn.LayerNorm(16), nn.Linear(16, 32))


def _linformer() -> Any:
    from linformer import LinformerLM

    return LinformerLM(num_tokens=32, dim=32, seq_len=16, depth=2, heads=4, k=8)


def _performer() -> Any:
    from performer_pytorch import PerformerLM

    return PerformerLM(
        num_tokens=32, max_seq_len=16, dim=32, depth=1, heads=4, dim_head=8, nb_features=16, feature_redraw_interval=None
    )


def _reformer() -> Any:
    from reformer_pytorch import ReformerLM

    return ReformerLM(
        num_tokens=32, dim=32, depth=1, max_seq_len=16, heads=4, bucket_size=4, n_hashes=2, causal=True, axial_position_emb=False
    )


def _local() -> Any:
    from local_attention import LocalTransformer

    return LocalTransformer(
        num_tokens=32, dim=32, depth=2, max_seq_len=16, local_attn_window_size=4, heads=4, dim_head=8, causal=True
    )


def _nystrom() -> Any:
    from nystrom_attention import Nystromformer

    return nn.Sequential(
        nn.Embedding(32, 32),
        Nystromformer(dim=32, dim_head=8, heads=4, depth=1, num_landmarks=4, pinv_iterations=3),
        nn.Linear(32, 32),
    )


def _g_mlp() -> Any:
    from g_mlp_pytorch import gMLP

    return gMLP(num_tokens=32, dim=32, depth=2, seq_len=16, causal=True)


def _perceiver() -> Any:
    from perceiver_pytorch import Perceiver

    return Perceiver(
        input_channels=3, input_axis=1, num_freq_bands=2, max_freq=4.0, depth=1, num_latents=8, latent_dim=32, cross_heads=1,
        latent_heads=4, cross_dim_head=8, latent_dim_head=8, num_classes=8, self_per_cross_attn=1,
    )  # fmt: skip


def _soft_moe() -> Any:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(dim=16, num_experts=4, num_slots=4)


def _conformer() -> Any:
    from conformer import Conformer

    return Conformer(dim=16, depth=1, heads=4, dim_head=4, ff_mult=2, conv_expansion_factor=2, conv_kernel_size=3)


def _tcn() -> Any:
    from pytorch_tcn import TCN

    return TCN(num_inputs=4, num_channels=[8, 8], kernel_size=3, dropout=0.0, causal=True, use_skip_connections=True)


class Forecaster(nn.Module):
    """iTransformer, which makes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        from iTransformer import iTransformer

        self.net = iTransformer(
            num_variates=4, lookback_len=16, dim=16, depth=2, heads=4, dim_head=4, pred_length=4, num_tokens_per_variate=1
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x, targets=y)
        return loss


def _ltc() -> Any:
    from ncps.torch import LTC
    from ncps.wirings import AutoNCP

    return LTC(4, AutoNCP(8, 2), ode_unfolds=2)


def _cfc() -> Any:
    from ncps.torch import CfC

    return CfC(4, 8, proj_size=2)


class Tagger(nn.Module):
    """An LSTM with a conditional random field, as the package's examples have it."""

    def __init__(self) -> None:
        super().__init__()
        from torchcrf import CRF

        self.embed, self.lstm, self.crf = nn.Embedding(32, 8), nn.LSTM(8, 5, batch_first=True), CRF(5, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = -self.crf(self.lstm(self.embed(x))[0], y)
        return loss


class NeuralOde(nn.Module):
    """The derivative is a small net; integrated by a solver of fixed steps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchdiffeq import odeint

        times = torch.linspace(0, 1, 3, dtype=x.dtype)
        found: torch.Tensor = odeint(lambda t, h: self.down(torch.tanh(self.up(h))), x, times, method="rk4")
        return found[-1]


def _quartznet() -> Any:
    from pytorchcv.models.jasper import Jasper

    return Jasper(
        channels=[8, 8, 8], kernel_sizes=[3, 3, 1], bn_eps=1e-3, dropout_rates=[0.0, 0.0, 0.0], repeat=1, use_dw=True,
        use_dr=False,
        from_audio=False, return_text=False, in_channels=8, num_classes=6,
    )  # fmt: skip


def _fno() -> Any:
    from neuralop.models import FNO

    return FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=1, projection_channel_ratio=2)


def sequence_models() -> dict[str, IndexSpecimen]:
    """By name."""
    r, n = torch.randint, torch.randn
    return {
        "x_decoder": IndexSpecimen("x_transformers", "language", "2104.09864", lambda: Fitted(_decoder(), words), tokens()),
        "x_encoder": IndexSpecimen("x_transformers", "language", "1910.10683", lambda: Fitted(_t5_bias(), words), tokens()),
        "linformer": IndexSpecimen("linformer", "language", "2006.04768", lambda: Fitted(_linformer(), words), tokens()),
        "performer": IndexSpecimen("performer_pytorch", "language", "2009.14794", lambda: Fitted(_performer(), words), tokens()),
        "reformer": IndexSpecimen("reformer_pytorch", "language", "2001.04451", lambda: Fitted(_reformer(), words), tokens()),
        "local_attention": IndexSpecimen("local_attention", "language", "2003.05997", lambda: Fitted(_local(), words), tokens()),
        "nystromformer": IndexSpecimen(
            "nystrom_attention", "language", "2102.03902", lambda: Fitted(_nystrom(), words), tokens()
        ),
        "g_mlp": IndexSpecimen("g_mlp_pytorch", "language", "2105.08050", lambda: Fitted(_g_mlp(), words), tokens()),
        "crf": IndexSpecimen(
            "torchcrf", "language", "1603.01360", Tagger, lambda b: {"x": r(0, 32, (b, 6)), "y": r(0, 5, (b, 6))}
        ),
        "perceiver": IndexSpecimen(
            "perceiver_pytorch",
            "sets",
            "2103.03206",
            lambda: Fitted(_perceiver(), F.cross_entropy),
            lambda b: {"x": n(b, 12, 3), "y": r(0, 8, (b,))},
        ),
        "soft_moe": IndexSpecimen("soft_moe_pytorch", "sets", "2308.00951", squares(_soft_moe), regression((16, 16), (16, 16))),
        "mamba": IndexSpecimen("mambapy", "state spaces", "2312.00752", lambda: Fitted(_mamba(), words), tokens(8)),
        "conformer": IndexSpecimen("conformer", "speech", "2005.08100", squares(_conformer), regression((12, 16), (12, 16))),
        "quartznet": IndexSpecimen(
            "pytorchcv",
            "speech",
            "1910.10261",
            lambda: FittedPair(_quartznet(), first(F.cross_entropy)),
            lambda b: {"x": n(b, 8, 16), "z": torch.full((b,), 16), "y": r(0, 6, (b, 8))},
        ),
        "tcn": IndexSpecimen("pytorch_tcn", "time series", "1803.01271", squares(_tcn), regression((4, 16), (8, 16))),
        "i_transformer": IndexSpecimen("iTransformer", "time series", "2310.06625", Forecaster, regression((16, 4), (4, 4))),
        "ltc": IndexSpecimen(
            "ncps", "recurrent", "2006.04439", lambda: Fitted(_ltc(), first(F.mse_loss)), regression((5, 4), (5, 2))
        ),
        "cfc": IndexSpecimen(
            "ncps", "recurrent", "2106.13898", lambda: Fitted(_cfc(), first(F.mse_loss)), regression((5, 4), (5, 2))
        ),
        "neural_ode": IndexSpecimen("torchdiffeq", "time series", "1806.07366", squares(NeuralOde), regression((4,), (4,))),
        "fno": IndexSpecimen("neuralop", "operators", "2010.08895", squares(_fno), regression((1, 8, 8), (1, 8, 8))),
    }

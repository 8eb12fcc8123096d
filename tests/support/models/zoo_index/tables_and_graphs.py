"""Tables, recommendation, graphs, molecules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.models.zoo_index.specimen import Fitted, FittedPair, IndexSpecimen, clicks, first, images, squares

FIELDS = (10, 10, 10)


def _torchfm(module: str, name: str, *arguments: Any, **options: Any) -> Any:
    import importlib

    return getattr(importlib.import_module(f"torchfm.model.{module}"), name)(FIELDS, *arguments, **options)


def _tabnet() -> Any:
    from pytorch_tabnet.tab_network import TabNet

    return TabNet(
        8,
        4,
        n_d=4,
        n_a=4,
        n_steps=2,
        cat_idxs=[],
        cat_dims=[],
        cat_emb_dim=1,
        virtual_batch_size=64,
        group_attention_matrix=torch.eye(8),
    )


def _ft_transformer() -> Any:
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(
        n_cont_features=4, cat_cardinalities=[5, 5], d_out=3, n_blocks=2, d_block=16, attention_n_heads=4, attention_dropout=0.0,
        ffn_d_hidden=None, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip


def _tabular_resnet() -> Any:
    from rtdl_revisiting_models import ResNet

    return ResNet(d_in=8, d_out=4, n_blocks=2, d_block=16, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0)


def _periodic() -> Any:
    from rtdl_num_embeddings import PeriodicEmbeddings

    return nn.Sequential(
        PeriodicEmbeddings(8, 4, n_frequencies=4, frequency_init_scale=0.1, lite=False),
        nn.Flatten(), nn.Linear(32, 16), nn.ReLU(),
        nn.Linear(16, 4),
    )  # fmt: skip


def _tab_transformer() -> Any:
    from tab_transformer_pytorch import TabTransformer

    return TabTransformer(
        categories=(5, 5, 5),
        num_continuous=4,
        dim=16,
        depth=2,
        heads=4,
        dim_head=4,
        dim_out=3,
        mlp_hidden_mults=(2, 1),
        mlp_act=nn.ReLU(),
    )


class Molecules(nn.Module):
    """Two equivariant layers and a readout, over dense graphs."""

    def __init__(self) -> None:
        super().__init__()
        from egnn_pytorch import EGNN

        self.layers = nn.ModuleList(EGNN(dim=8, m_dim=8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x, z = layer(x, z)
        return F.mse_loss(self.head(x).sum((1, 2)), y) + z.square().mean()


class DenseGraphs(nn.Module):
    """Dense graph convolutions with differentiable pooling between them."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import DenseGCNConv, DenseSAGEConv

        self.one, self.assign, self.two = DenseGCNConv(4, 16), DenseSAGEConv(4, 3), DenseSAGEConv(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        from torch_geometric.nn import dense_diff_pool

        pooled, adjacency, link, entropy = dense_diff_pool(self.one(x, z).relu(), z, self.assign(x, z))
        out = self.two(pooled, adjacency).relu().mean(1)
        return F.cross_entropy(self.head(out), y) + link + entropy


class NodeClassifier(nn.Module):
    """A model of the package on one graph that is whole in a batch: nodes, edges, and a label for each node."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import torch_geometric.nn

        self.net = getattr(torch_geometric.nn, name)(4, 16, 2, 3)

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x, edge_index), y)


def _graphs(b: int) -> dict[str, Tensor]:
    return {"x": torch.randn(b, 5, 4), "z": (torch.rand(b, 5, 5) < 0.5).float(), "y": torch.randint(0, 4, (b,))}


def _graph(b: int) -> dict[str, Tensor]:
    return {"x": torch.randn(b, 4), "edge_index": torch.randint(0, b, (2, 3 * b)), "y": torch.randint(0, 3, (b,))}


def _structure() -> Any:
    from invariant_point_attention import IPABlock

    return IPABlock(
        dim=16, heads=2, scalar_key_dim=4, scalar_value_dim=4, point_key_dim=2, point_value_dim=2, require_pairwise_repr=False
    )


class Structure(nn.Module):
    """One block of invariant point attention with given frames."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _structure()

    def forward(self, x: Tensor, rotations: Tensor, translations: Tensor) -> Tensor:
        out: Tensor = self.net(x, rotations=rotations, translations=translations)
        return out.square().mean()


def table_models() -> dict[str, IndexSpecimen]:
    """By name."""
    bce, n, r = F.binary_cross_entropy, torch.randn, torch.randint
    table = images(8, classes=4)

    def fm(*arguments: Any, **options: Any) -> Any:
        return lambda: Fitted(_torchfm(*arguments, **options), bce)

    return {
        "deep_fm": IndexSpecimen(
            "torchfm", "recommendation", "1703.04247", fm("dfm", "DeepFactorizationMachineModel", 8, (16,), 0.0), clicks()
        ),
        "deep_cross": IndexSpecimen(
            "torchfm", "recommendation", "1708.05123", fm("dcn", "DeepCrossNetworkModel", 8, 2, (16,), 0.0), clicks()
        ),
        "auto_int": IndexSpecimen(
            "torchfm",
            "recommendation",
            "1810.11921",
            fm("afi", "AutomaticFeatureInteractionModel", 8, 2, 2, (16,), (0.0, 0.0)),
            clicks(),
        ),
        "x_deep_fm": IndexSpecimen(
            "torchfm",
            "recommendation",
            "1803.05170",
            fm("xdfm", "ExtremeDeepFactorizationMachineModel", 8, (16,), 0.0, (8, 8), split_half=False),
            clicks(),
        ),
        "product_net": IndexSpecimen(
            "torchfm",
            "recommendation",
            "1611.00144",
            fm("pnn", "ProductNeuralNetworkModel", 8, (16,), 0.0, method="inner"),
            clicks(),
        ),
        "tab_net": IndexSpecimen(
            "pytorch_tabnet", "tabular", "1908.07442", lambda: Fitted(_tabnet(), first(F.cross_entropy)), table
        ),
        "ft_transformer": IndexSpecimen(
            "rtdl_revisiting_models",
            "tabular",
            "2106.11959",
            lambda: FittedPair(_ft_transformer(), F.cross_entropy),
            lambda b: {"x": n(b, 4), "z": r(0, 5, (b, 2)), "y": r(0, 3, (b,))},
        ),
        "tabular_resnet": IndexSpecimen(
            "rtdl_revisiting_models", "tabular", "2106.11959", lambda: Fitted(_tabular_resnet(), F.cross_entropy), table
        ),
        "periodic": IndexSpecimen(
            "rtdl_num_embeddings", "tabular", "2203.05556", lambda: Fitted(_periodic(), F.cross_entropy), table
        ),
        "tab_transformer": IndexSpecimen(
            "tab_transformer_pytorch",
            "tabular",
            "2012.06678",
            lambda: FittedPair(_tab_transformer(), F.cross_entropy),
            lambda b: {"x": r(0, 5, (b, 3)), "z": n(b, 4), "y": r(0, 3, (b,))},
        ),
        "egnn": IndexSpecimen(
            "egnn_pytorch", "graphs", "2102.09844", Molecules, lambda b: {"x": n(b, 5, 8), "z": n(b, 5, 3), "y": n(b)}
        ),
        "diff_pool": IndexSpecimen("torch_geometric", "graphs", "1806.08804", DenseGraphs, _graphs),
        "gcn": IndexSpecimen("torch_geometric", "graphs", "1609.02907", lambda: NodeClassifier("GCN"), _graph),
        "gat": IndexSpecimen("torch_geometric", "graphs", "1710.10903", lambda: NodeClassifier("GAT"), _graph),
        "gin": IndexSpecimen("torch_geometric", "graphs", "1810.00826", lambda: NodeClassifier("GIN"), _graph),
        "structure": IndexSpecimen(
            "invariant_point_attention",
            "molecules",
            "AlphaFold 2",
            Structure,
            lambda b: {"x": n(b, 6, 16), "rotations": n(b, 6, 3, 3), "translations": n(b, 6, 3)},
        ),
        "mlp_mixer": IndexSpecimen(
            "mlp_mixer_pytorch", "images", "2105.01601", squares(_mixer), lambda b: {"x": n(b, 3, 8, 8), "y": n(b, 4)}
        ),
    }


def _mixer() -> Any:
    from mlp_mixer_pytorch import MLPMixer

    return MLPMixer(image_size=8, channels=3, patch_size=4, dim=16, depth=2, num_classes=4)

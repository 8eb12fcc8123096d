"""What random models are made of: statements as text with slots, which are filled at random and kept where they run.

Slots: ``{x} {y} {z}`` floating-point values (``y`` and ``z`` mostly fit ``x``), ``{n}`` integers, ``{m}`` booleans, ``{d} {e}``
dimensions of ``x``, ``{size}`` the size of ``d``, ``{last}``, ``{rows}`` and ``{chan}`` the sizes of the last two dimensions and of dimension 1,
``{o}`` a new size, ``{k}`` 0 to 2, ``{t} {u}`` fresh names, ``{M}`` the statement's own module or parameter. In front of ``@``
is what makes that module; a statement's value is its last line.
"""

# ruff: noqa: E501

from __future__ import annotations

ELEMENTWISE = """
torch.tanh({x})
torch.sigmoid({x})
F.relu({x})
F.gelu({x})
F.gelu({x}, approximate="tanh")
F.silu({x})
F.softplus({x})
F.leaky_relu({x}, 0.1)
F.elu({x})
F.hardtanh({x}, -0.8, 0.9)
F.mish({x})
F.logsigmoid({x})
{x}.abs()
{x}.square()
-{x}
{x} * 0.5
1.5 - {x}
2 / (1 + {x}.abs())
{x} / (1 + {x}.abs())
torch.sin({x})
torch.exp(-{x}.abs())
torch.log1p({x}.abs())
torch.sqrt({x}.abs() + 0.1)
({x}.square() + 0.5).rsqrt()
{x}.pow(3)
torch.erf({x})
{x}.clamp(-0.7, 0.9)
{x}.clamp(min=0.1)
{x}.sign() * {x}
{x}.detach()
{x}.clone()
{x}.contiguous()
torch.nan_to_num({x})
torch.where({x} > 0, {x}, 0.1 * {x})
torch.floor({x}) + {x}
torch.ones_like({x}) + {x}
F.dropout({x}, 0.0, self.training)
{x}.float().to({x}.dtype) * 0 + {x}
{x}.type_as({y})
{x} + {x}
"""

BROADCASTING = """
{x} + {y}
{x} - {y}
{x} * {y}
{x} / (1 + {y}.abs())
torch.maximum({x}, {y})
torch.minimum({x}, {y})
torch.where({x} > {y}, {x}, {y} * 0.5)
torch.where({m}, {x}, {y})
torch.lerp({x}, {y}, 0.3)
torch.addcmul({x}, {y}, {z}, value=0.5)
{x}.masked_fill({m}, 0.25)
{x}.masked_fill({y} > 0, 0.0)
{x} * {m}
{x} + {n}
torch.atan2({x}, 1 + {y}.abs())
torch.logaddexp({x}, {y})
torch.add({x}, {y}, alpha=0.5)
{x}.expand_as({y}) + {y}
"""

VIEWS = """
{x}.transpose({d}, {e})
{x}.mT
{x}.movedim({d}, {e})
{x}.permute(0, *range({x}.dim() - 1, 0, -1))
{x}.flatten(1)
{x}.flatten({k}, {k} + 1)
{x}.flatten(0, 1)
{x}.reshape({x}.shape[0], -1)
{x}.reshape(-1, {last})
{x}.reshape({x}.shape[0], -1, 2)
{x}.reshape({x}.shape[0], 2, -1)
{x}.view({x}.shape[0], {last}, -1)
{x}.view(*{x}.shape[:-1], 2, -1)
{x}.unflatten({d}, (2, -1))
{x}.unflatten({d}, (-1, 3))
{x}.unsqueeze({d})
{x}.unsqueeze(1)
{x}.unsqueeze(-1)
{x}.squeeze({d})
{x}.squeeze()
{x}[:, {k}]
{x}[:, -1]
{x}[:, 1:]
{x}[:, :-1]
{x}[..., ::2]
{x}[..., {k}:]
{x}[..., None] * {x}[..., None, :]
{x}[:, [0, -1]]
{x}.narrow({d}, 0, 1)
{x}.narrow(-1, {k}, 2)
{x}.select({d}, {k})
{x}.chunk(2, {d})[{k}]
{x}.chunk(2, -1)[0] * {x}.chunk(2, -1)[1]
{x}.split([1, {last} - 1], -1)[1]
{x}.split(2, {d})[{k}]
{x}.unbind({d})[{k}]
sum({x}.unbind(1))
torch.cat(({x}, {y}), {d})
torch.cat(({x}, {y}), -1)
torch.cat(({x}, {x} * 2), {d})
torch.cat([{x}, {x}.flip(1)], 1)
torch.stack(({x}, {y}), {d})
torch.stack(({x}, {x}.sin()), 1)
torch.stack([{x}, {x} * 2]).sum(0)
{x}.unsqueeze(1).expand(-1, 3, *{x}.shape[1:])
{x}.repeat(1, 2)
{x}.repeat_interleave(2, {d})
{x}.tile(2)
{x}.flip({d})
{x}.roll(1, {d})
F.pad({x}, (1, 0))
F.pad({x}, (0, 0, 1, 2))
F.pad({x}, (0, -1))
torch.tril({x})
torch.triu({x}, 1)
torch.diagonal({x}, 0, -2, -1)
{x}.unfold({d}, 2, 1)
{x}.view_as({x}).T
{x}.index_select({d}, torch.tensor([0, 0]))
"""

ALONG = """
F.softmax({x}, {d})
F.softmax({x}, -1)
F.log_softmax({x}, {d})
{x}.cumsum({d})
{x}.softmax(-1).cumprod(-1)
F.normalize({x}, dim={d})
F.layer_norm({x}, {x}.shape[-1:])
F.layer_norm({x}, ({last},))
F.glu({x}, {d})
{x} - {x}.mean({d}, keepdim=True)
{x} / {x}.norm(dim={d}, keepdim=True).clamp(min=0.1)
({x} - {x}.mean(-1, keepdim=True)) * torch.rsqrt({x}.var(-1, keepdim=True, unbiased=False) + 1e-3)
{x}.sort({d})[0]
{x}.topk(2, -1)[0]
{x}.topk(1, {d})[0]
torch.diff({x}, dim={d})
F.one_hot({x}.argmax(-1), {last}).to({x}.dtype)
{x}.gather(-1, {x}.argsort(-1))
{x}.gather({d}, {x}.argmax({d}, keepdim=True))
F.cosine_similarity({x}, {y}, dim={d})
{x}.sum({d})
{x}.sum({d}, keepdim=True)
{x}.mean({d})
{x}.mean({d}, keepdim=True)
{x}.mean((1, -1))
{x}.sum((0, -1))
{x}.amax({d})
{x}.max({d})[0]
{x}.min({d}, keepdim=True)[0]
{x}.logsumexp({d})
{x}.var({d})
{x}.std({d}, keepdim=True)
{x}.norm(dim={d})
{x}.prod({d})
{x}.mean()
{x}.sum() * 0.1
{x}.max()
"""

PRODUCTS = """
{x} @ {y}
{x} @ {y}.mT
{x}.mT @ {y}
{x} @ {x}.mT
torch.einsum("bi,bj->bij", {x}, {y})
torch.einsum("bsd,btd->bst", {x}, {y})
torch.einsum("bsd,bsd->bs", {x}, {y})
torch.einsum("bsd,bsd->d", {x}, {y})
torch.bmm({x}, {y}.transpose(1, 2))
({x} * {y}).sum(-1)
torch.outer({x}.flatten()[:3], {y}.flatten()[:4])
F.scaled_dot_product_attention({x}, {x}, {x})
F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)
F.scaled_dot_product_attention({x}, {y}, {y})
F.scaled_dot_product_attention({x}.unsqueeze(1), {y}.unsqueeze(1), {x}.unsqueeze(1)).squeeze(1)
torch.cdist({x}, {y})
"""

MODULES = """
nn.Linear({last}, {o}) @ self.{M}({x})
nn.Linear({last}, {o}, bias=False) @ self.{M}({x})
nn.Linear({last}, {last}) @ {x} + self.{M}({x})
nn.Linear({last}, {o}) @ F.relu(self.{M}({x}))
nn.Linear({last}, {o}).requires_grad_(False) @ self.{M}({x})
nn.Linear({last}, {last}) @ self.{M}(torch.tanh(self.{M}({x})))
nn.Sequential(nn.Linear({last}, {o}), nn.GELU(), nn.Linear({o}, {last})) @ {x} + self.{M}({x})
nn.Sequential(nn.LayerNorm({last}), nn.Linear({last}, {o}), nn.Tanh()) @ self.{M}({x})
nn.Linear({last}, 3 * {last}) @ {t}, {u}, {v} = self.{M}({x}).chunk(3, -1);F.scaled_dot_product_attention({t}, {u}, {v})
nn.Linear({last}, 6) @ {t} = self.{M}({x}).view({x}.shape[0], -1, 2, 3).transpose(1, 2);F.scaled_dot_product_attention({t}, {t}, {t}, is_causal=True).transpose(1, 2).flatten(2)
nn.LayerNorm({last}) @ self.{M}({x})
nn.LayerNorm({last}, elementwise_affine=False) @ self.{M}({x})
nn.RMSNorm({last}) @ self.{M}({x})
nn.BatchNorm1d({chan}) @ self.{M}({x})
nn.BatchNorm1d({chan}, momentum=None) @ self.{M}({x})
nn.BatchNorm1d({chan}, affine=False) @ F.relu(self.{M}({x}))
nn.BatchNorm1d({chan}, track_running_stats=False) @ self.{M}({x})
nn.BatchNorm1d({chan}) @ self.{M}(self.{M}({x}) * 2)
nn.BatchNorm2d({chan}) @ self.{M}({x})
nn.GroupNorm(1, {chan}) @ self.{M}({x})
nn.GroupNorm(2, {chan}) @ self.{M}({x})
nn.InstanceNorm1d({chan}, affine=True) @ self.{M}({x})
nn.PReLU() @ self.{M}({x})
nn.PReLU({chan}) @ self.{M}({x})
nn.Conv1d({chan}, {o}, 3, padding=1) @ self.{M}({x})
nn.Conv1d({chan}, {o}, 2) @ self.{M}({x})
nn.Conv1d({chan}, {chan}, 3, padding=1, groups={chan}) @ {x} + self.{M}({x})
nn.Conv2d({chan}, {o}, 3, padding=1) @ self.{M}({x})
nn.Conv2d({chan}, {o}, 1, bias=False) @ self.{M}({x})
nn.Conv2d({chan}, {o}, 3, stride=2, padding=1) @ self.{M}({x})
nn.Conv2d({chan}, 2 * {chan}, 3, padding=1, groups={chan}) @ self.{M}({x})
nn.Conv2d({chan}, {o}, 3, padding="same", dilation=2) @ self.{M}({x})
nn.ConvTranspose1d({chan}, {o}, 2, stride=2) @ self.{M}({x})
nn.ConvTranspose2d({chan}, {o}, 2, stride=2) @ self.{M}({x})
nn.Sequential(nn.Conv2d({chan}, {o}, 3, padding=1, bias=False), nn.BatchNorm2d({o}), nn.ReLU(inplace=True)) @ self.{M}({x})
nn.Sequential(nn.Conv1d({chan}, {o}, 3, padding=1), nn.GroupNorm(1, {o}), nn.SiLU()) @ self.{M}({x})
nn.MaxPool1d(2) @ self.{M}({x})
nn.AvgPool1d(2) @ self.{M}({x})
nn.MaxPool2d(2) @ self.{M}({x})
nn.AvgPool2d(2) @ self.{M}({x})
nn.AdaptiveAvgPool1d(2) @ self.{M}({x})
nn.AdaptiveAvgPool2d(1) @ self.{M}({x})
nn.Upsample(scale_factor=2) @ self.{M}({x})
nn.Embedding(7, {o}) @ self.{M}({n})
nn.Embedding(6, {o}, padding_idx=0) @ self.{M}({n} % 6)
nn.EmbeddingBag(7, {o}) @ self.{M}({n})
nn.Embedding(8, {last}) @ {x} + self.{M}(torch.arange({x}.shape[-2]))
nn.Embedding(7, {last}) @ F.linear({x}, self.{M}.weight) + self.{M}({n}).mean()
nn.Embedding(8, {last}) @ F.linear({x} + self.{M}.weight[:1], self.{M}.weight)
nn.MultiheadAttention({last}, 1, batch_first=True) @ self.{M}({x}, {x}, {x}, need_weights=False)[0]
nn.MultiheadAttention({last}, 2, batch_first=True) @ self.{M}({x}, {x}, {x})[0]
nn.TransformerEncoderLayer({last}, 2, 8, dropout=0.0, batch_first=True) @ self.{M}({x})
nn.GRU({last}, {o}, batch_first=True) @ self.{M}({x})[0]
nn.LSTM({last}, 3, batch_first=True) @ self.{M}({x})[0][:, -1]
nn.Bilinear({last}, {last}, {o}) @ self.{M}({x}, {x}.tanh())
nn.Dropout(0.3) @ self.{M}({x})
nn.Dropout1d(0.3) @ self.{M}({x})
nn.Flatten() @ self.{M}({x})
"""

PARAMETERS = """
nn.Parameter(torch.randn({last})) @ {x} * self.{M}
nn.Parameter(torch.randn({size}, 1)) @ {x} + self.{M}
nn.Parameter(torch.tensor(0.7)) @ {x} * self.{M}
nn.Parameter(torch.randn({o}, {last})) @ {x} @ self.{M}.T
nn.Parameter(torch.randn({last}, {o})) @ {x} @ self.{M}
nn.Parameter(torch.randn(1, {chan})) @ torch.cat((self.{M}.expand({x}.shape[0], -1), {x}), 1)
nn.Parameter(torch.randn(1, 1, {last})) @ torch.cat((self.{M}.expand({x}.shape[0], -1, -1), {x}), 1)
nn.Parameter(torch.randn(7, {o})) @ self.{M}[{n}]
nn.Parameter(torch.randn(3, {last}), requires_grad=False) @ {x}[..., None, :] + self.{M}
nn.Parameter(torch.randn(2, {last}, {last})) @ {x} @ self.{M}[0] + {x} @ self.{M}[1]
nn.ParameterList([nn.Parameter(torch.randn({last})) for _ in range(2)]) @ sum({x} * each for each in self.{M})
nn.Buffer(torch.randn({last})) @ {x} + self.{M}
nn.Buffer(torch.arange({last}) + 0.5) @ {x} * self.{M}
nn.Buffer(torch.ones({rows}, {last}).tril()) @ {x}.masked_fill(self.{M} == 0, -1.0)
nn.Buffer(torch.zeros({last})) @ with torch.no_grad(): self.{M}.mul_(0.9).add_({x}.detach().flatten(0, -2).mean(0), alpha=0.1);{x} - self.{M}
nn.Buffer(torch.zeros(())) @ self.{M} += 1;{x} / self.{M}
nn.Buffer(torch.zeros(())) @ self.{M} += {x}.detach().mean();{x}.tanh()
nn.Buffer(torch.ones({last})) @ with torch.no_grad(): self.{M}.copy_({x}.reshape(-1, {last}).amax(0));{x} * 0.3
nn.Buffer(torch.zeros(3)) @ {x} + self.{M}.mean()
Plain(torch.randn({last}, dtype=torch.float64)) @ {x} * self.{M}
"""

WRITES = """
{t} = {x}.clone();{t}[:, 0] = 0.5;{t}
{t} = {x}.clone();{t}[:, :1] += {y}[:, :1];{t}
{t} = {x} * 1;{t} += {y};{t}
{t} = {x} * 1;{t}.mul_(0.5).add_(1);{t}
{t} = {x} + 0;F.relu_({t});{t}
{t} = {x}.clone();{t}[..., 0].mul_(2);{t}
{t} = torch.zeros_like({x});{t}[:, 1:] = {x}[:, :-1];{t}
{t} = {x}.new_zeros({x}.shape[0], 3);{t}[:, 0] = {x}.flatten(1)[:, 0];{t}
{t} = torch.zeros({x}.shape[0], {last}, dtype={x}.dtype);{t} + {x}
{t} = torch.arange({last}, dtype={x}.dtype);{x} * {t}
{t} = {x}.clone();{t}.masked_fill_({t} > 0.5, 0.5);{t}
{t} = {x}.clone();{t}[{t} > 0.5] = 0.5;{t}
nn.Parameter(torch.randn({last})) @ {t} = {x}.clone();{t}[({t} > 0.1).any(-1)] = self.{M};{t}
{t} = torch.zeros_like({x}).scatter_add({d}, {x}.argsort({d}), {x});{t}
{t} = {x}.new_zeros({x}.shape[0], 7).scatter_(1, {n}.reshape({x}.shape[0], -1), 1.0);{t}
{t} = torch.full(({last},), 0.5, dtype={x}.dtype);{x} - {t}
{t} = torch.ones({x}.shape[-2], {x}.shape[-2], dtype=torch.bool).tril();({x} @ {x}.mT).masked_fill(~{t}, -9.0).softmax(-1) @ {x}
"""

CONTROL = """
{x} * 2 if self.training else {x}
{x}.sum(1) if {x}.shape[1] > 2 else {x}
{t} = [{x}[:, i] for i in range({x}.shape[1])];torch.stack({t}[::-1], 1)
{t} = {x}[:, 0];for i in range({x}.shape[1]): {t} = torch.tanh({t} + {x}[:, i]);{t}
with torch.no_grad(): {t} = {x}.softmax(-1);{x} * {t}
with torch.no_grad(): {t} = {x}.mean();{x} - {t}
with torch.enable_grad(): {t} = {x}.sin();{t}
{t} = {{"a": {x}, "b": {y}}};{t}["a"].tanh() + {t}["b"].mean()
checkpoint(lambda v: torch.tanh(v) * v, {x}, use_reentrant=False)
"""

NUMBERS = """
{x} * {x}.shape[0]
{x} / {x}.shape[1]
{x} + {x}.numel()
{x} * (1 / {x}.shape[0])
{x} + 0.3 / {x}.shape[0]
{x} - 1.5 * {x}.shape[0] / {x}.shape[-1]
{x} * (({x}.shape[0] + 1) / ({x}.shape[0] + 3))
{x} / {x}.shape[0] ** 2 + 1 / {x}.numel()
{x} * {x}.shape[1] ** -0.5
{x}.clamp(max={x}.shape[0] / 7)
{x}.masked_fill({m}, 1 / {x}.shape[0])
{x} + torch.full(({last},), 2 / {x}.shape[0], dtype={x}.dtype)
{x} + {x}.new_tensor(0.5) * ({x}.shape[0] - 1)
torch.add({x}, {y}, alpha={x}.shape[0] - 1)
torch.sub({x}, {y}, alpha=1 / {x}.shape[0])
torch.lerp({x}, {y}, 1 / {x}.shape[0])
torch.where({x} > 1 / {x}.shape[0], {x}, {x}.shape[0] / 9)
F.leaky_relu({x}, 1 / {x}.shape[0])
F.layer_norm({x}, {x}.shape[-1:], eps=1 / {x}.shape[0])
{x}[: {x}.shape[0] - 1].sum(0) + {x}
{x} * torch.arange({x}.shape[0], dtype={x}.dtype).mean()
{x} + torch.arange({x}.shape[0], dtype={x}.dtype).view(-1, *[1] * ({x}.dim() - 1)) / {x}.shape[0]
{x} * (2 if {x}.shape[0] > 3 else 0.5)
{x} * math.sqrt({x}.shape[-1]) / math.log(1 + {x}.shape[0])
{x} * max({x}.shape[0], 2) + min({x}.shape[1], 3)
{x} * round({x}.shape[0] / 3) + int({x}.shape[0] * 0.3)
{x} * ({x}.shape[0] % 3) + {x}.shape[0] // 3
{x} * len({x}) + float({x}.shape[0])
{x} * 2 if {x}.shape[0] % 2 else {x}
{x} * {x}[2:].shape[0] + {x}[:3].shape[0]
{x} * [1.0, 2.0, 0.5][{x}.shape[0] % 3]
{x} * torch.tensor({x}.shape[0]) / torch.tensor([1.0, {x}.shape[0]], dtype={x}.dtype).sum()
"""

RANDOM = """
F.dropout({x}, 0.4, self.training)
{x} + torch.rand_like({x})
{x} * (torch.rand({x}.shape[0], *[1] * ({x}.dim() - 1), dtype={x}.dtype) > 0.3)
"""

LOW = """
F.gelu({x}.float()).to({x}.dtype)
{x}.to(torch.float32).softmax(-1).double()
{x}.float().mean(-1, keepdim=True).double() + {x}
"""

LOSSES = """
{x}.mean()
{x}.square().mean()
{x}.sum() * 0.05
{x}.abs().sum() / {x}.shape[0]
{x}.square().sum(-1).mean()
F.mse_loss({x}, {y})
F.mse_loss({x}, {x}.detach() * 0.5)
F.l1_loss({x}, torch.zeros_like({x}))
F.smooth_l1_loss({x}, {y}, reduction="sum")
F.huber_loss({x}, torch.ones_like({x}))
F.binary_cross_entropy_with_logits({x}, ({y} > 0).to({x}.dtype))
F.binary_cross_entropy_with_logits({x}, ({x} > 0).to({x}.dtype), reduction="sum")
F.kl_div({x}.log_softmax(-1), {y}.softmax(-1), reduction="batchmean")
-({x}.log_softmax(-1) * {x}.detach().softmax(-1)).sum(-1).mean()
F.cross_entropy({x}.flatten(0, -2), {x}.detach().roll(1, -1).argmax(-1).flatten())
F.cross_entropy({x}, {n} % {chan})
F.cross_entropy({x}, {n} % {chan}, label_smoothing=0.1)
F.cross_entropy({x}.flatten(0, -2), ({n} % {last}).flatten(), ignore_index=0)
F.cross_entropy({x}, {n} % {chan}, weight=torch.arange(1, {chan} + 1, dtype={x}.dtype))
F.cross_entropy({x}, {n} % {chan}, reduction="sum") * 0.1
F.nll_loss({x}.log_softmax(1), {n} % {chan})
F.cosine_similarity({x}, {y}, dim=-1).mean()
{x}.logsumexp(-1).mean()
{x}.norm()
{x}.var()
{x}.amax(-1).mean()
({x} * {m}).sum() / {m}.sum().clamp(min=1)
({x}.flatten(1).mean(1) * {y}.flatten(1).mean(1)).mean()
"""

KINDS = {
    "elementwise": (ELEMENTWISE, 10), "broadcasting": (BROADCASTING, 10), "views": (VIEWS, 16), "along": (ALONG, 10),
    "products": (PRODUCTS, 6), "modules": (MODULES, 18), "parameters": (PARAMETERS, 8), "writes": (WRITES, 4),
    "control": (CONTROL, 3), "numbers": (NUMBERS, 6), "random": (RANDOM, 1), "low": (LOW, 1),
}  # fmt: skip
"""Statements by kind, and how often each kind is drawn."""


def statements_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


STATEMENTS = {kind: (statements_of(text), weight) for kind, (text, weight) in KINDS.items()}
LOSS_STATEMENTS = statements_of(LOSSES)

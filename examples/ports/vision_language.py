"""A vision-language model: a frozen image encoder, a projector and a language model that train; checks that only validate."""

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # autopar

words, width, patches = 64, 32, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gates = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x)
        x = x + torch.cumsum(torch.sigmoid(self.gates(h)) * h, 1) / h.shape[1]
        return x + self.down(F.gelu(self.up(x)))


class VisionLanguage(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(48, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.projector = nn.Linear(width, width)
        self.embed, self.layers = nn.Embedding(words, width), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, pixels, input_ids, labels):
        with torch.no_grad():
            seen = self.vision(pixels)
        if seen.shape[1] != patches:
            raise ValueError(f"{patches} patches are expected")
        x = torch.cat([self.projector(seen), self.embed(input_ids)], dim=1)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x[:, patches:])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def batch():
    ids = torch.randint(0, words, (16, 12))
    return {"pixels": torch.randn(16, patches, 48), "input_ids": ids, "labels": ids.masked_fill(ids < 8, -100)}


torch.manual_seed(0)
batches = [batch() for _ in range(4)]
model = VisionLanguage()
model.vision.requires_grad_(False)
model = autopar.parallelize(model, "local", example_inputs=batches[0])  # autopar
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
losses = []
for inputs in batches[:3]:
    loss = model(**inputs)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.eval()
with torch.no_grad():
    losses.append(model(**batches[3])["logits"].abs().mean().item())
print(losses)

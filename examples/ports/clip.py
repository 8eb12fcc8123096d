"""CLIP: two encoders and a learned temperature that is an output; the contrastive loss is outside."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # autopar


class CLIP(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(48, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.words, self.text = nn.Embedding(64, width), nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text(self.words(text)).mean(1), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


torch.manual_seed(0)
model = CLIP()
example = (torch.zeros(16, 48), torch.zeros(16, 6, dtype=torch.long))  # autopar
model = autopar.parallelize(model, "local", example_inputs=example)  # autopar
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.2)
losses = []
for _step in range(4):
    images, texts = torch.randn(16, 48), torch.randint(0, 64, (16, 6))
    image_features, text_features, logit_scale = model(images, texts)
    logits = logit_scale * image_features @ text_features.t()
    labels = torch.arange(16)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    losses.append(loss.item())
print(losses)

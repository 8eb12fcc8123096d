"""Distillation: a frozen teacher in evaluation, a smaller student, soft targets beside the labels."""

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # autopar


def classifier(width):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))


torch.manual_seed(0)
teacher, student = classifier(128), classifier(32)
teacher.eval()
for p in teacher.parameters():
    p.requires_grad = False
teacher, student = autopar.parallelize([teacher, student], "local", [(torch.zeros(16, 16),), (torch.zeros(16, 16),)])  # autopar
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
T, losses = 2.0, []
for _step in range(4):
    x, y = torch.randn(16, 16), torch.randint(0, 8, (16,))
    with torch.no_grad():
        soft = F.softmax(teacher(x) / T, dim=-1)
    logits = student(x)
    loss = F.kl_div(F.log_softmax(logits / T, dim=-1), soft, reduction="batchmean") * T * T + F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)

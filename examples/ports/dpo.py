"""Direct preference optimisation: a policy beside its frozen reference, log-probabilities of answers outside of the models."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # autopar


class LM(nn.Module):
    def __init__(self, words=32, width=32):
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.gates, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + torch.cumsum(torch.sigmoid(self.gates(x)) * x, 1) / ids.shape[1]
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def logps(model, ids, answer_from=4):
    logits = model(ids)[:, answer_from - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, answer_from:, None]).squeeze(-1).sum(-1)


torch.manual_seed(0)
chosen, rejected = torch.randint(0, 32, (4, 16, 12)), torch.randint(0, 32, (4, 16, 12))
policy = LM()
reference = copy.deepcopy(policy).requires_grad_(False).eval()
policy, reference = autopar.parallelize([policy, reference], "local", [(chosen[0],), (chosen[0],)])  # autopar
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
losses = []
for good, bad in zip(chosen, rejected, strict=True):
    with torch.no_grad():
        wanted = logps(reference, good) - logps(reference, bad)
    margin = logps(policy, good) - logps(policy, bad) - wanted
    loss = -F.logsigmoid(0.1 * margin).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)

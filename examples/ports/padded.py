"""Padded batches: each as long as its longest sentence, a mask, labels that are ignored, and a last batch that is smaller."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import autopar  # autopar


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, width, padding_idx=0), nn.Linear(width, 8)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids, labels):
        h = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100)


def collate(sentences):
    ids = pad_sequence(sentences, batch_first=True)
    return {"ids": ids, "labels": (ids % 8).masked_fill(ids == 0, -100)}


torch.manual_seed(0)
sentences = [torch.randint(1, 64, (6 + 2 * (number % 3),)) for number in range(40)]
loader = DataLoader(sorted(sentences, key=len), batch_size=16, collate_fn=collate)
model = Tagger()
model = autopar.parallelize(model, "local", example_inputs=next(iter(loader)))  # autopar
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for batch in loader:
    loss = model(**batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)

"""A word language model: an LSTM whose state is carried from window to window (truncated backpropagation through time)."""

import inspect
import json

import torch
from torch import nn

import autopar  # autopar

text = inspect.getsource(json).encode()
data = torch.tensor(list(text[: len(text) // 16 * 16])).view(16, -1)
window = 8


class RNN(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.encoder, self.lstm = nn.Embedding(256, width), nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, 256)

    def forward(self, x, hidden):
        out, hidden = self.lstm(self.encoder(x), hidden)
        return self.decoder(out), hidden


torch.manual_seed(0)
model = RNN()
hidden = (torch.zeros(2, 16, 32), torch.zeros(2, 16, 32))
example, dims = {"x": data[:, :window], "hidden": hidden}, {"hidden.0": 1, "hidden.1": 1}  # autopar
model = autopar.parallelize(model, "local", example_inputs=example, batch_dim=dims)  # autopar
criterion = nn.CrossEntropyLoss()
losses = []
for step in range(4):
    x = data[:, step * window : (step + 1) * window]
    y = data[:, step * window + 1 : (step + 1) * window + 1]
    hidden = tuple(each.detach() for each in hidden)
    model.zero_grad()
    output, hidden = model(x, hidden)
    loss = criterion(output.reshape(-1, 256), y.reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=-2.0)
    losses.append(loss.item())
print(losses)

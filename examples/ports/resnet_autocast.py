"""A small ResNet with batch norm under autocast; the loss is outside of the model, and the last batch is evaluated."""

import torch
from torch import nn

import autopar  # autopar


class Basic(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layers, self.pool, self.fc = nn.Sequential(Basic(16), Basic(16)), nn.AdaptiveAvgPool2d(1), nn.Linear(16, 8)

    def forward(self, images):
        return self.fc(self.pool(self.layers(self.stem(images))).flatten(1))


torch.manual_seed(0)
images, targets = torch.randn(64, 3, 16, 16), torch.randint(0, 8, (64,))
model = ResNet()
model = autopar.parallelize(model, "local", example_inputs=(images[:16],))  # autopar
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
losses = []
for start in (0, 16, 32):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images[start : start + 16])
        loss = criterion(output, targets[start : start + 16])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
model.eval()
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    losses.append(criterion(model(images[48:]), targets[48:]).item())
print(losses)

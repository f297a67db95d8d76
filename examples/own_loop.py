"""A plain PyTorch loop whose batches are cut as small as memory demands."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import brim

model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))


def loss(batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets, reduction="sum")


step = brim.AdaptiveStep(model, loss)
for batch in DataLoader(data, batch_size=1024, shuffle=True):
    mean_loss = step(batch)  # the gradient of the whole batch's mean loss, whatever the memory
    optimizer.step()
    print(f"{mean_loss:.3f}")

"""A loss that really becomes NaN: the learning rate is far too high."""

import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
for step in range(8):
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(f"step: {step} loss: {loss.item():.4f} lr: 1e+30", flush=True)

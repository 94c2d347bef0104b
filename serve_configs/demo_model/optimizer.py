"""Muon for weight matrices, AdamW for the rest, over flat groups.

Every number that changes from step to step is a tensor on the device, so that a whole step can be one CUDA graph.
"""

from __future__ import annotations

import torch
from flat import FlatWeights

BETA1, BETA2, EPS = 0.9, 0.97, 1e-8
MOMENTUM, DECAY, MATRIX_GAIN = 0.95, 0.05, 2.0


def orthogonal(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest matrices of about unit singular values to a stack [n, rows, columns] (Newton-Schulz, 5 rounds)."""
    x = x.to(dtype)
    wide = x.shape[-2] > x.shape[-1]
    if wide:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if wide else x


class Optimizer:
    """Clips the gradients' norm to 1, then updates the masters in place."""

    def __init__(self, flat: FlatWeights, device: torch.device) -> None:
        self.flat = flat
        self.lr = torch.zeros((), device=device)
        self.time = torch.zeros((), device=device)
        self.first = [torch.zeros_like(g.master) for g in flat.groups]
        self.second = [torch.zeros(() if g.matrices else g.master.shape, device=device) for g in flat.groups]
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    @torch.no_grad()
    def step(self) -> None:
        self.time += 1
        norm = torch.stack([g.grad.norm() for g in self.flat.groups]).norm()
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for group, first, second in zip(self.flat.groups, self.first, self.second, strict=True):
            grad = group.grad.mul_(scale)
            if group.matrices:
                first.lerp_(grad, 1 - MOMENTUM)
                update = orthogonal(grad.lerp(first, MOMENTUM), self.dtype).float()
                # Sized to match AdamW's usual update, so that one rate serves both.
                update *= MATRIX_GAIN * 0.2 * max(group.master.shape[-2:]) ** 0.5
                group.master.mul_(1 - self.lr * DECAY)
            else:
                first.lerp_(grad, 1 - BETA1)
                second.lerp_(grad * grad, 1 - BETA2)
                update = first / (1 - BETA1**self.time) / ((second / (1 - BETA2**self.time)).sqrt() + EPS)
            group.master.sub_(self.lr * update)

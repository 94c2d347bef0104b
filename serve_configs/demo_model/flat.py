"""Parameters as a few flat tensors: fp32 masters for the optimizer, bf16 copies for the arithmetic.

Matrices of one shape lie together as [count, rows, columns], so that the optimizer treats them in one call; all else
(gains, biases, embeddings, the patch kernel) lies in one vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Group:
    """Parameters that are updated together; `master`, `grad` and `copy` have the same shape."""

    names: list[str]
    matrices: bool
    master: torch.Tensor
    grad: torch.Tensor
    copy: torch.Tensor


def shape_key(name: str, parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The group a parameter belongs to: its shape for weight matrices, () for the rest."""
    matrix = parameter.ndim == 2 and "embed_tokens" not in name
    return tuple(parameter.shape) if matrix else ()


class FlatWeights:
    """Owns the training copies of a model's parameters; `write_back` returns them to the model."""

    def __init__(self, model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model
        self.groups: list[Group] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.grads: dict[str, torch.Tensor] = {}  # where each parameter's gradient belongs
        sorted_by_shape: dict[tuple[int, ...], list[tuple[str, torch.nn.Parameter]]] = {}
        for name, p in model.named_parameters():
            sorted_by_shape.setdefault(shape_key(name, p), []).append((name, p))
        for key, members in sorted_by_shape.items():
            flat = torch.cat([p.detach().float().flatten() for _, p in members]).to(device)
            grad, copy = torch.zeros_like(flat), flat.to(dtype)
            at = 0
            for name, p in members:
                self.weights[name] = copy[at : at + p.numel()].view(p.shape).detach().requires_grad_()
                self.grads[name] = grad[at : at + p.numel()].view(p.shape)
                at += p.numel()
            stacked = (len(members), *key) if key else flat.shape
            self.groups.append(
                Group([n for n, _ in members], bool(key), flat.view(stacked), grad.view(stacked), copy.view(stacked))
            )

    def collect(self) -> None:
        """Moves the gradients of the copies to the groups."""
        leaves = [self.weights[name] for name in self.grads]
        torch._foreach_copy_(list(self.grads.values()), [leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the masters into the bf16 copies, after the optimizer's step."""
        for group in self.groups:
            group.copy.copy_(group.master)

    @torch.no_grad()
    def write_back(self) -> torch.nn.Module:
        """The model with the trained weights, rounded as they were used."""
        params = dict(self.model.named_parameters())
        for name, weight in self.weights.items():
            params[name].copy_(weight.detach().float().cpu())
        return self.model

"""The training forward: Qwen2.5-VL's arithmetic over packed batches, with the HF model's own parameters.

HF's vision tower loops over windows in Python; here every layer is one variable-length attention call between two
fused pieces. `check.py` proves that both give the same numbers. The rest of the recipe uses the HF classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from shape import MEAN, STD

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, causal: bool) -> Tensor:
    """Attention within segments on the GPU; q, k, v are [rows, heads, dim]."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)
    return varlen_attn(q, k, v, borders, borders, longest, longest, window_size=window)


def attend_plain(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, causal: bool) -> Tensor:
    """The same, one segment at a time: the oracle, and what runs on a CPU."""
    out = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if start == stop:
            continue
        one = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        out.append(F.scaled_dot_product_attention(*one, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(out)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [rows, heads, dim] by angles [rows, dim]."""
    a, b = x.float().chunk(2, dim=-1)
    turned = torch.cat((-b, a), dim=-1)
    return (x.float() * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def vision_qkv(x: Tensor, cos: Tensor, sin: Tensor, n: Tensor, w: Tensor, b: Tensor, heads: int) -> list[Tensor]:
    q, k, v = F.linear(norm(x, n, 1e-6), w, b).view(len(x), 3, heads, -1).unbind(1)
    return [rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()]


def text_qkv(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    n: Tensor,
    eps: float,
    q: tuple[Tensor, Tensor],
    k: tuple[Tensor, Tensor],
    v: tuple[Tensor, Tensor],
    heads: int,
) -> list[Tensor]:
    """Keys and values come out repeated to the number of query heads."""
    h = norm(x, n, eps)
    dim = q[0].shape[0] // heads
    qs, ks, vs = (F.linear(h, *p).view(len(x), -1, dim) for p in (q, k, v))
    repeat = heads // ks.shape[1]
    return [rotate(qs, cos, sin), rotate(ks, cos, sin).repeat_interleave(repeat, 1), vs.repeat_interleave(repeat, 1)]


def after_attention(
    x: Tensor,
    a: Tensor,
    o: tuple[Tensor, Tensor | None],
    n: Tensor,
    eps: float,
    gate: tuple[Tensor, Tensor | None],
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
) -> Tensor:
    """Output projection and gated MLP, each added to the residual stream."""
    x = x + F.linear(a.flatten(1), *o)
    h = norm(x, n, eps)
    return x + F.linear(F.silu(F.linear(h, *gate)) * F.linear(h, *up), *down)


class Net:
    """Logits of a packed batch from a mapping of parameter names (HF's) to tensors."""

    def __init__(self, config, device: torch.device, compiled: bool) -> None:
        self.config = config
        self.device = device
        self.attend: Attend = attend_varlen if device.type == "cuda" else attend_plain
        wrap = functools.partial(torch.compile, dynamic=False) if compiled else (lambda f: f)
        self.vision_qkv, self.text_qkv, self.after = wrap(vision_qkv), wrap(text_qkv), wrap(after_attention)
        self.mean = torch.tensor(MEAN, device=device).repeat_interleave(196)
        self.std = torch.tensor(STD, device=device).repeat_interleave(196)

    def frequencies(self, theta: float, dim: int) -> Tensor:
        return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=self.device) / dim)

    def vision(self, w: dict[str, Tensor], batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Features of every merged slot, in window order."""
        c = self.config.vision_config
        pre = "model.visual."
        kernel = w[pre + "patch_embed.proj.weight"]
        # Both frames of a still picture are the same, so the two halves of the kernel add up.
        kernel = kernel.sum(2).reshape(c.hidden_size, -1)
        x = F.linear(((batch["pixels"].float() / 255 - self.mean) / self.std).to(dtype), kernel)
        angles = batch["places"].float()[..., None] * self.frequencies(10000.0, c.hidden_size // c.num_heads // 2)
        angles = angles.flatten(1).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        for i in range(c.depth):
            p = f"{pre}blocks.{i}."
            whole = i in c.fullatt_block_indexes
            q, k, v = self.vision_qkv(
                x, cos, sin, w[p + "norm1.weight"], w[p + "attn.qkv.weight"], w[p + "attn.qkv.bias"], c.num_heads
            )
            a = self.attend(q, k, v, batch["full_borders" if whole else "window_borders"], 1024 if whole else 64, False)
            x = self.after(
                x,
                a,
                pair(w, p + "attn.proj"),
                w[p + "norm2.weight"],
                1e-6,
                *(pair(w, p + m) for m in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
            )
        x = norm(x, w[pre + "merger.ln_q.weight"], 1e-6).view(len(x) // 4, -1)
        return F.linear(F.gelu(F.linear(x, *pair(w, pre + "merger.mlp.0"))), *pair(w, pre + "merger.mlp.2"))

    def __call__(self, w: dict[str, Tensor], batch: dict[str, Tensor], dtype: torch.dtype, longest: int) -> Tensor:
        """Logits [labels, vocabulary] at the scored rows."""
        c = self.config.text_config
        pre = "model.language_model."
        embedding = w[pre + "embed_tokens.weight"]
        x = F.embedding(batch["ids"], embedding).index_copy(0, batch["slots"], self.vision(w, batch, dtype))
        rope = c.rope_parameters
        angles = batch["positions"].float()[..., None] * self.frequencies(
            rope["rope_theta"], c.hidden_size // c.num_attention_heads
        )
        section = rope["mrope_section"]
        angles = torch.cat([a[i % 3] for i, a in enumerate(angles.split(section, dim=-1))], dim=-1).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        eps = c.rms_norm_eps
        for i in range(c.num_hidden_layers):
            p = f"{pre}layers.{i}."
            q, k, v = self.text_qkv(
                x,
                cos,
                sin,
                w[p + "input_layernorm.weight"],
                eps,
                *(pair(w, f"{p}self_attn.{m}_proj") for m in "qkv"),
                c.num_attention_heads,
            )
            a = self.attend(q, k, v, batch["text_borders"], longest, True)
            x = self.after(
                x,
                a,
                pair(w, p + "self_attn.o_proj"),
                w[p + "post_attention_layernorm.weight"],
                eps,
                *(pair(w, p + m) for m in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
            )
        x = norm(x[batch["rows"]], w[pre + "norm.weight"], eps)
        return F.linear(x, embedding)


def pair(w: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor | None]:
    """A linear layer's weight and bias, the latter if it has one."""
    return w[name + ".weight"], w.get(name + ".bias")

"""A Llama with LoRA adapters in plain torch.

For measurements where transformers and PEFT may be missing (`make gpu-check` runs where nothing can
be installed), and where the host's own cost should be small. Shapes and operations are Llama's:
grouped-query attention with rotary positions, SwiGLU, RMSNorm. Adapters are on queries and values,
in float32, and compute in the type of the frozen weights, as they do under autocast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trae_mem.bench.large_models import LargeLlama

CHECKPOINTING = ("none", "non-reentrant", "reentrant")
_EPSILON = 1e-5
_THETA = 10000.0  # of the rotary positions


class Adapted(nn.Module):
    """A frozen linear map and a trained one of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.down = nn.Parameter(torch.empty(rank, inputs, dtype=torch.float32))
        self.up = nn.Parameter(torch.empty(outputs, rank, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``, mapped by both."""
        low = F.linear(hidden, self.down.to(hidden.dtype))
        return F.linear(hidden, self.weight) + F.linear(low, self.up.to(hidden.dtype))


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``, of mean square 1, scaled."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)
        return (wide * scale).to(hidden.dtype) * self.weight


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: LargeLlama, rank: int) -> None:
        super().__init__()
        self.heads, self.key_value_heads = shape.heads, shape.key_value_heads
        self.head_size = shape.hidden // shape.heads
        inner = self.key_value_heads * self.head_size
        self.norm = Norm(shape.hidden)
        self.query = Adapted(shape.hidden, shape.hidden, rank)
        self.key = _frozen(shape.hidden, inner)
        self.value = Adapted(shape.hidden, inner, rank)
        self.output = _frozen(shape.hidden, shape.hidden)
        self.second_norm = Norm(shape.hidden)
        self.gate = _frozen(shape.hidden, shape.intermediate)
        self.up = _frozen(shape.hidden, shape.intermediate)
        self.down = _frozen(shape.intermediate, shape.hidden)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """``hidden`` ``(batch, length, hidden)`` behind attention and the gated map."""
        normed = self.norm(hidden)
        query = _rotate(self._split(self.query(normed), self.heads), cosine, sine)
        key = _rotate(self._split(self.key(normed), self.key_value_heads), cosine, sine)
        value = self._split(self.value(normed), self.key_value_heads)
        repeats = self.heads // self.key_value_heads
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.second_norm(attended)
        mapped: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return attended + mapped

    def _split(self, projected: Tensor, heads: int) -> Tensor:
        """``(batch, length, heads * size)`` as ``(batch, heads, length, size)``."""
        batch, length, _ = projected.shape
        return projected.view(batch, length, heads, self.head_size).transpose(1, 2)


class PlainLlama(nn.Module):
    """The model; ``forward`` gives the language model's loss.

    Args:
        shape: its sizes.
        rank: of the adapters.
        checkpointing: one of :data:`CHECKPOINTING`.
        repeats: how often the layers are run through in a pass. A model of few layers then takes
            the activations and the loads of one that is so many times deeper, with a fraction of
            its host memory.
    """

    def __init__(
        self, shape: LargeLlama, *, rank: int = 8, checkpointing: str = "none", repeats: int = 1
    ) -> None:
        super().__init__()
        self.shape, self.checkpointing, self.repeats = shape, checkpointing, repeats
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden).requires_grad_(False)
        self.layers = nn.ModuleList(Block(shape, rank) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self.head = _frozen(shape.hidden, shape.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of predicting each next token of ``ids`` ``(batch, length)``."""
        hidden = self.embedding(ids)
        cosine, sine = _positions(ids.shape[1], self.shape.hidden // self.shape.heads, hidden)
        if self.checkpointing != "none":  # a reentrant checkpoint needs an input with a gradient
            hidden.requires_grad_()
        for _ in range(self.repeats):
            for layer in self.layers:
                if self.checkpointing == "none":
                    hidden = layer(hidden, cosine, sine)
                else:
                    reentrant = self.checkpointing == "reentrant"
                    hidden = checkpoint(layer, hidden, cosine, sine, use_reentrant=reentrant)
        logits = self.head(self.norm(hidden))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def build(
    shape: LargeLlama,
    dtype: torch.dtype,
    device: str,
    *,
    rank: int = 8,
    checkpointing: str = "none",
    repeats: int = 1,
) -> PlainLlama:
    """The model with uninitialised weights; frozen ones in ``dtype``, adapters in float32."""
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return PlainLlama(shape, rank=rank, checkpointing=checkpointing, repeats=repeats)
        finally:
            torch.set_default_dtype(default)


@torch.no_grad()
def fill(model: PlainLlama, seed: int = 0, *, alike: bool = False) -> PlainLlama:
    """Random weights, the same for the same seed wherever the model is.

    Args:
        model: is changed in place.
        seed: of the numbers.
        alike: every layer gets the first one's frozen weights. For sizes at which the numbers
            would take longer than the measurement.
    """
    generator = torch.Generator().manual_seed(seed)
    first = dict(model.layers[0].named_parameters())
    for name, parameter in model.named_parameters():
        _, _, inside = name.removeprefix("layers.").partition(".")
        layer = name.startswith("layers.")
        if alike and layer and not parameter.requires_grad and parameter is not first[inside]:
            parameter.copy_(first[inside])
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            numbers = torch.empty(parameter.shape).normal_(std=0.02, generator=generator)
            parameter.copy_(numbers)
    return model


def tokens(step: int, batch: int, length: int, vocabulary: int, device: str) -> Tensor:
    """The token ids of one step, ``(batch, length)``; the same for everyone."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(device)


def _frozen(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False).requires_grad_(False)


def _positions(length: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size
    steps = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(steps, _THETA**-exponents).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine

"""The models that are measured: Llama's shape, random weights, LoRA adapters."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama model; heads are ``head_size`` wide, keys and values have as many."""

    layers: int
    hidden: int
    intermediate: int
    head_size: int = 64
    vocabulary: int = 256  # small: what is streamed are the layers

    def config(self) -> LlamaConfig:
        """The transformers configuration."""
        heads = self.hidden // self.head_size
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_hidden_layers=self.layers,
            vocab_size=self.vocabulary,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=0,
            eos_token_id=1,
        )


def random_llama(shape: LlamaShape, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model with the same random weights each time."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape.config())
    nn.Module.to(model, dtype)  # transformers' own `to` is not typed
    return model


def add_adapters(model: nn.Module, rank: int = 8) -> nn.Module:
    """LoRA on the queries and values of each layer, the same each time; the rest is frozen.

    The second matrix of each pair starts at random, not at zero, so that every loss depends on
    every adapter from the first step on.
    """
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # PEFT reads a name that transformers is about to change
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(model, options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(model):
            parameter.normal_(std=0.02, generator=generator)
    return model.train()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def digest(tensors: Iterable[Tensor]) -> str:
    """The same for the same bits only."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tokens(step: int, batch: int, length: int, vocabulary: int) -> Tensor:
    """The token ids of one step, ``(batch, length)``; the same for everyone."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, vocabulary, (batch, length), generator=generator)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The language model's loss on these tokens."""
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss

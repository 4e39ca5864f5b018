"""Llama models of the sizes that people fine-tune, without their weights.

They are transformers' own models with PEFT's adapters, built on the meta device: shapes, modules
and hooks are real, and no weight takes any memory. On the simulated GPU in dry mode that is all
that a training run needs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class LargeLlama:
    """One model's sizes, as its ``config.json`` has them."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int  # fewer than heads: grouped-query attention
    vocabulary: int = 32000

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer, its norms included."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * head * self.key_value_heads
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model; embedding and head are separate."""
        outside = 2 * self.vocabulary * self.hidden + self.hidden
        return self.layers * self.layer_parameters + outside

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Of the whole model in that type."""
        return self.parameters * dtype.itemsize


LLAMA_2_7B = LargeLlama("Llama-2-7B", 32, 4096, 11008, 32, 32)
LLAMA_2_13B = LargeLlama("Llama-2-13B", 40, 5120, 13824, 40, 40)
CODE_LLAMA_34B = LargeLlama("CodeLlama-34B", 48, 8192, 22016, 64, 8)
LLAMA_2_70B = LargeLlama("Llama-2-70B", 80, 8192, 28672, 64, 8)


def build_with_adapters(
    shape: LargeLlama, dtype: torch.dtype, *, rank: int, checkpointing: bool
) -> nn.Module:
    """The model on the meta device, in training mode, with LoRA as PEFT does it for Llama.

    PEFT's default for Llama adapts the query and value projections, and keeps adapters in float32
    beside 16-bit weights.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        base: Any = LlamaForCausalLM(config)
    nn.Module.to(base, dtype)
    with warnings.catch_warnings():  # PEFT reads a name that transformers is about to change
        warnings.simplefilter("ignore", FutureWarning)
        if checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        model: Any = get_peft_model(base, LoraConfig(r=rank, task_type="CAUSAL_LM"))
        if checkpointing:
            model.enable_input_require_grads()
    trained: nn.Module = model.train()
    return trained

"""Text for causal language modelling: read, tokenised, cut into blocks of equal length.

Documents are joined with the end-of-text token and cut without padding, so every token of a batch
is trained on and every step does the same work. The order is that of the source; the Trainer's
own seeded sampler shuffles it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trae_mem.config import DataSection
from trae_mem.errors import ConfigError


class TokenBlocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Blocks of `sequence_length` tokens; labels are the tokens themselves.

    `blocks` is one int64 tensor [blocks, sequence_length].
    """

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


@dataclass(frozen=True)
class TextData:
    """The training blocks, the blocks held out for evaluation (or None), and the token count."""

    train: TokenBlocks
    evaluation: TokenBlocks | None
    tokens: int


def load_text_data(section: DataSection, tokenizer: Any) -> TextData:
    """Reads, tokenises and cuts the text of a `data:` section.

    Raises:
        ConfigError: The source cannot be read, or holds less than the blocks that are asked for.
    """
    tokens = tokenize(read_documents(section), tokenizer)
    length = section.sequence_length
    count = len(tokens) // length
    if section.max_blocks is not None:
        count = min(count, section.max_blocks)
    if count <= section.eval_blocks:
        raise ConfigError(
            f"data.source {section.source!r} gives {len(tokens)} tokens, which are {count} blocks "
            f"of {length}: too few beside {section.eval_blocks} for evaluation; "
            "lower data.sequence_length or data.eval_blocks, or take a longer text"
        )
    blocks = tokens[: count * length].view(count, length)
    cut = count - section.eval_blocks
    held_out = TokenBlocks(blocks[cut:]) if section.eval_blocks else None
    return TextData(TokenBlocks(blocks[:cut]), held_out, len(tokens))


def tokenize(documents: Iterable[str], tokenizer: Any) -> torch.Tensor:
    """All documents as one int64 tensor [tokens], each ended by the end-of-text token."""
    encoded = tokenizer(
        list(documents),
        add_special_tokens=False,
        return_attention_mask=False,
        verbose=False,  # a document longer than the model's context is fine: it is cut below
    )["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return torch.tensor([token for ids in encoded for token in (*ids, *end)], dtype=torch.int64)


def read_documents(section: DataSection) -> list[str]:
    """The documents of `data.source`: a Python module's texts, a .txt file or a .jsonl file."""
    if section.source.startswith("python:"):
        return _from_module(section.source.removeprefix("python:"))
    path = Path(section.source).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        raise ConfigError(f"data.source: cannot read {section.source!r}: {reason}") from error
    if path.suffix == ".jsonl":
        return _from_json_lines(path, text, section.text_field)
    return [text]


def _from_json_lines(path: Path, text: str, field: str) -> list[str]:
    documents: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not valid JSON: {error.msg}") from error
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            names = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise ConfigError(
                f"{path}:{number}: no text under {field!r} (it has: {names}); set data.text_field"
            )
        documents.append(record[field])
    return documents


def _from_module(name: str) -> list[str]:
    """ "package.module" or "package.module:attribute"; the attribute defaults to the last word."""
    module_name, _, attribute = name.partition(":")
    attribute = attribute or module_name.rpartition(".")[2]
    try:
        value = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(f"data.source: 'python:{name}' cannot be imported: {error}") from error
    texts = list(value.values()) if isinstance(value, dict) else value
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"data.source: 'python:{name}' is not text: a str, or a list or dict of str, is needed"
        )
    return list(texts)

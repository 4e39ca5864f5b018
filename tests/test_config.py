"""The YAML of `trae-mem train`: what it accepts, and how it says what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from trae_mem.config import RunConfig, load_config
from trae_mem.errors import ConfigError
from trae_mem.gpus import GPUS, find_gpu

ROOT = Path(__file__).parent.parent
GIB = 1 << 30


@pytest.fixture
def write(tmp_path):
    def write_config(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_config


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def test_the_three_keys_of_each_section_load_as_they_are_advertised(write):
    config = load_config(
        write(
            "resource:\n"
            "  gpu_type: A10\n"
            "  enable_memory_fragment_cleanup: true\n"
            "model_config:\n"
            "  enable_lazy_load: true\n"
            "  prefetch_layer_num: 2\n"
            "  lora_rank: 8\n"
        )
    )
    assert config.resource.gpu_type == "A10"
    assert config.resource.enable_memory_fragment_cleanup is True
    assert config.model.enable_lazy_load is True
    assert config.model.prefetch_layer_num == 2
    assert config.model.lora_rank == 8
    assert config.output_dir == "runs/run"
    assert config.as_dict()["model_config"]["lora_rank"] == 8


def test_an_unknown_key_is_named_with_its_line_and_a_suggestion(write):
    path = write("model_config:\n  lora_rank: 4\n  prefetch_layer_nmu: 2\n")
    assert problems_of(path) == [
        f"{path}:3: model_config.prefetch_layer_nmu: unknown key; did you mean prefetch_layer_num?"
    ]


def test_an_unknown_section_gets_a_suggestion(write):
    path = write("seed: 1\nmodel_conf: {}\n")
    assert problems_of(path) == [f"{path}:2: model_conf: unknown key; did you mean model_config?"]


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(write):
    path = write("model_config:\n  sequence_length: 128\n")
    assert problems_of(path) == [
        f"{path}:2: model_config.sequence_length: unknown key here; it belongs in the section data"
    ]


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(write):
    path = write(
        "training:\n"
        "  max_step: 4\n"
        "model_config:\n"
        "  lora_rank: eight\n"
        "  slots: 0\n"
        "resource:\n"
        "  budget: 1.5\n"
    )
    lines = problems_of(path)
    assert [line.removeprefix(f"{path}:").split(":")[0] for line in lines] == ["2", "4", "5", "7"]
    assert "did you mean max_steps?" in lines[0]
    assert "valid integer" in lines[1]
    assert "'eight'" in lines[1]
    assert "between 0 and 1" in lines[3]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model_config: {lora_rank: true}", "model_config.lora_rank"),
        ("model_config: {prefetch_layer_num: -1}", "model_config.prefetch_layer_num"),
        ("model_config: {lora_dropout: 1.0}", "model_config.lora_dropout"),
        ("model_config: {source: disk}", "model_config.source"),
        ("resource: {budget: 10 bananas}", "resource.budget"),
        ("resource: {budget: true}", "resource.budget"),
        ("resource: {budget: 0}", "resource.budget"),
        ("resource: {device: gpu}", "resource.device"),
        ("data: {sequence_length: 1}", "data.sequence_length"),
        ("training: {learning_rate: fast}", "training.learning_rate"),
        ("training: {per_device_train_batch_size: 2.5}", "training.per_device_train_batch_size"),
        ("training: {max_steps: true}", "training.max_steps"),
        ("training: {gradient_checkpointing: maybe}", "training.gradient_checkpointing"),
        ("training: {output_dir: x}", "training.output_dir"),
        ("training: {fsdp: full_shard}", "training.fsdp"),
        ("training: [1, 2]", "training"),
    ],
)
def test_a_value_that_makes_no_sense_is_named_with_its_line(write, text, name):
    path = write(text + "\n")
    (line,) = problems_of(path)
    assert line.startswith(f"{path}:1: {name}: ")


def test_scalars_follow_yaml_1_2(write):
    config = load_config(
        write("training:\n  learning_rate: 1e-3\n  save_strategy: no\n  lr_scheduler_type: on\n")
    )
    assert config.training == {
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "lr_scheduler_type": "on",
    }


def test_overrides_replace_values_and_add_sections(write):
    config = load_config(
        write("model_config:\n  lora_rank: 4\ndata:\n"),
        ["model_config.lora_rank=16", "training.max_steps=3", "data.text_field='a: b'", "seed=7"],
    )
    assert config.model.lora_rank == 16
    assert config.training == {"max_steps": 3}
    assert config.data.text_field == "a: b"
    assert config.seed == 7


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model_config.lora_rnk=4", "did you mean lora_rank?"),
        ("training.lerning_rate=1", "did you mean learning_rate?"),
        ("model_config", "training.max_steps=4"),
        ("seed.x=1", "seed is a value, not a section"),
        ("data.source=[", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_named_as_it_was_typed(write, override, expected):
    (line,) = problems_of(write("seed: 3\n"), override)
    assert line.startswith(f"override {override!r}: ")
    assert expected in line


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("seed: 1\nseed: 2\n", ":2", "seed: written twice"),
        ("data:\n  source: [\n", ":3", "not valid YAML"),
        ("- 1\n", ":1", "section"),
    ],
)
def test_a_file_that_is_no_mapping_names_the_line(write, text, place, expected):
    path = write(text)
    (line,) = problems_of(path)
    assert line.startswith(f"{path}{place}: ")
    assert expected in line


def test_a_missing_file_is_named(tmp_path):
    (line,) = problems_of(tmp_path / "none.yaml")
    assert "none.yaml: cannot read the configuration: No such file" in line


def test_a_comparison_needs_streaming(write):
    path = write("compare_resident: true\nmodel_config:\n  enable_lazy_load: false\n")
    assert "enable_lazy_load: true" in problems_of(path)[0]


# --- the cap of gpu_type -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu_type", "budget", "capped"),
    [
        ("A10", "30GiB", 24 * GIB),
        ("A10", "2GiB", 2 * GIB),
        ("A10", 0.5, 12 * GIB),
        ("A10", None, None),
        (None, "30GiB", "30GiB"),
        (None, 0.5, 0.5),
    ],
)
def test_gpu_type_caps_the_budget_to_the_memory_of_the_card(gpu_type, budget, capped):
    config = RunConfig.model_validate({"resource": {"gpu_type": gpu_type, "budget": budget}})
    assert config.resource.capped_budget == capped


@pytest.mark.parametrize(
    ("name", "full", "gib"),
    [
        ("A10", "A10", 24),
        ("nvidia a10g", "A10", 24),
        ("GeForce RTX 4090", "RTX 4090", 24),
        ("a100", "A100-40GB", 40),
        ("A100-SXM4-80GB", "A100-80GB", 80),
        ("h100", "H100", 80),
        ("tesla t4", "T4", 16),
    ],
)
def test_cards_are_found_under_the_names_that_people_use(name, full, gib):
    gpu = find_gpu(name)
    assert (gpu.name, gpu.memory_bytes) == (full, gib * GIB)


def test_every_card_is_found_under_its_own_name():
    assert [find_gpu(gpu.name) for gpu in GPUS] == list(GPUS)


def test_an_unknown_card_gets_a_suggestion(write):
    path = write("resource:\n  gpu_type: A1000\n")
    (line,) = problems_of(path)
    assert line.startswith(f"{path}:2: resource.gpu_type: unknown card 'A1000'; did you mean A100")


# --- the documents -------------------------------------------------------------------------------


def test_every_key_is_documented():
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE))
    known: set[str] = set()
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            assert f"## `{field.alias or name}`" in text
            known |= set(section.model_fields)
        elif name != "training":
            known.add(name)
    assert documented >= known
    for gpu in GPUS:
        assert gpu.name in text


def test_the_quickstart_loads():
    config = load_config(ROOT / "examples" / "quickstart.yaml")
    assert config.compare_resident
    assert config.model.source == "file"
    assert config.output_dir == "runs/quickstart"

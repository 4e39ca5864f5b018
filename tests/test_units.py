"""Which modules become units."""

from __future__ import annotations

import pytest
import transformers
from models import FAMILIES, UNITS, Block, Stack, build, build_lora
from torch import nn

import trae_mem
from trae_mem.units import find_units

LISTS = {"llama": "model.layers", "gpt2": "transformer.h", "bert": "bert.encoder.layer"}


def names(model, wanted=None) -> list[str]:
    return [unit.name for unit in find_units(model, wanted)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_transformers_models(family):
    expected = [f"{LISTS[family]}.{index}" for index in range(UNITS)]
    assert names(build(family)) == expected
    assert names(build_lora(family)) == [f"base_model.model.{name}" for name in expected]


def test_each_list_of_declared_blocks():
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=3, num_decoder_layers=2
    )
    found = names(transformers.T5ForConditionalGeneration(config))
    assert found == [
        *(f"encoder.block.{i}" for i in range(3)),
        "decoder.block.0",
        "decoder.block.1",
    ]


def test_without_a_declaration_the_list_with_most_parameters():
    model = Stack()
    model.small = nn.ModuleList([nn.Linear(2, 2)])
    assert names(model) == [f"blocks.{index}" for index in range(UNITS)]


def test_of_lists_inside_of_lists_the_outer_one():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.ModuleList([Block()])) for _ in range(3)])
    assert names(model) == ["layers.0", "layers.1", "layers.2"]


def test_the_units_are_in_the_order_of_the_model():
    model = build()
    wanted = ["lm_head", "model.layers", "model.embed_tokens"]
    layers = [f"model.layers.{index}" for index in range(UNITS)]
    assert names(model, wanted) == ["model.embed_tokens", *layers, "lm_head"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (["blocks"], [f"blocks.{i}" for i in range(UNITS)]),
        ("blocks", [f"blocks.{i}" for i in range(UNITS)]),
        (["blocks.3", "blocks.1"], ["blocks.1", "blocks.3"]),
        ([Block], [f"blocks.{i}" for i in range(UNITS)]),
        (Block, [f"blocks.{i}" for i in range(UNITS)]),
        (["Block"], [f"blocks.{i}" for i in range(UNITS)]),
        (["layer"], [f"blocks.{i}.layer" for i in range(UNITS)]),
        (["inlet", Block], ["inlet", *(f"blocks.{i}" for i in range(UNITS))]),
        (["blocks", "blocks.2"], [f"blocks.{i}" for i in range(UNITS)]),
    ],
)
def test_units_by_name_and_by_class(wanted, expected):
    assert names(Stack(), wanted) == expected


def test_a_unit_inside_of_another_is_refused():
    with pytest.raises(trae_mem.ConfigError, match=r"'blocks\.0\.layer' lies inside .*'blocks\.0'"):
        find_units(Stack(), ["blocks", "layer"])
    with pytest.raises(trae_mem.ConfigError, match="lies inside"):
        find_units(Stack(), [nn.Linear, Block])


def test_an_empty_choice_is_refused():
    with pytest.raises(trae_mem.ConfigError, match=r"units=\[\] names no module"):
        find_units(Stack(), [])


@pytest.mark.parametrize("model", [nn.Module(), nn.Linear(2, 2), nn.ModuleList([])])
def test_a_model_without_blocks(model):
    with pytest.raises(trae_mem.ConfigError, match="no repeated blocks"):
        find_units(model)

"""Bad input: a clear error that names what helps, and the model is as it was."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from models import (
    UNITS,
    Stack,
    add_lora,
    assert_same,
    assert_same_trace,
    assert_still_streams,
    assert_untouched,
    blocks,
    build,
    build_lora,
    logits,
    same_bits,
    state_of,
    train,
)
from torch import nn

import trae_mem
from trae_mem.runtime import find_runtime


def test_no_repeated_blocks_names_the_candidates():
    model = nn.Module()
    model.encoder, model.head = nn.Linear(64, 64), nn.Linear(8, 8)
    with pytest.raises(trae_mem.ConfigError, match=r"no repeated blocks.*'encoder' \(Linear\)"):
        trae_mem.enable(model.requires_grad_(False))
    trae_mem.enable(model, units=["encoder"])


def test_units_that_do_not_exist_name_the_lists_of_modules():
    model = build_lora()
    with pytest.raises(trae_mem.ConfigError, match=r"'decoder' matches no module.*'.*layers'"):
        trae_mem.enable(model, units=["decoder"])
    assert_untouched(model)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_that_streams_already(wrapped):
    model = trae_mem.enable(build())
    again = add_lora(model) if wrapped else model
    with pytest.raises(trae_mem.ConfigError, match=r"streams already.*trae_mem\.disable"):
        trae_mem.enable(again)
    for part in (again.get_submodule("model") if not wrapped else again.base_model, again):
        with pytest.raises(trae_mem.ConfigError, match="streams already"):
            trae_mem.enable(part)
    assert trae_mem.status(again).units == UNITS
    assert same_bits(logits(again), logits(add_lora(build()) if wrapped else build()))


@pytest.mark.parametrize("prefetch", [-1, 1.5, "2", None, True])
def test_a_prefetch_that_is_no_number_of_units(prefetch):
    model = build_lora()
    with pytest.raises(trae_mem.ConfigError, match=f"prefetch={prefetch!r}.*0 or more"):
        trae_mem.enable(model, prefetch=prefetch)
    assert_untouched(model)


@pytest.mark.parametrize("slots", [0, 3, -1, 4.0, True])
def test_too_few_slots(slots):
    model = build_lora()
    with pytest.raises(trae_mem.ConfigError, match=f"slots={slots!r}.*at least 4"):
        trae_mem.enable(model, prefetch=2, slots=slots)
    assert_untouched(model)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("meta")])
def test_another_device(device):
    model = build_lora()
    with pytest.raises(trae_mem.ConfigError, match=f"{device!s}.*device='cpu'"):
        trae_mem.enable(model, device=device)
    assert_untouched(model)


def test_another_debug_mode():
    model = build_lora()
    with pytest.raises(trae_mem.ConfigError, match=r"debug='nan'.*'poison'"):
        trae_mem.enable(model, debug="nan")
    assert_untouched(model)


def test_nothing_frozen_to_stream():
    model = build().requires_grad_()
    with pytest.raises(trae_mem.ConfigError, match=r"nothing is left to stream.*requires_grad_"):
        trae_mem.enable(model)
    assert find_runtime(model) is None
    assert_same_trace(train(model, 2), train(build().requires_grad_(), 2))


@pytest.mark.parametrize("function", [trae_mem.disable, trae_mem.status, trae_mem.refresh])
def test_a_model_that_does_not_stream(function):
    model = build_lora()
    with pytest.raises(trae_mem.ConfigError, match=r"PeftModel.* does not stream.*enable"):
        function(model)
    assert_untouched(model)


def test_a_device_without_room():
    model = Stack()
    device = trae_mem.HostDevice(memory_bytes=2 << 20)
    other = trae_mem.enable(Stack(), device=device)
    with pytest.raises(trae_mem.OutOfMemoryError, match=r"2\.00 MiB of 2\.00 MiB in use") as caught:
        trae_mem.enable(model, device=device)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert find_runtime(model) is None
    assert_same(state_of(model), state_of(Stack()))
    trae_mem.disable(other)


def test_copies_and_pickles_of_a_model_that_streams():
    model = trae_mem.enable(build_lora())
    for part in (model, model.base_model.model, blocks(model), blocks(model)[0]):
        with pytest.raises(trae_mem.TraeMemError, match=r"cannot be copied.*trae_mem\.disable"):
            copy.deepcopy(part)
        with pytest.raises(trae_mem.TraeMemError, match=r"cannot be pickled.*state_dict"):
            pickle.dumps(part)
        with pytest.raises(trae_mem.TraeMemError, match="cannot be pickled"):
            torch.save(part, io.BytesIO())
    assert_still_streams(model)
    trae_mem.disable(model)
    assert_same(state_of(copy.deepcopy(model)), state_of(model))
    assert pickle.dumps(model)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_second_derivatives():
    model = trae_mem.enable(build_lora())
    loss = model(input_ids=torch.arange(8)[None]).logits.square().mean()
    with pytest.raises(trae_mem.TraeMemError, match=r"'.*layers\.6'.*create_graph=True"):
        loss.backward(create_graph=True)
    model.zero_grad()
    assert_still_streams(model)


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_a_conversion_while_it_streams(convert):
    model = trae_mem.enable(build_lora())
    logits(model)
    convert(model)
    with pytest.raises(trae_mem.ConfigError, match=r"layers\.0.*torch\.float32.*disable"):
        logits(model)
    trae_mem.disable(model)
    reference = convert(build_lora())
    assert_same(state_of(model), state_of(reference))
    trae_mem.enable(model)
    assert_same_trace(train(model, 2), train(reference, 2))


def test_a_conversion_that_changes_nothing():
    model = trae_mem.enable(build_lora())
    model.to("cpu").to(torch.float32).float()
    assert_still_streams(model)

"""What streaming costs in memory, on the device and on the host."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
from children import run_python
from models import UNITS, backward_step, blocks, build_lora, logits, state_of, train

import trae_mem

PAGE = 2 << 20


@pytest.fixture
def device():
    return trae_mem.HostDevice()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_device_holds_the_slots_rounded_up_once(device, prefetch):
    model = trae_mem.enable(build_lora(hidden_size=256), prefetch=prefetch, device=device)
    status = trae_mem.status(model)
    slots = (prefetch + 2) * status.unit_bytes
    assert PAGE // 2 < slots < status.total_bytes
    train(model, 2)
    assert device.used_bytes == -(-slots // PAGE) * PAGE
    assert status.bytes_on_device == slots


def test_bytes_are_those_of_the_streamed_weights():
    model = build_lora()
    frozen = [
        parameter.numel() * parameter.element_size()
        for parameter in blocks(model).parameters()
        if not parameter.requires_grad
    ]
    trae_mem.enable(model)
    gaps = UNITS * 256 * len(frozen) // UNITS
    total = trae_mem.status(model).total_bytes
    assert sum(frozen) <= total <= sum(frozen) + gaps
    assert trae_mem.status(model).unit_bytes == total // UNITS


@pytest.mark.parametrize("ends", ["disabled", "dropped", "both"])
def test_everything_is_given_back(device, ends, checkpoints):
    model = trae_mem.enable(build_lora(), device=device, source=checkpoints["llama"])
    loss = train(model, 2).losses[0]
    recorder = trae_mem.Recorder(model)
    assert device.used_bytes > 0
    parts = [weakref.ref(part) for part in (model, blocks(model)[3], model.base_model)]
    if ends != "dropped":
        trae_mem.disable(model)
        del recorder
        gc.collect()
        assert device.used_bytes == 0
    if ends != "disabled":
        model = recorder = None
        gc.collect()
        assert device.used_bytes == 0
        assert [part() for part in parts] == [None] * 3
    assert torch.isfinite(loss)


def test_host_memory_of_the_packs_goes_with_the_model():
    """Each pack lives as long as a tensor that rests in it, and no longer."""
    model = trae_mem.enable(build_lora())
    backward_step(model)
    expected = state_of(model)
    trae_mem.disable(model)
    gc.collect()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_of(model).items())


def test_the_device_is_free_after_disable_without_a_garbage_collection(device):
    gc.disable()
    try:
        model = trae_mem.enable(build_lora(), device=device)
        backward_step(model)
        trae_mem.disable(model)
        assert device.used_bytes == 0
    finally:
        gc.enable()


def test_a_device_is_used_by_one_model_after_the_other(device):
    for _ in range(3):
        model = trae_mem.enable(build_lora(), device=device)
        logits(model)
        used = device.used_bytes
        trae_mem.disable(model)
        gc.collect()
        assert device.used_bytes == 0
    assert used == PAGE


_FOOTPRINT = """
import gc, json, sys
import torch, trae_mem
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)

def resident_bytes():
    # The proportional size counts a page once that is mapped twice, as those of slots are.
    gc.collect()
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))

def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

def restart_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak_bytes()

def step(model):
    x = torch.linspace(0, 1, 8 * 384).view(1, 8, 384).requires_grad_()
    model(inputs_embeds=x).logits.sum().backward()
    return x.grad

config = LlamaConfig(
    vocab_size=64, hidden_size=384, intermediate_size=1152, num_attention_heads=8,
    num_key_value_heads=8, num_hidden_layers=16, max_position_embeddings=64,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config).requires_grad_(False)
model.to_empty(device="cpu")
model.model.rotary_emb.inv_freq.copy_(torch.linspace(1, 0.01, 24))
for parameter in model.parameters():
    parameter.uniform_(-0.05, 0.05)
model.save_pretrained(sys.argv[1])
expected = step(model)
found = {}

before, peak = resident_bytes(), restart_peak()
trae_mem.enable(model, prefetch=0)
found["enabling in ram"] = peak_bytes() - peak
step(model)
found["ram"] = resident_bytes() - before
status = trae_mem.status(model)
found |= {"unit": status.unit_bytes, "all": status.total_bytes, "slots": status.bytes_on_device}
trae_mem.disable(model)

trae_mem.enable(model, prefetch=0, source=sys.argv[1])
step(model)
found["checkpoint"] = resident_bytes() - before
trae_mem.disable(model)
del model

before = resident_bytes()
model = trae_mem.load_lazily(sys.argv[1]).requires_grad_(False)
found["lazy"] = resident_bytes() - before
trae_mem.enable(model, prefetch=0)
gradients = [step(model) for _ in range(2)]
found["file"] = resident_bytes() - before
model.model.rotary_emb.inv_freq.copy_(torch.linspace(1, 0.01, 24))
found["same"] = torch.equal(step(model), expected)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def footprint(tmp_path_factory):
    """Bytes by which a process of its own grew; the model has 16 blocks of 7.7 MB."""
    found = json.loads(run_python(_FOOTPRINT, tmp_path_factory.mktemp("large")))
    assert found["unit"] > 7e6
    assert found["slots"] == 2 * found["unit"]
    assert found["same"]
    return found


def test_in_ram_only_the_slots_are_added(footprint):
    assert footprint["ram"] < footprint["slots"] + 0.1 * footprint["all"]


def test_packing_into_ram_needs_a_unit_more_for_a_moment(footprint):
    assert footprint["enabling in ram"] < 2 * footprint["unit"] + 0.05 * footprint["all"]


def test_a_named_checkpoint_frees_the_memory_of_the_weights(footprint):
    assert footprint["checkpoint"] < footprint["slots"] - 0.8 * footprint["all"]


def test_weights_that_stay_in_their_file_are_never_all_in_memory(footprint):
    assert footprint["lazy"] < 0.05 * footprint["all"]
    assert footprint["file"] < footprint["slots"] + 0.1 * footprint["all"]

"""Checkpoints that are named, and those that are missing, broken or changed."""

from __future__ import annotations

import os
import pickle
import shutil

import pytest
import torch
from models import (
    UNITS,
    Stack,
    assert_same,
    assert_still_streams,
    assert_untouched,
    backward_step,
    build,
    build_lora,
    logits,
    same_bits,
    state_of,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from torch import nn

import trae_mem


def test_meta_parameters_without_a_file():
    with torch.device("meta"):
        model = build()
    with pytest.raises(trae_mem.ConfigError, match=r"'.*weight' .*meta device.*source='PATH'"):
        trae_mem.enable(model)


def test_meta_parameters_with_a_file(checkpoints):
    reference = build()
    model = build()
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        meta = nn.Parameter(parameter.to("meta"), requires_grad=False)
        setattr(model.get_submodule(owner), leaf, meta)
    trae_mem.enable(model, source=checkpoints["llama"])
    assert trae_mem.status(model).source == "file"
    assert_same(state_of(model), state_of(reference))
    assert same_bits(logits(model), logits(reference))


def test_the_file_store_without_a_file():
    model = build_lora()
    with pytest.raises(trae_mem.ConfigError, match="load_lazily"):
        trae_mem.enable(model, source="file")
    assert_untouched(model)


def test_a_path_with_nothing_there(tmp_path):
    model = build_lora()
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.safetensors"):
        with pytest.raises(trae_mem.WeightFileError, match=str(path)):
            trae_mem.enable(model, source=path)
    assert_untouched(model)


def test_a_checkpoint_of_another_model(checkpoints):
    model = build_lora()
    with pytest.raises(trae_mem.ConfigError, match="holds none of the weights"):
        trae_mem.enable(model, source=checkpoints["bert"])
    assert_untouched(model)


@pytest.mark.parametrize("difference", ["values", "shape", "dtype"])
def test_a_checkpoint_that_differs(difference, tmp_path):
    """The last weight differs: those that were compared before it stay as they are."""
    model = build_lora()
    folder = write_checkpoint("llama", tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = f"model.layers.{UNITS - 1}.mlp.up_proj.weight"
    weights[name] = {
        "values": weights[name] + 1e-6,
        "shape": weights[name][:-1].contiguous(),
        "dtype": weights[name].bfloat16(),
    }[difference]
    save_file(weights, file)
    before = {id(p): p.data_ptr() for p in model.parameters()}
    with pytest.raises(trae_mem.ConfigError, match=rf"{name.replace('weight', '')}.*{file}"):
        trae_mem.enable(model, source=folder)
    assert_untouched(model)
    assert {id(p): p.data_ptr() for p in model.parameters()} == before


def test_a_checkpoint_of_scalars_and_transposed_weights(tmp_path):
    def make():
        stack = Stack()
        for block in stack.blocks:
            block.register_buffer("temperature", torch.tensor(0.5))
            block.layer.weight.data = block.layer.weight.data.t().contiguous().t()
        return stack

    weights = {name: tensor.contiguous() for name, tensor in make().state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    model = trae_mem.enable(make(), source=tmp_path)
    assert_same(state_of(model), state_of(make()))
    strides = [t.stride() for t in model.parameters()]
    assert strides == [t.stride() for t in make().parameters()]


@pytest.fixture
def own_checkpoint(tmp_path):
    """A checkpoint that a test may break, and its file."""
    folder = write_checkpoint("llama", tmp_path)
    return folder, folder / "model.safetensors"


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_file(own_checkpoint, kept):
    folder, file = own_checkpoint
    size = file.stat().st_size
    os.truncate(file, {0.5: size // 2, -1: size - 1}.get(kept, kept))
    model = build_lora()
    with pytest.raises(trae_mem.WeightFileError) as caught:
        trae_mem.enable(model, source=folder)
    assert str(file) in str(caught.value)
    if kept in (0.5, -1):
        assert "tensor 'model." in str(caught.value)
        assert "truncated" in str(caught.value)
    with pytest.raises(trae_mem.WeightFileError, match=str(file)):
        trae_mem.load_lazily(folder)
    assert_untouched(model)


def with_header(text: bytes, data: bytes = b"\0" * 64) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


BROKEN = {
    "not JSON": with_header(b"{"),
    "not an object": with_header(b"[1, 2]"),
    "entry not an object": with_header(b'{"model.norm.weight": 3}'),
    "no offsets": with_header(b'{"a": {"dtype": "F32", "shape": [1]}}'),
    "no dtype": with_header(b'{"a": {"shape": [1], "data_offsets": [0, 4]}}'),
    "another dtype": with_header(b'{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}'),
    "backwards": with_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}'),
    "negative": with_header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}}'),
    "another shape": with_header(b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}'),
    "negative shape": with_header(
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'
    ),
    "text for a shape": with_header(
        b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}'
    ),
    "not UTF-8": with_header(b'{"\xff": 1}'),
    "huge header": b"\xff" * 8 + b"{}",
    "a pickle": pickle.dumps({"weight": [1, 2, 3]}),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_not_safetensors(kind, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(BROKEN[kind])
    model = build_lora()
    with pytest.raises(trae_mem.WeightFileError, match=str(file)):
        trae_mem.enable(model, source=tmp_path)
    assert_untouched(model)


def test_a_shard_that_is_missing(tmp_path):
    build().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(trae_mem.WeightFileError, match=shard.name):
        trae_mem.enable(build_lora(), source=tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_broken(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(trae_mem.WeightFileError, match=str(index)):
        trae_mem.enable(build_lora(), source=tmp_path)


@pytest.mark.parametrize("change", ["truncated", "grown", "rewritten"])
def test_a_file_that_changes_while_it_is_used(own_checkpoint, change):
    folder, file = own_checkpoint
    original = file.read_bytes()
    status = file.stat()
    model = trae_mem.enable(build_lora(), source=folder)
    backward_step(model)
    model.zero_grad()
    with open(file, "r+b") as opened:
        if change == "truncated":
            opened.truncate(len(original) - 1)
        elif change == "grown":
            opened.seek(0, os.SEEK_END)
            opened.write(b"x")
        else:
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(trae_mem.WeightFileError, match=r"tensor 'model\.layers\..*'") as caught:
        backward_step(model)
    assert str(file) in str(caught.value)
    with open(file, "r+b") as opened:
        opened.write(original)
        opened.truncate(len(original))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_still_streams(model)


def test_a_file_that_is_replaced_is_used_on(own_checkpoint):
    """Its old content lives as long as the model: it is open."""
    folder, file = own_checkpoint
    model = trae_mem.enable(build_lora(), source=folder)
    replacement = file.with_suffix(".new")
    shutil.copy(file, replacement)
    with open(replacement, "r+b") as opened:
        opened.truncate(100)
    os.replace(replacement, file)
    assert_still_streams(model)

"""Models whose weights are mapped from their safetensors files."""

from __future__ import annotations

import gc
import json

import pytest
import torch
import transformers
from models import (
    add_lora,
    assert_same,
    assert_same_trace,
    batch,
    build,
    logits,
    named_tensors,
    same_bits,
    state_of,
    train,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file

import trae_mem
from trae_mem.loading import Checkpoint, find_span


def from_pretrained(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_lazy_model_equals_the_loaded_one(family, checkpoints):
    loaded = from_pretrained(checkpoints[family], dtype=torch.float32)
    lazy = trae_mem.load_lazily(checkpoints[family])
    assert type(lazy) is type(loaded)
    assert_same(state_of(lazy), state_of(loaded))
    assert lazy.training == loaded.training
    requires = [parameter.requires_grad for parameter in loaded.parameters()]
    assert [parameter.requires_grad for parameter in lazy.parameters()] == requires
    assert lazy.generation_config.to_dict() == loaded.generation_config.to_dict()
    with torch.no_grad():
        assert same_bits(lazy(**batch()).logits, loaded(**batch()).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_lazy_model_streams_from_its_file(family, checkpoints):
    lazy = trae_mem.load_lazily(checkpoints[family])
    gc.collect()  # what was read of the file must outlive the reading
    model = add_lora(lazy.requires_grad_(False), family)
    trae_mem.enable(model)
    assert trae_mem.status(model).source == "file"
    loaded = from_pretrained(checkpoints[family], dtype=torch.float32).requires_grad_(False)
    assert_same_trace(train(model, 2), train(add_lora(loaded, family), 2))


def test_every_parameter_is_mapped_and_only_the_blocks_stay_so(checkpoints):
    model = trae_mem.load_lazily(checkpoints["llama"]).requires_grad_(False)
    assert all(find_span(parameter) is not None for parameter in model.parameters())
    trae_mem.enable(model)
    mapped = {name for name, p in model.named_parameters() if find_span(p) is not None}
    assert mapped == {name for name, _ in model.named_parameters() if ".layers." in name}


@pytest.mark.parametrize("source", ["ram", "auto"])
def test_a_lazy_model_in_ram_and_one_in_ram_from_its_file(source, checkpoints):
    model = trae_mem.load_lazily(checkpoints["llama"]).requires_grad_(False)
    trae_mem.enable(model, source=source)
    assert trae_mem.status(model).source == {"ram": "ram", "auto": "file"}[source]
    assert_same(state_of(model), state_of(build()))
    expected = train(add_lora(build()), 2)
    assert_same_trace(train(add_lora(model), 2), expected)


def test_half_precision_is_kept(tmp_path):
    build().to(torch.bfloat16).save_pretrained(tmp_path)
    model = trae_mem.load_lazily(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_same(state_of(model), state_of(from_pretrained(tmp_path, dtype=torch.bfloat16)))


def test_another_dtype_is_refused(checkpoints):
    with pytest.raises(trae_mem.ConfigError, match=r"torch\.float32, not torch\.bfloat16"):
        trae_mem.load_lazily(checkpoints["llama"], dtype=torch.bfloat16)
    trae_mem.load_lazily(checkpoints["llama"], dtype=torch.float32)


def test_a_checkpoint_in_shards(tmp_path):
    build().save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    lazy = trae_mem.load_lazily(tmp_path)
    assert_same(state_of(lazy), state_of(build()))
    model = add_lora(lazy.requires_grad_(False))
    trae_mem.enable(model, debug="poison")
    assert trae_mem.status(model).source == "file"
    assert_same_trace(train(model, 2), train(add_lora(build()), 2))


def test_tied_weights_are_tied(tmp_path):
    folder = write_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    model = trae_mem.load_lazily(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(state_of(model), state_of(build(tie_word_embeddings=True)))


def test_changes_made_before_it_streams_are_kept(tmp_path):
    """Each tensor shares its first and its last page of memory with its neighbours."""
    for source in ("auto", "ram"):
        folder = write_checkpoint("llama", tmp_path / source)
        model, expected = trae_mem.load_lazily(folder), build()
        for each in (model.requires_grad_(False), expected):
            with torch.no_grad():
                for number, parameter in enumerate(each.parameters()):
                    if number % 3 == 0:
                        parameter.view(-1)[-1] = 7
                        parameter.view(-1)[0] = 5
        trae_mem.enable(model, source=source)
        assert_same(state_of(model), state_of(expected))
        assert same_bits(logits(model), logits(expected))
        trae_mem.disable(model)
        assert_same(state_of(model), state_of(expected))


def test_the_file_is_never_written(tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    model = trae_mem.load_lazily(folder)
    trae_mem.enable(model.requires_grad_(False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model(**batch())
    trae_mem.disable(model)
    del model
    gc.collect()
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_changed_lazy_model_is_saved_as_it_is(tmp_path, checkpoints):
    model = trae_mem.load_lazily(checkpoints["llama"]).requires_grad_(False)
    trae_mem.enable(model)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(3)
    model.save_pretrained(tmp_path)
    expected = build()
    with torch.no_grad():
        expected.model.layers[2].mlp.up_proj.weight.mul_(3)
    assert_same(load_file(tmp_path / "model.safetensors"), expected.state_dict())


def test_a_checkpoint_that_lacks_a_parameter(tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(trae_mem.WeightFileError, match=r"lacks 'model\.layers\.3\.mlp\.up_proj"):
        trae_mem.load_lazily(folder)


def test_a_folder_without_a_configuration(tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(trae_mem.WeightFileError, match=r"no config\.json"):
        trae_mem.load_lazily(folder)


@pytest.mark.parametrize("form", ["folder", "file", "index"])
def test_forms_of_a_path(form, tmp_path):
    build().save_pretrained(tmp_path, max_shard_size="40KB" if form == "index" else "1GB")
    path = {
        "folder": tmp_path,
        "file": tmp_path / "model.safetensors",
        "index": tmp_path / "model.safetensors.index.json",
    }[form]
    model = trae_mem.enable(build(), source=str(path))
    assert trae_mem.status(model).source == "file"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight",
        "base_model.model.model.layers.0.mlp.up_proj.weight",
        "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight",
        "layers.0.mlp.up_proj.weight",
        "lm.model.layers.0.mlp.up_proj.weight",
    ],
)
def test_names_of_wrapped_models_are_found(name, checkpoints):
    checkpoint = Checkpoint(checkpoints["llama"])
    assert checkpoint.name_of(name) == "model.layers.0.mlp.up_proj.weight"


def test_names_that_are_not_there_are_not_found(checkpoints):
    checkpoint = Checkpoint(checkpoints["llama"])
    for name in ("weight", "up_proj.weight", "model.layers.0.mlp.up_proj.lora_A.default.weight"):
        assert checkpoint.name_of(name) is None


def test_dtypes_and_shapes_of_a_file(tmp_path):
    weights = {
        "float": torch.randn(3, 2),
        "half": torch.randn(2).half(),
        "brain": torch.randn(1, 1, 5).bfloat16(),
        "double": torch.randn(()).double(),
        "long": torch.arange(3),
        "flags": torch.tensor([True, False]),
        "eight": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
    }
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.names()) == sorted(weights)
    for name, expected in weights.items():
        tensor = checkpoint.tensor(name)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        if expected.numel():
            assert same_bits(tensor, expected)
            span = find_span(tensor)
            assert (span.name, span.bytes) == (name, expected.nbytes)


def test_a_part_of_a_mapped_tensor_is_a_part_of_its_span(checkpoints):
    tensor = Checkpoint(checkpoints["llama"]).tensor("lm_head.weight")
    whole, part = find_span(tensor), find_span(tensor[2:4])
    assert part.offset == whole.offset + 2 * tensor.stride(0) * 4
    assert part.bytes == 2 * tensor.shape[1] * 4
    assert find_span(tensor.clone()) is None
    assert find_span(torch.empty(0)) is None
    assert find_span(torch.empty(3, device="meta")) is None


def test_the_index_is_read_where_there_are_shards(tmp_path):
    build().save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(Checkpoint(tmp_path).names()) == sorted(index["weight_map"])
    assert dict(named_tensors(trae_mem.load_lazily(tmp_path)))

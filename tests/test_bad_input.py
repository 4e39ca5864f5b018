"""Bad input and bad luck: a clear error, and the model computes what it did before."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import shutil
import signal

import pytest
import torch
from children import run_python
from models import (
    UNITS,
    Stack,
    add_lora,
    assert_same,
    assert_same_trace,
    assert_unharmed,
    backward_step,
    blocks,
    build,
    build_lora,
    logits,
    same_bits,
    state_of,
    train,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from torch import nn

import trae_mem
from trae_mem.runtime import find_runtime


def assert_untouched(model: nn.Module) -> None:
    """``build_lora()`` does not stream, and is what it was."""
    assert find_runtime(model) is None
    assert_unharmed(copy.deepcopy(model))


def assert_still_streams(model: nn.Module) -> None:
    """``build_lora()`` streams, and is what it was."""
    assert trae_mem.status(model).streamed_units + trae_mem.status(model).resident_units == UNITS
    assert_unharmed(model)
    find_runtime(model).streamer.check_invariants()


# --- arguments -----------------------------------------------------------------------------------


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


# --- sources -------------------------------------------------------------------------------------


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


# --- weight files that break ---------------------------------------------------------------------


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


# --- devices that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 6])
@pytest.mark.parametrize("operation", ["reserve", "create", "map", "create_stream", "create_event"])
def test_a_set_up_that_fails(operation, number):
    device = trae_mem.HostDevice(faults=f"{operation}:{number}")
    model = build_lora()
    message = ""
    try:
        trae_mem.enable(model, device=device)
    except trae_mem.TransferError as error:
        message = str(error)
    if message:
        gc.collect()
        assert f"{operation} number {number}" in message
        assert device.used_bytes == 0
        assert_untouched(model)
        trae_mem.enable(model, device=device)
    else:  # it is called fewer times than that
        assert operation in ("create", "create_stream")
        assert number > 1
    assert_still_streams(model)


@pytest.mark.parametrize("number", [1, 4, UNITS])
def test_host_memory_that_cannot_be_had(number):
    device = trae_mem.HostDevice(faults=f"allocate_host:{number}")
    model = build_lora()
    with pytest.raises(trae_mem.TransferError, match=f"allocate_host number {number}"):
        trae_mem.enable(model, device=device)
    assert_untouched(model)
    assert_still_streams(trae_mem.enable(model, device=device))


@pytest.mark.parametrize("resident_units", [0, 3])
@pytest.mark.parametrize("number", [1, 3, 7, 13])
@pytest.mark.parametrize("operation", ["copy", "record", "wait"])
def test_a_step_that_fails(operation, number, resident_units, checkpoints):
    device = trae_mem.HostDevice(faults=f"{operation}:{number}")
    model = build_lora()
    trae_mem.enable(model)
    slot = trae_mem.status(model).unit_bytes + 255
    trae_mem.disable(model)
    budget = (3 + resident_units) * slot if resident_units else None
    failures = []
    for _ in range(5):
        try:
            if find_runtime(model) is None:
                trae_mem.enable(model, prefetch=1, budget=budget, device=device)
            backward_step(model)
        except trae_mem.TransferError as error:
            failures.append(str(error))
        model.zero_grad()
    # No failure: a load ahead could not be begun; it is begun again when its unit is used.
    assert failures or operation != "copy"
    assert failures in ([], [f"injected fault: {operation} number {number}"])
    assert_still_streams(model)


@pytest.mark.parametrize("operation", ["record", "wait", "copy"])
def test_a_disable_after_a_failure(operation):
    for number in range(1, 60, 9):
        device = trae_mem.HostDevice(faults=f"{operation}:{number}")
        model = build_lora()
        try:
            trae_mem.enable(model, device=device)
            backward_step(model)
        except trae_mem.TransferError:
            pass
        model.zero_grad()
        for _ in range(2):
            if find_runtime(model) is not None:
                with contextlib.suppress(trae_mem.TransferError):
                    trae_mem.disable(model)
        assert_untouched(model)


# --- what cannot be done while a model streams ---------------------------------------------------


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


# --- forked children -----------------------------------------------------------------------------


def in_child(function) -> int:
    """Runs the function in a forked child and returns its exit code; 99 for an exception."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(params=["ram", "file"])
def forked(request, checkpoints):
    source = checkpoints["llama"] if request.param == "file" else "ram"
    model = trae_mem.enable(build_lora(), source=source)
    backward_step(model)
    model.zero_grad()
    return model


def test_use_in_a_forked_child_is_an_error_that_says_so(forked):
    def child() -> int:
        errors = 0
        for use in (logits, backward_step, trae_mem.status):
            try:
                use(forked)
            except trae_mem.TraeMemError as error:
                errors += "forked" in str(error) and str(os.getpid()) in str(error)
        return errors

    assert in_child(child) == 3
    assert_still_streams(forked)


def test_a_forked_child_reads_the_weights(forked):
    expected = state_of(forked)
    assert in_child(lambda: assert_same(state_of(forked), expected) or 7) == 7


def test_a_forked_child_may_enable_the_model_anew(forked):
    expected = logits(build_lora())

    def child() -> int:
        trae_mem.disable(forked)
        resident = same_bits(logits(forked), expected)
        trae_mem.enable(forked)
        return 7 if resident and same_bits(logits(forked), expected) else 1

    assert in_child(child) == 7
    assert_still_streams(forked)


def test_workers_of_a_data_loader_are_forked_children(forked):
    loader = torch.utils.data.DataLoader(range(4), num_workers=2, multiprocessing_context="fork")
    assert len(list(loader)) == 4
    assert_still_streams(forked)


def test_a_forked_child_ends_as_any_process_does():
    """All of Python's and C++'s endings run, with copies in flight when it was forked."""
    output = run_python(
        """
        import os, signal, sys
        import trae_mem
        from models import backward_step, build_lora

        device = trae_mem.HostDevice(random_delay_us=2000)
        model = trae_mem.enable(build_lora(), device=device)
        backward_step(model)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        backward_step(model)
        """
    )
    assert output.split() == ["0"]

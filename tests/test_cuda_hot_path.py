"""On a GPU the host never waits while a model streams, and nothing is allocated."""

from __future__ import annotations

import functools

import pytest
import torch
from models import (
    UNITS,
    GroupedStack,
    Stack,
    batch,
    build_lora,
    numbers,
    use_checkpointing,
)
from sim_support import held, let_go

import trae_mem
from trae_mem.runtime import find_runtime

pytestmark = pytest.mark.sim(gpu="A10", memory="1GiB", delay_us=200)


def backward(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()


def counted(step) -> tuple[dict[str, int], dict[str, int]]:
    """The calls that blocked the host during the step, all and ours."""
    from trae_mem.sim import control

    control.reset_calls()
    step()
    return control.blocking_calls(), control.blocking_calls("_native")


def blocking_calls_of_a_step(model: torch.nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    inputs = {name: tensor.to("cuda") for name, tensor in batch().items()}

    def step():
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer's state is made in the first
    blocking = counted(step)
    torch.cuda.synchronize()
    return blocking


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("store", ["ram", "file"])
def test_a_step_makes_no_call_that_waits_for_the_gpu(store, checkpointing, checkpoints):
    model, resident = build_lora(), build_lora().to("cuda")
    for each in (model, resident):
        use_checkpointing(each, checkpointing)
    source = str(checkpoints["llama"]) if store == "file" else "ram"
    trae_mem.enable(model, source=source)
    blocking, ours = blocking_calls_of_a_step(model)
    assert ours == {}
    # transformers itself waits once in a checkpointed forward, whatever we do.
    assert blocking == blocking_calls_of_a_step(resident)[0]
    assert checkpointing != "none" or blocking == {}


def test_a_step_of_a_plain_model_waits_for_nothing_at_all():
    for model in (Stack(), GroupedStack(2, use_reentrant=False)):
        trae_mem.enable(model, prefetch=1)
        step = functools.partial(backward, model, numbers().to("cuda"))
        step()
        blocking, _ = counted(step)
        assert blocking == {}


def test_a_whole_step_is_queued_while_the_gpu_is_held_at_its_first_kernel():
    """If any call waited for the GPU, this would never end."""
    model = trae_mem.enable(Stack(), prefetch=1)
    inputs = numbers().to("cuda")
    model(inputs).square().mean().backward()
    torch.cuda.synchronize()
    before = trae_mem.status(model).acquires
    with held(torch.cuda.current_stream().cuda_stream):
        model(inputs).square().mean().backward()
        assert trae_mem.status(model).acquires == before + 2 * UNITS
    torch.cuda.synchronize()


def test_a_step_maps_creates_and_reserves_nothing():
    from trae_mem.sim import control

    model = trae_mem.enable(Stack(), prefetch=1)
    inputs = numbers().to("cuda")
    model(inputs).square().mean().backward()
    control.reset_calls()
    model(inputs).square().mean().backward()
    ours = {
        name for name, calls in control.calls().items() if any("_native" in n for n in calls.by)
    }
    assert not {
        name for name in ours if name.startswith(("cuMem", "cuMemHost")) and "Memcpy" not in name
    }
    assert {"cuStreamWaitEvent", "cuEventRecord"} <= ours


def test_the_bytes_on_the_gpu_are_the_slots():
    from trae_mem.sim import control

    let_go()
    torch.cuda.empty_cache()
    before = control.used_bytes(0) - torch.cuda.memory_reserved()
    model = trae_mem.enable(Stack(), prefetch=1)
    runtime, status = find_runtime(model), trae_mem.status(model)
    slot = max(pack.bytes for pack in runtime.packs)
    page = 2 << 20
    assert status.bytes_on_device == 3 * -(-slot // 256) * 256
    pages = -(-status.bytes_on_device // page) * page
    assert runtime.pool.used_bytes == pages
    assert control.used_bytes(0) - torch.cuda.memory_reserved() - before == pages

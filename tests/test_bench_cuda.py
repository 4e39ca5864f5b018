"""The benchmarks of the GPU: their models, the dry mode's BLAS, and tiny runs from end to end."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simgpu_blas
import torch
from models import same_bits
from torch import nn
from typer.testing import CliRunner

import trae_mem
from trae_mem.bench import gpu_parity, headline, large_models, overlap_cuda, plain_llama
from trae_mem.bench.large_models import LargeLlama
from trae_mem.bench.schedule import ideal_step_seconds
from trae_mem.cli.bench import app
from trae_mem.errors import TraeMemError
from trae_mem.gpus import GPUS, find_gpu

TINY = LargeLlama("tiny", layers=7, hidden=64, intermediate=96, heads=4, key_value_heads=2)
SMALL = LargeLlama("small", layers=6, hidden=512, intermediate=1024, heads=8, key_value_heads=8)


@pytest.fixture(scope="module")
def simulator() -> Path:
    """The folder of the simulated GPU's libraries, built."""
    from trae_mem.sim import libraries

    try:
        return libraries.build("dry").folder
    except libraries.UnavailableError as error:
        pytest.skip(str(error))


# --- cards and models -----------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_each_card_s_numbers_are_of_the_right_size(gpu: Any) -> None:
    """A slip in a unit is a factor of a thousand."""
    assert 10e9 < gpu.link_bytes_per_second < gpu.memory_bytes_per_second < 10e12
    assert 10e12 < gpu.flops < 10e15
    assert (6, 0) <= gpu.compute_capability <= (12, 0)
    assert 20 < gpu.multiprocessors < 200


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        # As published with the models' checkpoints.
        (large_models.LLAMA_2_7B, 6_738_415_616),
        (large_models.LLAMA_2_13B, 13_015_864_320),
        (large_models.CODE_LLAMA_34B, 33_743_970_304),
        (large_models.LLAMA_2_70B, 68_976_648_192),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_large_models_are_as_large_as_the_real_ones(shape: LargeLlama, parameters: int) -> None:
    model = large_models.build_with_adapters(shape, torch.float16, rank=8, checkpointing=True)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert sum(p.numel() for p in frozen) == parameters == shape.parameters
    assert {p.dtype for p in frozen} == {torch.float16}
    assert shape.weight_bytes(torch.float16) == 2 * parameters
    assert all(p.is_meta for p in model.parameters())
    adapters = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(adapters) == 4 * shape.layers
    assert all(".q_proj." in name or ".v_proj." in name for name in adapters)


def test_the_plain_model_has_the_same_frozen_weights() -> None:
    model = plain_llama.build(TINY, torch.bfloat16, "meta")
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert sum(p.numel() for p in frozen) == TINY.parameters
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def plain(checkpointing: str = "none", **options: Any) -> plain_llama.PlainLlama:
    model = plain_llama.build(TINY, torch.float32, "cpu", checkpointing=checkpointing, **options)
    return plain_llama.fill(model)


def trained(model: plain_llama.PlainLlama, steps: int = 3) -> list[torch.Tensor]:
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(plain_llama.tokens(step, 2, 9, TINY.vocabulary, "cpu"))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in adapters)]


@pytest.mark.parametrize("checkpointing", plain_llama.CHECKPOINTING)
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_plain_model_trains_the_same_when_it_streams(checkpointing: str, repeats: int) -> None:
    resident, streamed = (plain(checkpointing, repeats=repeats) for _ in range(2))
    trae_mem.enable(streamed, prefetch=1, device="cpu", source="ram")
    expected, found = trained(resident), trained(streamed)
    assert all(map(torch.isfinite, expected[:3]))
    assert len({loss.item() for loss in expected[:3]}) == 3
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))


def test_layers_that_are_filled_alike_differ_in_their_adapters_only() -> None:
    model = plain_llama.fill(plain_llama.build(TINY, torch.float32, "cpu"), alike=True)
    first, last = model.layers[0], model.layers[-1]
    assert torch.equal(first.gate.weight, last.gate.weight)
    assert not torch.equal(first.query.down, last.query.down)
    assert first.gate.weight.std() > 0


# --- the dry mode's BLAS --------------------------------------------------------------------------


def test_every_symbol_of_the_installed_blas_is_there(simulator: Path) -> None:
    for library in simgpu_blas.find_cublas():
        ours = simgpu_blas._read(simulator / library.soname)
        assert ours.symbols == library.symbols
        assert ours.version_node == library.version_node


A10 = find_gpu("A10")


def kernel_seconds(work: Any) -> float:
    """Modelled time of what the call queues."""
    from trae_mem.sim import control

    torch.cuda.synchronize()
    before = control.busy_seconds("kernels")
    work()
    torch.cuda.synchronize()
    return control.busy_seconds("kernels") - before


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


@pytest.mark.sim(gpu="A10", mode="dry", pace=True)
@pytest.mark.parametrize(
    ("dtype", "weight"), [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 4)]
)
def test_a_matrix_product_takes_as_long_as_its_flops(dtype: torch.dtype, weight: int) -> None:
    first, second = empty(1024, 2048, dtype=dtype), empty(2048, 4096, dtype=dtype)
    expected = weight * 2 * 1024 * 2048 * 4096 / A10.flops
    assert kernel_seconds(lambda: first @ second) == pytest.approx(expected, rel=1e-6)
    assert kernel_seconds(lambda: first.t().t() @ second) == pytest.approx(expected, rel=1e-6)


@pytest.mark.sim(gpu="A10", mode="dry", pace=True)
def test_a_product_with_little_to_compute_takes_as_long_as_its_bytes() -> None:
    first, second = empty(4, 8192), empty(8192, 8192)
    bytes_moved = 2 * (4 * 8192 + 8192 * 8192 + 4 * 8192)
    expected = bytes_moved / A10.memory_bytes_per_second
    assert kernel_seconds(lambda: first @ second) == pytest.approx(expected, rel=1e-6)


@pytest.mark.sim(gpu="A10", mode="dry", pace=True)
def test_batches_and_biases_are_counted() -> None:
    one = 2 * 512 * 1024 * 2048 / A10.flops
    first, second = empty(8, 512, 1024), empty(8, 1024, 2048)
    assert kernel_seconds(lambda: torch.bmm(first, second)) == pytest.approx(8 * one, rel=1e-6)
    bias, weight = empty(2048), empty(2048, 1024)
    with_bias = kernel_seconds(lambda: nn.functional.linear(first[0], weight, bias))
    assert with_bias == pytest.approx(one, rel=1e-6)


@pytest.mark.sim(gpu="A10", mode="dry")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_training_is_made_of_runs_without_a_number_being_computed(dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 128, device="cuda", dtype=dtype)
    hidden = empty(2, 16, 64, dtype=dtype).requires_grad_()
    output = layer(hidden)
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (128, 64)
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    heads = empty(2, 4, 16, 32, dtype=dtype).requires_grad_()
    nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    table = nn.Embedding(100, 64, device="cuda", dtype=dtype)
    ids = torch.zeros(2, 16, dtype=torch.long, device="cuda")
    logits = nn.functional.linear(table(ids), table.weight)
    nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        torch.optim.AdamW([*layer.parameters(), *table.parameters()], **options).step()


@pytest.mark.sim(gpu="A10", mode="dry")
def test_a_dry_run_allocates_what_a_real_one_would() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = empty(1024, 1024) @ empty(1024, 2048)
    assert torch.cuda.memory_allocated() - before >= kept.nbytes
    assert torch.cuda.max_memory_allocated() - before >= 2 * (1024 * 1024 + 2 * 1024 * 2048)


# --- from end to end ------------------------------------------------------------------------------

HEADLINE = headline.Settings(
    headline=SMALL,
    larger=(dataclasses.replace(SMALL, name="deeper", layers=8),),
    dtypes=("bfloat16", "float16"),
    length=64,
    steps=4,
    steps_of_larger=2,
)
OVERLAP = overlap_cuda.Settings(
    shape=SMALL,
    batch=1,
    length=128,
    ratios=(1.0,),
    prefetches=(0, 2),
    rounds=2,
    rounds_beside=1,
    calibration_steps=1,
)


def bench(folder: Path, *words: str) -> dict[str, Any]:
    """One benchmark through the command line, with its figure; its JSON."""
    path, figure = folder / "results.json", folder / "figure.png"
    command = [*words, "--quick", "--json", str(path), "--figure", str(figure)]
    result = CliRunner().invoke(app, command)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    reached = all(check["ok"] for check in report["checks"])
    assert result.exit_code == (0 if reached else 1)
    assert figure.read_bytes().startswith(b"\x89PNG")
    return report


def missed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["ok"]]


def test_headline_measures_memory_with_and_without_us(
    simulator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headline, "QUICK", HEADLINE)
    report = bench(tmp_path, "headline", "--gpu", "a10")
    # A tiny model fits; the rest must hold for it too.
    assert all("runs out of memory" in name for name in missed(report))
    assert report["environment"]["simulated_gpu"] == "A10"
    rows = report["results"]["runs"]
    ours = next(row for row in rows if row["role"] == "streams")
    assert ours["steps_done"] == 4
    status = ours["streaming_status"]
    assert status["bytes_on_device"] == status["slots"] * status["unit_bytes"]
    extra = ours["peak"]["device_bytes"] - ours["peak"]["reserved_bytes"]
    assert extra >= status["bytes_on_device"]  # whole pages
    assert [row["model"] for row in report["results"]["smallest"]] == ["small", "deeper"]
    assert all(row["gib"] == 1 for row in report["results"]["smallest"])


def test_headline_tells_where_memory_runs_out(simulator: Path) -> None:
    one = headline.Run(
        "out of memory", SMALL, "bfloat16", 8, 1, 1, checkpointing=False, streaming=False
    )
    settings = dataclasses.replace(HEADLINE, length=512)
    with headline.simulated_card(settings) as child:
        row = headline.measure(child, one, 40 << 20, settings)
        again = headline.measure(child, one, 4 << 30, settings)
    assert row["steps_done"] == 0
    assert row["out_of_memory"].startswith("CUDA out of memory. Tried to allocate")
    assert row["card_bytes"] == 40 << 20
    assert again["steps_done"] == 1
    assert again["card_bytes"] == 4 << 30


def test_overlap_on_a_simulated_gpu_sets_the_link_to_the_compute(
    simulator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap_cuda, "QUICK", OVERLAP)
    report = bench(tmp_path, "overlap", "--device", "cuda", "--sim", "A10")
    assert all(name.startswith("efficiency") for name in missed(report))
    points = {point["prefetch"]: point for point in report["results"]["points"]}
    assert points[0]["loads_per_step"] == 2 * (6 - 2)
    assert points[2]["loads_per_step"] == 2 * (6 - 4)
    for point in points.values():
        assert point["seconds_per_load"]["median"] >= 0.9 * point["nominal_seconds_per_load"]


def test_where_the_host_runs_ahead_two_slots_overlap_without_prefetch() -> None:
    compute, load = [1.0] * 10, 1.0
    waits = ideal_step_seconds(compute, compute, load, slots=2, prefetch=0)
    ahead = ideal_step_seconds(compute, compute, load, slots=2, prefetch=0, host_runs_ahead=True)
    assert waits == pytest.approx(20 + 16)  # each of 2 x (10 - 2) loads
    # A load is behind the last use of its slot: each waits for the one before, none for the host.
    assert ahead == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "expected cpu or cuda"),
        (["--sim", "A10"], "add --device cuda"),
        (["--device", "cuda", "--sim", "A11"], "did you mean"),
    ],
)
def test_overlap_explains_options_that_make_no_sense(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["overlap", *words])
    assert isinstance(result.exception, TraeMemError)
    assert message in str(result.exception)


def test_overlap_without_a_gpu_says_how_to_simulate_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = CliRunner().invoke(app, ["overlap", "--device", "cuda"])
    assert isinstance(result.exception, TraeMemError)
    assert "--sim A10" in str(result.exception)


@pytest.mark.sim(gpu="A10", mode="numeric", delay_us=200, poison=True)
def test_gpu_check_s_parity_scene_finds_the_same_bits() -> None:
    found = gpu_parity.run(simulated=True, quick=True)
    assert found["ok"], [case for case in found["cases"] if case["difference"]]
    assert len(found["cases"]) == 3 * 2 * 2


@pytest.mark.sim(gpu="A10", mode="numeric")
def test_gpu_check_s_parity_scene_notices_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("CHECKPOINTING", ("none",)), ("STORES", ("ram",)), ("DEBUG", (None,))):
        monkeypatch.setattr(gpu_parity, name, few)
    train = gpu_parity._train
    calls = iter(range(100))

    def other(model: Any) -> Any:
        found = train(model)
        return [(n, t + 1) for n, t in found] if next(calls) == 1 else found

    monkeypatch.setattr(gpu_parity, "_train", other)
    found = gpu_parity.run(simulated=True, quick=True)
    assert not found["ok"]
    assert found["failed"] == 1
    assert found["cases"][0]["difference"] == "loss 0 differs"


def test_gpu_check_rehearses_on_a_simulated_card(simulator: Path, tmp_path: Path) -> None:
    """One scene, as the script starts it."""
    root = Path(__file__).resolve().parent.parent
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "trae_mem.sim", "--gpu", "A10", "--mode", "dry"]
    command += [str(root / "tools" / "gpu_check.py"), "--scene"]
    command += ["trae_mem.bench.gpu_scenes:link", "--sim", "A10", "--quick"]
    subprocess.run([*command, "--result", str(result)], check=True, cwd=root, timeout=300)
    found = json.loads(result.read_text(encoding="utf-8"))
    assert set(found["bytes_per_second"]) == {"pinned", "pageable", "to_host_pinned", "loads"}

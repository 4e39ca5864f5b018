"""The environment variables of the table: each has the effect that the table says."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
from models import SLOW_LINK, UNITS, assert_same_trace, build_lora, logits, train

import trae_mem
from trae_mem.native import load_native

OPTIONS = {name: (variable, default) for name, variable, default, _ in load_native().options()}


def test_every_option_has_a_variable_of_its_own():
    variables = [variable for variable, _ in OPTIONS.values()]
    assert len(set(variables)) == len(variables)
    assert all(re.fullmatch(r"TRAE_MEM_[A-Z_]+", variable) for variable in variables)


def test_every_variable_that_the_core_reads_is_in_the_table():
    core = Path(trae_mem.__file__).parent.parent / "csrc" / "core"
    sources = [path.read_text(encoding="utf-8") for path in core.glob("*.cpp")]
    assert sources
    assert not re.findall(r"TRAE_MEM_[A-Z_]+", "".join(sources))
    readers = [text for text in sources if "getenv(" in text]
    assert len(readers) == 1


# What only a GPU reads, and what is a list.
ELSEWHERE = {"faults", "staging_bytes"}


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - ELSEWHERE))
def test_a_value_that_is_no_number_is_refused_by_name(name, monkeypatch, checkpoints):
    variable, _ = OPTIONS[name]
    for value in ("many", "-1", "1.5", ""):
        monkeypatch.setenv(variable, value)
        with pytest.raises(ValueError, match=f"{variable}='{value}'"):
            trae_mem.enable(build_lora(), source=checkpoints["llama"])


def test_faults(monkeypatch):
    monkeypatch.setenv("TRAE_MEM_HOST_FAULTS", "copy:2")
    model = trae_mem.enable(build_lora())
    with pytest.raises(trae_mem.TransferError, match="copy number 2"):
        logits(model)
    assert_same_trace(train(model, 2), train(build_lora(), 2))


@pytest.mark.parametrize("value", ["copy", "copy:0", "copy:x", ":3"])
def test_faults_that_cannot_be_read(value, monkeypatch):
    monkeypatch.setenv("TRAE_MEM_HOST_FAULTS", value)
    with pytest.raises(ValueError, match=value):
        trae_mem.enable(build_lora())


def test_a_slow_link_makes_each_use_wait(monkeypatch):
    monkeypatch.setenv("TRAE_MEM_HOST_LINK", str(SLOW_LINK))
    model = trae_mem.enable(build_lora(), prefetch=0)
    logits(model)
    status = trae_mem.status(model)
    assert (status.hits, status.stalls) == (0, UNITS)


def test_delays_change_nothing(monkeypatch):
    monkeypatch.setenv("TRAE_MEM_HOST_DELAY", "200")
    monkeypatch.setenv("TRAE_MEM_HOST_SEED", "5")
    assert_same_trace(train(trae_mem.enable(build_lora()), 2), train(build_lora(), 2))


@pytest.mark.parametrize("number", [1, 5])
def test_reader_threads(number, monkeypatch, checkpoints):
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    monkeypatch.setenv("TRAE_MEM_READER_THREADS", str(number))
    gc.collect()  # the threads of streams that are no longer used
    before = threads()
    model = trae_mem.enable(build_lora(), source=checkpoints["llama"])
    assert threads() - before == number  # the thread that copies reads too
    assert_same_trace(train(model, 2), train(build_lora(), 2))


def test_the_event_log_keeps_as_many_entries(monkeypatch):
    monkeypatch.setenv("TRAE_MEM_EVENT_LOG", "5")
    model = trae_mem.enable(build_lora())
    logits(model)
    entries, count, lost = trae_mem.runtime.find_runtime(model).streamer.events(0)
    assert len(entries) == 5
    assert count == 5 + lost

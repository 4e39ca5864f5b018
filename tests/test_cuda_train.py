"""`trae-mem train` on a GPU: the same configuration file, the same losses as all resident."""

from __future__ import annotations

import pytest
from test_cli_train import checkpoint, one_thread, run_once, train, write_configuration

__all__ = ["checkpoint", "one_thread", "run_once"]  # fixtures

pytestmark = pytest.mark.sim(gpu="A10", memory="2GiB", poison=True, delay_us=50)

ON_THE_GPU = "resource.device=cuda"


def test_a_streamed_run_has_the_losses_and_adapters_of_the_resident_one(run_once):
    streamed = run_once(ON_THE_GPU)
    resident = run_once(ON_THE_GPU, "model_config.enable_lazy_load=false")
    assert streamed.code == resident.code == 0
    assert streamed.record.status["device"] == "A10"
    assert streamed.record.status["source"] == "file"
    assert streamed.record.losses == resident.record.losses
    assert all(
        (streamed.adapter[name] == tensor).all() for name, tensor in resident.adapter.items()
    )


def test_a_gpu_is_what_auto_means_where_there_is_one(tmp_path, checkpoint):
    path = write_configuration(tmp_path, checkpoint)
    code, record = train(path, "resource.device=auto", "model_config.source=ram")
    assert code == 0
    assert (record.status["device"], record.status["source"]) == ("A10", "ram")

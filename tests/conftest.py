"""What all tests share: no network, one thread, no streaming or memory left behind."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

import hypothesis
import pytest
import torch

from trae_mem import sim

pytest_plugins = ["trae_mem.sim.pytest_plugin"]

# The models here are so small that a second thread costs more than it does.
torch.set_num_threads(1)

# The same tests on a GPU, real or simulated: models are made there, and streamed to there.
if device := os.environ.get("TRAE_MEM_TEST_DEVICE"):
    torch.set_default_device(device)

if sim.active():
    # The simulated GPU takes attention's mathematical path; so must the CPU, to compare bits.
    torch.backends.cuda.enable_flash_sdp(False)

# No time limits: the machine may be busy. The same examples each time.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tests")


def pytest_configure(config):
    # The old name works in each version of transformers that we support, the new one does not.
    for name in ("gradient_checkpointing_enable", "is_gradient_checkpointing"):
        config.addinivalue_line("filterwarnings", f"ignore:.*`{name}` is deprecated:FutureWarning")
    config.addinivalue_line("markers", "host_only(reason): does not apply to a GPU")


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("host_only")
    if marker is not None and os.environ.get("TRAE_MEM_TEST_DEVICE", "cpu") != "cpu":
        pytest.skip(marker.args[0])


def pytest_collection_finish(session):
    # What the libraries made while they were imported is not garbage: collecting gets quick.
    gc.collect()
    gc.freeze()


@pytest.fixture(params=[None, "poison"])
def debug(request):
    """Each test with it runs twice, the second time with released slots full of NaN."""
    return request.param


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """The folder of a tiny model's safetensors checkpoint, by family; written once."""
    from models import FAMILIES, write_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(family, root / family) for family in FAMILIES}

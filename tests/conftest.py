"""What all tests share: no network, one thread, no streaming or memory left behind."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

import hypothesis
import pytest
import torch

# The models here are so small that a second thread costs more than it does.
torch.set_num_threads(1)

# No time limits: the machine may be busy. The same examples each time.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tests")


def pytest_configure(config):
    # The old name works in each version of transformers that we support, the new one does not.
    for name in ("gradient_checkpointing_enable", "is_gradient_checkpointing"):
        config.addinivalue_line("filterwarnings", f"ignore:.*`{name}` is deprecated:FutureWarning")


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

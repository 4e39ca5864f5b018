"""TraeMemCallback in a transformers.Trainer that is the user's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trae_mem
from trae_mem.integrations.transformers import TraeMemCallback
from trae_mem.runtime import find_runtime


class Blocks(nn.Module):
    """Four frozen linear layers and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


@pytest.fixture
def train(tmp_path):
    from transformers import Trainer, TrainingArguments

    def run(model: nn.Module, callback: TraeMemCallback) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = [{"x": torch.full((8,), float(number))} for number in range(4)]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train()
        return trainer

    return run


def test_the_model_streams_during_the_training_and_is_itself_again_afterwards(train):
    torch.manual_seed(0)
    model = Blocks()
    before = {name: value.clone() for name, value in model.layers.state_dict().items()}
    trainer = train(model, TraeMemCallback(prefetch=0, slots=2, device="cpu"))
    assert find_runtime(model) is None
    assert all(
        torch.equal(value, before[name]) for name, value in model.layers.state_dict().items()
    )
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    assert logs[-1]["trae_mem/loads"] > 0


def test_a_model_that_streams_already_is_left_as_it_is(train):
    model = trae_mem.enable(Blocks(), prefetch=0, slots=3, device="cpu")
    train(model, TraeMemCallback())
    assert trae_mem.status(model).slots == 3
    trae_mem.disable(model)

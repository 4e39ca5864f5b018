"""One training run in this process, from a configuration to a folder full of results.

In order: output folder, model, text, LoRA, streaming, HF Trainer; then, however it ended, the
adapter as far as it got, `summary.json`, `events.jsonl` and `memory.jsonl`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import TrainerCallback, TrainingArguments, set_seed

from trae_mem.config import ResourceSection, RunConfig
from trae_mem.errors import BudgetError, ConfigError
from trae_mem.report.environment import describe_environment
from trae_mem.report.summary import ADAPTER, EVENTS, MEMORY, SUMMARY, RunRecord, StepRecord
from trae_mem.report.tables import print_line
from trae_mem.sizes import format_bytes, parse_bytes
from trae_mem.training import models
from trae_mem.training.arguments import build_arguments
from trae_mem.training.channel import Channel
from trae_mem.training.data import TextData, load_text_data
from trae_mem.training.memory import MemorySampler, current_rss, peak_rss, write_samples
from trae_mem.training.output import prepare_output
from trae_mem.training.progress import LiveLine
from trae_mem.training.steps import Counters, StepLossTrainer, StepRecorder
from trae_mem.training.turns import TurnTaker


def run_training(config: RunConfig, console: Console, channel: Channel | None = None) -> RunRecord:
    """Trains, saves, and returns the record that it also wrote to `summary.json`.

    Args:
        config: The run; its `compare_resident` is not looked at here.
        console: Where the live line goes.
        channel: Given when another run is trained in turns with this one.

    Returns:
        The record. Its outcome is "finished", or "interrupted" after Ctrl-C during the training.

    Raises:
        ConfigError: Something in the configuration cannot work; nothing was trained.
        Exception: What stopped the training; the record, with outcome "failed", is written.
    """
    _quiet_libraries()
    begin_ns = time.monotonic_ns()
    folder = prepare_output(config.output_dir, clean=channel is None)
    device = choose_device(config.resource)
    arguments = build_arguments(config, device)
    record = RunRecord(
        config=config.as_dict(),
        environment=describe_environment(device),
        begin_ns=begin_ns,
        device=device,
    )
    with MemorySampler() as sampler:
        session = _Session(config, arguments, device, record, console)
        session.load()
        try:
            session.train(channel)
            record.outcome = "finished"
        except KeyboardInterrupt:
            record.outcome = "interrupted"
        except BaseException as error:
            record.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            record.peak_rss_bytes = peak_rss()
            session.save(folder)
            write_samples(folder / MEMORY, sampler.samples)
            record.paths |= {"memory": str(folder / MEMORY), "summary": str(folder / SUMMARY)}
            record.write(folder)
    return record


def choose_device(resource: ResourceSection) -> str:
    """ "cuda" or "cpu": `resource.device`, where "auto" is the GPU if there is one.

    Raises:
        ConfigError: "cuda" was asked for and torch sees no GPU.
    """
    if resource.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("resource.device: cuda, but torch sees no GPU; set resource.device=cpu")
    if resource.device != "auto":
        return resource.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _quiet_libraries() -> None:
    """Our own lines say what is going on; the libraries' bars and notices would tear them."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Renamed in a later 5.x; PEFT and configurations for any 5.x use the name that all know.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*")


class _Session:
    """The parts of one run while it lasts."""

    def __init__(
        self,
        config: RunConfig,
        arguments: TrainingArguments,
        device: str,
        record: RunRecord,
        console: Console,
    ) -> None:
        self.config = config
        self.arguments = arguments
        self.device = device
        self.record = record
        self.console = console
        self.model: Any = None
        self.tokenizer: Any = None
        self.data: TextData | None = None
        self.recorder: Any = None  # trae_mem.Recorder, once streaming has begun
        self.steps: StepRecorder | None = None

    # --- before -----------------------------------------------------------------------------

    def load(self) -> None:
        """Model, text, LoRA and streaming; everything that can be wrong is wrong here."""
        section = self.config.model
        begin = time.monotonic()
        checkpoint = models.resolve_checkpoint(section.model, self.console)
        print_line(self.console, f"loading {section.model}")
        self.tokenizer = models.load_tokenizer(checkpoint)
        self.data = load_text_data(self.config.data, self.tokenizer)
        model = models.load_model(checkpoint, section)
        # Seeded here and not earlier, so that LoRA starts the same whatever loading drew.
        set_seed(self.config.seed)
        self.model = models.add_lora(model, section)
        self._describe_model(checkpoint)
        if section.enable_lazy_load:
            self._enable_streaming()
        self._announce()
        self.record.load_seconds = time.monotonic() - begin

    def _describe_model(self, checkpoint: Path) -> None:
        assert self.data is not None
        parameters = list(self.model.parameters())
        layer_bytes = models.layer_weight_bytes(self.model)
        frozen = sum(p.nbytes for p in parameters if not p.requires_grad)
        self.record.model = {
            "checkpoint": str(checkpoint),
            "layers": len(models.repeated_blocks(self.model)),
            "layer_bytes": layer_bytes,
            "other_bytes": frozen - layer_bytes,
            "parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "budget_bytes": None,
        }
        evaluation = self.data.evaluation
        self.record.data = {
            "tokens": self.data.tokens,
            "train_blocks": len(self.data.train),
            "evaluation_blocks": 0 if evaluation is None else len(evaluation),
            "sequence_length": self.config.data.sequence_length,
        }

    def _announce(self) -> None:
        record, counters = self.record, self._counters()
        how = "stay on the device"
        if self.config.model.enable_lazy_load:
            how = f"stream, {format_bytes(counters.bytes_on_device)} of them on the device"
        layers = f"{record.model['layers']} layers of {format_bytes(record.model['layer_bytes'])}"
        text = f"{record.data['tokens']} tokens in {record.data['train_blocks']} blocks"
        print_line(self.console, f"{layers} {how}; text of {text}")
        if self.config.resource.enable_memory_fragment_cleanup:
            print_line(
                self.console,
                "resource.enable_memory_fragment_cleanup: no effect yet, this version has no "
                "allocator of its own",
            )

    def _enable_streaming(self) -> None:
        import trae_mem

        section, resource = self.config.model, self.config.resource
        budget = resource.capped_budget
        trae_mem.enable(
            self.model,
            prefetch=section.prefetch_layer_num,
            device="cpu" if self.device == "cpu" else torch.device("cuda"),
            source=section.source,
            budget=budget,
            slots=section.slots,
        )
        if budget is not None and not isinstance(budget, float):
            self.record.model["budget_bytes"] = parse_bytes(budget)
        on_device = trae_mem.status(self.model).bytes_on_device
        if resource.gpu is not None and on_device > resource.gpu.memory_bytes:
            raise BudgetError(
                f"the slots take {format_bytes(on_device)}, and resource.gpu_type "
                f"{resource.gpu.name} has {format_bytes(resource.gpu.memory_bytes)}; "
                "lower model_config.prefetch_layer_num or model_config.slots",
                minimum=on_device,
            )

    # --- the training ---------------------------------------------------------------------------

    def train(self, channel: Channel | None) -> None:
        assert self.data is not None
        self.steps = StepRecorder(self._counters)
        callbacks: list[TrainerCallback] = [self.steps]
        if channel is not None:
            callbacks.insert(0, TurnTaker(channel, self.steps))
        trainer = StepLossTrainer(
            model=self.model,
            args=self.arguments,
            train_dataset=self.data.train,
            eval_dataset=self.data.evaluation,
            processing_class=self.tokenizer,
            data_collator=transformers.default_data_collator,
            callbacks=callbacks,
            streamed=self.config.model.enable_lazy_load,
        )
        trainer.remove_callback(transformers.PrinterCallback)  # it prints every log as a dict
        self.steps.trainer = trainer
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            self._record_events(stack)
            self._show_progress(stack, trainer)
            try:
                trainer.train(resume_from_checkpoint=self.arguments.resume_from_checkpoint)
            finally:
                self.record.train_seconds = time.monotonic() - begin
                self.record.evaluations = [
                    {"step": entry["step"], "loss": entry["eval_loss"]}
                    for entry in trainer.state.log_history
                    if "eval_loss" in entry
                ]

    def _counters(self) -> Counters:
        if not self.config.model.enable_lazy_load:
            return Counters(bytes_on_device=self.record.model["layer_bytes"])
        import trae_mem

        status = trae_mem.status(self.model)
        return Counters(status.stall_seconds, status.loads, status.bytes_on_device)

    def _record_events(self, stack: contextlib.ExitStack) -> None:
        """Opens a Recorder for the first `record_steps` steps; more would only fill the disk."""
        limit = self.config.record_steps
        if not self.config.model.enable_lazy_load or limit == 0:
            return
        import trae_mem

        assert self.steps is not None
        recording = contextlib.ExitStack()
        self.recorder = recording.enter_context(trae_mem.Recorder(self.model))
        stack.enter_context(recording)

        def stop(step: StepRecord) -> None:
            if step.step >= limit:
                recording.close()

        self.steps.listeners.append(stop)

    def _show_progress(self, stack: contextlib.ExitStack, trainer: StepLossTrainer) -> None:
        assert self.steps is not None
        line: LiveLine | None = None

        def show(step: StepRecord) -> None:
            nonlocal line
            if line is None:  # only now does the Trainer know how many steps there will be
                line = stack.enter_context(LiveLine(self.console, trainer.state.max_steps))
            line.show(step.step, live_text(step, self.record, current_rss()))

        self.steps.listeners.append(show)

    # --- after ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """The adapter as it stands, the events, and the last figures of the streaming."""
        record = self.record
        if self.steps is not None:
            record.steps = self.steps.records
        if self.config.model.enable_lazy_load:
            import trae_mem

            record.status = dataclasses.asdict(trae_mem.status(self.model))
        if self.recorder is not None:
            self.recorder.write_json_lines(folder / EVENTS)
            record.paths["events"] = str(folder / EVENTS)
        if record.steps:
            self.model.save_pretrained(folder / ADAPTER)
            self.tokenizer.save_pretrained(folder / ADAPTER)
            record.paths["adapter"] = str(folder / ADAPTER)


def live_text(step: StepRecord, record: RunRecord, rss: int) -> str:
    """Loss, speed, device memory and stall share of one step, for the live line."""
    parts = [
        f"loss {step.loss:.4f}",
        f"{step.tokens / step.seconds:.0f} tokens/s",
        f"layers on device {format_bytes(step.bytes_on_device)}"
        f" of {format_bytes(record.model['layer_bytes'])}",
        f"process {format_bytes(rss)}",
    ]
    if record.config["model_config"]["enable_lazy_load"]:
        parts.append(f"stall {100 * step.stall_seconds / step.seconds:.1f} %")
    return "  ".join(parts)

"""One file of tensors and plain values: written whole or not at all, checked when it is read.

format, step, seconds, best_val_loss, wandb_id
model          {name: tensor}             the same names whether the run was compiled or not
optimizer      {name: {state}}            all optimizers in one
scaler         the gradient scaler's state; empty where none was used
vocab_size, tokenizer, model_config       enough to sample from the file alone
identity       what must not change when a run continues
config         the whole run config, for readers; nothing is built from it
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from common.checkpoint_file import save_checkpoint
from common.errors import UserError, format_value
from training.optimizer import load_state_by_name, state_by_name


@dataclass
class TrainState:
    """Everything that a step changes: the weights, and how far the run has come."""

    model: nn.Module
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler
    step: int = 0  # optimizer steps done
    seconds: float = 0.0
    best_val_loss: float = math.inf
    wandb_id: str | None = None

    def counters(self) -> dict:
        return {key: getattr(self, key) for key in ("step", "seconds", "best_val_loss", "wandb_id")}

    def summary(self) -> dict:
        """How far the run has come, as summary.json names it."""
        return {"step": self.step, "best_val_loss": self.best_val_loss, "wall_seconds": self.seconds}

    def save(self, path: Path, about: dict) -> None:
        """`about`: what does not change, see `about` below."""
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": state_by_name(self.model, self.optimizers),
            "scaler": self.scaler.state_dict(),
        }
        save_checkpoint(path, about | self.counters() | tensors)

    def restore(self, saved: dict) -> None:
        self.model.load_state_dict(saved["model"])
        load_state_by_name(self.model, self.optimizers, saved["optimizer"])
        if saved["scaler"]:  # empty where the run had none, and a new one starts afresh
            self.scaler.load_state_dict(saved["scaler"])
        for key in self.counters():
            setattr(self, key, saved[key])


def checkpoint_metadata(config: Any, meta: dict) -> dict:
    """What a checkpoint says of itself beside the state, from the run's config and the prepared data's meta.json."""
    model = asdict(config.model)
    return {
        "model_config": model,
        "vocab_size": meta["vocab_size"],
        "tokenizer": meta["tokenizer"],
        "identity": {f"model.{key}": value for key, value in model.items() if key not in ("name", "dropout")}
        | {"data.name": meta["source"]["name"], "data": meta["fingerprint"]}
        | {"data.document_mask": config.data.document_mask}
        | {f"data.mix.{name}.weight": part.weight for name, part in config.data.mix.items()}
        | {"tokenizer.name": config.tokenizer.name, "vocabulary": meta["vocab_size"]}
        | {"train.init_from": config.train.init_from}
        | {"optimizer.name": config.optimizer.name, "train.batch_size": config.train.batch_size},
        "config": asdict(config),
    }


def check_identity(path: Path, saved: dict, now: dict) -> None:
    """Raises UserError where a run would continue as something else, listing what differs."""
    differs = [key for key in now if saved.get(key) != now[key]]
    if differs:
        listed = ", ".join(
            f"{key}={format_value(saved.get(key))} (now {format_value(now[key])})" for key in differs[:4]
        )
        if len(differs) > 4:
            listed += f" and {len(differs) - 4} more, all in its config.yaml and the command in its summary.json"
        raise UserError(f"{path} was trained with {listed}; set that back, or set another name")

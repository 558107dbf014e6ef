"""What stands around the loop: optimizers, schedule, checkpoints, tracking, devices."""

from training.config import (
    AdamWConfig,
    CheckpointConfig,
    EvalConfig,
    MuonConfig,
    ScheduleConfig,
    TrainConfig,
    TrainWandbConfig,
    WandbConfig,
)

__all__ = [
    "AdamWConfig",
    "CheckpointConfig",
    "EvalConfig",
    "MuonConfig",
    "ScheduleConfig",
    "TrainConfig",
    "TrainWandbConfig",
    "WandbConfig",
]

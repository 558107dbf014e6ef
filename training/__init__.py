"""What stands around the loop: optimizers, schedule, checkpoints, tracking, devices."""

from training.config import (
    AdamWConfig,
    BenchConfig,
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
    "BenchConfig",
    "CheckpointConfig",
    "EvalConfig",
    "MuonConfig",
    "ScheduleConfig",
    "TrainConfig",
    "TrainWandbConfig",
    "WandbConfig",
]

"""The config of bench.py: types and checks."""

from dataclasses import dataclass
from math import inf

from common.errors import UserError

PHASES = ("forward", "forward+backward", "decode", "step")
LISTS = ("backends", "phases", "dtypes", "block_sizes")
NUMBERS = (
    "batch_size",
    "n_head",
    "n_kv_head",
    "head_size",
    "value_size",
    "vocab_size",
    "rounds",
    "repeats",
    "seconds",
    "time_limit",
)


@dataclass
class BenchConfig:
    """What a bench measures: every combination of phases, dtypes, block_sizes and backends.

    backends: such as "naive", or "sdpa:math" for one kernel; the first is the baseline. None: all backends that can
    train on the device. block_sizes: context lengths T. batch_size: sequences. n_head, n_kv_head, head_size,
    value_size: shapes of attention alone; None: those of the model. vocab_size: of the model in phase step.
    rounds: how often the backends take turns. Each turn times at least `repeats` calls, and calls for `seconds`.
    time_limit: seconds for all turns of a row.
    """

    backends: list[str] | None
    phases: list[str]
    dtypes: list[str]
    block_sizes: list[int]
    batch_size: int
    n_head: int | None
    n_kv_head: int | None
    head_size: int | None
    value_size: int | None
    vocab_size: int
    rounds: int
    repeats: int
    seconds: float
    time_limit: float

    def __post_init__(self):
        for key in LISTS:
            values = getattr(self, key)
            if values is not None and not values:
                raise UserError(f"{key}=[] leaves nothing to measure; set one or more values")
            if values is not None and len(set(values)) < len(values):
                raise UserError(f"{key}=[{','.join(map(str, values))}] contains a value twice; remove one")
        unknown = [phase for phase in self.phases if phase not in PHASES]
        if unknown:
            raise UserError(f"phases: {unknown[0]} is unknown; set one or more of {', '.join(PHASES)}")
        if min(self.block_sizes) < 1:
            raise UserError(f"block_sizes={self.block_sizes} must be numbers of tokens from 1; set, say, [64,1024]")
        for key in NUMBERS:
            value = getattr(self, key)
            if value is not None and not 0 < value < inf:
                raise UserError(f"{key}={value} must be a finite number greater than 0")

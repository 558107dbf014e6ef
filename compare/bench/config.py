"""The config of bench.py: types and checks."""

from dataclasses import dataclass, fields
from math import inf

from common.errors import UserError

PHASES = ("forward", "forward+backward", "decode", "step")


@dataclass
class BenchConfig:
    """A bench measures every combination of phases, dtypes, block_sizes and backends.

    backends: such as "naive", or "sdpa:math" for one kernel; the first is the baseline. None: all backends that can
    train on the device. block_sizes: context lengths T. batch_size: sequences per call. n_head, n_kv_head, head_size,
    value_size: shapes of attention alone; None: those of the model. vocab_size: of the model in phase step.
    rounds: number of rounds, in which each backend has one turn. repeats: minimum number of timed calls per turn.
    seconds: approximate duration of a turn. time_limit: seconds for all turns of a row.
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
        for key in (field.name for field in fields(BenchConfig)):
            value = getattr(self, key)
            if isinstance(value, int | float) and not 0 < value < inf:
                raise UserError(f"{key}={value} must be a finite number greater than 0")
            if isinstance(value, list) and not value:
                raise UserError(f"{key}=[] leaves nothing to measure; set one or more values")
            if isinstance(value, list) and len(set(value)) < len(value):
                raise UserError(f"{key}=[{','.join(map(str, value))}] contains a value twice; remove one")
        unknown = [phase for phase in self.phases if phase not in PHASES]
        if unknown:
            raise UserError(f"phases: {unknown[0]} is unknown; set one or more of {', '.join(PHASES)}")
        if min(self.block_sizes) < 1:
            raise UserError(f"block_sizes={self.block_sizes} must be positive numbers of tokens; set, say, [64,1024]")

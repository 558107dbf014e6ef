"""What bench.py measures: types and checks of its config."""

from dataclasses import dataclass
from math import inf

from common.errors import UserError

PHASES = ("forward", "forward+backward", "decode", "step")


@dataclass
class BenchConfig:
    """What bench.py measures: every combination of phases, dtypes, block_sizes and backends.

    backends: as in "naive" or, with one of its kernels or implementations, "sdpa:math"; the others are held against the
    first; None: all that can train on the device. block_sizes: contexts T. batch_size: sequences.
    n_head, n_kv_head, head_size, value_size: of attention alone; None: the model's, and values as wide as keys.
    vocab_size: of whole training steps. rounds: processes per row, taking turns with the other backends; repeats: the
    fewest calls that each times, seconds: how long it goes on. time_limit: seconds after which a row is given up.
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
        for key in ("backends", "phases", "dtypes", "block_sizes"):
            values = getattr(self, key)
            if values is not None and not values:
                raise UserError(f"{key}=[] leaves nothing to measure; set one or more")
            if values is not None and len(set(values)) < len(values):
                raise UserError(f"{key}=[{','.join(map(str, values))}] says something twice; set each once")
        unknown = [phase for phase in self.phases if phase not in PHASES]
        if unknown:
            raise UserError(f"phases: {unknown[0]} is unknown; set one or more of {', '.join(PHASES)}")
        if min(self.block_sizes) < 1:
            raise UserError(f"block_sizes={self.block_sizes} takes numbers of tokens from 1; set, say, [64,1024]")
        for key in ("batch_size", "n_head", "n_kv_head", "head_size", "value_size", "vocab_size", "rounds", "repeats",
                    "seconds", "time_limit"):  # fmt: skip
            value = getattr(self, key)
            if value is not None and not 0 < value < inf:
                raise UserError(f"{key}={value} must be a finite number greater than 0")

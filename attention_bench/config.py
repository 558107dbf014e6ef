"""The config of bench.py: types and checks. This module must not import torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.run_paths import RUNS
from common.settings import Rule, check_path_component, setting
from training.config import WandbConfig

BENCHES = RUNS / "bench"  # runs/bench/<name>: results of bench.py
TOKENS_PER_CALL = 2048  # as in a step of the default run
PHASES = ("forward", "forward+backward", "decode")


@dataclass
class BenchConfig:
    """Config of bench.py.

    It measures every combination of phases, masks, dtypes, block_sizes and backends.
    """

    name: str | None = None  # folder below runs/bench/; None: <time>-<device>
    seed: int = setting(1337, 0, 2**32 - 1)
    device: str = setting("auto", choices=("auto", "cpu", "cuda", "mps"))
    tf32: bool = False
    backends: list[str] | None = None  # such as [naive,sdpa:math]; None is all that can train
    phases: list[str] = setting(list(PHASES), choices=PHASES)  # decode: one query on T keys
    # window:256: 256 keys per query; documents:256: documents of 256 tokens
    masks: list[str] = setting(["causal"], choices=("causal", "window:N", "documents:N"))
    # auto: as in train.py
    dtypes: list[str] = setting(["auto"], choices=("auto", "float32", "bfloat16", "float16"))
    block_sizes: list[int] = setting([128, 512, 2048], 1, 10**8)  # context lengths T, in tokens
    # sequences; None: 2,048 tokens, as in a step of the default run, and one sequence in decode
    batch_size: int | None = setting(None, 1, 10**6)
    n_head: int = setting(2, 1, 10**4)  # the default model has these shapes
    n_kv_head: int | None = setting(None, 1, 10**4)  # None: n_head
    head_size: int = setting(64, 1, 10**5)
    value_size: int | None = setting(None, 1, 10**5)  # None: head_size
    rounds: int = setting(3, 1, 10**6)  # how often the backends take turns
    seconds: float = setting(0.1, above=0, high=1e7)  # approximate duration of a turn
    # seconds for a turn, including compilation and the start of a process
    time_limit: float = setting(60.0, above=0, high=1e6)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def rules(self, section: str) -> Iterator[Rule]:
        if self.name is not None:
            check_path_component("name", self.name)
        yield (
            "n_kv_head",
            self.n_head % (self.n_kv_head or self.n_head) == 0,
            f"does not divide the {self.n_head} heads; set a divisor",
        )
        yield (
            "masks",
            not {"window:0", "documents:0"} & set(self.masks),
            "has a mask of length 0; set 1 or more",
        )
        for key, value in vars(self).items():
            yield key, value != [], "leaves nothing to measure; set one or more values"


def mask_length(mask: str, kind: str) -> int | None:
    """The number N of a mask "KIND:N". None for other masks."""
    name, _, length = mask.partition(":")
    return int(length) if name == kind else None

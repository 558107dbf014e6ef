"""The config of bench.py: types and checks. This module must not import torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.errors import UserError
from common.run_paths import RUNS
from common.settings import Rule, check_path_component, setting
from model import GPTConfig
from training.config import MuonConfig, OptimizerConfig, WandbConfig

BENCHES = RUNS / "bench"  # runs/bench/<name>: results of bench.py
PHASES = ("forward", "forward+backward", "decode", "step")
CAUSAL = "causal"
DEFAULT_TOKENS = 2048


@dataclass
class BenchConfig:
    """Config of bench.py.

    It measures every combination of phases, masks, dtypes, block_sizes and backends.
    """

    name: str | None = None  # folder below runs/bench/; None: <time>-<device>-<model>
    seed: int = setting(1337, 0, 2**32 - 1)
    device: str = setting("auto", choices=("auto", "cpu", "cuda", "mps"))
    compile: bool | None = None  # compile the model of phase step; None: as in train.py
    tf32: bool = False
    # of phase step; attention alone has its head shapes
    model: GPTConfig = field(default_factory=GPTConfig)
    optimizer: OptimizerConfig = field(default_factory=MuonConfig)
    # such as [naive,sdpa:math]; the first is the baseline; None: all
    backends: list[str] | None = None
    # decode: one query on T keys; step: a training step
    phases: list[str] = setting(list(PHASES), choices=PHASES)
    # window:256: 256 keys per query; documents:256: documents of 256 tokens
    masks: list[str] = setting([CAUSAL])
    # auto: as in train.py
    dtypes: list[str] = setting(["auto"], choices=("auto", "float32", "bfloat16", "float16"))
    block_sizes: list[int] = setting([128, 512, 2048], 1, 10**8)  # context lengths T, in tokens
    # sequences; None: 2,048 tokens, as in a step of the default run, and one sequence in decode
    batch_size: int | None = setting(None, 1, 10**6)
    n_head: int | None = setting(None, 1, 10**4)  # of attention alone; None: as in the model
    n_kv_head: int | None = setting(None, 1, 10**4)
    head_size: int | None = setting(None, 1, 10**5)
    value_size: int | None = setting(None, 1, 10**5)  # None: head_size
    vocab_size: int = setting(2048, 1, 10**7)  # of the model of phase step
    rounds: int = setting(3, 1, 10**6)  # how often the backends take turns
    repeats: int = setting(2, 1, 10**9)  # minimum number of timed calls per turn
    seconds: float = setting(0.1, above=0, high=1e7)  # approximate duration of a turn
    # seconds for a turn, including compilation
    time_limit: float = setting(60.0, above=0, high=1e6)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def rules(self, section: str) -> Iterator[Rule]:
        if self.name is not None:
            check_path_component("name", self.name)
        check_path_component("model.name", self.model.name)
        if "softmax" not in self.model.attention_types:
            advice = "set backends=[sdpa,linear] instead"
            raise UserError(f"model.attention_type=linear leaves no backend to compare; {advice}")
        H, G, _, _ = self.kernel_shape()
        advice = f"does not divide the {H} heads; set a divisor, or null"
        yield "n_kv_head", H % G == 0, advice
        for key, value in vars(self).items():
            if isinstance(value, list):
                yield key, len(value) > 0, "leaves nothing to measure; set one or more values"
                yield key, len(set(value)) == len(value), "contains a value twice; remove one"
        for mask in self.masks:
            parse_mask(mask)

    def num_sequences(self, phase: str, T: int) -> int:
        """Sequences of a call with T keys."""
        if self.batch_size is not None:
            return self.batch_size
        return 1 if phase == "decode" else max(1, DEFAULT_TOKENS // T)

    def kernel_shape(self, phase: str = "forward") -> tuple[int, int, int, int]:
        """Shape of attention in a phase; step and null: the model's.

        Returns heads H, key/value heads G, head dimension D, and head dimension Dv of values.
        """
        model = self.model
        if phase == "step":
            return model.n_head, model.kv_heads, model.head_dim, model.head_dim
        H = self.n_head or model.n_head
        G = self.n_kv_head or (H if self.n_head else model.kv_heads)
        D = self.head_size or model.head_dim
        return H, G, D, self.value_size or D


def parse_mask(mask: str) -> tuple[int | None, int | None]:
    """Parse a mask of BenchConfig.masks. Raises UserError.

    Returns (window, document length). None is unlimited.
    """
    if mask == CAUSAL:
        return None, None
    match = re.fullmatch(r"(window|documents):([1-9]\d{0,8})", mask)
    if match is None:
        advice = f"set {CAUSAL}, window:256 or documents:256, for example"
        raise UserError(f"masks: {mask} is unknown; {advice}")
    lengths = {match[1]: int(match[2])}
    return lengths.get("window"), lengths.get("documents")

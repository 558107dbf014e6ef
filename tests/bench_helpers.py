"""Cases, configs and made-up rows for the tests of bench.py."""

import ctypes
from dataclasses import replace

import torch

from attention_bench.config import BenchConfig
from attention_bench.measure import COLUMNS, list_cases

CPU = torch.device("cpu")
CONFIG = BenchConfig(
    dtypes=["float32"],
    batch_size=2,
    n_head=4,
    n_kv_head=2,
    head_size=8,
    value_size=6,
    rounds=1,
    seconds=0.001,
    time_limit=300.0,
)


def parent_death_signal() -> int:
    """The signal that this process gets when its parent ends. Only on Linux."""
    signum = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signum))  # PR_GET_PDEATHSIG
    return signum.value


def make_case(
    phase: str = "forward", backend: str = "naive", *, T: int = 16, mask: str = "causal", **changes
) -> dict:
    """A small case. changes: keys of the config."""
    config = replace(
        CONFIG, phases=[phase], backends=[backend], block_sizes=[T], masks=[mask], **changes
    )
    ((case,),) = list_cases(config, CPU)
    return case


def make_row(backend: str, T: int, ms: float | None, **changes) -> dict:
    """A made-up row. ms None: the case ran out of memory."""
    sizes = {"B": 2, "T": T, "H": 4, "G": 2, "D": 8, "Dv": 8}
    case = {"backend": backend, "phase": "forward", "mask": "causal", "dtype": "float32"}
    if ms is None:
        result = {"status": "out of memory", "reason": "needed 8.0 GiB more"}
    else:
        result = {"status": "finished", "resolved": backend, "ms_median": ms}
        result |= {"ms_q1": 0.99 * ms, "ms_q3": 1.01 * ms}
    return dict.fromkeys(COLUMNS) | sizes | case | result | changes

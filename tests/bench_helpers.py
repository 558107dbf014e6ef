"""Cases, a config and made-up rows for the tests of bench.py."""

from dataclasses import replace

import torch

from comparison.bench.cases import GRAD_PHASES, Case
from comparison.bench.config import BenchConfig
from comparison.bench.results import Timing
from model import AttentionConfig
from model.attention import AttentionRequest

CPU = torch.device("cpu")
CONFIG = BenchConfig(
    seed=1,
    dtypes=["float32"],
    vocab_size=64,
    compile=False,
    rounds=1,
    seconds=0.001,
    time_limit=300.0,
)
COLUMNS = (
    "backend,resolved,status,reason,phase,mask,device,dtype,B,T,H,G,D,Dv,ms_median,ms_q1,ms_q3,flops_per_second,"
    "peak_memory_bytes,error_y,error_gradients,compile_s"
)


def make_case(phase="forward", backend="naive", *, T=16, **changes):
    """A small case. changes: fields of its request."""
    Tq, grad = 1 if phase == "decode" else T, phase in GRAD_PHASES
    small = AttentionRequest(
        B=2, Tq=Tq, Tk=T, H=4, G=2, D=8, Dv=6, dtype=torch.float32, device=CPU, grad=grad
    )
    return Case(
        backend, AttentionConfig(backend, None, None), phase, "causal", replace(small, **changes)
    )


def make_row(backend, T, ms, spread=0.01, **changes):
    """A made-up row. ms None: the case ran out of memory."""
    columns = make_case(backend=backend, T=T).start_row()
    if ms is None:
        return replace(
            Timing(**columns, status="out of memory", reason="needed 8.0 GiB more"), **changes
        )
    times = {"ms_median": ms, "ms_q1": ms * (1 - spread), "ms_q3": ms * (1 + spread)}
    return replace(Timing(**columns, status="finished", resolved=backend, **times), **changes)


def make_rows(**times):
    """Made-up rows from {backend: {T: ms}}."""
    return [make_row(backend, T, ms) for backend, line in times.items() for T, ms in line.items()]

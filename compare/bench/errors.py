"""Numerical errors of the attention backends, compared with float64, on the activations of a trained run.

q, k, v and the gradient of y come from a forward and a backward pass of the model in float32. For comparison, the same
errors are measured on random inputs of the same shapes, with the same masks.

B sequences, T tokens, H query heads, G key/value heads, D head dimension.
"""

import argparse
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from common.console import ProgressBar, format_number, make_console, make_table
from common.errors import UserError
from common.plots import COLORS, make_figure, style_axes
from compare.bench.cases import OUTPUT_NAMES, compute_reference, select_variants
from compare.bench.config import BenchConfig
from compare.bench.plot import MARKERS
from compare.bench.results import FINISHED, group_rows
from compare.bench.worker import try_call
from data import prepare
from data.loader import Batch, Loader
from data.shards import PreparedData, read_meta
from data.tokenizer import encode, from_spec
from model import AttentionConfig, GPTConfig
from model.attention import AttentionRequest, ResolvedAttention, attention_scores, get_attention_fn, naive, resolve
from model.gpt import GPT
from model.pretrained import load_pretrained
from training.device import DTYPES, configure_backends

Failures = dict[tuple[str, str], tuple[str, str]]  # backend and dtype -> status and reason


@dataclass(frozen=True)
class HeadError:
    """A row of errors.csv: the errors of one backend and dtype in one query head. Layers and heads count from 1.

    inputs: "random" or "real". score_variance: variance of the scores q k / sqrt(D) over all keys that queries see.
    error_*: largest absolute difference from float64, divided by the largest absolute value of the head in float64.
    Query heads that share a key/value head have the same error_dk and error_dv.
    """

    backend: str
    resolved: str
    dtype: str
    inputs: str
    layer: int
    head: int
    score_variance: float
    error_y: float
    error_dq: float
    error_dk: float
    error_dv: float

    @property
    def error_gradients(self) -> float:
        """The largest error of dq, dk and dv; NaN if one of them is."""
        return torch.tensor([self.error_dq, self.error_dk, self.error_dv]).max().item()


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one layer: q, k, v and the gradient of y, and the mask (window, doc_ids and softcap)."""

    name: str  # random or real
    layer: int
    tensors: tuple[Tensor, ...]
    mask: dict


def record_inputs(config: BenchConfig, device: torch.device) -> list[AttentionInputs]:
    """Run a trained model on some text -> inputs of its layers, random and real.

    Layers with linear attention are left out. The gradient of y is scaled to a mean square of 1, as loss scaling does
    for float16. Raises UserError if the run or its prepared data does not exist, or if all layers are left out.
    """
    configure_backends(device, deterministic=False, tf32=config.tf32)
    path, checkpoint = load_pretrained(config.run, config.checkpoint or "best")
    model_config = GPTConfig.from_checkpoint(checkpoint["model_config"])
    x, targets, doc_ids = _read_batch(checkpoint, path, model_config.block_size, config, device)
    calls = []

    layers = [number for number, mixer in enumerate(model_config.mixers, start=1) if mixer == "softmax"]
    if not layers:
        raise UserError(f"{path} has only linear attention, which has no other backends; set another run")

    def record(q, k, v, *, dropout_p, **mask) -> Tensor:
        y = naive(q, k, v, **mask)
        y.retain_grad()
        calls.append((q, k, v, y, mask))
        return y

    model = GPT(model_config, checkpoint["vocab_size"], record, weights=checkpoint["model"]).to(device).eval()
    model(x, targets, doc_ids=doc_ids).backward()
    generator, inputs = torch.Generator().manual_seed(config.seed), []
    for layer, (q, k, v, y, mask) in zip(layers, calls, strict=True):
        real = q.detach(), k.detach(), v.detach(), y.grad / y.grad.square().mean().sqrt()
        random = tuple(torch.randn(tensor.shape, generator=generator).to(device) for tensor in real)
        inputs += [AttentionInputs("random", layer, random, mask), AttentionInputs("real", layer, real, mask)]
    return inputs


def _read_batch(checkpoint: dict, path: Path, T: int, config: BenchConfig, device: torch.device) -> Batch:
    """The first validation windows of a run's data; for a model without data (hf:FOLDER), Python source code."""
    if "identity" not in checkpoint:
        source = encode(from_spec(checkpoint["tokenizer"]), inspect.getsource(argparse))
        tokens = torch.from_numpy(np.resize(source.astype(np.int64), config.batch_size * T + 1)).to(device)
        return tokens[:-1].view(-1, T), tokens[1:].view(-1, T), None
    identity = checkpoint["identity"]
    folder = prepare.ROOT / f"{identity['data.name']}-{identity['data']}"
    meta = read_meta(folder)
    if meta is None:
        raise UserError(f"{folder}, the data of {path}, is missing; run prepare.py with the data settings of the run")
    loader = Loader(PreparedData(folder, meta), T, config.seed, device, identity["data.document_mask"])
    return loader.batch("val", 0, config.batch_size)


def measure_errors(config: BenchConfig, layers: list[AttentionInputs]) -> tuple[list[HeadError], Failures]:
    """Measure all backends in all dtypes, with a progress bar. Backends that fail have no rows, but a reason."""
    if config.dtypes == ["auto"]:
        config = replace(config, dtypes=list(DTYPES))
    variants, dtypes = select_variants(config, layers[0].tensors[0].device)
    variances = [score_variances(*inputs.tensors[:2], **inputs.mask).tolist() for inputs in layers]
    rows, failures, steps = [], {}, itertools.count()
    with ProgressBar(len(dtypes) * len(layers) * len(variants)) as progress:
        for dtype, (inputs, variance) in itertools.product(dtypes, zip(layers, variances, strict=True)):
            dtype_name = str(dtype).removeprefix("torch.")
            tensors = [tensor.to(dtype) for tensor in inputs.tensors]
            reference = compute_reference(tensors, grad=True, **inputs.mask)
            for name, attention in variants.items():
                progress.update(next(steps), f"{name}, {dtype_name}, layer {inputs.layer}")
                if (name, dtype_name) in failures:
                    continue
                status, result = try_call(head_errors, attention, tensors, inputs.mask, reference)
                if status != FINISHED:
                    failures[name, dtype_name] = status, result.split("; set ")[0]
                    continue
                kernel, errors = result
                where = name, kernel.resolved, dtype_name, inputs.name, inputs.layer
                for head, values in enumerate(zip(variance, *errors, strict=True), start=1):
                    rows.append(HeadError(*where, head, *values))
    return [row for row in rows if (row.backend, row.dtype) not in failures], failures


def head_errors(
    attention: AttentionConfig, inputs: list[Tensor], mask: dict, reference: dict[str, Tensor]
) -> tuple[ResolvedAttention, list[list[float]]]:
    """The kernel, and the errors of y, dq, dk and dv in each query head: see HeadError. Raises UserError."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in inputs[:3])
    (B, T, H, D), G = q.shape, k.shape[2]
    shape = {"B": B, "Tq": T, "Tk": T, "H": H, "G": G, "D": D, "Dv": v.shape[3]}
    options = {"dtype": q.dtype, "device": q.device, "grad": True, "window": mask["window"], "softcap": mask["softcap"]}
    kernel = resolve(attention, AttentionRequest(**shape, **options, document_mask=mask["doc_ids"] is not None))
    y = get_attention_fn(attention)(q, k, v, **mask)
    outputs = y.detach(), *torch.autograd.grad(y, (q, k, v), inputs[3])
    errors = []
    for name, output in zip(OUTPUT_NAMES, outputs, strict=True):
        expected = reference[name]
        error, largest = ((x.abs().amax((0, 1, 3))) for x in (output.cpu().double() - expected, expected))
        error = error / torch.where(largest > 0, largest, 1)  # absolute if all values are zero
        errors.append(error.repeat_interleave(H // len(error)).tolist())
    return kernel, errors


def score_variances(q: Tensor, k: Tensor, **mask) -> Tensor:
    """Variance of the scores q k / sqrt(D) of each query head, over all keys that the queries see -> (H,)."""
    scores = attention_scores(q, k, **mask)  # (B, H, T, T)
    return torch.stack([head[head > -torch.inf].var(correction=0) for head in scores.unbind(1)])


def print_errors(rows: list[HeadError], failures: Failures, folder: Path) -> None:
    """Print a row per backend and dtype: the median over the heads, and the worst head of the real inputs."""
    console = make_console(width=120)
    headers = ("{}\nrandom", "\nreal", "\nworst head")
    table = make_table(
        "\nbackend", "\ndtype", *(header.format(output) for output in ("y", "gradients") for header in headers), left=2
    )
    for (backend, dtype), group in group_rows(rows, "backend", "dtype").items():
        cells = []
        for key in ("error_y", "error_gradients"):
            cells += _summarize_heads(group, key, "{:.1e}".format)
        table.add_row(backend, dtype, *cells)
    if rows:
        console.print("\nlargest error of a head, relative to its largest value in float64: median head", style="bold")
        console.print(table)
        one = next(iter(group_rows(rows, "backend", "dtype").values()))
        cells = _summarize_heads(one, "score_variance", format_number)
        console.print("Variance of the scaled scores: random {}, real {}, largest {}.".format(*cells))
    kernels = dict.fromkeys(f"{row.backend} ran {row.resolved}" for row in rows if row.backend != row.resolved)
    if kernels:
        console.print(f"{'; '.join(kernels)}.")
    dtypes_by_failure: dict[tuple[str, ...], list[str]] = {}
    for (backend, dtype), failure in failures.items():
        dtypes_by_failure.setdefault((backend, *failure), []).append(dtype)
    for (backend, status, reason), dtypes in dtypes_by_failure.items():
        console.print(f"{backend}: {status} ({', '.join(dtypes)}): {reason}")
    if rows:
        print(f"\nwritten  {folder / 'errors.csv'}  {folder / 'errors.png'}")


def _summarize_heads(rows: list[HeadError], key: str, form: Callable[[float], str]) -> tuple[str, str, str]:
    """The median of random and of real inputs, and the largest value of real inputs with its layer and head."""
    random, real = ([row for row in rows if row.inputs == inputs] for inputs in ("random", "real"))
    worst = real[int(torch.tensor([getattr(row, key) for row in real]).argmax())]  # NaN counts as the largest
    medians = (form(median(getattr(row, key) for row in group)) for group in (random, real))
    return *medians, f"{form(getattr(worst, key))} (layer {worst.layer}, head {worst.head})"


def plot_errors(rows: list[HeadError], path: Path, title: str) -> None:
    """Plot each head's error over the variance of its scores. Random inputs have hollow markers."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure = make_figure(9.0, 4.6)
    panels = figure.subplots(1, 2)
    backends, dtypes = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("backend", "dtype"))
    for axes, key, heading in zip(panels, ("error_y", "error_gradients"), ("y", "dq, dk, dv"), strict=True):
        style_axes(axes, f"relative error of {heading}")
        axes.set(xscale="log", yscale="log", xlabel="variance of the scaled scores")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        for (backend, dtype, inputs), group in group_rows(rows, "backend", "dtype", "inputs").items():
            index = backends.index(backend)
            color = COLORS[index % len(COLORS)]
            axes.plot(
                [row.score_variance for row in group],
                [getattr(row, key) for row in group],
                MARKERS[dtypes.index(dtype) % len(MARKERS)],
                color=color,
                fillstyle="none" if inputs == "random" else "full",
                markersize=4 + 4 * (len(backends) - index) / len(backends),  # covered points stay visible
                label=f"{backend}, {dtype}" if inputs == "real" else None,
            )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, title="hollow: random", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)

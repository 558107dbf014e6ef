"""Train a GPT.

    python train.py                                       a small model of Python code, in about two minutes
    python train.py data=text data.path=mybook.txt        a text file of your own
    python train.py experiment=shakespeare_char_cpu       a whole recipe
    python train.py name=mine train.steps=4000            continues runs/mine where it stopped
    python train.py -m attention=sdpa,flash seed=1,2,3    a run for each, and a comparison of them
    torchrun --nproc_per_node=8 train.py                  one run on eight GPUs

the keys most used:
  name=NAME             the run's folder below runs/; the same name again continues it
  experiment=NAME       a whole recipe from configs/experiment/
  data.path=FILE        the text to train on (with data=text)
  train.steps=N         optimizer steps, and train.minutes=M a budget of time
  train.batch_size=N    sequences per step; train.micro_batch_size=N, or auto, fits them into memory
                        piece by piece
  model.n_layer=N       with model.n_head, model.n_embd and model.block_size: the model's size
  optimizer.lr=X        the peak learning rate
  eval.every=N          steps between looks at the validation loss
  device=cuda           or cpu, mps; dtype=bfloat16 and compile=true likewise
  train.profile=true    say where the time of a step goes, and write a trace of it
  plan=true             say what the run will take in memory and time, and train nothing
  seed=N                another draw of weights and batches
"""

if __name__ == "__main__":  # ahead of the imports below, which take seconds: a wrong word is answered at once
    from configs.cli import parse_config

    config = parse_config("train", __doc__)

import time
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path

import tiktoken
import torch

from common import checkpoint_file, system
from common.interrupt import StopRequest
from common.run_dir import RunDir, has_checkpoint
from configs.cli import exit_fast
from configs.cli import run_main as run_main
from configs.schema import Train
from data import tokenizer
from data.loader import Loader, prefetch
from data.prepare import prepare
from model import SamplingConfig
from model.attention import get_attention_fn, pin_kernel_under_compile, resolve_model
from model.flops import flops_per_token, n_params
from model.generation.attention_maps import attention_maps, entropy, layer_entropies
from model.generation.attention_plots import plot_overview
from model.generation.engine import Prompt, generate
from model.gpt import GPT
from training import checkpoint, optimizer
from training.device import autocast, configure_backends, grad_scaler, resolve_compile, resolve_device, resolve_dtype
from training.distributed import Dist
from training.evaluate import evaluate
from training.init_from import load_init_weights, load_run_tokenizer
from training.loss_plot import plot_loss
from training.metrics import MetricsFile, MetricsLogger
from training.planning.micro_batch import resolve_micro_batch_size
from training.planning.plan import show_plan
from training.profiler import build_profiler
from training.progress import TrainingProgress, closing_summary, run_banner
from training.schedule import lr_scale, run_progress
from training.speed import Speed, compile_seconds, peak_flops
from training.wandb_logger import WandbRun

MAP_TOKENS = 64  # of a picture of attention, many heads of which stand side by side


def main(config: Train) -> int:
    if config.plan:
        return show_plan(config)

    # What will run is settled before anything is computed or written.
    dist = Dist.from_environment()
    device = resolve_device(config.device, dist.local_rank)
    dtype = resolve_dtype(config.dtype, device)
    compiled = resolve_compile(config.compile, device)
    steps, minutes, batch_size = config.train.steps, config.train.minutes, config.train.batch_size
    block_size = config.model.block_size
    configure_backends(device, config.deterministic, config.tf32)
    resolve = partial(
        resolve_model, config.attention, config.model, dtype=dtype, device=device, grad=True,
        document_mask=config.data.document_mask,
    )  # fmt: skip
    resolve(B=config.train.plan(dist.world_size)[0])
    dist.connect(device)

    # Text, model, optimizer.
    with dist.main_first():
        spec = load_run_tokenizer(config.tokenizer.run, config.name)
        prepared = prepare(config.data, config.tokenizer, block_size, spec=spec)
    encoding = prepared.encoding
    loader = Loader(prepared, block_size, config.seed, device, config.data.document_mask)
    torch.manual_seed(config.seed)
    model = GPT(config.model, encoding.n_vocab, get_attention_fn(config.attention)).to(device)
    micro_batch_size, accumulation = resolve_micro_batch_size(config, model, dtype, dist)
    attention = resolve(B=micro_batch_size)
    forward = dist.wrap(model)
    if compiled:
        pin_kernel_under_compile(config.attention)
        forward = torch.compile(forward, dynamic=False)
    optimizers = optimizer.build_optimizers(model, config.optimizer)
    scaler = grad_scaler(device, dtype)
    state = checkpoint.TrainState(model, optimizers, scaler)
    about = checkpoint.checkpoint_metadata(config, prepared.meta)
    if config.train.init_from is not None and not has_checkpoint(config.name):
        load_init_weights(config.train.init_from, model, about)

    label = f"{config.data.label}-{config.model.name}-{config.attention.backend}"
    with (
        RunDir(config.name, label, config.resume, dist) as run,
        StopRequest(ignore_repeats=dist.world_size > 1, silent=not dist.is_main) as stop,
        dist.raise_on_lost_rank(),
    ):
        if run.last.exists():
            saved = checkpoint_file.load_checkpoint(run.last)
            checkpoint.check_identity(run.folder, saved["identity"], about["identity"])
            state.restore(saved)
        dist.check_same("step", state.step)
        progress = run_progress(state.step, steps, state.seconds, minutes)
        if progress >= 1:
            if run.finish() and dist.is_main:
                plot_loss(run.folder)
            print(f"{run.folder} is finished, at step {state.step}; set a larger train.steps to go on, or another name")
            return 0

        tokens_per_step = batch_size * block_size
        flops = flops_per_token(config.model, encoding.n_vocab, block_size) * tokens_per_step
        speed = Speed(device, tokens_per_step, flops, peak_flops(device, dtype) * dist.world_size)
        facts = system.describe_environment(device) | {
            "dtype": str(dtype).removeprefix("torch."), "compile": compiled, "attention": asdict(attention),
            "n_params": n_params(model), "vocab_size": encoding.n_vocab, "micro_batch_size": micro_batch_size,
            "accumulation": accumulation, "world_size": dist.world_size, "data": str(prepared.folder),
        }  # fmt: skip
        run.start(asdict(config), facts | state.summary())
        wandb = WandbRun(config.wandb, run, asdict(config), state.wandb_id)
        state.wandb_id = wandb.id
        metrics = MetricsFile(run.folder / "metrics.jsonl", state.step) if dist.is_main else None

        def look() -> dict:
            """The validation loss, and a text if the model is able to write one."""
            windows = loader.val_windows if config.eval.batches is None else config.eval.batches * batch_size
            row = evaluate(forward, loader, encoding, windows, micro_batch_size, dtype, dist)
            if isfinite(row["val/loss"]):
                with autocast(device, dtype):
                    if state.step > 0:  # before, it would be noise
                        row["sample"] = write_text(model, encoding, config.eval.sample, config.seed + state.step)
                    if config.wandb.attention_maps and dist.is_main:
                        row |= look_inside(model, loader, run.folder / f"attention/step-{state.step:06d}.png")
            return row

        def keep(*paths: Path) -> None:
            """Save checkpoints, behind the rows that they count on."""
            if not dist.is_main:
                return
            tracker.flush(sync=True)
            for path in paths:
                state.save(path, about)
            took = {"compile_s": compile_seconds() if compiled else None}
            run.update(state.summary() | speed.median() | took | tracker.summary())
            wandb.set_summary(run.summary)

        with (
            MetricsLogger(metrics, wandb, scaler) as tracker,
            TrainingProgress(steps, progress) as show,
            build_profiler(config.train.profile and dist.is_main, device, run.folder, show.console) as profiler,
        ):
            show.print(run_banner(run.folder, config, facts, prepared.meta, state.step))
            system.reset_peak_memory(device)
            started = time.perf_counter() - state.seconds
            if state.step == 0:
                row = {"step": 0, "tokens": 0, "seconds": 0.0} | look()
                tracker.log(row)
                show.evaluated(row)
                if config.train.init_from is not None:  # weights that may be the best of all
                    state.best_val_loss = row["val/loss"]
                    keep(run.best)

            starts = dist.micro_batch_starts(state.step, batch_size, micro_batch_size)
            batches = speed.wrap_loader(profiler.wrap_loader(prefetch(loader, starts, micro_batch_size)))
            stopped = False
            while progress < 1 and not stopped:
                # One optimizer step, on batch_size sequences, micro_batch_size at a time.
                profiler.start()
                speed.start()
                fraction = lr_scale(config.schedule, state.step, steps, progress)
                optimizer.set_lr(optimizers, fraction)
                loss = torch.zeros((), device=device)
                for micro in range(accumulation):
                    x, y, doc_ids = next(batches)
                    dist.seed(device, config.seed, state.step, micro)
                    with dist.sync_gradients(forward, now=micro == accumulation - 1):
                        with autocast(device, dtype):
                            micro_loss = forward(x, y, doc_ids=doc_ids) / accumulation
                        scaler.scale(micro_loss).backward()
                    loss += micro_loss.detach()
                grad_norm = optimizer.optimizer_step(model, optimizers, scaler, config.train.grad_clip)
                timing = speed.stop()
                profiler.stop()

                # What came of it: a row of numbers, now and then a look at unseen text, and a checkpoint.
                state.step += 1
                seconds = time.perf_counter() - started
                stopped, state.seconds = dist.sync_stop_and_time(stop.requested, seconds, wandb.start_seconds)
                progress = run_progress(state.step, steps, state.seconds, minutes)
                row = {
                    "step": state.step, "tokens": state.step * tokens_per_step, "seconds": state.seconds,
                    "train/loss": dist.mean(loss), "grad_norm": grad_norm, "lr": config.optimizer.lr * fraction,
                }  # fmt: skip
                better = False
                if state.step % config.eval.every == 0 or progress >= 1:
                    row |= look() | {"peak_memory_bytes": system.peak_memory_bytes(device)}
                    better = row["val/loss"] < state.best_val_loss
                    show.evaluated(row, better)
                tracker.log(row, timing)
                if better:
                    state.best_val_loss = row["val/loss"]
                    keep(run.best, run.last)
                elif state.step % config.checkpoint.every == 0 or progress >= 1:
                    keep(run.last)
                show.update(state.step, progress, tracker.last)

            if progress < 1:
                keep(run.last)
            dist.barrier()
            if dist.is_main:
                plot_loss(run.folder)
            if progress < 1:
                raise KeyboardInterrupt(f"saved at step {state.step}; the same command with name={run.name} goes on")
        if dist.is_main:
            print(closing_summary(run.summary, run.folder))
        return 0


def write_text(model: GPT, encoding: tiktoken.Encoding, sampling: SamplingConfig, seed: int) -> str:
    """A text from nothing, by the model as it is now."""
    prompt = Prompt(tokenizer.initial_tokens(encoding), seed)
    return "".join(chunk.text for chunk in generate(model, encoding, [prompt], sampling, batch_size=1))


def look_inside(model: GPT, loader: Loader, picture: Path) -> dict:
    """Where each head looks at the beginning of the validation text: a picture, and how widely per layer."""
    x, _, doc_ids = loader.batch("val", 0, 1)
    weights = attention_maps(model, x[:, :MAP_TOKENS], None if doc_ids is None else doc_ids[:, :MAP_TOKENS])
    return {"attention": plot_overview(weights.numpy(), entropy(weights).numpy(), picture)} | layer_entropies(weights)


if __name__ == "__main__":
    exit_fast(run_main(main, config))

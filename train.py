"""Train a GPT.

    python train.py                                       train a small model of Python code, in one to two minutes
    python train.py data.path=mybook.txt                  train on your own text file
    python train.py experiment=shakespeare_char_cpu       train a complete recipe
    python train.py data.path=mybook.txt name=mine        the same command again resumes an interrupted run
    python train.py -m attention=sdpa,flash seed=1,2,3    train six models, and compare them
    torchrun --nproc_per_node=8 train.py                  train one model on eight GPUs

most used keys:
  name=NAME             run folder in runs/; the same name again resumes the run
  experiment=NAME       a complete recipe from configs/experiment/
  data.path=FILE        the text to train on
  train.steps=N         optimizer steps; train.minutes=M sets a time limit
  train.batch_size=N    sequences per step; train.micro_batch_size=N, or auto, splits a step to fit into memory
  model.n_layer=N       size of the model, with model.n_head, model.n_embd and model.block_size
  optimizer.lr=X        peak learning rate
  eval.every=N          steps between evaluations
  device=cuda           or cpu, mps; see also dtype=bfloat16 and compile=true
  train.profile=true    show where the time of a step goes, and write a trace
  plan=true             estimate memory and time of the run without training
  seed=N                seed of the initial weights and the batches
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("train", __doc__)

import shlex
import sys
import time
from dataclasses import asdict
from functools import partial
from math import inf

import torch

from common import system
from common.interrupt import StopRequest
from common.process import run_process
from common.run_dir import RunDir, has_checkpoint, read_summary
from data.loader import Loader, prefetch
from data.prepare import prepare
from model.attention import get_attention_fn
from model.flops import flops_per_token, n_params
from model.gpt import GPT
from training.activation_checkpointing import checkpoint_activations
from training.checkpoint import CheckpointWriter, TrainState, compute_progress, make_checkpoint_metadata
from training.config import RunConfig
from training.device import build_grad_scaler, configure_backends, resolve_runtime
from training.evaluate import Evaluator
from training.init_from import load_init_weights, load_run_tokenizer
from training.observers import Observers
from training.optimizer import build_optimizers, optimizer_step, set_lr
from training.planning.micro_batch import check_micro_batch_size, resolve_micro_batch_size
from training.planning.plan import show_plan
from training.progress import format_banner, format_summary
from training.run_plots import plot_run
from training.schedule import lr_scale


def main(config: RunConfig) -> int:
    # runtime: anything that cannot run here is refused before a file is written
    runtime = resolve_runtime(config.device, config.dtype, config.compile, config.parallel, config.world_size)
    dist, device, dtype = runtime.dist, runtime.device, runtime.dtype
    configure_backends(device, config.deterministic, config.tf32)
    min_micro_batch_size = check_micro_batch_size(config, runtime)
    runtime.resolve_attention(config.attention, config.model, min_micro_batch_size, config.data.document_mask)
    if config.plan:
        return show_plan(config, runtime)
    dist.connect(device)
    dist.check_same(f"dtype={str(dtype).removeprefix('torch.')}", "set dtype=float32 or dtype=bfloat16")

    # data
    spec = load_run_tokenizer(config.tokenizer.run, config.name)
    prepared = prepare(config.data, config.tokenizer, config.model.block_size, spec=spec)
    advice = "copy the text and data/prepared from rank 0's machine; data=python_stdlib also needs its Python version"
    dist.check_same(prepared.identity, advice)
    tokenizer = prepared.tokenizer
    loader = Loader(prepared, config.model.block_size, config.seed, device, config.data.document_mask)

    # model, micro-batch size, attention kernel, optimizers
    torch.manual_seed(config.seed)
    attend = get_attention_fn(config.attention)
    model = dist.build_model(partial(GPT, config.model, tokenizer.n_vocab, attend), device, dtype)
    checkpoint_activations(model, config.train.activation_checkpointing)
    micro_batch_size, accumulation = resolve_micro_batch_size(config, runtime, model)
    attention = runtime.resolve_attention(config.attention, config.model, micro_batch_size, config.data.document_mask)
    metadata = make_checkpoint_metadata(config, prepared.meta)
    if config.train.init_from is not None and not has_checkpoint(config.name):
        load_init_weights(config.train.init_from, model, metadata)
    wrapped_model = runtime.wrap(model, config.attention)  # copies the weights of rank 0
    optimizers = build_optimizers(model, config.optimizer, dtype)
    scaler = build_grad_scaler(device, dtype)
    state = TrainState(model, optimizers, scaler)

    # run folder; load the last checkpoint if there is one
    label = f"{config.data.label}-{config.model.name}-{config.attention.backend}"
    with (
        RunDir(config.name, label, config.resume, dist.is_main, dist.broadcast) as run,
        StopRequest() as stop,
    ):
        if run.last.exists():
            state.resume(run.last, metadata)
        dist.check_same(f"{run.folder} at step {state.step}", f"copy the newest {run.folder} to all machines")
        progress = compute_progress(config.train, state.step, state.seconds, state.evals_since_best)
        run_info = runtime.describe() | {
            "attention": asdict(attention), "n_params": n_params(model), "vocab_size": tokenizer.n_vocab,
            "micro_batch_size": micro_batch_size, "accumulation": accumulation, "data": str(prepared.folder),
            "flops_per_token": flops_per_token(config.model, tokenizer.n_vocab, config.model.block_size),
        }  # fmt: skip
        is_done = progress >= 1 and not state.evaluation_interrupted
        if is_done and read_summary(run.folder).get("status") == "finished":
            limit = "train.patience" if state.evals_since_best >= (config.train.patience or inf) else "train.steps"
            print(f"{run.folder} is finished at step {state.step}; set a larger {limit}, or another name")
            return 0
        run.start(asdict(config), run_info | state.summary())

        # observers, evaluation, checkpoints
        observers = Observers(config, runtime, run, state, progress)
        run.update(observers.summary())  # of a run that was killed after its last step
        state.wandb_id = observers.wandb.id
        evaluator = Evaluator(
            config, runtime, model, wrapped_model, loader, tokenizer, micro_batch_size, run.folder, stop
        )
        checkpoints = CheckpointWriter(run, state, metadata, observers, config.checkpoint)
        observers.progress.print(format_banner(config, run.folder, run.summary, prepared.meta))

        with observers:
            system.reset_peak_memory(device)
            started = time.perf_counter() - state.seconds
            if (state.step == 0 and config.eval.initial) or state.evaluation_interrupted:
                row, is_best = evaluator.evaluate(state)
                progress = compute_progress(config.train, state.step, state.seconds, state.evals_since_best)
                observers.log_step(row, progress, is_best and state.step > 0)
                if is_best or state.step > 0:
                    checkpoints.save(best=is_best, last=state.step > 0)

            starts = dist.micro_batch_starts(state.step, config.train.batch_size, micro_batch_size)
            batches = prefetch(loader, starts, micro_batch_size)
            stopped = False
            while progress < 1 and not stopped:
                observers.start_step()
                # set the learning rate of this step
                scale = lr_scale(config.schedule, state.step, config.train.steps, progress)
                set_lr(optimizers, scale)

                # forward and backward, accumulating gradients over micro batches
                # the loss is the mean over all targets of the step, also if the micro batches have different numbers
                num_targets = loader.count_targets(state.step * config.train.batch_size, config.train.batch_size)
                loss = torch.zeros((), device=device)
                for micro_step in range(accumulation):
                    with observers.phase("data"):
                        x, y, doc_ids = next(batches)
                    dist.seed(device, config.seed, state.step, micro_step)
                    with dist.sync_gradients(wrapped_model, is_last=micro_step == accumulation - 1):
                        with observers.phase("forward"), runtime.autocast():
                            micro_loss = wrapped_model(x, y, doc_ids=doc_ids, reduction="sum")
                            micro_loss = micro_loss / (num_targets / dist.world_size)  # the processes are averaged
                        with observers.phase("backward"):
                            scaler.scale(micro_loss).backward()
                    loss += micro_loss.detach()

                # clip the gradients and update the weights
                with observers.phase("optimizer"):
                    grad_norm = optimizer_step(model, optimizers, scaler, config.train.grad_clip)
                observers.end_step()
                state.step += 1
                stop.enable()

                # all processes agree on the time, and on whether to stop
                stopped, state.seconds = dist.sync_stop_and_time(stop.requested, time.perf_counter() - started)
                progress = compute_progress(config.train, state.step, state.seconds, state.evals_since_best)

                # evaluate and log
                lr = config.optimizer.lr * scale
                row = {"train/loss": dist.all_reduce_mean(loss), "grad_norm": grad_norm, "lr": lr}
                is_best = False
                if state.step % config.eval.every == 0 or progress >= 1:
                    evaluation, is_best = evaluator.evaluate(state, stopped)
                    row, stopped = row | evaluation, stopped or state.evaluation_interrupted
                    progress = compute_progress(config.train, state.step, state.seconds, state.evals_since_best)
                observers.log_step(row, progress, is_best)

                # save checkpoints
                if is_best or state.step % config.checkpoint.every == 0 or progress >= 1 or stopped:
                    checkpoints.save(best=is_best, last=True)

            dist.barrier()
            if dist.is_main:
                plot_run(run.folder)
            if progress < 1 or state.evaluation_interrupted:  # stopped by a signal
                raise KeyboardInterrupt(f"saved at step {state.step}; resume with: {format_resume_command(run.name)}")
        if dist.is_main:
            print(format_summary(run.summary, run.folder))
        return 0


def format_resume_command(name: str) -> str:
    """The command that resumes a run: that of this process, with the name of the run."""
    words = [word for word in sys.argv if not word.startswith(("name=", "resume="))]
    return shlex.join([*system.launcher(), *words, f"name={name}"])


if __name__ == "__main__":
    run_process(main, config)

"""Train a GPT.

    python train.py                                     train a small model of Python code
    python train.py data.path=mybook.txt                train on your own text file
    python train.py experiment=shakespeare_char_cpu     train a complete recipe
    python train.py data.path=mybook.txt name=mine      again: resume an interrupted run
    python train.py -m attention=sdpa,flash seed=1,2    train four models, and compare them
    python train.py -m sweep.trials=20 'optimizer.lr=log(1e-4,1e-2)'    search the best value
    torchrun --nproc_per_node=8 train.py                train one model on eight GPUs

most used keys:
  name=NAME             run folder in runs/; the same name again resumes the run
  experiment=NAME       a complete recipe from configs/experiment/
  data.path=FILE        the text to train on
  preset=1MB            for this amount of text: 20kB, 100kB, 300kB, 1MB, 3MB or 10MB; or auto
  train.steps=N         optimizer steps; train.minutes=M sets a time limit
  train.batch_size=N    sequences per step; train.micro_batch_size=N splits it to fit into memory
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

from contextlib import ExitStack
from functools import partial

import torch

from data.loader import Loader
from data.prepare import prepare
from model.activation_checkpointing import checkpoint_activations
from model.attention import get_attention_fn
from model.gpt import GPT
from training.checkpoint import CheckpointWriter, TrainState, make_checkpoint_header
from training.config import RunConfig
from training.device import build_grad_scaler, resolve_runtime, seed_device
from training.evaluate import Evaluator
from training.init_from import load_init_weights, load_run_tokenizer
from training.observers import Observers
from training.optimizer import build_optimizers, optimizer_step, set_lr
from training.planning.micro_batch import resolve_micro_batches
from training.planning.plan import show_plan
from training.run import open_run
from training.schedule import lr_scale
from training.signals import run_process

SAME_DATA = "copy the text and data/prepared from rank 0's machine; data=python_stdlib also needs its Python version"


def main(config: RunConfig) -> int:
    runtime = resolve_runtime(
        config
    )  # refuses anything that cannot run here, before a file is written
    if config.plan:
        return show_plan(config, runtime)
    dist, parallel, device, dtype = runtime.dist, runtime.parallel, runtime.device, runtime.dtype
    dist.connect(device, dtype)

    # data
    tokenizer_spec = load_run_tokenizer(config.tokenizer.run, config.name)
    data = prepare(config.data, config.tokenizer, config.model.block_size, tokenizer_spec)
    dist.require_equal(str(data.folder), SAME_DATA)
    tokenizer = data.tokenizer
    loader = Loader(data, config.model.block_size, config.seed, device, config.data.document_mask)

    # model and optimizers
    torch.manual_seed(config.seed)
    model = parallel.build(
        partial(GPT, config.model, tokenizer.n_vocab, get_attention_fn(config.attention))
    )
    checkpoint_activations(model, config.train.activation_checkpointing)
    micro = resolve_micro_batches(config, runtime, model)  # size, number per step, attention kernel
    load_init_weights(config.train.init_from, config.name, model, data.meta["tokenizer"])
    wrapped_model = runtime.wrap(model, config.attention)
    optimizers = build_optimizers(model, config.optimizer, dtype)
    scaler = build_grad_scaler(device, dtype)
    state = TrainState(config.train, model, optimizers, scaler)
    header = make_checkpoint_header(config, data.meta)

    with ExitStack() as stack:
        # run folder: loads the last checkpoint if there is one, and reports the results when the loop has ended
        run, stop = stack.enter_context(open_run(config, runtime, state, data, micro, header))
        if run.summary is None:  # finished by an earlier process
            return 0
        observers = stack.enter_context(Observers(config, runtime, run, state))
        evaluator = Evaluator(
            config, runtime, model, wrapped_model, loader, tokenizer, micro.size, run.folder, stop
        )
        checkpoints = CheckpointWriter(
            config.checkpoint, run, state, header, observers.flush, state.step
        )

        # evaluate the initial weights, or repeat the evaluation that a signal has stopped
        if state.unlogged or (state.step == 0 and config.eval.initial):
            observers.log_step(evaluator.evaluate(state, state.unlogged))
            checkpoints.save()

        while not state.is_done:
            observers.start_step()
            # set the learning rate of this step
            scale = lr_scale(config.schedule, state.step, config.train.steps, state.progress)
            set_lr(optimizers, scale)

            # forward and backward, accumulating gradients over micro batches
            # divide by the targets of the whole step: micro batches may contain different numbers of them
            first = state.step * config.train.batch_size  # sequence of this step
            num_targets = loader.count_targets(first, config.train.batch_size)
            first += dist.rank * micro.size * micro.count  # first sequence of this process
            loss = 0.0
            for i in range(micro.count):
                with observers.phase("data"):
                    x, y, doc_ids = loader.batch("train", first + i * micro.size, micro.size)
                seed_device(device, config.seed, state.step, i, dist.rank)  # dropout
                parallel.sync_gradients(wrapped_model, enabled=i == micro.count - 1)
                with observers.phase("forward"), runtime.autocast():
                    micro_loss = wrapped_model(x, y, doc_ids=doc_ids, reduction="sum")
                    micro_loss = micro_loss / (
                        num_targets / dist.world_size
                    )  # DDP averages over processes
                with observers.phase("backward"):
                    scaler.scale(micro_loss).backward()
                loss += micro_loss.detach()

            # clip the gradients and update the weights
            with observers.phase("optimizer"):
                grad_norm = optimizer_step(model, optimizers, scaler, config.train.grad_clip)
            observers.end_step()
            state.finish_step(dist, stop)

            # evaluate, log and save
            lr = config.optimizer.lr * scale
            metrics = {"train/loss": dist.all_reduce_mean(loss), "grad_norm": grad_norm, "lr": lr}
            if state.step % config.eval.every == 0 or state.progress >= 1:
                metrics = evaluator.evaluate(state, metrics)
            observers.log_step(metrics)
            if checkpoints.is_due():
                checkpoints.save()
    return 0


if __name__ == "__main__":
    run_process(main, config)

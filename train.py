"""Train a GPT.

    python train.py                                     train a small model of Python code
    python train.py data.path=mybook.txt                train on your own text file
    python train.py experiment=shakespeare_char_cpu     train a complete recipe
    python train.py data.path=mybook.txt name=mine      again: resume an interrupted run
    python train.py -m model.window=null,32 seed=auto   train until this change is judged
    torchrun --nproc_per_node=8 train.py                train one model on eight GPUs

most used keys:
  name=NAME             run folder in runs/; the same name again resumes the run
  experiment=NAME       a complete recipe from configs/experiment/
  data.path=FILE        the text to train on
  preset=1MB            for this amount of text: 20kB, 100kB, 300kB, 1MB, 3MB or 10MB; or auto
  train.minutes=M       without train.steps: a model for this text and M minutes on this machine;
                        for a short text, of several models (train.n_teachers=null: of one)
  train.steps=N         optimizer steps; or train.epochs=N, passes over the text
  train.batch_size=N    sequences per step; train.micro_batch_size=N splits it to fit into memory
  model.n_layer=N       size of the model, with model.n_head, model.n_embd and model.block_size
  optimizer.lr=X        peak learning rate
  eval.every=N          steps between evaluations
  device=cuda           or cpu, mps; see also dtype=bfloat16 and compile=true
  wandb.mode=online     or disabled; the default is offline, which needs no account
  wandb.project=NAME    also wandb.entity, wandb.group, wandb.tags=[A,B] and wandb.log_model=true
  plan=true             estimate memory and time of the run without training
  seed=N                seed of the initial weights and the batches; with -m also auto: as many as
                        are needed to judge each change as better, worse or not different
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("train", __doc__)

from contextlib import ExitStack
from dataclasses import asdict

import torch

from common.console import print_text
from common.errors import EXIT_CODES
from common.process import StopRequest, run_process
from data.loader import Loader
from results.plots import plot_run
from results.wandb import WandbExport
from training.banner import describe_finished_run, format_banner, print_report
from training.build import build_data, build_model, describe_run, load_init_weights
from training.checkpoint import (
    CheckpointWriter,
    load_last_checkpoint,
    make_checkpoint_header,
    remove_later_steps,
)
from training.config import RunConfig
from training.evaluate import Evaluator
from training.log import RunLogger
from training.optimizer import build_optimizers, optimizer_step, set_lr
from training.plan import show_plan
from training.presets import choose_preset
from training.run_folder import RunFolder
from training.runtime import resolve_runtime, seed_device
from training.teachers import mean_probabilities
from training.train_state import TrainState


def main(config: RunConfig) -> int:
    """Train a model. Returns the exit code."""
    config = choose_preset(config)  # values for the size of the text, and for the time
    runtime = resolve_runtime(config)  # refuses what cannot run here, before a file is written
    dist = runtime.dist
    device = runtime.device
    dist.connect(device, runtime.dtype)  # refuses processes with different dtypes
    with ExitStack() as stack:
        export = stack.enter_context(WandbExport(vars(config.wandb)))  # exits last, and waits
        # run folder: its name, its lock, and whether the run resumes
        run = stack.enter_context(RunFolder(config, dist))

        # data, model and optimizers
        data = build_data(config, run, dist)
        T = config.model.block_size
        loader = Loader(data, T, config.seed, device, config.data.document_mask)
        torch.manual_seed(config.seed)  # initial weights do not depend on what ran before
        model = build_model(config, runtime, data.meta["vocab_size"])
        if config.train.init_from is not None and not run.resumes:
            load_init_weights(config.train.init_from, model, data.meta["tokenizer"])
        wrapped_model = runtime.wrap(model, config.attention)  # for training and validation losses
        optimizers = build_optimizers(model, config.optimizer, runtime.dtype)
        # loss scaling for float16 (Micikevicius et al., arXiv:1710.03740)
        scaler = torch.amp.GradScaler(device.type, enabled=runtime.dtype == torch.float16)

        # training state: from the last checkpoint, if the run resumes
        epoch_steps = loader.windows_per_epoch / config.train.batch_size
        state = TrainState(config.train, config.schedule, model, optimizers, scaler, epoch_steps)
        header = make_checkpoint_header(config, data.meta)  # what all its checkpoints have
        load_last_checkpoint(run, state, header, dist)
        if run.is_finished(state):
            print_text(describe_finished_run(run, state))
            return 0

        # files of the run: remove what a killed process wrote after its last checkpoint
        remove_later_steps(run, state)
        facts = describe_run(config, runtime, model, data)
        logger = RunLogger(config, runtime, run, state, facts)
        checkpoints = CheckpointWriter(config.checkpoint, run, state, header)
        run.start(asdict(config), facts | logger.results())
        if run.is_main:
            export.start(run.folder)
        print_text(format_banner(config, run, data.meta))
        stack.enter_context(logger)
        stop = stack.enter_context(StopRequest())  # until stop.enable(), a signal raises

        # evaluate the initial weights, or repeat the evaluation that a signal has stopped
        evaluator = Evaluator(config.eval, runtime, loader, run, stop, model, wrapped_model)
        if state.evaluation_was_stopped or (state.step == 0 and config.eval.initial):
            evaluation = evaluator.evaluate(state)
            logger.log_step(state.unlogged | evaluation)
            state.unlogged = {}
            save(logger, checkpoints, run)

        B = runtime.micro_batch_size
        while not state.is_done:
            if state.model_progress >= 1:  # with train.n_teachers, a run trains several models
                state.start_next_model(config.seed)
            loader.select_order(len(state.teachers))  # each model reads the text in its own order
            logger.start_step()
            set_lr(optimizers, state.lr_scale)  # of this step

            # forward and backward, accumulating gradients over micro batches
            step_start = state.step * config.train.batch_size  # first sequence of this step
            rank_start = step_start + dist.rank * runtime.accumulation * B
            # divide by the targets of the whole step: micro batches may have different numbers
            num_targets = loader.count_targets(step_start, config.train.batch_size)
            targets_per_rank = num_targets / dist.world_size  # DDP averages gradients over ranks
            loss = torch.zeros((), device=device)
            for i in range(runtime.accumulation):
                x, y, doc_ids = loader.batch("train", rank_start + i * B, B)
                if state.is_student:  # its targets are probabilities
                    y = mean_probabilities(state.teachers, x, y, doc_ids, runtime.autocast())
                seed_device(device, config.seed, state.step, i, dist.rank)  # repeatable dropout
                is_last = i == runtime.accumulation - 1
                runtime.parallel.sync_gradients(wrapped_model, enabled=is_last)
                with runtime.autocast():
                    loss_sum = wrapped_model(x, y, doc_ids=doc_ids, reduction="sum")
                    micro_loss = loss_sum / targets_per_rank  # a summand of the step's loss
                scaler.scale(micro_loss).backward()
                loss += micro_loss.detach()

            # clip the gradients, update the weights and clear the gradients
            grad_norm = optimizer_step(model, optimizers, scaler, config.train.grad_clip)
            logger.end_step()
            stop.enable()  # from the first step on, a signal lets the step finish, and saves
            state.count_step(dist, stop.requested)  # all processes agree on time and stop

            # evaluate, log and save
            lr = optimizers[0].param_groups[0]["lr"]  # optimizer.lr, scaled
            metrics = {"train/loss": dist.all_reduce_mean(loss), "grad_norm": grad_norm, "lr": lr}
            evaluates = state.evaluation_is_due(config.eval.every)
            if evaluates:
                metrics |= evaluator.evaluate(state)
            if evaluates and state.stopped:  # the resumed run evaluates again, and logs the row
                state.unlogged = metrics | logger.read_timing()
            else:
                logger.log_step(metrics)
            if checkpoints.is_due:
                save(logger, checkpoints, run)

        dist.barrier()  # rank 0 may still save a checkpoint
        if run.is_main:
            plot_run(run.folder)
        run.end(state)
    print_report(run)
    return EXIT_CODES[run.summary["status"]]


def save(logger: RunLogger, checkpoints: CheckpointWriter, run: RunFolder) -> None:
    """Save in an order from which a run that is killed in between resumes.

    A checkpoint is written after the rows of its steps, and the summary after the checkpoint.
    """
    logger.flush()
    checkpoints.save()
    run.update(logger.results())


if __name__ == "__main__":
    run_process(show_plan if config.plan else main, config)

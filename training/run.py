"""The run around the training loop: its folder, resuming, the signals that stop it, and its last lines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from common.console import print_text
from common.system import describe_environment
from data.prepare import PreparedData
from model.flops import flops_per_token, n_params
from training.checkpoint import TrainState, remove_later_steps
from training.config import RunConfig
from training.device import Runtime
from training.observers import remove_later_rows
from training.planning.micro_batch import MicroBatches
from training.plots import plot_run
from training.progress import format_banner, format_summary
from training.run_folder import RunFolder
from training.signals import StopRequest


@contextmanager
def open_run(
    config: RunConfig,
    runtime: Runtime,
    state: TrainState,
    data: PreparedData,
    micro: MicroBatches,
    header: dict,
) -> Iterator[tuple[RunFolder, StopRequest]]:
    """Context manager around the training loop: locks the run folder, and loads the last checkpoint into `state`.

    If an earlier process has finished the run, its summary is None, and the loop must not start. After the loop, the
    metrics are plotted. A run that a signal has stopped raises KeyboardInterrupt with advice to resume it.
    """
    dist = runtime.dist
    label = f"{config.data.name}-{config.model.name}-{config.attention.backend}"
    with (
        RunFolder(config.name, label, config.resume, dist.is_main, dist.broadcast) as run,
        StopRequest() as stop,
    ):
        if run.last.exists():
            state.resume(run.last, header)
        checkpoint = (
            f"{run.folder} at step {state.step} with the best evaluation at step {state.best_step}"
        )
        dist.require_equal(checkpoint, f"copy the newest {run.folder} to all machines")
        was_finished = (
            run.previous.get("status") == "finished" and run.previous.get("step") == state.step
        )
        if dist.broadcast(was_finished and state.progress >= 1):
            ended_by = " and ".join(key for key, used in state.limits.items() if used >= 1)
            advice = f"set a larger {ended_by}, or another name"
            print_text(f"{run.folder} is finished at step {state.step}; {advice}")
            yield run, stop
            return
        if run.is_main:  # the row of this step may be written again
            step = state.step - (state.step == 0 or bool(state.unlogged))
            state.metrics = remove_later_rows(run.folder / "metrics.jsonl", step)
        remove_later_steps(run, state, header, dist)
        model, vocab_size = config.model, data.meta["vocab_size"]
        facts = describe_environment(runtime.device) | {
            "dtype": str(runtime.dtype).removeprefix("torch."), "compile": runtime.compile,
            "world_size": dist.world_size, "attention": asdict(micro.attention), "vocab_size": vocab_size,
            "micro_batch_size": micro.size, "accumulation": micro.count, "data": str(data.folder),
            "n_params": n_params(state.model), "flops_per_token": flops_per_token(model, vocab_size, model.block_size),
        }  # fmt: skip
        run.start(asdict(config), facts | state.summary())
        print_text(format_banner(config, run.folder, run.summary, data.meta))
        yield run, stop
        dist.all_reduce(0.0)  # a barrier: rank 0 may still save a checkpoint
        if dist.is_main:
            plot_run(run.folder)
        if state.stopped:
            raise KeyboardInterrupt(
                f"saved at step {state.step}; resume with the same command and name={run.name}"
            )
    if dist.is_main:
        print_text(format_summary(run.summary, run.folder))

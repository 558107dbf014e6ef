"""A plan as a page of at most 80 columns."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from common.console import format_duration, pluralize
from training.config import AUTO
from training.distributed import Dist
from training.planning.memory import Memory
from training.planning.plan import Plan, make_plan
from training.progress import epochs, shape

WIDTH = 80


def show_plan(config: Any) -> int:
    """Print the plan of `config` (of train.py) -> the exit code. Of several processes rank 0 alone makes it."""
    dist = Dist.from_environment()
    if dist.is_main:
        console = Console(highlight=False, emoji=False)
        with console.status("") as status:
            plan = make_plan(config, dist, say=lambda text: status.update(f"{text} ..."))
        page(plan, config, console)
    return 0


def page(plan: Plan, config: Any, console: Console) -> None:
    """Print `plan`, of a run of `config`."""

    def say(text: str = "", style: str | None = None) -> None:
        console.print(text, style=style, markup=False, width=WIDTH)

    model = config.model
    say(
        f"{model.name}: {shape(model)}, {config.tokenizer.name} vocabulary of "
        f"{'at most ' if plan.at_most else ''}{plan.vocab_size:,}\n"
    )
    say("parameters", "bold")
    console.print(_shares(plan.parameters, lambda count: f"{count:,}"))
    say()
    say("FLOPs per token of training, forward and backward", "bold")
    flops = {"weights, 6 each (T C² a sequence)": plan.linear_flops, "attention (T² C)": plan.attention_flops}
    console.print(_shares(flops, si))
    at = "never" if plan.crossover is None else f"at a context of {plan.crossover:,}"
    say(f"attention overtakes the rest {at}\n")

    fit = ", as many as fit" if config.train.micro_batch_size == AUTO else ""
    say(
        f"memory of a process, MiB: {pluralize(plan.micro_batch_size, 'sequence')} at a time{fit}, {plan.dtype}", "bold"
    )
    console.print(_memory(plan), width=WIDTH)
    say("activations live at the end of a forward pass, scores are their T x T part")
    if plan.process_bytes:
        say(f"process: with what malloc keeps, and {mib(plan.process_bytes)} MiB of Python and libraries")
    for name, memory in plan.memory.items():
        if isinstance(memory, str):
            say(f"{name}: {memory}")
    say()
    say("the run", "bold")
    console.print(_run(plan, config), width=WIDTH)


def _shares(counts: dict[str, int], show: Callable[[int], str]) -> Table:
    """Counts, their shares, and their sum."""
    table, total = _table("", "", ""), sum(counts.values())
    for name, count in counts.items():
        if count:
            table.add_row(name, show(count), f"{count / total:.1%}")
    table.add_row("in all", show(total), "", style="bold")
    return table


def _memory(plan: Plan) -> Table:
    table = _table("attention", "weights", "gradients", "optimizer", "activations", "scores", "peak", "process")
    table.show_header = True
    for name, memory in plan.memory.items():
        if isinstance(memory, Memory):
            parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.scores, memory.peak)
            total = plan.total_bytes(name)
            table.add_row(name, *map(mib, parts), "?" if total is None else mib(total))
        else:
            table.add_row(name, "refused")
    return table


def _run(plan: Plan, config: Any) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    train, T = config.train, config.model.block_size
    parts = f"{pluralize(plan.world_size, 'process')} x {plan.accumulation} x {plan.micro_batch_size}"
    table.add_row("on", plan.device)
    table.add_row("a step", f"{parts} = {train.batch_size:,} sequences of {T:,} = {plan.tokens_per_step:,} tokens")
    fit = f", which fit into {train.minutes:g} minutes" if train.minutes is not None else ""
    table.add_row("steps", f"{plan.steps:,}{fit}, of them {min(plan.steps, config.schedule.warmup_steps):,} to warm up")
    times = "text not prepared yet" if plan.epochs is None else epochs(plan.epochs)
    table.add_row("tokens", f"{plan.tokens:,} ({times})")
    looks = f", and {si(plan.evaluation_flops)} for {plan.evaluations:,} evaluations" if plan.evaluation_flops else ""
    table.add_row("FLOPs", f"{si(plan.training_flops)} of training{looks}")
    share = (
        "as given" if plan.peak is None else f"measured, {plan.flops_per_second / plan.peak:.0%} of its matrix products"
    )
    table.add_row("speed", f"{si(plan.flops_per_second)} FLOP/s ({share})")
    without = "evaluations, " if plan.evaluation_flops is None else ""
    table.add_row("time", f"{_time(plan.seconds)}, without {without}optimizer, texts and checkpoints")
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _time(seconds: float) -> str:
    return format_duration(seconds) if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"


def mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def si(number: float) -> str:
    """1234567 -> "1.23 M", with the prefixes of the SI: k, M, G, T, P, E, Z, Y."""
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if number < 999.5:
            return f"{number:.3g} {prefix}".rstrip()
        number /= 1000
    return f"{number:.3g} Y"

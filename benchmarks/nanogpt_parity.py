"""Compare trilGPT with nanoGPT step by step: same initial weights, same batches, same losses.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/nanogpt_parity.py nanoGPT tinyshakespeare.txt

Model and learning rates come from experiment=shakespeare_char_cpu, in float32 on the CPU. The comparison
runs twice, without and with biases. Each project builds its optimizer, and trains for 20 steps. Gradients are clipped
at 1.0. Both use trilGPT's schedule, because nanoGPT's is part of its train.py. Prints both losses before each update.
The exit code is 1 if they differ by more than 1e-4.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configs.cli import parse_config  # noqa: E402
from data.tokenizer import build_tokenizer, encode  # noqa: E402
from model.gpt import GPT  # noqa: E402
from training.config import AdamWConfig, RunConfig  # noqa: E402
from training.optimizer import build_optimizers, set_lr  # noqa: E402
from training.schedule import lr_scale  # noqa: E402

MAX_DIFFERENCE_NATS = 1e-4  # float32 rounding over 20 steps stays below it
# Our module names, and nanoGPT's names. Both store linear weights as outputs x inputs, and q, k and v in this order.
OUTER_MODULES = {
    "wte": "transformer.wte",
    "wpe": "transformer.wpe",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
BLOCK_MODULES = {
    "norm_attn": "ln_1", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj",
    "norm_mlp": "ln_2", "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("text", type=Path, help="a text file; its characters are the tokens")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    for file in (arguments.nanogpt / "model.py", arguments.text):
        if not file.is_file():
            parser.error(
                f"{file} does not exist; pass the folder of a nanoGPT checkout and a text file"
            )
    theirs = import_model(arguments.nanogpt / "model.py")
    differences = [
        compare_losses(theirs, arguments.text, arguments.steps, bias) for bias in (False, True)
    ]
    print(f"\nlargest difference {max(differences):.1e}, allowed {MAX_DIFFERENCE_NATS:.0e}")
    is_equal = all(difference <= MAX_DIFFERENCE_NATS for difference in differences)  # NaN is not
    return int(not is_equal)


def import_model(file: Path) -> ModuleType:
    """Import nanoGPT's model.py under another name, because `model` is a package here."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare_losses(theirs: ModuleType, text: Path, steps: int, bias: bool) -> float:
    """Train both models, and print one row per step. Returns the largest difference of their losses, in nats."""
    config: RunConfig = parse_config("train", "", [
        "experiment=shakespeare_char_cpu", f"data.path={text}", f"model.bias={str(bias).lower()}",
    ])  # fmt: skip
    document = text.read_text(encoding="utf-8")
    tokenizer = build_tokenizer(config.tokenizer, [document], has_several_documents=False)
    tokens = torch.from_numpy(encode(tokenizer, document).astype("int64"))
    shape = {
        key: getattr(config.model, key)
        for key in ("n_layer", "n_head", "n_embd", "block_size", "dropout", "bias")
    }

    print(f"\nbias={str(bias).lower()}: {shape}, vocabulary of {tokenizer.n_vocab}")
    torch.manual_seed(config.seed)
    their_model = theirs.GPT(theirs.GPTConfig(vocab_size=tokenizer.n_vocab, **shape))
    our_model = GPT(config.model, tokenizer.n_vocab)
    copy_weights(their_model, our_model)
    adamw = config.optimizer
    assert isinstance(adamw, AdamWConfig)
    their_optimizer = their_model.configure_optimizers(
        adamw.weight_decay, adamw.lr, tuple(adamw.betas), "cpu"
    )
    our_optimizers = build_optimizers(our_model, adamw)

    length = config.train.steps
    warmup_progress = config.schedule.warmup_steps / length
    random = torch.Generator().manual_seed(config.seed)
    print(f"{'step':>4} {'nanoGPT':>10} {'ours':>10} {'difference':>11}")
    largest = 0.0
    for step in range(steps):
        x, y = random_windows(tokens, config.train.batch_size, config.model.block_size, random)
        scale = lr_scale(config.schedule, step, step / length, warmup_progress)
        for group in their_optimizer.param_groups:
            group["lr"] = adamw.lr * scale
        set_lr(our_optimizers, scale)
        their_loss = train_step(
            their_model, their_model(x, y)[1], [their_optimizer], config.train.grad_clip
        )
        our_loss = train_step(our_model, our_model(x, y), our_optimizers, config.train.grad_clip)
        print(f"{step:>4} {their_loss:>10.6f} {our_loss:>10.6f} {our_loss - their_loss:>11.1e}")
        largest = max(abs(our_loss - their_loss), largest)
    return largest


def copy_weights(their_model: nn.Module, our_model: nn.Module) -> None:
    """Copy all of nanoGPT's weights into our model. The head is tied to the embedding in both."""
    source, remaining = their_model.state_dict(), set(their_model.state_dict())
    with torch.no_grad():
        for name, weight in our_model.state_dict(keep_vars=True).items():
            module, parameter = name.rsplit(".", 1)
            if module in OUTER_MODULES:
                theirs = f"{OUTER_MODULES[module]}.{parameter}"
            else:
                _, layer, inner = module.split(".", 2)
                theirs = f"transformer.h.{layer}.{BLOCK_MODULES[inner]}.{parameter}"
            if weight.shape != source[theirs].shape:
                raise ValueError(
                    f"{name} has shape {tuple(weight.shape)}, and nanoGPT's {theirs} {tuple(source[theirs].shape)}"
                )
            weight.copy_(source[theirs])
            remaining.remove(theirs)
    if remaining:
        raise ValueError(f"nanoGPT's {', '.join(sorted(remaining))} have no counterpart in trilGPT")


def random_windows(
    tokens: Tensor, B: int, T: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (B, T), at random positions of the text."""
    starts = torch.randint(len(tokens) - T, (B, 1), generator=random)
    window = tokens[starts + torch.arange(T + 1)]
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def train_step(
    model: nn.Module, loss: Tensor, optimizers: list[torch.optim.Optimizer], grad_clip: float
) -> float:
    """Run backward, gradient clipping and one optimizer step. Returns the loss before the step, in nats."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    sys.exit(main())

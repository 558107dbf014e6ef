"""Compare the training step of trilGPT with a jitted step of the same model in JAX. They run in alternation.

    pip install jax
    python benchmarks/jax_speed.py tinyshakespeare.txt

Both train the model of nanoGPT's CPU recipe in float32, with AdamW and clipped gradients, for 200 steps. JAX gets a
batch of random tokens in each step. In the first steps, both get the same tokens, trilGPT's model with PyTorch's AdamW.
The exit code is 1 if these losses differ.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from nanogpt_speed import RECIPES, WARMUP_STEPS, format_rate, print_ratios, run_python  # noqa: E402

from configs.compose import compose_config  # noqa: E402
from model.config import GPTConfig  # noqa: E402
from model.gpt import GPT  # noqa: E402

RECIPE = RECIPES["shakespeare_char_cpu"]
VOCAB_SIZE = 65  # characters of Tiny Shakespeare
STEPS = 200
LEARNING_RATE, WEIGHT_DECAY, BETA1, BETA2, EPS, MAX_NORM = 1e-3, 0.1, 0.9, 0.99, 1e-8, 1.0
CHECKED_STEPS = 5  # in which the losses of both programs are compared
MAX_LOSS_DIFFERENCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="a text file that trilGPT trains on")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    text = arguments.text.resolve()
    ratios = []
    # one process per round, because idle threads of one library slow down the other
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                difference, jax_ms = process.submit(train_with_jax).result()
            name = f"step-{number}"
            settings = [
                *RECIPE.trilgpt,
                f"data.path={text}",
                "wandb.mode=disabled",
                f"train.steps={STEPS}",
                f"eval.every={STEPS}",
                "eval.windows=12",
                "eval.sample.max_new_tokens=0",
                f"name={name}",
            ]
            run_python(Path(folder), ROOT / "train.py", *settings)
            metrics = Path(folder, "runs", name, "metrics.jsonl").read_text(encoding="utf-8")
            rows = [json.loads(line) for line in metrics.splitlines()]
            ms = [row["step_ms"] for row in rows if "step_ms" in row][WARMUP_STEPS:]
            ratios.append(statistics.median(jax_ms) / statistics.median(ms))
            print(
                f"JAX {format_rate(RECIPE, jax_ms)}   trilGPT {format_rate(RECIPE, ms)}   {ratios[-1]:.2f}   "
                "tokens/s of the median step (ms, quartiles), ratio"
            )
            print(f"difference of the losses: {difference:.1e}", flush=True)
    print_ratios(ratios, "as many tokens/s as JAX")
    return int(not difference <= MAX_LOSS_DIFFERENCE)


def train_with_jax() -> tuple[float, list[float]]:
    """Train in JAX. Returns the largest difference of the first losses to PyTorch's, and the ms of each step."""
    config = compose_config("train", RECIPE.trilgpt)
    shape = (config.train.batch_size, config.model.block_size)
    torch.manual_seed(1)
    model = GPT(config.model, VOCAB_SIZE)
    jax = import_module("jax")  # not a dependency, so the type checker may not find it
    jnp = jax.numpy
    weights = {
        name: jnp.array(weight.detach().numpy()) for name, weight in model.named_parameters()
    }
    moments = [{name: jnp.zeros_like(weight) for name, weight in weights.items()} for _ in range(2)]
    train_step = make_train_step(jax, config.model)

    generator = np.random.default_rng(1)
    batches = [generator.integers(VOCAB_SIZE, size=(2, *shape)) for _ in range(STEPS)]
    expected = train_with_torch(model, batches[:CHECKED_STEPS])
    losses, times = [], []
    for step, (tokens, targets) in enumerate(batches, start=1):
        started = time.perf_counter()
        loss, weights, moments = train_step(weights, moments, step, tokens, targets)
        losses.append(float(loss))
        times.append(1e3 * (time.perf_counter() - started))
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=False))
    return difference, times[WARMUP_STEPS:]


def train_with_torch(model: GPT, batches: list[np.ndarray]) -> list[float]:
    """Losses of a step on each batch, with PyTorch's AdamW."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, LEARNING_RATE, (BETA1, BETA2), EPS)
    losses = []
    for batch in batches:
        tokens, targets = torch.from_numpy(batch)
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_train_step(jax, config: GPTConfig):
    """The jitted function of a training step: weights, moments, step number, tokens and targets (B, T)."""
    jnp, D = jax.numpy, config.n_embd // config.n_head

    def layer_norm(x, weight):
        centered = x - x.mean(-1, keepdims=True)
        return (
            centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * weight
        )

    def block(x, w):
        B, T, C = x.shape
        heads = (layer_norm(x, w["norm_attn.weight"]) @ w["attn.qkv.weight"].T).reshape(B, T, -1, D)
        q, k, v = jnp.split(heads, 3, axis=2)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(B, T, C)
        x = x + y @ w["attn.proj.weight"].T
        hidden = layer_norm(x, w["norm_mlp.weight"]) @ w["mlp.fc.weight"].T
        return x + jax.nn.gelu(hidden, approximate=False) @ w["mlp.proj.weight"].T

    def compute_loss(weights, tokens, targets):
        x = weights["wte.weight"][tokens] + weights["wpe.weight"][: tokens.shape[1]]
        for layer in range(config.n_layer):
            prefix = f"blocks.{layer}."
            own = {
                name.removeprefix(prefix): w
                for name, w in weights.items()
                if name.startswith(prefix)
            }
            x = block(x, own)
        logits = layer_norm(x, weights["norm.weight"]) @ weights["wte.weight"].T
        log_probabilities = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1).mean()

    def train_step(weights, moments, step, tokens, targets):
        loss, gradients = jax.value_and_grad(compute_loss)(weights, tokens, targets)
        norm = jnp.sqrt(sum(jnp.square(gradient).sum() for gradient in gradients.values()))
        scale = jnp.minimum(1.0, MAX_NORM / norm)
        new_weights, first, second = {}, {}, {}
        for name, weight in weights.items():
            gradient = gradients[name] * scale
            first[name] = BETA1 * moments[0][name] + (1 - BETA1) * gradient
            second[name] = BETA2 * moments[1][name] + (1 - BETA2) * jnp.square(gradient)
            update = first[name] / (1 - BETA1**step)
            update = update / (jnp.sqrt(second[name] / (1 - BETA2**step)) + EPS)
            decay = WEIGHT_DECAY if weight.ndim >= 2 else 0.0
            new_weights[name] = weight - LEARNING_RATE * (update + decay * weight)
        return loss, new_weights, [first, second]

    return jax.jit(train_step, donate_argnums=(0, 1))


if __name__ == "__main__":
    sys.exit(main())

"""Compare the decode steps of trilGPT and ONNX Runtime. They run in turns.

The model is the default one with random weights, without the key offset.

    pip install onnx onnxscript onnxruntime
    python benchmarks/onnx_speed.py

The model reads 64 tokens and generates 64, greedily. ONNX Runtime gets two graphs, for the prompt and for a new token,
which PyTorch exports from trilGPT's model. The exit code is 1 if the logits differ.
"""

import argparse
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configs.compose import compose_config  # noqa: E402
from generation.config import SamplingConfig  # noqa: E402
from generation.cpu_linear import replace_linears  # noqa: E402
from generation.engine import Engine, Prompt  # noqa: E402
from model.attention import sdpa  # noqa: E402
from model.gpt import GPT  # noqa: E402

VOCAB_SIZE = 2048
PROMPT_TOKENS, NEW_TOKENS = 64, 64
THREAD_IDLE_WAIT_S = 0.5  # idle threads of the other program wait actively for up to 0.2 s
MAX_LOGIT_DIFFERENCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    context, ratios = get_context("spawn"), []
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, context) as ours,
        ProcessPoolExecutor(1, context, start_onnx, (folder,)) as theirs,
    ):
        difference = theirs.submit(measure_difference).result()
        print(f"largest difference of logits: {difference:.1e}")
        for _ in range(arguments.rounds):
            our_ms = ours.submit(time_trilgpt).result()
            onnx_ms = theirs.submit(time_onnx).result()
            ratios.append(our_ms / onnx_ms)
            print(f"ms of the median decode step: trilGPT {our_ms:.3f}, ONNX Runtime {onnx_ms:.3f}")
    print(
        f"ONNX Runtime is {statistics.median(ratios):.2f} times as fast "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return int(not difference <= MAX_LOGIT_DIFFERENCE)


def build_model(attend=sdpa) -> GPT:
    torch.manual_seed(1)
    config = compose_config("train", ["model.key_offset=false"])
    return GPT(config.model, VOCAB_SIZE, attend).eval().requires_grad_(False)


def make_prompt() -> Tensor:
    return torch.randint(VOCAB_SIZE, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(2))


def median_ms(times: list[float]) -> float:
    return 1e3 * statistics.median(after - before for before, after in pairwise(times))


def time_trilgpt() -> float:
    """ms of the median decode step."""
    time.sleep(THREAD_IDLE_WAIT_S)
    model = replace_linears(build_model(), torch.float32, rows=1)
    engine = Engine(model, SamplingConfig(temperature=0.0), 1, PROMPT_TOKENS + NEW_TOKENS)
    engine.add([Prompt(make_prompt()[0].tolist(), seed=0)])
    times = []
    for _ in range(NEW_TOKENS):
        engine.step()
        times.append(time.perf_counter())
    return median_ms(times)


class Step(nn.Module):
    """Reads tokens after the keys and values of earlier ones. Returns the last logits, and all keys and values."""

    def __init__(self, is_prompt: bool):
        super().__init__()
        self.model = build_model(partial(self.attend, is_causal=is_prompt))

    @staticmethod
    def attend(q, k, v, is_causal, **_) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return y.transpose(1, 2)

    def forward(
        self, tokens: Tensor, positions: Tensor, previous_tokens: Tensor, cache: list[Tensor]
    ) -> tuple[Tensor, ...]:
        self.previous_tokens, self.cache, self.new_cache = previous_tokens, cache, []
        x = self.model.backbone(tokens, positions=positions, kv_cache=self)
        return self.model.logits(x[:, -1]), *self.new_cache

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None]:
        if self.cache:
            k = torch.cat((self.cache[2 * layer], k), dim=1)
            v = torch.cat((self.cache[2 * layer + 1], v), dim=1)
        self.new_cache += [k, v]
        return k, v, None


INPUTS = ["tokens", "positions", "previous_tokens"]
_sessions = []  # of the prompt, and of a new token


def start_onnx(folder: str) -> None:
    """Export both graphs, and start ONNX Runtime in this process."""
    onnxruntime = import_module(
        "onnxruntime"
    )  # not a dependency, so the type checker may not find it
    config = build_model().config
    cache = [torch.zeros(1, 5, config.kv_heads, config.head_dim) for _ in range(2 * config.n_layer)]
    previous_tokens = -torch.ones(1, config.max_ngram - 1, dtype=torch.long)
    dynamic = {1: torch.export.Dim("T", min=2, max=config.block_size)}
    tokens = make_prompt()
    graphs = {
        "prompt": (tokens, torch.arange(PROMPT_TOKENS)[None], previous_tokens, []),
        "token": (tokens[:, :1], torch.full((1, 1), 5), previous_tokens, cache),
    }
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    for name, inputs in graphs.items():
        is_prompt = name == "prompt"
        program = torch.onnx.export(
            Step(is_prompt),
            inputs,
            dynamo=True,
            verbose=False,
            input_names=INPUTS + [f"cache{i}" for i in range(len(inputs[-1]))],
            dynamic_shapes=(dynamic, dynamic, None, [])
            if is_prompt
            else (None, None, None, [dynamic] * len(cache)),
        )
        file = f"{folder}/{name}.onnx"
        program.save(file)
        _sessions.append(
            onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        )


def run_onnx(new: int) -> tuple[list[int], list[float], Tensor]:
    """Generate tokens. Returns them with the prompt, the times at which they were finished, and the last logits."""
    read_prompt, read_token = _sessions
    tokens = make_prompt()[0].tolist()
    max_distance = build_model().config.max_ngram - 1
    times = []
    inputs = [[tokens], [list(range(len(tokens)))], [[-1] * max_distance]]
    session, cache = read_prompt, []
    for _ in range(new):
        names = [value.name for value in session.get_inputs()]
        arrays = [torch.tensor(value).numpy() for value in inputs] + cache
        logits, *cache = session.run(None, dict(zip(names, arrays, strict=True)))
        session = read_token
        tokens.append(int(logits[0].argmax()))
        times.append(time.perf_counter())
        inputs = [[tokens[-1:]], [[len(tokens) - 1]], [tokens[-1 - max_distance : -1]]]
    return tokens, times, torch.from_numpy(logits[0])


def time_onnx() -> float:
    """ms of the median decode step."""
    time.sleep(THREAD_IDLE_WAIT_S)
    return median_ms(run_onnx(NEW_TOKENS)[1])


def measure_difference() -> float:
    """Largest difference between the last logits of ONNX Runtime and of trilGPT's complete forward pass."""
    tokens, _, logits = run_onnx(NEW_TOKENS)
    expected = build_model()(torch.tensor([tokens[:-1]]))[0, -1]
    return (logits - expected).abs().max().item()


if __name__ == "__main__":
    sys.exit(main())

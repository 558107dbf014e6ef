"""The programs that generation_speed.py compares, each with the weights of the same random GPT-2 124M.

Each program runs in its own process, because the idle threads of one library slow down the others. The process calls
`start`, then `measure_difference` and `measure_speed`.
"""

import ctypes
import importlib.util
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from nanogpt_parity import BLOCK_MODULES, OUTER_MODULES, import_model  # noqa: E402

from configs.compose import compose_config  # noqa: E402
from generation.config import SamplingConfig  # noqa: E402
from generation.cpu_linear import replace_linears  # noqa: E402
from generation.engine import Engine, Prompt  # noqa: E402
from model.gpt import GPT  # noqa: E402

VOCAB_SIZE = 50_257
CHECKED_TOKENS = 8  # that each program generates for the comparison
THREAD_IDLE_WAIT_S = 0.5  # OpenMP threads wait actively for up to 0.2 s after their work


@dataclass
class Setup:
    """Arguments of a program. It has weights of `dtype` on `device`. checkout: nanoGPT's. It may write to `folder`."""

    name: str
    dtype: str
    device: str
    checkout: Path | None
    folder: Path


@dataclass
class Program:
    """A running program.

    generate(prompt (B, T), new) -> tokens (B, T + new), and the time at which each new token of the first sample was
    finished; decoding is greedy. logits(tokens (T)) -> (T, V). mlp: the activation of its MLP, a value of model.mlp.
    """

    generate: Callable[[Tensor, int], tuple[Tensor, list[float]]]
    logits: Callable[[Tensor], Tensor]
    mlp: str = "gelu_tanh"


def build_model(mlp: str = "gelu_tanh", weights: dict[str, Tensor] | None = None) -> GPT:
    """GPT-2 124M with `weights`, or with random ones, the same in every process."""
    torch.manual_seed(1)
    config = replace(compose_config("train", ["model=gpt2"]).model, mlp=mlp)
    model = GPT(config, VOCAB_SIZE)
    if weights is not None:
        model.load_state_dict(weights)
    model.eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weights is None and name.endswith(
            "bias"
        ):  # at zero, a missing bias would not be noticed
            nn.init.normal_(weight, std=0.02)
    return model


def trilgpt(setup: Setup) -> Program:
    device, dtype = torch.device(setup.device), getattr(torch, setup.dtype)
    models: dict[int, GPT] = {}  # by number of samples, because replace_linears depends on it

    def model_for(samples: int) -> GPT:
        if samples not in models:
            models[samples] = replace_linears(build_model().to(device), dtype, samples)
        return models[samples]

    def generate(prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
        settings = SamplingConfig(temperature=0.0)
        engine = Engine(model_for(len(prompt)), settings, len(prompt), prompt.shape[1] + new)
        engine.add([Prompt(row, seed=0) for row in prompt.tolist()])
        times = []
        for _ in range(new):
            engine.step()
            times.append(time.perf_counter())
        return torch.tensor([sequence.tokens for sequence in engine.sequences]), times

    return Program(generate, lambda tokens: model_for(1)(tokens[None].to(device))[0])


def transformers(setup: Setup) -> Program:
    device = torch.device(setup.device)
    theirs = build_transformers_model(build_model()).to(device, getattr(torch, setup.dtype))

    def generate(prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
        streamer = TimeRecorder()
        tokens = theirs.generate(
            prompt.to(device),
            attention_mask=torch.ones_like(prompt, device=device),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            streamer=streamer,
        )
        return tokens, streamer.times

    return Program(generate, lambda tokens: theirs(tokens[None].to(device)).logits[0])


class TimeRecorder:
    """A transformers streamer, which records the time of each new token. It receives the prompt before the tokens."""

    def __init__(self):
        self.times = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        del self.times[0]  # the prompt


def nanogpt(setup: Setup) -> Program:
    """nanoGPT has no KV cache: each step processes all tokens. All steps are assumed to take the same time."""
    assert setup.checkout is not None
    device = torch.device(setup.device)
    theirs = build_nanogpt_model(build_model(), setup.checkout).to(
        device, getattr(torch, setup.dtype)
    )

    def generate(prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
        started = time.perf_counter()
        tokens = theirs.generate(prompt.to(device), new, top_k=1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        token_s = (time.perf_counter() - started) / new
        return tokens, [started + token_s * number for number in range(1, new + 1)]

    def logits(
        tokens: Tensor,
    ) -> Tensor:  # without targets, nanoGPT returns only the logits of the last token
        return theirs(tokens[None].to(device), torch.zeros_like(tokens[None], device=device))[0][0]

    return Program(generate, logits, mlp="gelu")


def ctranslate2(setup: Setup) -> Program:
    """CTranslate2 reads the model from files."""
    ct2 = import_module("ctranslate2")  # not a dependency, so the type checker may not find it
    GPT2Loader = import_module("ctranslate2.converters.transformers").GPT2Loader

    spec = GPT2Loader().get_model_spec(build_transformers_model(build_model()))
    spec.register_vocabulary([f"<{token}>" for token in range(VOCAB_SIZE)])
    for role in ("bos_token", "eos_token", "unk_token"):
        setattr(spec.config, role, "<0>")
    spec.validate()
    spec.optimize()
    folder = setup.folder / f"ctranslate2-{setup.dtype}"
    folder.mkdir()
    spec.save(str(folder))
    threads = torch.get_num_threads()
    generator = ct2.Generator(
        str(folder), compute_type=setup.dtype, inter_threads=1, intra_threads=threads
    )

    def generate(prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
        times = []

        def record(result: ct2.GenerationStepResult) -> bool:
            if result.batch_id == 0:
                times.append(time.perf_counter())
            return False

        options = dict(
            max_length=new, min_length=new, include_prompt_in_result=False, callback=record
        )
        prompts = [[f"<{token}>" for token in row] for row in prompt.tolist()]
        results = generator.generate_batch(prompts, **options)
        samples = torch.tensor([result.sequences_ids[0] for result in results])
        return torch.cat((prompt, samples), dim=1), times

    def logits(tokens: Tensor) -> Tensor:
        view = generator.forward_batch([tokens.tolist()]).to(ct2.DataType.float32)
        return torch.from_numpy(np.array(view))[0]

    return Program(generate, logits)


def llama_cpp(setup: Setup) -> Program:
    """llama.cpp reads the model from a GGUF file. Its int8 format is Q8_0."""
    llama = import_module("llama_cpp")
    threads = torch.get_num_threads()
    file = setup.folder / f"{setup.dtype}.gguf"
    write_gguf(file, build_model())
    if setup.dtype == "int8":
        source, file = file, setup.folder / "q8_0.gguf"
        options = llama.llama_model_quantize_default_params()
        options.ftype, options.nthread = llama.LLAMA_FTYPE_MOSTLY_Q8_0, threads
        llama.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(options))
    llama.llama_log_set(llama_log_nothing, ctypes.c_void_p(0))
    theirs = llama.llama_model_load_from_file(
        str(file).encode(), llama.llama_model_default_params()
    )

    def read(context, tokens: Tensor, first: int, all_logits: bool = False) -> np.ndarray:
        """Read tokens (B, T) at the positions from `first` on. Returns the logits of the last or of all tokens."""
        B, T = tokens.shape
        batch = llama.llama_batch_init(B * T, 0, 1)
        batch.n_tokens = B * T
        for index, token in enumerate(tokens.flatten().tolist()):
            batch.token[index] = token
            batch.pos[index] = first + index % T
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = index // T
            batch.logits[index] = all_logits or index % T == T - 1
        assert llama.llama_decode(context, batch) == 0, "llama_decode failed"
        llama.llama_batch_free(batch)
        rows = B * T if all_logits else B
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (rows, VOCAB_SIZE))

    def start_context(samples: int, length: int):
        options = llama.llama_context_default_params()
        options.n_ctx = samples * -(-length // 256) * 256  # each sample gets a multiple of 256
        options.n_batch = options.n_ctx
        options.n_seq_max = samples
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = llama.GGML_TYPE_F32  # of the KV cache
        return llama.llama_init_from_model(theirs, options)

    def generate(prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
        context = start_context(len(prompt), prompt.shape[1] + new)
        tokens, unread, times = prompt, prompt, []
        for _ in range(new):
            logits = read(context, unread, tokens.shape[1] - unread.shape[1])
            unread = torch.from_numpy(logits).argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, unread), dim=1)
            times.append(time.perf_counter())
        llama.llama_free(context)
        return tokens, times

    def logits(tokens: Tensor) -> Tensor:
        context = start_context(1, len(tokens))
        return torch.from_numpy(read(context, tokens[None], 0, all_logits=True).copy())

    return Program(generate, logits)


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def llama_log_nothing(level, text, data) -> None:
    pass


def write_gguf(file: Path, model: GPT) -> None:
    """Write GPT-2's weights in float32 as a GGUF file, with a vocabulary without text."""
    gguf = import_module("gguf")
    config = model.config
    writer = gguf.GGUFWriter(file, "gpt2")
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.mlp_channels)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{token}>" for token in range(VOCAB_SIZE)])
    writer.add_token_merges(["< 0"])  # llama.cpp needs at least one
    names = {"wte": "token_embd", "wpe": "position_embd", "norm": "output_norm"} | {
        f"blocks.{i}.{ours}": f"blk.{i}.{theirs}"
        for i in range(config.n_layer)
        for ours, theirs in GGUF_MODULES.items()
    }
    for name, weight in model.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if module in names:  # the head is tied to wte
            writer.add_tensor(f"{names[module]}.{kind}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_MODULES = {
    "norm_attn": "attn_norm",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_output",
    "norm_mlp": "ffn_norm",
    "mlp.fc": "ffn_up",
    "mlp.proj": "ffn_down",
}


def openvino(setup: Setup) -> Program:
    """OpenVINO GenAI reads the model that optimum-intel converts. Its int8 rounds the weights."""
    ov, genai = import_module("openvino"), import_module("openvino_genai")
    main_export = import_module("optimum.exporters.openvino").main_export
    folder = setup.folder / f"openvino-{setup.dtype}"
    build_transformers_model(build_model()).save_pretrained(folder / "transformers")
    main_export(
        folder / "transformers", folder, task="text-generation-with-past", convert_tokenizer=False
    )
    if setup.dtype == "int8":
        model = ov.Core().read_model(folder / "openvino_model.xml")
        compressed = import_module("nncf").compress_weights(model)
        copy = folder.with_name("openvino-weights-int8")
        folder = Path(shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.bin")))
        ov.save_model(compressed, folder / "openvino_model.xml", compress_to_fp16=False)
    precision = "bf16" if setup.dtype == "bfloat16" else "f32"
    options = dict(INFERENCE_PRECISION_HINT=precision, KV_CACHE_PRECISION=precision)
    # the defaults of LLMPipeline, but without its prefix cache: each round reads the same prompts
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = sys.maxsize
    scheduler.enable_prefix_caching = False
    pipeline = genai.LLMPipeline(folder, "CPU", scheduler_config=scheduler, **options)

    def generate(prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
        tokens = ov.Tensor(prompt.numpy())
        attention_mask = ov.Tensor(torch.ones_like(prompt).numpy())
        settings = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        results = pipeline.generate(genai.TokenizedInputs(tokens, attention_mask), settings)
        samples = torch.tensor(results.tokens)
        times = [ms / 1e3 for ms in results.perf_metrics.raw_metrics.m_new_token_times]
        return torch.cat((prompt, samples), dim=1), times

    def logits(tokens: Tensor) -> Tensor:
        model = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", options)
        T = len(tokens)
        inputs = dict(
            input_ids=tokens[None].numpy(),
            attention_mask=np.ones((1, T), np.int64),
            position_ids=np.arange(T)[None],
            beam_idx=np.zeros(1, np.int32),
        )
        return torch.from_numpy(model(inputs)["logits"][0].copy())

    return Program(generate, logits)


BUILDERS = {
    "trilGPT": trilgpt,
    "transformers": transformers,
    "nanoGPT": nanogpt,
    "CTranslate2": ctranslate2,
    "llama.cpp": llama_cpp,
    "OpenVINO": openvino,
}
PACKAGES = {
    "transformers": ["transformers"],
    "CTranslate2": ["ctranslate2", "transformers"],
    "llama.cpp": ["llama_cpp", "gguf"],
    "OpenVINO": ["openvino_genai", "optimum", "transformers"],
}
CPU_ONLY = {"CTranslate2", "llama.cpp", "OpenVINO"}  # as these scripts call them
MAX_SAMPLES = {"nanoGPT": 1}  # in a batch, of programs that these scripts do not run with more


def missing_package(name: str) -> str | None:
    """A package that a program needs and that is not installed."""
    return next(
        (
            package
            for package in PACKAGES.get(name, [])
            if importlib.util.find_spec(package) is None
        ),
        None,
    )


_program: Program | None = None


def start(setup: Setup) -> None:
    """Start a program in this process."""
    global _program
    torch.set_grad_enabled(False)
    _program = BUILDERS[setup.name](setup)


def measure_difference(tokens: Tensor) -> float:
    """Largest difference between the logits of the program and of trilGPT in float32, over all tokens.

    Also of generated tokens: by how much the logit of a token is below the largest one.
    """
    assert _program is not None
    reference_model = build_model(_program.mlp, build_model().state_dict())
    logits = _program.logits(tokens)[:, :VOCAB_SIZE].float().cpu()
    difference = (logits - reference_model(tokens[None])[0]).abs().max().item()
    samples, _ = _program.generate(tokens[None], CHECKED_TOKENS)
    logits = reference_model(samples[:, :-1].cpu())[0, -CHECKED_TOKENS:]
    chosen = logits.gather(1, samples[0, -CHECKED_TOKENS:, None].cpu())
    return max(difference, (logits.max(dim=1).values - chosen[:, 0]).max().item())


def measure_speed(prompt: Tensor, new: int) -> tuple[float, float]:
    """Generate `new` tokens. Returns (seconds, ms of the median decode step)."""
    assert _program is not None
    time.sleep(THREAD_IDLE_WAIT_S)
    started = time.perf_counter()
    tokens, times = _program.generate(prompt, new)
    seconds = time.perf_counter() - started
    assert tokens.shape == (len(prompt), prompt.shape[1] + new) and len(times) == new, (
        "wrong number of tokens"
    )
    return seconds, 1e3 * statistics.median(after - before for before, after in pairwise(times))


def build_transformers_model(model: GPT) -> nn.Module:
    """transformers' GPT-2 with the weights of `model`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    names = {"wte": "wte", "wpe": "wpe", "norm": "ln_f"} | {
        f"blocks.{i}.{ours}": f"h.{i}.{other}"
        for i in range(model.config.n_layer)
        for ours, other in BLOCK_MODULES.items()
    }
    source, target = model.state_dict(), theirs.transformer.state_dict()
    remaining = set(target)
    for ours, other in names.items():
        for parameter in ("weight", "bias"):
            if f"{ours}.{parameter}" in source:
                value = source[f"{ours}.{parameter}"]
                # transformers stores inputs x outputs
                is_transposed = ".c_" in other and parameter == "weight"
                target[f"{other}.{parameter}"].copy_(
                    value.T if is_transposed else value[: len(target[f"{other}.{parameter}"])]
                )
                remaining.remove(f"{other}.{parameter}")
    assert not remaining, remaining
    return theirs


def build_nanogpt_model(model: GPT, checkout: Path) -> nn.Module:
    """nanoGPT's GPT-2 with the weights of `model`."""
    module = import_model(checkout / "model.py")
    with redirect_stdout(StringIO()):
        theirs = module.GPT(module.GPTConfig(vocab_size=model.vocab_size, dropout=0.0)).eval()
    source, target = model.state_dict(), theirs.state_dict()
    block_modules = {
        f"blocks.{i}.{ours}": f"transformer.h.{i}.{other}"
        for i in range(model.config.n_layer)
        for ours, other in BLOCK_MODULES.items()
    }
    remaining = set(target)
    for name, value in source.items():
        ours, parameter = name.rsplit(".", 1)
        other = f"{({**OUTER_MODULES, **block_modules})[ours]}.{parameter}"
        target[other].copy_(value[: len(target[other])])
        remaining.discard(other)
    assert not remaining, remaining
    return theirs

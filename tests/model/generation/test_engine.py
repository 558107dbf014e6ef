"""Text from a cache: held to the same model without one, in batches to itself alone, and streams to whole texts."""

from dataclasses import replace

import pytest
import torch
from helpers import BYTE, ON_CPU, sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GPT2, GROUPED, MODERN

from common.errors import UserError
from data import tokenizer
from model import GPTConfig
from model.attention import BACKENDS, naive
from model.generation.cuda_graph import CudaGraphStep
from model.generation.decode_linear import NUM_CHUNKS, convert_linears
from model.generation.detokenizer import IncrementalDetokenizer
from model.generation.engine import Engine, Prompt, TextChunk, generate
from model.generation.kv_cache import KVCache
from model.generation.sampling import apply_repetition_penalty
from model.gpt import GPT

BYTES = tokenizer.byte(tokenizer.Corpus([""], several=False), BYTE)
WINDOWED = GROUPED | dict(window=[5, None])
VARIANTS = {"gpt2": GPT2, "modern": MODERN, "grouped": GROUPED, "windowed": WINDOWED, "one": GPT2 | dict(block_size=1)}
EACH_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
DECODES = [
    pytest.param(name, marks=[pytest.mark.compiles, pytest.mark.slow] if BACKENDS[name].needs_compiler else [])
    for name in ON_CPU
]


def make(variant, attend=naive, dtype=torch.float32, V=256):
    """A model whose logits are far apart, n-grams and biases included."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**variant), V, attend).requires_grad_(False)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model.to(dtype).eval()


def without_cache(model, text):
    """Logits of what follows the text, by the definition of generate.py: all of it anew.

    Rotary: in layers that see block_size tokens at the most, or their window. Learned positions: the last half of
    block_size whenever the room is used up.
    """
    T = model.config.block_size
    if model.wpe is None:
        config = replace(model.config, block_size=4 * T, window=[w or T for w in model.config.windows])
        longer = GPT(config, model.vocab_size, naive, weights=model.state_dict())
        return longer(torch.tensor([text]))[0, -1]
    length = min(len(text), T)
    if len(text) > T:
        half = max(1, T // 2)
        length = half + (len(text) - T - 1) % (T - half + 1)
    return model(torch.tensor([text[-length:]]))[0, -1]


# The cache


@pytest.mark.parametrize("name", DECODES)
@EACH_VARIANT
def test_logits_from_the_cache_are_those_without(name, variant):
    """Prompts of different lengths side by side, well past block_size; for each, every step's logits."""
    if BACKENDS[name].needs_compiler and variant is not WINDOWED:
        pytest.skip("compiling takes long; the variant with all of it stands for the others")
    model = make(variant, attend=BACKENDS[name].attend)
    T = model.config.block_size
    decoder = Engine(model, sampling(temperature=0.0), rows=4, longest=100)
    seen = logits_of(decoder)
    prompts = [[7], list(range(3, 3 + T // 2 + 1)), list(range(40, 40 + T)), [9, 8]]
    decoder.add([Prompt(tokens, seed=0) for tokens in prompts])
    for _ in range(T + 5 if T > 1 else 6):
        before = [list(row.tokens) for row in decoder.rows]
        decoder.step()
        logits = seen[-1]
        for row, text in enumerate(before):
            torch.testing.assert_close(logits[row], without_cache(model, text), atol=2e-4, rtol=1e-4)


def logits_of(decoder):
    """A list that grows by the logits (n, V) of each step."""
    seen, head = [], decoder.model.lm_head.forward
    decoder.model.lm_head.forward = lambda x: seen.append(head(x)) or seen[-1]
    return seen


@EACH_VARIANT
def test_greedy_text_is_that_without_a_cache(variant):
    model = make(variant)
    for prompt in ([3], [3, 4, 5, 6, 7]):
        made = greedy(model, prompt[-model.config.block_size :], 60)
        text = prompt[-model.config.block_size :]
        for token in made:
            assert token == without_cache(model, text).argmax()
            text = [*text, token]


def greedy(model, prompt, new):
    decoder = Engine(model, sampling(temperature=0.0), 1, len(prompt) + new)
    decoder.add([Prompt(prompt, seed=0)])
    return [decoder.step()[0] for _ in range(new)]


@pytest.mark.parametrize("fixed", [False, True])
def test_the_penalty_is_of_the_prompt_and_of_what_was_made(fixed, monkeypatch):
    """Greedy, against a loop without a cache."""
    model = make(MODERN)
    how = sampling(temperature=0.0, repetition_penalty=1.5)
    decoder = Engine(model, how, 2, 60)
    if fixed:
        decoder.recorded = Replayed(decoder._advance, 2, torch.device("cpu"))
    prompts = [[3, 4, 5], [200, 7]]
    decoder.add([Prompt(tokens, seed=0) for tokens in prompts])
    made = [decoder.step() for _ in range(40)]
    for row, text in enumerate(prompts):
        for step in made:
            seen = torch.zeros(1, 256, dtype=torch.bool)
            seen[0, text] = True
            assert apply_repetition_penalty(without_cache(model, text).unsqueeze(0), seen, 1.5).argmax() == step[row]
            text = [*text, step[row]]
    repeated = greedy(model, [3, 4, 5], 40)
    assert len(set(repeated)) < len({step[0] for step in made}), "it repeats itself less"


def test_prompts_that_are_read_in_several_parts_lie_in_their_own_rows(monkeypatch):
    model = make(MODERN)
    prompts = [list(range(i, i + n)) for i, n in enumerate((5, 9, 3, 12, 7))]

    def texts():
        decoder = Engine(model, sampling(temperature=0.0), 5, 40)
        decoder.add([Prompt(tokens, seed=0) for tokens in prompts])
        return [decoder.step() for _ in range(10)]

    whole = texts()
    monkeypatch.setattr("model.generation.kv_cache.PREFILL", 20)
    assert texts() == whole


def test_logits_that_are_not_numbers_are_told():
    model = make(MODERN)
    model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="the model's logits are not numbers"):
        list(generate(model, BYTES, [Prompt([1], 0)], sampling(), end=None, rows=1))


def test_of_a_long_prompt_the_last_block_size_tokens_are_read():
    for variant in (GPT2, MODERN):
        model = make(variant)
        long = [i % 50 for i in range(70)]
        assert greedy(model, long, 5) == greedy(model, long[-24:], 5)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7), rows=st.integers(1, 4),
    variant=st.sampled_from([GPT2, MODERN, WINDOWED]), temperature=st.sampled_from([0.0, 1.0]),
    penalty=st.sampled_from([1.0, 1.3]), end=st.sampled_from([None, 17, 100]),
)  # fmt: skip
def test_a_text_is_the_same_alone_and_beside_others(lengths, rows, variant, temperature, penalty, end):
    """Rows are given on to the next text, and a last one moves into the place of one that has ended."""
    model = make(variant, dtype=torch.float64)
    prompts = [Prompt([(i * 7 + j) % 250 for j in range(n)], seed=i) for i, n in enumerate(lengths)]
    how = sampling(temperature=temperature, repetition_penalty=penalty, max_new_tokens=40)

    def texts(prompts, rows):
        made = [(piece.index, piece.text, piece.ended, piece.tokens) for piece in
                generate(model, BYTES, prompts, how, end=end, rows=rows)]  # fmt: skip
        assert sorted(index for index, _, ended, _ in made if ended) == list(range(len(prompts)))
        return [("".join(text for index, text, *_ in made if index == i),
                 *next((ended, tokens) for index, _, ended, tokens in made if index == i and ended))
                for i in range(len(prompts))]  # fmt: skip

    together = texts(prompts, rows)
    assert together == [texts([prompt], 1)[0] for prompt in prompts]


def test_the_seed_decides_the_text_whatever_its_length_and_the_global_generator_is_left_alone():
    model = make(MODERN)
    model.train()
    before = torch.get_rng_state()

    def text(seed, most=20):
        prompts = [Prompt([1], seed)]
        return "".join(
            piece.text for piece in generate(model, BYTES, prompts, sampling(max_new_tokens=most), end=None, rows=1)
        )

    assert text(1) == text(1) != text(2)
    assert text(1, 40).startswith(text(1)[:-1])
    assert torch.equal(before, torch.get_rng_state())
    assert model.training, "it was training before"


def test_a_text_that_is_given_up_leaves_the_model_as_it_was():
    model = make(MODERN).train()
    attends = [block.attn.attend for block in model.blocks]
    pieces = generate(model, BYTES, [Prompt([1], 0)], sampling(), end=None, rows=1)
    next(pieces)
    assert [block.attn.attend for block in model.blocks] == attends, "also between two pieces"
    pieces.close()
    assert model.training


def test_generation_ends_at_end_of_text_without_giving_it():
    model = make(MODERN)
    end = greedy(model, [1], 1)[0]
    made = list(generate(model, BYTES, [Prompt([1], 0)], sampling(temperature=0.0), end=end, rows=1))
    assert made == [TextChunk(0, "", 0, "end")]


def test_no_tokens_are_a_text_too_and_no_prompts_none():
    model = make(MODERN)
    made = list(generate(model, BYTES, [Prompt([1], 0)] * 2, sampling(max_new_tokens=0), end=None, rows=1))
    assert made == [TextChunk(0, "", 0, "length"), TextChunk(1, "", 0, "length")]
    assert list(generate(model, BYTES, [], sampling(), end=None, rows=4)) == []


class Replayed(CudaGraphStep):
    """Recorded, with a step that is computed anew where CUDA would replay it: into the same tensor."""

    def record(self, *inputs):
        chosen = self.function(*inputs)
        return lambda: chosen.copy_(self.function(*inputs)), chosen


@EACH_VARIANT
def test_a_step_of_fixed_shapes_writes_the_same_texts(variant, monkeypatch):
    """What is recorded on CUDA: texts filled up to a power of two, slots that nobody has filled, masks for all."""
    monkeypatch.setattr("model.generation.cuda_graph.MIN_SLOTS", 4)
    model = make(variant, dtype=torch.float64)
    prompts = [Prompt([(i * 7 + j) % 250 for j in range(n)], seed=i) for i, n in enumerate((1, 5, 3, 20, 2, 9, 4))]
    how = sampling(max_new_tokens=30, repetition_penalty=1.2)

    def run(fixed):
        decoder = Engine(model, how, 5, 60)
        if fixed:
            decoder.recorded = Replayed(decoder._advance, 5, torch.device("cpu"))
        decoder.add(prompts[:5])
        made = [decoder.step() for _ in range(6)]
        for dropped in (1, 3, 2):
            decoder.drop(dropped)
        made += [decoder.step() for _ in range(3)]
        decoder.add(prompts[5:])
        made += [decoder.step() for _ in range(21)]
        if fixed and model.config.block_size == 24:
            assert {reach for _, reach in decoder.recorded.graphs} <= {4, 8, 16, 32}, "no more past block_size"
            assert {rows for rows, _ in decoder.recorded.graphs} <= {2, 4, 5}
        return made

    assert run(fixed=True) == run(fixed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [GPT2, MODERN, GROUPED, WINDOWED])
def test_on_cuda_recorded_steps_write_the_text_of_steps_that_are_not(variant):
    prompts = [Prompt([(i * 7 + j) % 250 for j in range(n)], seed=i) for i, n in enumerate((1, 5, 3, 20, 2))]
    model = make(variant, attend=BACKENDS["sdpa"].attend, dtype=torch.float64)
    model.to("cuda")
    made = []
    for recorded in (True, False):
        decoder = Engine(model, sampling(max_new_tokens=30), 4, 60, graphs=recorded)
        assert (decoder.recorded is not None) == recorded
        decoder.add(prompts[:4])
        steps = [decoder.step() for _ in range(10)]
        decoder.drop(1)
        made.append(steps + [decoder.step() for _ in range(20)])
    assert made[0] == made[1]


def test_a_cache_is_no_larger_than_what_a_layer_sees():
    model = make(MODERN | dict(window=[5, None]))
    assert [ring.W for ring in KVCache(model, 2, 100).rings] == [5, 24]
    assert [ring.W for ring in KVCache(model, 2, 10).rings] == [5, 10]


# Linear layers for few rows


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70), K=st.integers(1, 40), N=st.integers(1, 3 * NUM_CHUNKS + 2), bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)  # fmt: skip
def test_layers_for_sampling_compute_what_the_linear_layer_does(rows, K, N, bias, dtype):
    if dtype == torch.float16 and "fbgemm" not in torch.backends.quantized.supported_engines:
        return
    torch.manual_seed(rows)
    layer = torch.nn.Linear(K, N, bias=bias)
    holder = make(GPT2)
    holder.lm_head = layer
    x = torch.randn(2, rows, K)
    expected = layer(x)
    with torch.no_grad():
        y = convert_linears(holder, dtype).lm_head(x)
    assert y.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(y, expected.detach(), atol=tolerance, rtol=tolerance)


def test_a_model_for_sampling_writes_as_the_one_for_training():
    plain, fast = make(GROUPED), convert_linears(make(GROUPED), torch.float32)
    tokens = torch.arange(20).unsqueeze(0)
    torch.testing.assert_close(fast(tokens), plain(tokens), atol=1e-4, rtol=1e-4)
    assert greedy(fast, [1, 2], 40) == greedy(plain, [1, 2], 40)


# From tokens to text


def whole(stream, tokens, end=None):
    """Everything that the stream shows, and why it ended."""
    shown = ""
    for token in tokens:
        text, ended = stream.push(token, end)
        shown += text
        if ended:
            return shown, ended
    return shown, None


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])), data=st.data())
def test_a_stream_never_shows_half_a_character(text, data):
    """A token is a byte here. What is shown is at any time a beginning of the text, and in the end all of it."""
    stream, shown = IncrementalDetokenizer(BYTES, sampling(max_new_tokens=10_000)), ""
    for token in text.encode():
        shown += stream.push(token, None)[0]
        assert text.startswith(shown)
    assert shown == text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)  # fmt: skip
def test_a_text_ends_ahead_of_the_stop_string_that_is_complete_first(text, stops, cuts):
    """However the text is cut into tokens, and never having shown what belonged to a stop string."""
    expected, met = text, False
    for size in range(len(text) + 1):
        ends = [size - len(stop) for stop in stops if text[:size].endswith(stop)]
        if ends:
            expected, met = text[: min(ends)], True
            break
    pieces, rest = [], text
    for cut in cuts:
        pieces, rest = [*pieces, rest[:cut]], rest[cut:]
    pieces = [piece for piece in [*pieces, *rest] if piece]
    encoding = tokenizer._encoding("words", r"(?s).", [p.encode() for p in dict.fromkeys(pieces)] or [b"a"], {})
    stream = IncrementalDetokenizer(encoding, sampling(stop=stops, max_new_tokens=10_000))
    shown = ""
    for piece in pieces:
        more, ended = stream.push(encoding.encode_single_token(piece.encode()), None)
        shown += more
        assert expected.startswith(shown), "something that a stop string begins with was shown"
        if ended:
            break
    if met:
        assert (shown, ended) == (expected, "stop")
    else:
        assert shown + stream.held == expected


def test_what_may_become_a_stop_string_is_held_back_and_shown_once_it_does_not():
    stream = IncrementalDetokenizer(BYTES, sampling(stop="\n\nEnd", max_new_tokens=100))
    assert [stream.push(token, None)[0] for token in b"a\n\nEx"] == ["a", "", "", "", "\n\nEx"]
    assert whole(IncrementalDetokenizer(BYTES, sampling(stop="xyz", max_new_tokens=3)), b"axy") == ("axy", "length")
    assert whole(IncrementalDetokenizer(BYTES, sampling(stop="xyz")), b"ax\0", end=0) == ("ax", "end")


def test_half_a_character_at_the_end_is_left_out_and_bytes_that_are_none_are_marked():
    assert whole(IncrementalDetokenizer(BYTES, sampling(max_new_tokens=4)), "aé€".encode()) == ("aé", "length")
    assert whole(IncrementalDetokenizer(BYTES, sampling(max_new_tokens=3)), b"a\xffb") == ("a\ufffdb", "length")

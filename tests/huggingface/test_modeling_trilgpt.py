"""The class TrilGPTForCausalLM of exported folders computes what the model here computes."""

import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
import transformers
from data_helpers import build
from generation_helpers import VARIANTS, greedy
from helpers import BYTE, TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GPT2, LLAMA, MODERN, ROTARY, random_tokens

from common.errors import UserError
from data.tokenizer import to_spec
from generation.load import load_pretrained, load_run
from huggingface import modeling_trilgpt
from huggingface.architectures import export_weights, to_config_json
from huggingface.folder import write_folder
from huggingface.modeling_trilgpt import TrilGPTConfig, TrilGPTForCausalLM
from model import GPTConfig
from model.attention import naive
from model.config import MLPS
from model.gpt import GPT

V = 50  # vocabulary
T = 24  # block_size
OPTIONS = {
    "modern": MODERN,
    "gpt2": GPT2,
    "llama": LLAMA,
    "key offset": LLAMA | {"key_offset": True},
    "key offset, learned positions": GPT2 | {"key_offset": True},
    "n-grams": GPT2 | {"max_ngram": 3},
    "qk_norm": LLAMA | {"qk_norm": True},
    "layernorm": LLAMA | {"norm": "layernorm"},
    "rmsnorm": GPT2 | {"norm": "rmsnorm"},
    "bias": LLAMA | {"bias": True, "norm": "layernorm"},
    "no bias": GPT2 | {"bias": False},
    "attention softcap": LLAMA | {"attention_softcap": 1.5},
    "logit softcap": LLAMA | {"logit_softcap": 2.0},
    "window": LLAMA | {"window": 5},
    "windows": GPT2 | {"window": [4, None]},
    "grouped-query attention": GPT2 | {"n_kv_head": 1},
    "linear attention": LLAMA | {"attention_type": "linear"},
    "linear attention, learned positions": GPT2 | {"attention_type": "linear"},
    "mixed attention": MODERN | {"attention_type": ["linear", "softmax"], "n_layer": 3},
    "tied": LLAMA | {"tie_embeddings": True},
    "untied": GPT2 | {"tie_embeddings": False},
    "padded vocabulary": MODERN | {"pad_vocab_multiple": 64},
    "odd head size": GPT2 | {"n_embd": 28, "key_offset": True},
    "odd half of the head size": MODERN | {"n_embd": 24},
    "narrow MLP": MODERN | {"mlp_width": 12},
    "one channel per head": GPT2 | {"n_embd": 4, "key_offset": True},
}
OPTIONS |= {f"mlp {name}": GPT2 | {"mlp": name} for name in MLPS} | ROTARY


def make_model(variant: dict, vocab_size: int = V) -> GPT:
    """A model with large random weights, also of biases, norms and n-grams."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**variant), vocab_size, naive)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model.eval()


def make_models(variant: dict, vocab_size: int = V) -> tuple[GPT, TrilGPTForCausalLM]:
    """A model, and the same model in transformers."""
    ours = make_model(variant, vocab_size)
    content = to_config_json(ours.config, "trilgpt")
    theirs = TrilGPTForCausalLM(TrilGPTConfig(**content | {"vocab_size": vocab_size}))
    weights = export_weights(ours.state_dict(), ours.config, "trilgpt", vocab_size)
    theirs.load_state_dict(weights, strict=not ours.config.tie_embeddings)
    theirs.tie_weights()
    return ours, theirs.eval()


def generate(model: TrilGPTForCausalLM, prompts: list[list[int]], n: int, **options) -> list:
    """Continue prompts, which are padded on the left, by n tokens. Greedy by default."""
    length = max(map(len, prompts))
    padding = [length - len(prompt) for prompt in prompts]
    tokens = [[0] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * n + [1] * (length - n) for n in padding]
    output = model.generate(
        torch.tensor(tokens),
        attention_mask=torch.tensor(mask),
        max_new_tokens=n,
        pad_token_id=0,
        **{"do_sample": False} | options,
    )
    return output[:, length:].tolist()


# Logits

# left padding, right padding, three documents, one document
DOCUMENT_LENGTHS = [[(0, 7), (1, 17)], [(1, 14), (0, 10)], [(1, 9), (2, 1), (5, 14)], [(1, T)]]


@torch.no_grad()
def assert_equal_logits(variant: dict) -> None:
    """With padding and documents, whose logits are those of separate forward passes."""
    ours, theirs = make_models(variant)
    tokens = random_tokens(B=4)
    doc_ids = [[i for i, n in lengths for _ in range(n)] for lengths in DOCUMENT_LENGTHS]
    logits = theirs(tokens, attention_mask=torch.tensor(doc_ids)).logits
    for row, lengths in enumerate(DOCUMENT_LENGTHS):
        start = 0
        for _, length in lengths:
            part = slice(start, start + length)
            expected = ours(tokens[row, part][None])[0]
            torch.testing.assert_close(logits[row, part], expected, atol=1e-5, rtol=1e-5)
            start += length


@pytest.mark.parametrize("variant", OPTIONS.values(), ids=OPTIONS)
def test_logits_are_equal_for_each_option(variant):
    assert_equal_logits(variant)


@st.composite
def random_variants(draw) -> dict:
    position = draw(st.sampled_from(["learned", "rotary"]))
    n_head = draw(st.sampled_from([1, 2, 4, 6]))
    n_layer = draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 6)) + (position == "learned") * draw(st.booleans())
    types = draw(st.lists(st.sampled_from(["softmax", "linear"]), min_size=1, max_size=n_layer))
    # the linear attention here has no windows
    windows = st.one_of(st.none(), st.integers(1, 30))
    window = draw(st.lists(windows, min_size=1, max_size=n_layer))
    softcaps = st.sampled_from([None, 1.0, 10.0])
    fractions = st.sampled_from([None, 0.3, 0.5, 1.0])
    return {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": draw(st.sampled_from([None, 1, n_head])),
        "n_embd": n_head * head_dim,
        "block_size": T,
        "bias": draw(st.booleans()),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "mlp": draw(st.sampled_from(MLPS)),
        "mlp_width": draw(st.one_of(st.none(), st.integers(1, 40))),
        "position": position,
        "attention_type": types,
        "window": window if types.count("softmax") == len(types) else None,
        "qk_norm": draw(st.booleans()),
        "key_offset": draw(st.booleans()),
        "rotary_fraction": draw(fractions) if position == "rotary" else None,
        "attention_softcap": draw(softcaps) if "softmax" in types else None,
        "logit_softcap": draw(softcaps),
        "tie_embeddings": draw(st.booleans()),
        "pad_vocab_multiple": draw(st.sampled_from([1, 64])),
        "max_ngram": draw(st.integers(1, 5)),
        "ngram_table_size": draw(st.sampled_from([1, 64, 1000])),
    }


@settings(max_examples=20, derandomize=True, deadline=None)
@given(random_variants())
def test_logits_are_equal_for_random_combinations(variant):
    assert_equal_logits(variant)


def test_every_setting_of_the_model_is_in_the_exported_code():
    names = {field.name for field in fields(GPTConfig)}
    code = Path(modeling_trilgpt.__file__).read_text(encoding="utf-8")
    missing = {name for name in names if f"config.{name}" not in code}
    # the weights have no padding, transformers ties weights, rotary_channels is in config.json
    assert missing == {"name", "pad_vocab_multiple", "tie_embeddings", "rotary_fraction"}


@torch.no_grad()
def test_documents_are_those_of_training():
    ours, theirs = make_models(MODERN)
    tokens = random_tokens()
    doc_ids = torch.tensor([[0] * 9 + [1] + [2] * 14, [0] * 24])
    expected = ours(tokens, doc_ids=doc_ids)
    logits = theirs(tokens, attention_mask=doc_ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_in_bfloat16_are_close():
    ours, theirs = make_models(MODERN)
    ours, theirs = ours.bfloat16(), theirs.bfloat16()
    logits = theirs(random_tokens()).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, ours(random_tokens()).float(), atol=0.03, rtol=0)


# Loss


def test_loss_and_gradients_are_equal():
    """Transformers shifts the labels. -100 is ignored, and num_items_in_batch divides the sum."""
    ours, theirs = make_models(MODERN)
    tokens = random_tokens()
    labels = tokens.clone()
    labels[0, :9] = -100
    loss = ours(tokens[:, :-1], labels[:, 1:])
    found = theirs(tokens, labels=labels).loss
    torch.testing.assert_close(found, loss)
    loss.backward()
    found.backward()
    gradients = dict(ours.named_parameters())
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name].grad, atol=1e-5, rtol=1e-4)
    half = theirs(tokens, labels=labels, num_items_in_batch=2 * (labels[:, 1:] >= 0).sum()).loss
    torch.testing.assert_close(2 * half, loss)


@pytest.mark.parametrize("variant", [MODERN, GPT2], ids=["modern", "gpt2"])
@torch.no_grad()
def test_dropout_of_the_run_is_used_in_training_only(variant):
    """At the same places: the same random numbers give the same logits."""
    ours, theirs = make_models(variant | {"dropout": 0.3})
    tokens = random_tokens()
    without_dropout = theirs(tokens).logits
    torch.manual_seed(1)
    expected = ours.train()(tokens)
    torch.manual_seed(1)
    logits = theirs.train()(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits, without_dropout, atol=0.1)


# Generation

PROMPTS = [[7, 3, 11, 3, 7], [1], [200, 3, 9, 40, 8, 2, 10, 12, 3]]


GENERATING = {name: variant for name, variant in VARIANTS.items() if variant["block_size"] > 9}
GENERATING |= {"window above block_size": MODERN | {"window": 2 * T}}


@pytest.mark.parametrize("variant", GENERATING.values(), ids=GENERATING)
def test_greedy_decoding_is_that_of_sample_py(variant):
    """With rotary positions also after block_size tokens, and with prompts of different lengths."""
    ours, theirs = make_models(variant, 256)
    block_size = variant["block_size"]
    n = block_size if variant["position"] == "rotary" else block_size - len(PROMPTS[2])
    expected = [greedy(ours, prompt, n) for prompt in PROMPTS]
    assert generate(theirs, PROMPTS, n) == expected


@pytest.mark.parametrize("variant", [MODERN, GPT2], ids=["modern", "gpt2"])
def test_generation_is_equal_without_cache(variant):
    ours, theirs = make_models(variant, 256)
    expected = [greedy(ours, prompt, 12) for prompt in PROMPTS]
    assert generate(theirs, PROMPTS, 12, use_cache=False) == expected


@pytest.mark.parametrize("variant", [MODERN, GPT2], ids=["modern", "gpt2"])
def test_beam_search_is_equal_with_and_without_cache(variant):
    _, theirs = make_models(variant, 256)
    found = generate(theirs, PROMPTS, 12, num_beams=3)
    assert found == generate(theirs, PROMPTS, 12, num_beams=3, use_cache=False)
    assert found != generate(theirs, PROMPTS, 12)


def test_cache_is_returned_unless_it_is_not_wanted():
    _, theirs = make_models(MODERN)
    tokens = random_tokens()
    first = theirs(tokens[:, :10])
    cache = first[-1]
    assert theirs(tokens, use_cache=False).keys() == {"logits"}
    second = theirs(tokens[:, 10:], past_key_values=cache)
    expected = theirs(tokens).logits
    torch.testing.assert_close(second.logits, expected[:, 10:], atol=1e-5, rtol=1e-5)


def test_learned_positions_end_at_block_size():
    _, theirs = make_models(GPT2)
    with pytest.raises(ValueError, match="25 tokens do not fit into block_size=24"):
        theirs(random_tokens(T=T + 1))


def test_static_cache_is_refused():
    _, theirs = make_models(MODERN, 256)
    with pytest.raises(ValueError, match="set a dynamic cache"):
        generate(theirs, PROMPTS, 3, cache_implementation="static")


# Folders


@pytest.fixture(scope="module")
def checkpoint() -> dict:
    """A model with most options. Its tokenizer has an end-of-text token."""
    spec = to_spec(build([TEXT, TEXT], BYTE))
    variant = MODERN | {"window": [5, None], "pad_vocab_multiple": 64, "dropout": 0.1}
    return {
        "model_config": variant,
        "vocab_size": 257,
        "tokenizer": spec,
        "model": make_model(variant, 257).state_dict(),
    }


@pytest.fixture
def exported(tmp_path, checkpoint, remote_code) -> Path:
    folder = tmp_path / "exported"
    folder.mkdir()
    write_folder(folder, checkpoint, "trilgpt", torch.float32)
    return folder


def load_folder(folder: Path) -> torch.nn.Module:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, trust_remote_code=True).eval()


def test_folder_is_loaded_with_its_code(exported, checkpoint):
    model = load_folder(exported)
    assert type(model).__name__ == "TrilGPTForCausalLM"
    assert type(model).__module__.startswith("transformers_modules")
    ours, _ = load_run(f"hf:{exported}")
    tokens = random_tokens(V=257)
    torch.testing.assert_close(model(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)


def test_tokenizer_of_the_folder_pads_for_generation(exported):
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    model = load_folder(exported)
    options = {"max_new_tokens": 8, "do_sample": False}
    batch = model.generate(
        **tokenizer(["The 1st", "A"], padding=True, return_tensors="pt"), **options
    )
    alone = model.generate(**tokenizer("A", return_tensors="pt"), **options)
    assert batch[1, -8:].tolist() == alone[0, -8:].tolist()


def test_logits_of_int32_tokens_are_equal():
    _, theirs = make_models(MODERN)
    tokens = random_tokens()
    assert torch.equal(theirs(tokens.int()).logits, theirs(tokens).logits)


def test_settings_of_a_newer_version_are_refused(exported):
    file = exported / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content |= {"sink": True, "settings": [*content["settings"], "sink"]}
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match="the model has sink; use the version"):
        load_pretrained(f"hf:{exported}")


def test_folder_without_trust_is_refused(exported):
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=False)


def assert_comes_back(folder: Path, checkpoint: dict) -> None:
    """A folder has the config and the weights of a checkpoint, without padding."""
    _, found = load_pretrained(f"hf:{folder}")
    config = GPTConfig(**checkpoint["model_config"])
    changed = {"name": "trilgpt", "pad_vocab_multiple": 1}
    changed |= {"n_kv_head": config.kv_heads, "mlp_width": config.mlp_channels}
    assert found["model_config"] == asdict(config) | changed
    assert found["tokenizer"] == checkpoint["tokenizer"]
    assert found["model"].keys() == checkpoint["model"].keys()
    for name, weight in found["model"].items():
        assert torch.equal(weight, checkpoint["model"][name][: len(weight)]), name


def test_folder_is_read_as_the_checkpoint_that_was_written(exported, checkpoint):
    """Its code is not needed, and not executed."""
    (exported / "modeling_trilgpt.py").write_text("raise SystemExit", encoding="utf-8")
    assert_comes_back(exported, checkpoint)


def test_folder_that_transformers_has_saved_again_is_equal(exported, checkpoint, tmp_path):
    model = load_folder(exported)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    tokenizer.save_pretrained(saved)
    assert_comes_back(saved, checkpoint)
    tokens = random_tokens(V=257)
    assert torch.equal(load_folder(saved)(tokens).logits, model(tokens).logits)


def test_pipeline_generates_text(exported):
    pipeline = transformers.pipeline("text-generation", str(exported), trust_remote_code=True)
    ours, tokenizer = load_run(f"hf:{exported}")
    (result,) = pipeline("The 7th", max_new_tokens=5, do_sample=False)
    tokens = greedy(ours, tokenizer.encode("The 7th"), 5)
    assert result["generated_text"] == "The 7th" + tokenizer.decode(tokens)


def test_all_tokens_can_be_sampled_as_in_sample_py(exported):
    """The default of transformers is the 50 most likely ones."""
    sample = load_folder(exported).generate(
        torch.tensor([[1]]), max_new_tokens=2, output_scores=True, return_dict_in_generate=True
    )
    assert torch.stack(sample.scores).isfinite().all()


@pytest.mark.slow
def test_trainer_finetunes_ten_steps(exported, tmp_path):
    pytest.importorskip("accelerate", reason="NOT RUN: needs accelerate")
    model = load_folder(exported)
    tokens = random_tokens(B=8, V=257).tolist()
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "trainer"),
        max_steps=10,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    before = model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    trainer = transformers.Trainer(model, arguments, train_dataset=examples)
    assert trainer.train().global_step == 10
    after = model.eval()(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    assert after < before - 0.2
    trainer.save_model(tmp_path / "saved")
    found = load_folder(tmp_path / "saved")(torch.tensor(tokens)).logits
    torch.testing.assert_close(found, model(torch.tensor(tokens)).logits)


@pytest.mark.slow
def test_compiled_model_has_the_same_logits():
    """The backend does not generate C++ code, which would take a minute."""
    _, theirs = make_models(MODERN)
    tokens = random_tokens()
    compiled = torch.compile(theirs, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_folder_works_without_the_checkout(exported, tmp_path):
    """In a new process in another folder, which imports installed packages only."""
    code = (
        "import sys, transformers as t\n"
        f"t.dynamic_module_utils.HF_MODULES_CACHE = {str(tmp_path / 'other')!r}\n"
        f"folder = {str(exported)!r}\n"
        "model = t.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n"
        "tokenizer = t.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)\n"
        "inputs = tokenizer('The 7th', return_tensors='pt')\n"
        "tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False)\n"
        "print(tokens.tolist())\n"
        "assert not {'model', 'common', 'huggingface'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    ours, tokenizer = load_run(f"hf:{exported}")
    prompt = tokenizer.encode("The 7th")
    assert done.stdout.splitlines()[-1] == str([[*prompt, *greedy(ours, prompt, 5)]])

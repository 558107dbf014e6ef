"""export.py: the complete path from training to transformers and back, and folders that cannot be read."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from data_helpers import write_file
from helpers import TEXT, file_size_limit, load, run_command
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.files import write_json
from data.tokenizer import END_OF_TEXT
from generation.load import load_pretrained, load_run
from huggingface.folder import format_model_card

PROMPT = "The 7th line"
LLAMA = ["model=llama", "model.n_head=4", "model.block_size=64", "tokenizer=byte"]


@pytest.fixture
def export(workdir, capsys):
    """export("run=a", ...) -> (exit code, output)."""

    def run(*overrides: str) -> tuple[int, str]:
        capsys.readouterr()
        return run_command("export", *overrides), "".join(capsys.readouterr())

    return run


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    "model",
    [
        ["model=gpt2", "model.block_size=64", "tokenizer=char"],
        [*LLAMA, "tokenizer=bpe", "tokenizer.vocab_size=300"],
    ],
)
def test_trained_model_is_the_same_in_transformers_and_when_imported(train, sample, export, model):
    for file in "ab":  # two documents, so there is an end-of-text token
        write_file(f"texts/{file}.txt", TEXT + END_OF_TEXT)
    model = [*model, "data.path=texts"]
    assert train("name=a", "train.steps=50", "eval.every=25", *model) == 0
    assert export("run=a", "out=exported")[0] == 0

    theirs, tokenizer = (auto.from_pretrained("exported") for auto in
                         (transformers.AutoModelForCausalLM, transformers.AutoTokenizer))  # fmt: skip
    generate = transformers.pipeline("text-generation", model=theirs, tokenizer=tokenizer)
    text = generate(PROMPT, max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert generate(PROMPT)[0]["generated_text"].startswith(
        PROMPT
    )  # with the settings in generation_config.json
    greedy = ["temperature=0", f"prompt={PROMPT}", "max_new_tokens=20"]
    assert sample("run=a", *greedy) == sample("run=hf:exported", *greedy) == text + "\n"
    ours, our_tokenizer = load_run("a")
    tokens = torch.tensor([our_tokenizer.encode(text)])
    assert tokenizer(text)["input_ids"] == tokens[0].tolist()
    assert tokenizer(END_OF_TEXT)["input_ids"] == our_tokenizer.encode(
        END_OF_TEXT, disallowed_special=()
    )
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-4, rtol=0)
    imported, _ = load_run("hf:exported")
    for (name, weight), other in zip(
        ours.state_dict().items(), imported.state_dict().values(), strict=True
    ):
        assert torch.equal(weight, other), name
    assert "50 steps" in Path("exported/README.md").read_text(encoding="utf-8")
    assert export("run=a", "out=half", "dtype=bfloat16")[0] == 0
    assert transformers.AutoModelForCausalLM.from_pretrained("half").dtype == torch.bfloat16
    assert {weight.dtype for weight in load_file("half/model.safetensors").values()} == {
        torch.bfloat16
    }


def test_exported_run_has_the_same_start_of_samples(train, sample, export):
    assert train("name=a", *LLAMA[:-1], "tokenizer=bpe", "tokenizer.vocab_size=300") == 0
    assert export("run=a", "out=exported")[0] == 0
    _, ours = load_run("a")
    _, imported = load_run("hf:exported")
    assert ours.decode([ours.start_token]) == ".\n"
    assert imported.start_token == ours.start_token
    assert transformers.AutoConfig.from_pretrained("exported").bos_token_id == ours.start_token
    assert sample("run=hf:exported", "max_new_tokens=9") == sample("run=a", "max_new_tokens=9")


QUESTIONS = [
    ("The 1st", " line"),
    ("The 1st", " more."),
    ("The ", "7th"),
    ("", "The"),
    ("The 7th line:\n", "says"),
]


def test_exported_run_has_the_same_log_likelihoods_in_lm_eval(train, export, workdir):
    """The reference divides a question into tokens by lm-eval's own rule, and has the logits of transformers."""
    lm_eval = pytest.importorskip("lm_eval.api.model", reason="NOT RUN: needs lm-eval")
    from generation.lm_eval_adapter import ModelAdapter

    settings = ["data.separator=\\n", "tokenizer=bpe", "tokenizer.vocab_size=300"]
    assert train("name=a", *LLAMA[:-1], *settings) == 0
    assert export("run=a", "out=exported")[0] == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")

    class Reference(lm_eval.TemplateLM):
        eot_token_id = tokenizer.eos_token_id
        generate_until = loglikelihood_rolling = None

        def tok_encode(self, string, add_special_tokens=None, **options):
            start = (
                [] if add_special_tokens is False else [tokenizer.bos_token_id]
            )  # as with add_bos_token=True
            return start + tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests, **options):
            return [self.score(context, continuation) for _, context, continuation in requests]

        def score(self, context, continuation):
            with torch.no_grad():
                logits = theirs(torch.tensor([context + continuation])).logits[
                    0, len(context) - 1 : -1
                ]
            tokens = torch.tensor(continuation)
            return logits.log_softmax(-1).gather(1, tokens[:, None]).sum().item(), bool(
                (logits.argmax(-1) == tokens).all()
            )

    requests = [SimpleNamespace(args=question) for question in QUESTIONS]
    ours = ModelAdapter(*load_run("a"), batch_size=4).loglikelihood(requests)
    for (score, is_greedy), expected in zip(
        ours, Reference().loglikelihood(requests, disable_tqdm=True), strict=True
    ):
        assert score == pytest.approx(expected[0], abs=1e-4)
        assert is_greedy == expected[1]


@pytest.mark.parametrize(
    "words", [["model=gpt2"], [*LLAMA, "data.path=texts"]], ids=["gpt2", "llama with documents"]
)
def test_folder_that_transformers_has_saved_again_is_the_same_when_imported(train, export, words):
    for file in "ab":  # two documents, so there is an end-of-text token
        write_file(f"texts/{file}.txt", TEXT)
    assert train("name=a", "train.steps=1", *words) == 0
    assert export("run=a", "out=exported")[0] == 0
    transformers.AutoModelForCausalLM.from_pretrained("exported").save_pretrained("again")
    transformers.AutoTokenizer.from_pretrained("exported").save_pretrained("again")
    (_, before), (_, after) = load_pretrained("hf:exported"), load_pretrained("hf:again")
    assert after["tokenizer"] == before["tokenizer"]
    assert after["model_config"] == before["model_config"]
    for name, weight in before["model"].items():
        assert torch.equal(weight, after["model"][name]), name


def test_folder_is_read_as_utf_8_in_any_locale(train, export, workdir, monkeypatch):
    """transformers writes characters of a vocabulary as UTF-8."""
    assert train("name=a", "model=gpt2", "train.steps=1") == 0
    assert export("run=a", "out=exported")[0] == 0
    path = workdir / "exported/tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()), ensure_ascii=False), encoding="utf-8")
    assert not path.read_bytes().isascii()
    monkeypatch.setattr(
        "io.text_encoding", lambda encoding, stacklevel=2: encoding or "ascii"
    )  # LC_ALL=C
    assert (
        load_pretrained("hf:exported")[1]["tokenizer"]["tokens"] == load("a")["tokenizer"]["tokens"]
    )


def test_training_starts_from_an_exported_folder(train, export, capsys):
    assert train("name=a", *LLAMA) == 0
    assert "next     python sample.py run=hf:runs/a/huggingface" in export("run=a")[1]
    words = [
        "train.init_from=hf:runs/a/huggingface",
        "tokenizer=run",
        "tokenizer.run=hf:runs/a/huggingface",
    ]
    assert train("name=b", *words) == 2  # another model; the message lists all settings to change
    advice = capsys.readouterr().err.partition("; set ")[2].split()
    assert "model.n_kv_head=2" in advice
    assert train("name=c", "model.block_size=64", *words, *advice) == 0
    unchanged = ["model.pad_vocab_multiple=64", "optimizer=adamw", "optimizer.lr=1e-12"]
    assert train("name=b", *LLAMA[:-1], *words, *unchanged) == 0
    before, after = (load(run, "best") for run in "ab")
    assert before["tokenizer"] == after["tokenizer"]
    for name, weight in before["model"].items():
        assert torch.allclose(weight, after["model"][name][: len(weight)], atol=1e-6), name


def test_gpt2_is_read_from_the_cache_of_the_hub(
    train, export, sample, workdir, monkeypatch, offline
):
    assert train("name=a", "model=gpt2", "tokenizer=byte") == 0
    snapshot = workdir / "hub/models--openai-community--gpt2/snapshots/0123"
    assert export("run=a", f"out={snapshot}")[0] == 0
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0123", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workdir / "hub"))
    assert sample("run=hf:openai-community/gpt2", "max_new_tokens=3", "prompt=a").startswith("a")
    assert train("name=b", "model=gpt2", "train.init_from=gpt2", "tokenizer=byte") == 0


def test_refused_and_failed_exports_leave_nothing(trained, train, export, workdir):
    assert train("name=b", "model=gpt2") == 0
    before = sorted(workdir.rglob("*"))
    (workdir / ".mine.unfinished/old").mkdir(parents=True)  # of an export that was killed
    refused = [
        (["run=none"], "run=none"),
        (["dtype=int8"], "dtype=int8"),
        (["run=b", "out=text.txt"], "set another out"),
        (["run=a", "out=new/mine"], "train with model=llama or model=gpt2"),  # the default model
    ]
    for words, message in refused:
        code, output = export(*words)
        assert code == 2 and message in output and output.count("\n") == 1
    with file_size_limit(10_000):  # as on a full disk
        code, output = export("run=b", "out=mine")
    assert code == 1 and output.endswith(
        "model.safetensors: File too large; free some disk space\n"
    )
    assert sorted(workdir.rglob("*")) == before


def test_values_in_the_readme_are_code(tmp_path):
    write_json(tmp_path / "summary.json", {"command": "<script>\n\n![](http://a.b/c)"})
    assert format_model_card(tmp_path, 1).endswith(
        'for 1 step.\n\n    command: "<script>\\n\\n![](http://a.b/c)"\n'
    )


def test_folders_that_cannot_be_read_are_reported(train, export, workdir, offline):
    assert train("name=a", "model=gpt2") == 0
    assert export("run=a", "out=exported")[0] == 0
    for file, old, new in [
        ("model.safetensors", b"{", b""), ("config.json", b"}", b""), ("config.json", b"gpt2", b"bert"),
        ("config.json", b'"n_layer": 2', b'"n_layer": 9999'), ("config.json", b'"n_embd": 16', b'"n_embd": 32'),
        ("tokenizer.json", rb"[\\s\\S]", b""), ("tokenizer.json", rb"[\\s\\S]", b"("), ("tokenizer.json", b"}", b""),
        ("tokenizer.json", b'"added_tokens": [', b'"added_tokens": [{"id": -1, "content": "x"}'),
        ("tokenizer.json", b'"added_tokens": [', b'"added_tokens": [{"id": 4294967296, "content": "x"}'),
    ]:  # fmt: skip
        content = (workdir / "exported" / file).read_bytes()
        assert old in content
        (workdir / "exported" / file).write_bytes(content.replace(old, new))
        with pytest.raises(UserError, match="model.safetensors" if b"n_" in old else file):
            load_pretrained("hf:exported")
        (workdir / "exported" / file).write_bytes(content)
    weights = load_file("exported/model.safetensors")
    save_file(weights | {"transformer.ln_f.weight": torch.ones(1)}, "exported/model.safetensors")
    with pytest.raises(UserError, match=r"norm.weight has the shape \(1,\) instead of \(16,\)"):
        load_pretrained("hf:exported")
    Path("exported/config.json").unlink()
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        load_pretrained("hf:exported")
    for name in ("no/such", "some/where/else"):
        with pytest.raises(UserError, match=f"{name} is not a folder"):
            load_pretrained(f"hf:{name}")

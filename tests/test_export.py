"""export.py: the complete path from training to transformers and back."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from data_helpers import write_file
from helpers import TEXT, load, run_command, train_here

from common.checkpoint_file import load_checkpoint
from data.tokenizer import END_OF_TEXT
from generation.load import load_pretrained, load_run

PROMPT = "The 7th line"
GPT2 = ["model=gpt2", "model.block_size=64", "tokenizer=char"]
LLAMA = ["model=llama", "model.n_head=4", "model.block_size=64"]
SMALL_BPE = ["tokenizer=bpe", "tokenizer.vocab_size=300"]
GREEDY = ["temperature=0", f"prompt={PROMPT}", "max_new_tokens=20"]


@pytest.fixture(scope="module")
def train_and_export(tmp_path_factory) -> Callable[..., SimpleNamespace]:
    """train_and_export(words, ...) -> the paths of a run, and of its export.

    The text has two documents, so that there is an end-of-text token.
    """

    def run(*words: str) -> SimpleNamespace:
        folder = tmp_path_factory.mktemp("export")
        with chdir(folder):
            for file in "ab":
                write_file(f"texts/{file}.txt", TEXT + END_OF_TEXT)
            assert train_here("name=a", "data.path=texts", *words) == 0
            assert run_command("export", "run=a", "out=exported") == 0
        return SimpleNamespace(run=folder / "runs/a", folder=folder / "exported")

    return run


@pytest.fixture(
    scope="module",
    params=[GPT2, [*LLAMA, *SMALL_BPE], ["model.block_size=64"]],
    ids=["gpt2", "llama", "default"],
)
def exported(request, train_and_export, remote_code) -> SimpleNamespace:
    """A trained model here (ours), in transformers (theirs), and the paths of both."""
    paths = train_and_export(*request.param)
    model, tokenizer = load_run(str(paths.run))
    return SimpleNamespace(
        run=paths.run,
        folder=paths.folder,
        ours=model,
        our_tokenizer=tokenizer,
        theirs=transformers.AutoModelForCausalLM.from_pretrained(
            paths.folder, trust_remote_code=True
        ),
        their_tokenizer=transformers.AutoTokenizer.from_pretrained(
            paths.folder, trust_remote_code=True
        ),
    )


@pytest.fixture(scope="module")
def gpt2(train_and_export) -> SimpleNamespace:
    """A GPT-2 of bytes after one step."""
    return train_and_export("model=gpt2", "tokenizer=byte", "train.steps=1")


@pytest.fixture
def export(workdir, capsys):
    """export("run=a", ...) -> (exit code, output)."""

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run_command("export", *words)
        return code, "".join(capsys.readouterr())

    return run


def assert_equal_weights(weights: dict, others: dict) -> None:
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


def test_transformers_generates_the_samples_of_sample_py(exported, sample):
    generate = transformers.pipeline(
        "text-generation", model=exported.theirs, tokenizer=exported.their_tokenizer
    )
    text = generate(PROMPT, max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert sample(f"run={exported.run}", *GREEDY) == text + "\n"
    assert sample(f"run=hf:{exported.folder}", *GREEDY) == text + "\n"
    assert exported.theirs.generation_config.do_sample


@pytest.mark.parametrize("text", [TEXT[:500], END_OF_TEXT], ids=["text", "special token"])
def test_tokenizer_in_transformers_has_the_same_ids(exported, text):
    expected = exported.our_tokenizer.encode(text, disallowed_special=())
    assert exported.their_tokenizer(text)["input_ids"] == expected


def test_folder_that_transformers_has_saved_again_is_imported_unchanged(exported, tmp_path):
    exported.theirs.save_pretrained(tmp_path)
    exported.their_tokenizer.save_pretrained(tmp_path)
    _, before = load_pretrained(f"hf:{exported.folder}")
    _, after = load_pretrained(f"hf:{tmp_path}")
    assert after["tokenizer"] == before["tokenizer"]
    assert after["model_config"] == before["model_config"]
    assert_equal_weights(before["model"], after["model"])
    assert_equal_weights(
        before["model"], load_checkpoint(exported.run / "checkpoints/best.pt")["model"]
    )


def test_export_is_written_into_the_folder_of_the_run(gpt2, export, workdir):
    shutil.copytree(gpt2.run, "runs/a")
    code, output = export("run=a", "dtype=bfloat16")
    assert code == 0
    assert "next     python sample.py run=hf:runs/a/huggingface" in output
    model = transformers.AutoModelForCausalLM.from_pretrained("runs/a/huggingface")
    assert model.dtype == torch.bfloat16


def test_code_in_the_model_card_generates_text(exported, monkeypatch, capsys):
    monkeypatch.chdir(exported.folder)
    (code,) = re.findall("```python\n(.+?)```", Path("README.md").read_text("utf-8"), re.DOTALL)
    exec(code)
    (prompt,) = re.findall(r"generate\((.*?), max_new_tokens", code)
    assert capsys.readouterr().out.startswith(json.loads(prompt))


def test_checkpoint_of_a_step_is_exported(train, export):
    words = ["model=gpt2", "tokenizer=byte", "checkpoint.every=1", "checkpoint.keep=9"]
    assert train("name=a", *words) == 0
    assert export("run=a", "out=exported", "checkpoint=step-2")[0] == 0
    _, exported = load_pretrained("hf:exported")
    assert_equal_weights(exported["model"], load("a", "step-000002")["model"])


def test_export_of_one_document_has_the_same_start_of_samples(train, sample, export):
    """Without an end-of-text token, samples start with the token that most often ends a line."""
    assert train("name=a", *LLAMA, *SMALL_BPE) == 0
    assert export("run=a", "out=exported")[0] == 0
    _, tokenizer = load_run("a")
    assert tokenizer.decode([tokenizer.start_token]) == ".\n"
    config = transformers.AutoConfig.from_pretrained("exported")
    assert config.bos_token_id == tokenizer.start_token
    assert sample("run=hf:exported", "max_new_tokens=9") == sample("run=a", "max_new_tokens=9")


def finetune_words(folder: Path) -> list[str]:
    return [f"train.init_from=hf:{folder}", "tokenizer=run", f"tokenizer.run=hf:{folder}"]


@pytest.mark.parametrize("model", [LLAMA, []], ids=["llama", "default"])
def test_finetuning_starts_from_the_weights_of_the_folder(train_and_export, train, model):
    """With almost no learning rate, they do not change. Rows that pad the vocabulary are added."""
    first = train_and_export(*model, "tokenizer=byte", "train.steps=1")
    words = ["model.pad_vocab_multiple=64", "optimizer=adamw", "optimizer.lr=1e-12"]
    assert train("name=b", *model, *finetune_words(first.folder), *words) == 0
    before = load_checkpoint(first.run / "checkpoints/best.pt")
    after = load("b", "best")
    assert before["tokenizer"] == after["tokenizer"]
    for name, weight in before["model"].items():
        assert torch.allclose(weight, after["model"][name][: len(weight)], atol=1e-6), name


@pytest.fixture
def hub(gpt2, workdir, monkeypatch) -> None:
    """Puts a GPT-2 into the cache of the hub. There is no network."""
    model = workdir / "hub/models--openai-community--gpt2"
    shutil.copytree(gpt2.folder, model / "snapshots/0123")
    write_file(str(model / "refs/main"), "0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workdir / "hub"))


def test_model_is_read_from_the_cache_of_the_hub(hub, train, sample):
    text = sample("run=hf:openai-community/gpt2", "max_new_tokens=3", "prompt=a")
    assert text.startswith("a")
    for file in "ab":
        write_file(f"texts/{file}.txt", TEXT)
    words = ["model=gpt2", "train.init_from=gpt2", "tokenizer=byte", "data.path=texts"]
    assert train("name=b", *words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run=none"], "run=none"),
        (["run=a", "dtype=int8"], "dtype=int8"),
        (["run=gpt2", "out=text.txt"], "text.txt: File exists; set another"),
    ],
    ids=["run", "dtype", "out"],
)
def test_refused_export_is_one_sentence_and_leaves_nothing(
    trained, gpt2, export, workdir, words, message
):
    shutil.copytree(gpt2.run, "runs/gpt2")
    before = sorted(workdir.rglob("*"))
    code, output = export(*words)
    assert code == 2
    assert message in output
    assert output.count("\n") == 1
    assert sorted(workdir.rglob("*")) == before

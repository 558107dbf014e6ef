"""export.py: the whole path from training to other programs and back, and errors of folders that cannot be read."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from common.checkpoint_file import load_checkpoint, save_checkpoint
from common.errors import UserError
from configs.cli import parse_config, run_main
from data.tokenizer import END_OF_TEXT, end_of_text
from model.pretrained import load_pretrained
from sample import load

PROMPT = "The 7th line"
LLAMA = ["model=llama", "model.n_head=4", "model.block_size=64", "tokenizer=byte"]
CONSUMER = Path("consumer.py")


@pytest.fixture
def export(workdir, capsys):
    """export("run=a", ...) -> (exit code, output)."""
    from export import main

    def run(*overrides: str) -> tuple[int, str]:
        capsys.readouterr()
        try:
            code = run_main(main, parse_config("export", "", list(overrides)))
        except SystemExit as exit:  # refused before torch is imported
            code = exit.code
        return code, "".join(capsys.readouterr())

    return run


@pytest.fixture
def documents(workdir):
    """The folder docs with two documents. The tokenizer therefore has an end-of-text token."""
    (workdir / "docs").mkdir()
    for name in "ab":
        shutil.copy("text.txt", f"docs/{name}.txt")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def randomize(run: str) -> None:
    """Replace the weights by larger random ones, so that logits differ visibly."""
    path = Path(f"runs/{run}/checkpoints/best.pt")
    content, generator = load_checkpoint(path), torch.Generator().manual_seed(0)
    content["model"] = {name: 0.2 * torch.randn(w.shape, generator=generator) for name, w in content["model"].items()}
    if content["model_config"]["tie_embeddings"]:
        content["model"]["lm_head.weight"] = content["model"]["wte.weight"]
    save_checkpoint(path, content)


@pytest.mark.parametrize(
    "model",
    [["model=gpt2", "model.block_size=64", "tokenizer=char"], [*LLAMA, "tokenizer=bpe", "tokenizer.vocab_size=300"]],
)
def test_trained_model_is_the_same_in_transformers_and_when_imported(train, sample, export, model):
    assert train("name=a", "train.steps=50", "eval.every=25", *model) == 0
    assert export("run=a", "out=exported")[0] == 0

    theirs, tokenizer = (auto.from_pretrained("exported") for auto in
                         (transformers.AutoModelForCausalLM, transformers.AutoTokenizer))  # fmt: skip
    generate = transformers.pipeline("text-generation", model=theirs, tokenizer=tokenizer)
    text = generate(PROMPT, max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert generate(PROMPT)[0]["generated_text"].startswith(PROMPT)  # with the settings in generation_config.json
    greedy = ["temperature=0", f"prompt={PROMPT}", "max_new_tokens=20"]
    assert sample("run=a", *greedy) == sample("run=hf:exported", *greedy) == text + "\n"
    ours, our_tokenizer = load("a")
    tokens = torch.tensor([our_tokenizer.encode(text)])
    assert tokenizer(text)["input_ids"] == tokens[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-4, rtol=0)
    imported, _ = load("hf:exported")
    for (name, weight), other in zip(ours.state_dict().items(), imported.state_dict().values(), strict=True):
        assert torch.equal(weight, other), name

    card = Path("exported/README.md").read_text()
    loss = json.loads(Path("runs/a/summary.json").read_text())["best_val_loss"]
    assert f"{loss:.4f} nats" in card and "50 steps" in card and Path("exported/loss.png").exists()


def test_training_starts_from_an_exported_folder(train, export, capsys):
    assert train("name=a", *LLAMA) == 0
    assert export("run=a")[0] == 0
    words = ["train.init_from=hf:runs/a/huggingface", "tokenizer=run", "tokenizer.run=hf:runs/a/huggingface"]
    assert train("name=b", *words) == 2  # another model; the message lists all settings to change
    advice = capsys.readouterr().err.partition("; set ")[2].split()
    assert "model.n_kv_head=2" in advice
    assert train("name=c", "model.block_size=64", *words, *advice) == 0
    assert (
        train("name=b", *LLAMA[:-1], *words, "model.pad_vocab_multiple=64", "optimizer=adamw", "optimizer.lr=1e-12")
        == 0
    )
    before, after = (load_checkpoint(Path(f"runs/{run}/checkpoints/best.pt")) for run in "ab")
    assert before["tokenizer"] == after["tokenizer"]
    for name, weight in before["model"].items():
        assert torch.allclose(weight, after["model"][name][: len(weight)], atol=1e-6), name


def test_model_finetuned_in_transformers_is_imported_with_its_biases(train, export):
    assert train("name=a", "model=nanogpt", "tokenizer=byte") == 0
    assert export("run=a", "out=exported")[0] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    model.save_pretrained("finetuned")
    shutil.copy("exported/tokenizer.json", "finetuned")
    tokens, (ours, _) = torch.arange(10)[None], load("hf:finetuned")
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_end_of_text_token_of_another_name_ends_samples(train, export, documents):
    assert train("name=a", *LLAMA, "data.path=docs") == 0
    assert export("run=a", "out=exported")[0] == 0
    path = Path("exported/tokenizer.json")
    path.write_text(path.read_text().replace(END_OF_TEXT, "</s>"))
    assert end_of_text(load("hf:exported")[1]) == end_of_text(load("a")[1]) == 256


def test_refused_export_keeps_other_files(train, export, workdir):
    assert train("name=a") == 0  # an architecture that cannot be exported
    (workdir / "mine.partial").mkdir()
    before = sorted(workdir.rglob("*"))
    assert export("run=a", "out=mine")[0] == export("run=a", "out=new/mine")[0] == 2
    assert sorted(workdir.rglob("*")) == before


def test_half_precision_is_half_the_size(train, export):
    assert train("name=a", *LLAMA) == 0
    for dtype in ("float32", "bfloat16"):
        assert export("run=a", f"out={dtype}", f"dtype={dtype}")[0] == 0
    sizes = [Path(dtype, "model.safetensors").stat().st_size for dtype in ("bfloat16", "float32")]
    assert 0.5 <= sizes[0] / sizes[1] < 0.6
    assert transformers.AutoModelForCausalLM.from_pretrained("bfloat16").dtype == torch.bfloat16


def test_bench_measures_errors_of_a_folder(train, export, capsys):
    from bench import main

    assert train("name=a", *LLAMA) == 0
    assert export("run=a", "out=exported")[0] == 0
    shutil.rmtree("runs/a")
    assert run_main(main, parse_config("bench", "", ["run=hf:exported", "dtypes=[float32]"])) == 0
    assert "errors.csv" in capsys.readouterr().out


def test_model_of_the_hub_is_read_from_its_cache(train, export, sample, workdir, monkeypatch, offline):
    assert train("name=a", "model=gpt2", "tokenizer=byte") == 0
    snapshot = workdir / "hub/models--openai-community--gpt2/snapshots/0123"
    assert export("run=a", f"out={snapshot}")[0] == 0
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workdir / "hub"))
    assert sample("run=hf:openai-community/gpt2", "max_new_tokens=3", "prompt=a").startswith("a")
    assert train("name=b", "model=gpt2", "train.init_from=gpt2", "tokenizer=byte") == 0


WRONG = [
    ({}, ["run=none"], "run=none has no checkpoint"),
    ({}, ["dtype=int8"], "dtype=int8 is unknown; set float32, bfloat16 or float16"),
    ({}, ["out=text.txt"], "text.txt exists; set another out, or remove it"),
    ({}, ["run=hf:somewhere/else/x"], "somewhere/else/x has no config.json; set hf:FOLDER"),
    ({}, ["run=hf:no/such"], "hf:no/such is not a folder, and could not be downloaded"),
    ({"model.safetensors": None}, ["run=hf:exported"], "exported has no model.safetensors; set hf:FOLDER"),
    ({"model.safetensors": "x" * 99}, ["run=hf:exported"], "model.safetensors is damaged"),
    ({"config.json": "{"}, ["run=hf:exported"], "config.json is damaged"),
    ({"config.json": "{}"}, ["run=hf:exported"], "model_type=null, but only gpt2, llama, arcee can be imported"),
    ({"config.json": "[1]"}, ["run=hf:exported"], "model_type=null, but only"),
    ({"config.json": '{"model_type": "gpt2", "quantization_config": {}}'}, ["run=hf:exported"], "quantized weights"),
    ({"config.json": "no vocab_size"}, ["run=hf:exported"], "config.json has vocab_size=null, but tokenizer.json has"),
    ({"tokenizer.json": "{}"}, ["run=hf:exported"], "tokenizer.json is not a byte-level BPE tokenizer"),
]


@pytest.mark.parametrize(("files", "words", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_input_is_one_sentence_and_leaves_nothing(train, export, workdir, offline, files, words, message):
    assert train("name=a", "model=gpt2") == 0
    if any(word.startswith("run=hf:exported") for word in words):
        assert export("run=a", "out=exported")[0] == 0
    for name, content in files.items():
        if content == "no vocab_size":
            fields = json.loads((workdir / "exported" / name).read_text())
            content = json.dumps({key: value for key, value in fields.items() if key != "vocab_size"})
        (workdir / "exported" / name).unlink()
        if content is not None:
            (workdir / "exported" / name).write_text(content)
    if words and words[0].startswith("run=hf:"):
        with pytest.raises(UserError) as error:
            load_pretrained(words[0].removeprefix("run="))
        assert message in str(error.value)
        return
    before = sorted(workdir.rglob("*"))
    code, output = export(*words)
    assert code == 2 and message in output and output.count("\n") == 1
    assert sorted(workdir.rglob("*")) == before


def test_default_architecture_is_refused_with_the_settings_to_change(train, export):
    assert train("name=a") == 0
    code, output = export("run=a")
    assert code == 2 and "train a model for ArceeForCausalLM, with model.qk_norm=false model.max_ngram=1" in output
    assert train("name=b", "model.qk_norm=false", "model.max_ngram=1") == 0
    assert export("run=b")[0] == 0


# Programs that read exported models. They are installed with `pip install -e ".[interoperability]"`.


@pytest.mark.slow
@pytest.mark.parametrize("model", [["model=gpt2", "tokenizer=byte"], LLAMA])
def test_ctranslate2_generates_the_same_text(train, export, documents, model):
    pytest.importorskip("ctranslate2", reason="NOT RUN: needs ctranslate2")
    assert train("name=a", *model, "data.path=docs") == 0
    randomize("a")
    assert export("run=a", "out=exported")[0] == 0
    CONSUMER.write_text(f"""
import ctranslate2, transformers
ctranslate2.converters.TransformersConverter("exported").convert("converted")
tokenizer = transformers.AutoTokenizer.from_pretrained("exported")
prompt = tokenizer.convert_ids_to_tokens(tokenizer.encode("{PROMPT}"))
generator = ctranslate2.Generator("converted")
(result,) = generator.generate_batch([prompt], max_length=4, sampling_topk=1, include_prompt_in_result=False)
print("ids", result.sequences_ids[0])
""")
    output = subprocess.run([sys.executable, CONSUMER], stdout=subprocess.PIPE, text=True, check=True).stdout
    ours, tokenizer = load("a")
    ids = tokenizer.encode(PROMPT)
    for _ in range(4):
        ids.append(int(ours(torch.tensor([ids]))[0, -1].argmax()))
    assert f"ids {ids[-4:]}" in output


@pytest.mark.slow
def test_lm_eval_scores_an_exported_model_as_sample_does(train, export, sample, documents):
    pytest.importorskip("lm_eval", reason="NOT RUN: needs lm-eval")
    assert train("name=a", *LLAMA, "data.path=docs") == 0
    assert export("run=a", "out=exported")[0] == 0
    contexts = ["The 7th line says ", "It's", "a line. " * 5]  # the last one exceeds block_size
    questions = [{"context": context, "choices": ["49", " zz", " no more"], "answer": 0} for context in contexts]
    Path("questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    Path("squares.yaml").write_text("""
task: squares
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""")
    command = "-m lm_eval --model hf --model_args pretrained=exported,add_bos_token=True --tasks squares --device cpu"
    command += " --include_path . --log_samples --output_path results"
    subprocess.run([sys.executable, *command.split()], check=True)
    sample("run=a", "questions=questions.jsonl", "out=scores.jsonl")
    ours = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
    (file,) = Path().glob("results/**/samples*.jsonl")
    theirs = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
    for row, reference in zip(ours, theirs, strict=True):
        scores = [float(score) for ((score, _),) in reference["resps"]]
        assert row["scores"] == pytest.approx(scores, abs=1e-4)
        assert [row["predictions"][key] == 0 for key in ("acc", "acc_norm")] == [
            reference["acc"],
            reference["acc_norm"],
        ]

"""Composing configs: every choice, every kind of invalid word or YAML file, and free text."""

import re
from dataclasses import replace
from math import nan
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.settings import check, list_keys
from configs.cli import parse_config
from configs.compose import list_choices
from configs.schema import SCRIPTS, CompareConfig
from training.config import OPTIMIZER_CONFIGS

ALL = [
    (group, choice)
    for group in ("model", "attention", "tokenizer", "optimizer", "schedule", "experiment")
    for choice in list_choices(group)
]


def error_message(capsys, *overrides, script="train") -> str:
    """The one sentence that an invalid command line prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        parse_config(script, "", list(overrides))
    out, err = capsys.readouterr()
    assert stopped.value.code == 2, (out, err)
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err.strip()


@pytest.mark.parametrize(("group", "choice"), ALL)
def test_every_choice_composes(group, choice, workdir):
    required = {"run": ["tokenizer.run=a"], "larger_model": ["data.path=text.txt"]}.get(choice, [])
    config = parse_config("train", "", [f"{group}={choice}", *required])
    if group != "experiment":
        assert choice in (getattr(getattr(config, group), key, None) for key in ("name", "backend"))


@pytest.mark.parametrize("choice", list_choices("data"))
def test_every_data_choice_composes(choice, workdir, capsys):
    if choice == "mix":
        with pytest.raises(SystemExit):
            parse_config("train", "", ["data=mix"])
        assert "data.mix={} has no sources; list them in a YAML file" in capsys.readouterr().err
    else:
        assert parse_config("train", "", [f"data={choice}", "data.path=text.txt"]).data.name == choice


WRONG = [
    (["train.stesp=3"], r"train.stesp: there is no such key \(did you mean train.steps\?\)"),
    (["steps=3"], r"steps: there is no such key \(did you mean train.steps\?\)"),
    (["n_layer=3"], r"did you mean model.n_layer\?"),
    (["modle=gpt2"], r"modle: there is no such key \(did you mean model\?\)"),
    (["optimizer.learning_rate=1"], r"optimizer.learning_rate: there is no such key"),
    (["optimizer=adamw", "optimizer.momentum=0.9"], r"optimizer.momentum is a key of another optimizer"),
    (
        ["model=gpt3"],
        r"model=gpt3: there is no such choice \(did you mean gpt2\?\); set gpt2, llama, modern, nano",
    ),
    (["attention=falsh"], r"did you mean flash\?\); set cudnn, "),
    (["seed=1,2"], r"'seed=1,2' must have one value; set it, or use train.py -m"),
    (["train.steps=f("], r"'train.steps=f\(' cannot be parsed; put .* quotes: 'train.steps=\"VALUE\"'$"),
    (["seed='1\n"], r"cannot be parsed; put its value in two pairs of quotes: 'seed=\"VALUE\"'$"),
    (["+train.foo=1"], r"is not a setting of the form key=value"),
    (["++seed=1"], r"is not a setting of the form key=value"),
    (["~seed"], r"is not a setting of the form key=value"),
    (["hydra.run.dir=x"], r"is not a setting of the form key=value"),
    (["hydra/launcher=x"], r"is not a setting of the form key=value"),
    (["--foo"], r"--foo' is not a setting"),
    (["-m"], r"-m needs several values for at least one key; set seed=1,2,3, for example"),
    (["-m", "seed=1"], r"-m needs several values for at least one key"),
    (["-m", "attention=naive,falsh"], r"attention=falsh: there is no such choice \(did you mean flash"),
    (["-m", "seed=1,2", "model.n_embd=96,97"], r"model.n_embd=97 must be a multiple of model.n_head=2"),
    (["-m", "seed=1,2", "name=a/b"], r"name='a/b' is not a folder name"),
    (
        ["-m", "seed=1,2", "hydra/launcher=nowhere"],
        r"hydra/launcher=nowhere' is not a setting",
    ),
    (["-m", "seed=1,2", "hydra.launcher._target_=os.system"], r"is not a setting of the form key=value"),
    (["-m", "seed=1,2", "hydra.launcher.x={_target_:os.system}"], r"is not a setting of the form key=value"),
    (["-m", "seed=1,2", "hydra.sweeper.params=x"], r"is not a setting of the form key=value"),
    (["-m", "seed=1,2", "seed=3,4"], r"seed is given twice; list all of its values at once"),
    (
        ["-m", "seed=1,2", "hydra.launcher.partition=gpu"],
        r"hydra.launcher.partition: there is no such key",
    ),
    (["-m", "seed=1,2,1"], r"seed=1 would be trained twice or is too long; list each value once"),
    (["-m", "seed=1,2", f"model.name={'a' * 99},{'b' * 99}", f"data.name={'a' * 99},{'b' * 99}"], r"is too long; list"),
    (["-m", "seed=1,2", "--cfg", "job"], r"--cfg and plan=true describe one run; remove -m"),
    (["steps"], r"is not a setting of the form key=value"),
    (
        ["model.n_embd=100", "model.n_head=6"],
        r"model.n_embd=100 must be a multiple of model.n_head=6; .*=96",
    ),
    (
        ["model.n_head=6", "model.n_embd=96", "model.n_kv_head=4"],
        r"model.n_kv_head=4 must divide model.n_head=6; set one of 1, 2, 3, 6",
    ),
    (["model.n_layer=0"], r"model.n_layer=0 must be at least 1 and at most 10,000"),
    (["train.batch_size=10", "train.micro_batch_size=4"], r"does not divide the 10 .* set one of 1, 2, 5, 10"),
    (
        ["train.micro_batch_size=large"],
        r"train.micro_batch_size=large must be a number .* auto .* null",
    ),
    (["train.steps=null"], r"train.steps=null needs train.minutes"),
    (["data=text"], r"data.path=null is missing; set data.path"),
    (["data=text", "data.path=nowhere.txt"], r"data.path=nowhere.txt has no file to read"),
    (["data.repo=a/b", "data.stream=true"], r"data.repo=a/b works only with data=hub"),
    (["experiment=null"], r"experiment=null: there is no such choice; set finetune_gpt2, gpt2_124m, larger_model"),
    (["data.val_fraction=1"], r"data.val_fraction=1.0 must be above 0 and below 1"),
    (["name=a/b"], r"name='a/b' is not a folder name"),
    (["name=sweeps"], r"name=sweeps is reserved"),
    (["seed=-1"], r"seed=-1 must be at least 0"),
    (["optimizer.weight_decay=100"], r"weight_decay=100.0 reverses .*; set less than 1 / optimizer.lr"),
    (["optimizer.ngram_weight_decay=2", "optimizer.embedding_lr=0.5"], r"set less than 1 / optimizer.embedding_lr"),
    (["optimizer=adamw", "optimizer.lr=10"], r"weight_decay=0.1 reverses .* set less than 1 / optimizer.lr"),
    (["optimizer.betas=[0.9]"], r"optimizer.betas=\[0.9\] must be two numbers"),
    (["optimizer.lr=nan"], r"optimizer.lr=nan must be above 0"),
    (["name=" + 300 * "a"], r"is not a folder name"),
    (["tokenizer=char", "tokenizer.vocab_size=500"], r"set tokenizer.vocab_size=null"),
    (["schedule=cosine", "schedule.name=cosin"], r"schedule.name=cosin is unknown; set one of cosine, linear, wsd"),
]


WRONG_TYPES = [
    ("train", ["train.steps=many"], "train.steps=many must be a whole number or null"),
    ("train", ["model.n_layer=null"], "model.n_layer=null must be a whole number"),
    ("train", ["compile=perhaps"], "compile=perhaps must be true or false or null"),
    ("train", ["optimizer=adamw", "optimizer.lr=fast"], "optimizer.lr=fast must be a number"),
    ("train", ["optimizer.betas=0.9"], "optimizer.betas=0.9 must be a list such as [1]"),
    ("train", ["train=5"], "train=5 must be a section; set its keys, such as train.steps"),
    ("train", ["data.mix=5"], "data.mix=5 must be a section of a YAML file"),
    ("train", ["data.mix=[a]"], "data.mix=[a] must be a section of a YAML file"),
    ("bench", ["block_sizes=64"], "block_sizes=64 must be a list such as [1]"),
    ("bench", ["block_sizes=[64,a]"], "block_sizes=[64,a] must be a whole number"),
    ("sample", ["stop=[]"], "stop=[] must be a string that is not empty, or a list of them"),
    ("sample", ['stop=["a", 1]'], "stop=[a,1] must be a string that is not empty, or a list of them"),
    ("prepare", ["data.text_column="], "'data.text_column=' must have one value; set it"),
    ("compare", ["out=", "a"], "'out=' must have one value; set it"),
    ("sample", ["interactive=true", "num_samples=5"], "num_samples=5 needs interactive=false; set one of them"),
    ("sample", ["max_new_tokens=0"], "max_new_tokens=0 generates nothing; set a larger number"),
    ("train", ["optimizer.lr=inf"], "optimizer.lr=inf must be above 0 and finite"),
    ("train", ["optimizer.name=adamw"], "optimizer.name=adamw selects no optimizer; set optimizer=adamw or"),
    ("train", ["preset=null"], "preset=null is unknown; set auto, 20kB"),
    ("train", ["train.init_from=a"], "train.init_from=a is unknown; set one of run:NAME, hf:NAME, gpt2, "),
    ("train", ["--learning_rate=1"], "is not a setting of the form key=value (did you mean optimizer.lr?)"),
    ("train", ["data.path=[]"], "data.path=[] is not a path"),
    ("bench", ["block_sizes=[1000000000]"], "block_sizes=1000000000 must be at least 1 and at most"),
]


@pytest.mark.parametrize(("script", "overrides", "message"), WRONG_TYPES, ids=[" ".join(w[1]) for w in WRONG_TYPES])
def test_value_of_the_wrong_type_is_refused(script, overrides, message, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [f"{script}.py"])
    assert message in error_message(capsys, *overrides, script=script) + "\n"


def with_value(config, key, value):
    """The config with another value of `key`, which may be in a section."""
    section, _, leaf = key.rpartition(".")
    if not section:
        return replace(config, **{leaf: value})
    return with_value(config, section, replace(attrgetter(section)(config), **{leaf: value}))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_limits(script, workdir):
    """Otherwise a huge value hangs, or fails with an error of PyTorch's C++ code."""
    words = {"train": ["data.path=text.txt"], "prepare": ["data.path=text.txt"], "compare": ["a"]}
    config = parse_config(script, "", words.get(script, []))
    types = dict(list_keys(type(config)))
    if "optimizer" in types:
        types |= dict(list_keys(type(config.optimizer), "optimizer."))
    for key, annotation in types.items():
        for value in [10**30] * (annotation in (int, int | None)) + [nan] * (annotation in (float, float | None)):
            with pytest.raises(UserError, match=f"{key}={value}"):
                check(with_value(config, key, value))


@pytest.mark.parametrize(
    ("script", "word", "message"),
    [
        ("bench", "attention=flash", "attention: there is no such key"),
        ("sample", "model=gpt2", "model: there is no such key"),
        ("sample", "model.n_layer=2", "there is no such key"),
        ("prepare", "experiment=gpt2_124m", "experiment: there is no such key"),
    ],
)
def test_group_of_another_script_is_refused(script, word, message, capsys):
    assert message in error_message(capsys, word, script=script)


@pytest.mark.parametrize(("overrides", "message"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_invalid_words_are_refused_and_leave_no_files(overrides, message, workdir, capsys):
    before = sorted(workdir.rglob("*"))
    assert re.search(message, error_message(capsys, *overrides))
    assert sorted(workdir.rglob("*")) == before


WRONG_YAML = [
    (
        "train: {stesp: 3}",
        r"experiment/mine.yaml: train.stesp: .* \(did you mean train.steps\?",
    ),
    ("trian: {steps: 3}", r"trian: there is no such key \(did you mean train\?\)"),
    ("model: {_target_: os.system}", r"model._target_: there is no such key"),
    ("model: {window: {_target_: os.system}}", r"model.window={_target_:os.system} must be a number"),
    ("train: [", r"experiment/mine.yaml: .*mine.yaml.*line .*; write YAML in UTF-8"),
    ("train: {steps: '${'}", r"train.steps: .* '\${'"),
    ("train: 5", r"experiment/mine.yaml: train must be a section; set its keys, such as train.steps"),
    ("eval: {sample: [1]}", r"experiment/mine.yaml: eval.sample must be a section; set its keys"),
    ("optimizer: {betas: [a]}", r"experiment/mine.yaml: optimizer.betas\[0\] must be a number"),
    ("train: {steps: many}", r"experiment/mine.yaml: train.steps must be a whole number or null"),
    ("train.steps: 5", r"experiment/mine.yaml: train.steps: write train: {steps: VALUE}"),
    ("# \udce9t\udce9", r"experiment/mine.yaml: 'utf-8' codec can't decode .*; write YAML in UTF-8"),
    ("5", r"experiment/mine.yaml: .* int; write YAML"),
    ("[1]", r"experiment/mine.yaml: its content must be a section"),
    ("hydra: {launcher: {_target_: os.system}}", r"experiment/mine.yaml sets hydra, .*; remove it"),
    ("# @package hydra.launcher\n_target_: os.system", r"experiment/mine.yaml sets hydra, .*; remove it"),
    ("defaults: [{override /hydra/launcher: basic}]", r"experiment/mine.yaml sets hydra, .*; remove it"),
    ("defaults: [mine]", r"a YAML file contains itself"),
    ("train: &a {steps: *a}", r"a YAML file contains itself"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_YAML, ids=[w[0] for w in WRONG_YAML])
def test_invalid_yaml_files_are_refused(content, message, workdir, capsys):
    (workdir / "own/experiment").mkdir(parents=True)
    (workdir / "own/experiment/mine.yaml").write_text(f"{content}\n", errors="surrogateescape")
    assert re.search(message, error_message(capsys, "--config-dir", "own", "experiment=mine"))


def test_attention_file_without_a_backend_is_refused(workdir, capsys):
    (workdir / "own/attention").mkdir(parents=True)
    (workdir / "own/attention/mine.yaml").write_text("kernels: [math]\n")
    message = "attention.backend is missing; set it in the YAML file"
    assert message in error_message(capsys, "--config-dir", "own", "attention=mine")


@pytest.mark.parametrize("header", ["", "# @package _global_\n", "# mine\n# @package _global_\n", "\n# mine\n"])
def test_words_win_over_an_experiment_of_the_user(header, workdir):
    (workdir / "own/experiment").mkdir(parents=True)
    (workdir / "own/experiment/mine.yaml").write_text(f"{header}train: {{steps: 7, batch_size: 3}}\n")
    config = parse_config("train", "", ["--config-dir", "own", "experiment=mine", "train.batch_size=5"])
    assert (config.train.steps, config.train.batch_size) == (7, 5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["temperature=nan"], "temperature=nan must be at least 0"),
        (["temperature=-1"], "temperature=-1.0 must be at least 0"),
        (["top_k=0"], "top_k=0 must be at least 1"),
        (["top_p=1.5"], "top_p=1.5 must be above 0 and at most 1"),
        (["num_samples=0"], "num_samples=0 must be at least 1"),
        (["checkpoint=first"], r"checkpoint=first is unknown; set one of best, last, step-N"),
        (["prompt=a", "prompt_file=b"], "set one of them"),
        (["promt=a"], r"promt: there is no such key \(did you mean prompt\?\)"),
    ],
)
def test_invalid_sampling_words_are_refused(overrides, message, capsys):
    assert re.search(message, error_message(capsys, *overrides, script="sample"))


FREE_TEXT = [
    "été",
    "def f(x):",
    "it's",
    'say "hi"',
    "a=b",
    "Hello, world",
    "null",
    "1e5",
    "${seed}",
    "\\${seed}",
    "",
    " x ",
    "[1]",
    "{a: b}",
    "back\\slash\\",
    "\\'",
    "two\nlines",
    "\t",
    "#no comment",
    "true",
    "007",
    "~a",
]


@pytest.mark.parametrize("text", FREE_TEXT)
def test_prompt_is_used_as_typed(text):
    assert parse_config("sample", "", [f"prompt={text}"]).prompt == text


@settings(max_examples=15, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    | st.text(alphabet="\\'\"${}()[], =", max_size=12)
)
def test_random_prompt_is_used_as_typed(text):
    assert parse_config("sample", "", [f"prompt={text}"]).prompt == text


def test_names_and_paths_are_used_as_typed_except_null(workdir):
    (workdir / "a, (b)=1e5.txt").write_text("text " * 300)
    config = parse_config("train", "", ["name=1e5", "data=text", "data.path=a, (b)=1e5.txt"])
    assert (config.name, config.data.path) == ("1e5", "a, (b)=1e5.txt")
    assert parse_config("train", "", ["name=null"]).name is None


@pytest.mark.parametrize("config_type", [*SCRIPTS.values(), *OPTIMIZER_CONFIGS.values()])
def test_every_config_has_defaults_that_are_valid(config_type, workdir):
    config = config_type()
    if config_type is CompareConfig:
        config.folders = ["runs/a"]
    check(config)

"""Composing configs: every choice, every kind of invalid word or YAML file, and free text."""

import re
from dataclasses import replace
from math import nan
from operator import attrgetter

import pytest
from data_helpers import write_file
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from common.errors import UserError
from common.settings import check, list_keys
from configs.cli import parse_config
from configs.compose import UserFolder, compose_config, hydra_initialized, list_choices, parse_word
from configs.schema import SCRIPTS
from data import DataConfig
from training.config import RunConfig

ALL = [
    (group, choice)
    for group in ("model", "attention", "data", "tokenizer", "optimizer", "schedule", "experiment")
    for choice in list_choices(group)
    if choice != "mix"  # it needs sources
]


def error_message(capsys, *overrides, script="train") -> str:
    """The one sentence that an invalid command line prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        parse_config(script, "", list(overrides))
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1), err
    assert "Traceback" not in err
    return err.strip()


@pytest.mark.parametrize(("group", "choice"), ALL)
def test_every_choice_composes(group, choice, workdir):
    required = {"run": ["tokenizer.run=a"], "larger_model": ["data.path=text.txt"]}.get(choice, [])
    required += ["data.path=text.txt"] * (group == "data" and choice != "python_stdlib")
    config = parse_config("train", "", [f"{group}={choice}", *required])
    if group != "experiment":
        assert choice in (getattr(getattr(config, group), key, None) for key in ("name", "backend"))


def test_data_path_replaces_the_name_of_the_default_data(workdir):
    assert parse_config("train", "", ["data.path=text.txt"]).data == DataConfig(path="text.txt")


NO_SETTINGS = ["+train.foo=1", "++seed=1", "~seed", "steps"]
HYDRA = ["hydra.run.dir=x", "hydra/launcher=x"]
NO_LAUNCHERS = [
    "hydra/launcher=nowhere",
    "hydra.launcher._target_=os.system",
    "hydra.sweeper.params=x",
]
NO_LAUNCHERS += ["hydra.launcher.x={_target_:os.system}"]
SWEEP = ["-m", "seed=1,2"]
TWO_LONG_NAMES = [f"{key}={'a' * 99},{'b' * 99}" for key in ("model.name", "data.name")]
INVALID = [
    *(([word], "is not a setting of the form key=value") for word in NO_SETTINGS),
    *(([word], f"{word.split('=')[0]}: there is no such key") for word in HYDRA),
    *(([*SWEEP, word], f"{word.split('=')[0]}: there is no such key") for word in NO_LAUNCHERS),
    (["--data.path=text.txt"], "is not a setting of the form key=value (did you mean data.path?)"),
    (["--learning_rate=1"], "is not a setting of the form key=value (did you mean optimizer.lr?)"),
    # keys and choices
    (["steps=3"], "steps: there is no such key (did you mean train.steps?)"),
    (["modle=gpt2"], "modle: there is no such key (did you mean model?)"),
    (["optimizer.learning_rate=1"], "optimizer.learning_rate: there is no such key"),
    (
        ["optimizer=adamw", "optimizer.momentum=0.9"],
        "optimizer.momentum is a key of another optimizer",
    ),
    (
        ["model=gpt3"],
        "model=gpt3: there is no such choice (did you mean gpt2?); set gpt2, llama, modern, nano",
    ),
    (
        ["experiment=null"],
        "experiment=null: there is no such choice; set finetune_gpt2, gpt2_124m, larger_model",
    ),
    (["preset=2MB"], "preset=2MB is unknown; set auto, 20kB"),
    (["parallel=zero"], "parallel=zero is unknown; set one of ddp, fsdp"),
    (["train.activation_checkpointing=all"], "set one of none, block, attention"),
    (
        ["schedule=cosine", "schedule.name=cosin"],
        "schedule.name=cosin is unknown; set one of cosine, linear, wsd",
    ),
    (["train.init_from=a"], "train.init_from=a is unknown; set one of run:NAME, hf:NAME, gpt2, "),
    (["optimizer.name=adamw"], "optimizer.name=adamw selects no optimizer; set optimizer=adamw or"),
    # words that cannot be parsed, and several values
    (["train.steps=1,000"], "'train.steps=1,000' must have one value"),
    (["-m", "data.path=a,b"], "and data.path=[A],[B] for paths and names"),
    (
        ["seed=1,2"],
        "'seed=1,2' must have one value; set it, or a list as in [A,B]; train.py -m takes",
    ),
    (["train.steps=f("], "put its value in two pairs of quotes: 'train.steps=\"VALUE\"'"),
    (["seed='1\n"], "cannot be parsed; put its value in two pairs of quotes: 'seed=\"VALUE\"'"),
    (["-m", "seed=1"], "-m needs several values for at least one key; set seed=1,2,3, for example"),
    (
        ["-m", "attention=naive,falsh"],
        "attention=falsh: there is no such choice (did you mean flash",
    ),
    ([*SWEEP, "model.n_embd=96,97"], "model.n_embd=97 must be a multiple of model.n_head=2"),
    ([*SWEEP, "name=a/b"], "name='a/b' is not a folder name"),
    ([*SWEEP, "hydra.launcher.partition=gpu"], "hydra.launcher.partition: there is no such key"),
    (["-m", "seed=1,2,1"], "seed=1 would be trained twice or is too long; list each value once"),
    ([*SWEEP, *TWO_LONG_NAMES], "is too long; list"),
    ([*SWEEP, "--cfg", "job"], "--cfg and plan=true describe one run; remove -m"),
    ([*SWEEP, "plan=true"], "--cfg and plan=true describe one run; remove -m"),
    # types
    (["train.steps=many"], "train.steps=many must be a whole number or null"),
    (["model.n_layer=null"], "model.n_layer=null must be a whole number"),
    (["compile=perhaps"], "compile=perhaps must be true or false or null"),
    (["optimizer=adamw", "optimizer.lr=fast"], "optimizer.lr=fast must be a number"),
    (["optimizer.betas=0.9"], "optimizer.betas=0.9 must be a list such as [A,B]"),
    (["train=5"], "train=5 must be a section; set its keys, such as train.steps"),
    (["data.mix=5"], "data.mix=5 must be a section of a YAML file"),
    (["data.mix=[a]"], "data.mix=[a] must be a section of a YAML file"),
    (["train.micro_batch_size=large"], "train.micro_batch_size=large must be a whole number"),
    (["data.path=[]"], "data.path=[] has no file to read"),
    (
        ["wandb.project=[a]"],
        "must be text; put its value in two pairs of quotes: 'wandb.project=\"VALUE\"'",
    ),
    (["wandb.tags=5"], "wandb.tags=5 must be a list such as [A,B]"),
    (
        ["train.batch_size=010"],
        "train.batch_size=010 has a leading zero, as octal numbers do; remove it",
    ),
    (["optimizer.betas=[0.9,00.95]"], "optimizer.betas=[0.9,00.95] has a leading zero"),
    (["train.steps=1:30"], "train.steps=1:30 must be a whole number or null"),
    (["model.window=0064"], "model.window=0064 must be a number of tokens"),
    (["-m", "train.batch_size=8,010"], "train.batch_size=010 has a leading zero"),
    # values
    (
        ["model.n_head=6", "model.n_embd=96", "model.n_kv_head=4"],
        "must divide model.n_head=6; set one of 1, 2, 3, 6",
    ),
    (["model.n_layer=0"], "model.n_layer=0 must be at least 1 and at most 10,000"),
    (["train.steps=null"], "train.steps=null needs train.minutes"),
    (["data=text"], "data.path=null is missing; set data.path"),
    (["data=mix"], "data.mix={} has no sources; list them in a YAML file"),
    (["data.repo=a/b", "data.stream=true"], "data.repo=a/b works only with data=hub"),
    (["data.val_fraction=1"], "data.val_fraction=1.0 must be above 0 and below 1"),
    (["tokenizer=char", "tokenizer.vocab_size=500"], "set null"),
    (["name=a/b"], "name='a/b' is not a folder name"),
    (["name=" + 300 * "a"], "is not a folder name"),
    (["name=sweeps"], "name=sweeps is reserved"),
    (["seed=-1"], "seed=-1 must be at least 0"),
    (["optimizer.weight_decay=100"], "set less than 1 / optimizer.lr"),
    (
        ["optimizer.ngram_weight_decay=2", "optimizer.embedding_lr=0.5"],
        "set less than 1 / optimizer.embedding_lr",
    ),
    (["plan=true", "flops_per_second=-1e9"], "flops_per_second=-1000000000.0 must be above 0"),
    (["flops_per_second=1e12"], "flops_per_second=1000000000000.0 needs plan=true"),
    (["world_size=4"], "world_size=4 needs plan=true"),
    (["optimizer.betas=[0.9]"], "optimizer.betas=[0.9] must be two numbers"),
    (["optimizer.lr=inf"], "optimizer.lr=inf must be above 0 and finite"),
]
INVALID_OF_OTHER_SCRIPTS = [
    ("bench", ["attention=flash"], "attention: there is no such key"),
    ("bench", ["block_sizes=64"], "block_sizes=64 must be a list such as [A,B]"),
    ("bench", ["block_sizes=[64,a]"], "block_sizes=[64,a] must be a whole number"),
    (
        "bench",
        ["block_sizes=[1000000000]"],
        "block_sizes=1000000000 must be at least 1 and at most",
    ),
    ("compare", ["out=", "a"], "'out=' must have one value; set it"),
    ("compare", ["a", "ouy=there"], "ouy: there is no such key (did you mean out?)"),
    ("prepare", ["data.text_column="], "'data.text_column=' must have one value; set it"),
    ("prepare", ["experiment=gpt2_124m"], "experiment: there is no such key"),
    ("sample", ["model.n_layer=2"], "there is no such key"),
    ("sample", ["stop=[]"], "stop=[] must be a string that is not empty, or a list of them"),
    (
        "sample",
        ['stop=["a", null]'],
        "stop=[a,null] must be a string that is not empty, or a list of them",
    ),
    (
        "sample",
        ["interactive=true", "num_samples=5"],
        "num_samples=5 needs interactive=false; set one of them",
    ),
    ("sample", ["max_new_tokens=0"], "max_new_tokens=0 generates nothing; set a larger number"),
    ("sample", ["checkpoint=first"], "checkpoint=first is unknown; set one of best, last, step-N"),
    ("sample", ["prompt=a", "prompt_file=b"], "set one of them"),
]


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [*(("train", *case) for case in INVALID), *INVALID_OF_OTHER_SCRIPTS],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_words_are_refused_and_leave_no_files(
    script, words, message, workdir, capsys, monkeypatch
):
    monkeypatch.setattr("sys.argv", [f"{script}.py"])
    before = sorted(workdir.rglob("*"))
    assert message in error_message(capsys, *words, script=script)
    assert sorted(workdir.rglob("*")) == before


def with_value(config, key, value):
    """The config with another value of `key`, which may be in a section."""
    section, _, leaf = key.rpartition(".")
    if not section:
        return replace(config, **{leaf: value})
    return with_value(config, section, replace(attrgetter(section)(config), **{leaf: value}))


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("device", "gpu", "cuda"),
        ("device", "cuda:0", "cuda"),
        ("dtype", "fp16", "float16"),
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "half", "float16"),
        ("model.norm", "rms_norm", "rmsnorm"),
        ("wandb.mode", "offlin", "offline"),
    ],
)
def test_wrong_choices_get_a_suggestion(key, value, hint):
    with pytest.raises(
        UserError, match=rf"{key}={value} is unknown \(did you mean {hint}\?\); set one of"
    ):
        check(with_value(RunConfig(), key, value))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_limits(script, workdir):
    """Otherwise a huge value hangs, or fails with an error of PyTorch's C++ code."""
    words = {key: ["data.path=text.txt"] for key in ("train", "prepare", "eval")} | {
        "compare": ["a"]
    }
    config = parse_config(script, "", words.get(script, []))
    types = dict(list_keys(type(config)))
    if "optimizer" in types:
        types |= dict(list_keys(type(config.optimizer), "optimizer."))
    for key, annotation in types.items():
        for value in [10**30] * (annotation in (int, int | None)) + [nan] * (
            annotation in (float, float | None)
        ):
            with pytest.raises(UserError, match=f"{key}={value}"):
                check(with_value(config, key, value))


WRONG_YAML = [
    ("train: {stesp: 3}", r"experiment/mine.yaml: train.stesp: .* \(did you mean train.steps\?"),
    ("trian: {steps: 3}", r"trian: there is no such key \(did you mean train\?\)"),
    ("model: {_target_: os.system}", r"model._target_: there is no such key"),
    (
        "model: {window: {_target_: os.system}}",
        r"model.window={_target_:os.system} must be a number",
    ),
    ("train: [", r"own/experiment/mine.yaml cannot be read .*line .*; write valid YAML in UTF-8"),
    ("train: {steps: '${'}", r"train.steps: .* '\${'"),
    (
        "train: 5",
        r"experiment/mine.yaml: train must be a section; set its keys, such as train.steps",
    ),
    ("eval: {sample: [1]}", r"experiment/mine.yaml: eval.sample must be a section; set its keys"),
    ("optimizer: {betas: [a]}", r"experiment/mine.yaml: optimizer.betas\[0\] must be a number"),
    ("train: {steps: many}", r"experiment/mine.yaml: train.steps must be a whole number or null"),
    ("train.steps: 5", r"experiment/mine.yaml: train.steps: write train: {steps: VALUE}"),
    (
        "eval-every: 5",
        r"experiment/mine.yaml: eval-every: there is no such key \(did you mean eval.every\?",
    ),
    (
        "train: {batch-size: 4}",
        r"train.batch-size: there is no such key \(did you mean train.batch_size\?",
    ),
    (
        "tokenizer: {vocab_size: 0400}",
        r"experiment/mine.yaml: tokenizer.vocab_size=0400 has a leading zero, .*; remove it",
    ),
    (
        "optimizer: {betas: [0.9, 00.95]}",
        r"experiment/mine.yaml: optimizer.betas=\[0.9,00.95\] has a leading zero",
    ),
    ("model: {window: [064]}", r"model.window=\[064\] must be a number of tokens"),
    ("train: {steps: 1:30}", r"experiment/mine.yaml: train.steps must be a whole number or null"),
    ("train: {micro_batch_size: 1:30}", r"train.micro_batch_size must be a whole number"),
    (
        "wandb: {project: [a]}",
        r"experiment/mine.yaml: wandb.project must be text; put it in quotes",
    ),
    (
        "seed: 1\nseed: 2",
        r"experiment/mine.yaml cannot be read .*duplicate key seed.*; write valid YAML",
    ),
    (
        "# \udce9t",
        r"experiment/mine.yaml cannot be read .*invalid continuation byte .*; write valid YAML in UTF-8",
    ),
    ("5", r"experiment/mine.yaml cannot be read .*its content must be a section"),
    ("[1]", r"experiment/mine.yaml cannot be read .*its content must be a section"),
    ("hydra: {launcher: {_target_: os.system}}", r"experiment/mine.yaml sets hydra, .*; remove it"),
    (
        "# @package hydra.launcher\n_target_: os.system",
        r"experiment/mine.yaml sets hydra, .*; remove it",
    ),
    (
        "defaults: [{override /hydra/launcher: basic}]",
        r"experiment/mine.yaml sets hydra, .*; remove it",
    ),
    ("defaults: [mine]", r"a YAML file contains itself"),
    ("train: &a {steps: *a}", r"a YAML file contains itself"),
    ("kernels: [math]", r"attention\.backend is missing; set it in the YAML file"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_YAML, ids=[w[0] for w in WRONG_YAML])
def test_invalid_yaml_files_are_refused(content, message, workdir, capsys):
    group = "attention" if message.startswith("attention") else "experiment"
    write_file(f"own/{group}/mine.yaml", f"{content}\n".encode(errors="surrogateescape"))
    assert re.search(message, error_message(capsys, "--config-dir", "own", f"{group}=mine"))


@pytest.mark.parametrize(
    "header", ["", "# @package _global_\n", "# mine\n# @package _global_\n", "\n# mine\n"]
)
def test_words_win_over_an_experiment_of_the_user(header, workdir):
    write_file("own/experiment/mine.yaml", f"{header}train: {{steps: 7, batch_size: 3}}\n")
    config = parse_config(
        "train", "", ["--config-dir", "own", "experiment=mine", "train.batch_size=5"]
    )
    assert (config.train.steps, config.train.batch_size) == (7, 5)


OTHER_TYPES = ["null", "true", "1e5", "007", "[1]", "{a: b}", "${seed}", "\\${seed}", ""]
SPECIAL_CHARACTERS = [
    "été",
    "def f(x):",
    "it's",
    'say "hi"',
    "a=b",
    "Hello, world",
    "#no comment",
    "~a",
]
SPECIAL_CHARACTERS += ["back\\slash\\", "\\'", "two\nlines", "\t", " x "]


@pytest.mark.parametrize("text", OTHER_TYPES + SPECIAL_CHARACTERS)
def test_prompt_is_used_as_typed(text):
    assert parse_config("sample", "", [f"prompt={text}"]).prompt == text


@settings(max_examples=15, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    | st.text(alphabet="\\'\"${}()[], =", max_size=12)
)
def test_random_prompt_is_used_as_typed(text):
    assert parse_config("sample", "", [f"prompt={text}"]).prompt == text


@pytest.mark.parametrize(
    "separator", ["[SEP]", "[a, b]", "#", "\"'", r"\n", "1e3", "a,b", "{x}", "${seed}"]
)
def test_separator_is_used_as_typed(workdir, separator):
    assert (
        parse_config(
            "train", "", ["data.path=text.txt", f"data.separator={separator}"]
        ).data.separator
        == separator
    )


def test_names_and_paths_are_used_as_typed_except_null(workdir):
    (workdir / "a, (b)=1e5.txt").write_text("text " * 300, encoding="utf-8")
    config = parse_config("train", "", ["name=1e5", "data=text", "data.path=a, (b)=1e5.txt"])
    assert (config.name, config.data.path) == ("1e5", "a, (b)=1e5.txt")
    assert parse_config("train", "", ["name=null"]).name is None


TEXT_KEYS = ["name", "wandb.project", "data.revision", "data.mix.a.revision"]
TEXT_LISTS = ["wandb.tags", "data.path", "eval.sample.stop"]
LIKE_OTHER_TYPES = [
    "no",
    "on",
    "true",
    "False",
    "007",
    "1e3",
    "1.10",
    "-.5",
    "0x1F",
    "1:30",
    "12e45",
    "1_000",
    "+1",
]
LIKE_OTHER_TYPES += ["inf", "NaN", "2020-01-01", "08", "1 2"]
plain_texts = st.sampled_from(LIKE_OTHER_TYPES) | st.text(
    alphabet="0123456789abefinotruxy._+", min_size=1, max_size=5
)
plain_texts = plain_texts.filter(lambda text: text.lower() != "null")


@settings(max_examples=30, deadline=None)
@given(key=st.sampled_from(TEXT_KEYS + TEXT_LISTS), text=plain_texts)
@example("wandb.project", "1e3")
@example("wandb.tags", "1.10")
@example("data.revision", "12e45")
@example("data.path", "1e3")
def test_text_keys_get_the_typed_characters(key, text):
    value = f"[{text}]" if key in TEXT_LISTS else text
    with hydra_initialized("train", None):
        parsed = parse_word("train", f"{key}={value}").value()
    assert parsed == ([text] if key in TEXT_LISTS else text)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(plain_texts, min_size=5, max_size=5))
@example(texts=["no", "1e3", "007", "1.10", "1:30"])
def test_text_keys_of_a_yaml_file_get_the_typed_characters(texts, workdir):
    name, project, revision, first, second = texts
    content = f"name: {name}\nwandb: {{project: {project}, tags: [{first}, {second}]}}\ndata: {{revision: {revision}}}"
    write_file("own/experiment/mine.yaml", content)
    values = UserFolder("user", "user://own").load_config("experiment/mine").config
    config = OmegaConf.merge(OmegaConf.structured(RunConfig), values)
    assert [config.name, config.wandb.project, config.data.revision, *config.wandb.tags] == texts


def test_numbers_and_switches_of_a_yaml_file_are_converted(workdir):
    lines = [
        "compile: no",
        "optimizer: {lr: 1e-3, betas: [.9, 0.950]}",
        "train: {steps: 1_000, micro_batch_size: 4}",
    ]
    lines += ["model: {window: [64, null]}", "eval: {every: 5}", "data: {path: text.txt}"]
    write_file("own/experiment/mine.yaml", "\n".join(lines))
    write_file("text.txt", "text")
    config = parse_config("train", "", ["--config-dir", "own", "experiment=mine"])
    assert (config.compile, config.optimizer.lr, config.optimizer.betas) == (
        False,
        1e-3,
        [0.9, 0.95],
    )
    assert (config.train.steps, config.train.micro_batch_size, config.model.window) == (
        1000,
        4,
        [64, None],
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("wandb.tags", "[a, 1.10 ,'1,2,3']", ["a", "1.10", "1,2,3"]),
        ("wandb.tags", r"""['it\'s, 1', "2"]""", ["it's, 1", "2"]),
        ("wandb.tags", "['a(b)',1.10]", ["a(b)", "1.10"]),
        ("wandb.project", "'1e3'", "1e3"),
        ("wandb.project", "null", None),
        ("wandb.project", "run 1e3", "run 1e3"),
        ("optimizer.betas", "[0.9,1e-3]", [0.9, 1e-3]),
        ("model.window", "[64,null]", [64, None]),
    ],
)
def test_words_keep_their_types(key, value, expected):
    with hydra_initialized("train", None):
        assert parse_word("train", f"{key}={value}").value() == expected


def test_text_of_a_mix_is_used_as_typed(workdir):
    write_file(
        "own/data/mine.yaml",
        "defaults: [mix, text@mix.a, _self_]\nmix: {a: {path: 1e3, split: 1.10}}",
    )
    write_file("1e3", "text")
    words = ["data=mine", "data.mix.a.prompt_column=007", "data.mix.a.text_column=12e45"]
    source = compose_config("prepare", words, "own").data.mix["a"]
    assert (source.path, source.split) == ("1e3", "1.10")
    assert (source.prompt_column, source.text_column) == ("007", "12e45")

"""sample.py: on a terminal, for many prompts, in Python, for the loss of documents, and for questions."""

import io
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TEXT

import sample as script
from common.errors import UserError
from configs.cli import parse_config, run_main
from model.generation.prompts import open_output, read_prompt
from sample import load, main, stream

RUN = ["run=a", "max_new_tokens=30"]
SAFETY_TIMEOUT_S = 600


def read_jsonl(file):
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").split("\n")[:-1]]


def run(*overrides):
    """Run sample.py in this process -> exit code."""
    return run_main(main, parse_config("sample", "", list(overrides)))


def refusal(capsys, *overrides):
    """Run a command that must be refused -> its message."""
    capsys.readouterr()
    try:
        code = run(*overrides)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    (message,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("runs/")]
    return message


# Samples


def test_sample_is_printed_as_it_is_generated(trained, monkeypatch, capsys):
    printed = []

    class RecordingOutput(io.StringIO):
        def write(self, text):
            printed.append(text)
            return super().write(text)

    monkeypatch.setattr("sys.stdout", RecordingOutput())
    assert run(*RUN, "prompt=The 1", "temperature=0") == 0
    printed = [text for text in printed if text]
    assert printed[0] == "The 1" and printed[-1] == "\n" and len(printed) == 32, "one character at a time"
    err = capsys.readouterr().err
    assert "30 tokens in " in err and " tokens/s\n" in err


def test_samples_of_one_prompt_equal_single_samples_with_their_seeds(trained, sample, capsys):
    alone = [sample(*RUN, "prompt=The ", f"seed={seed}") for seed in (5, 6, 7)]
    capsys.readouterr()
    assert run(*RUN, "prompt=The ", "seed=5", "num_samples=3", "batch_size=2") == 0
    batch = capsys.readouterr()
    assert batch.out == "".join(alone)
    headers = [line for line in batch.err.splitlines() if line.startswith("---")]
    assert headers == ["--- 1 ---", "--- 2 ---", "--- 3 ---"]


def test_sample_ends_before_a_stop_string(trained, sample):
    full = sample(*RUN, "prompt=The ")
    stop = full[12:15]
    stopped = full[: full.index(stop, 4)] + "\n"
    assert sample(*RUN, "prompt=The ", f"stop={stop}") == stopped
    assert sample(*RUN, "prompt=The ", f"stop={json.dumps(['Ω', stop])}") == stopped
    assert sample(*RUN, "prompt=The ", f"stop=[{stop}").startswith("The "), "a string that looks like a list"


def test_prompt_and_stop_understand_the_same_escapes(train, sample, workdir):
    """Escapes work on the command line and in lines of a file. prompt_file, JSON and Python strings are exact."""
    assert train("name=a", "tokenizer=byte") == 0
    assert sample(*RUN, r"prompt=a\nb\\n\t").startswith("a\nb\\n\t")
    (workdir / "p.txt").write_text("a\\nb\n")
    sample(*RUN, "prompts=p.txt", "out=o.jsonl")
    assert read_jsonl("o.jsonl")[0]["prompt"] == "a\nb"
    (workdir / "p.jsonl").write_text(json.dumps({"prompt": r"a\nb"}))
    sample(*RUN, "prompts=p.jsonl", "out=o2.jsonl")
    assert read_jsonl("o2.jsonl")[0]["prompt"] == r"a\nb"
    assert sample(*RUN, "prompt_file=p.txt").startswith("a\\nb\n")
    model, tokenizer = load("a")
    exact = "".join(stream(model, tokenizer, r"a\nb", max_new_tokens=30))
    assert sample(*RUN, r"prompt=a\\nb") == r"a\nb" + exact + "\n"


def test_stop_of_training_samples_understands_escapes(train, workdir):
    settings = ["eval.sample.temperature=1", "eval.sample.max_new_tokens=200", "train.steps=4", "eval.every=4"]
    assert train("name=a", *settings) == 0
    assert train("name=b", *settings, r"eval.sample.stop=\n") == 0
    full, stopped = (read_jsonl(f"runs/{name}/metrics.jsonl")[-1]["sample"] for name in "ab")
    assert stopped == full[: full.index("\n")]


def test_run_is_found_by_its_name_or_folder(trained, sample, workdir):
    by_name = sample("run=a", "max_new_tokens=5")
    for path in ("runs/a", f"{workdir}/runs/a", "./runs/a/"):
        assert sample(f"run={path}", "max_new_tokens=5") == by_name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_low_precision_weights_change_the_loss_only_slightly(train, sample, dtype):
    if dtype == "int8" and "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("NOT RUN: int8 needs an x86 CPU")
    assert train("name=a", "train.steps=30") == 0
    losses, tolerance = {}, {"bfloat16": 1e-2, "float16": 1e-3, "int8": 3e-2}[dtype]
    for name in ("float32", dtype):
        sample("run=a", "loss=true", "data.path=text.txt", f"dtype={name}", f"out={name}.jsonl")
        losses[name] = read_jsonl(f"{name}.jsonl")[0]["loss"]
    assert losses["float32"] != losses[dtype]
    assert losses["float32"] == pytest.approx(losses[dtype], abs=tolerance)
    assert sample(*RUN, f"dtype={dtype}", "prompt=The").startswith("The")


# Many prompts


def test_samples_of_many_prompts_are_written_in_order(trained, sample, workdir, capsys):
    prompts = ["The 1", "T", "The 22nd line says", "line", "says 1"]
    (workdir / "p.txt").write_text("\n\n".join(prompts) + "\n")
    (workdir / "p.jsonl").write_text("\n".join(json.dumps({"prompt": prompt, "id": 1}) for prompt in prompts))
    settings = [*RUN, "stop=.", "num_samples=2", "batch_size=3", "seed=4"]
    for file in ("p.txt", "p.jsonl"):
        sample(*settings, f"prompts={file}", f"out={file}.out")
    assert Path("p.txt.out").read_text() == Path("p.jsonl.out").read_text()
    assert sample(*settings, "prompts=p.txt") == Path("p.txt.out").read_text(), "without out: on stdout"
    lines = read_jsonl("p.txt.out")
    assert [line["prompt"] for line in lines] == [prompt for prompt in prompts for _ in range(2)]
    assert [line["seed"] for line in lines] == list(range(4, 14))
    assert {line["ended"] for line in lines} <= {"stop", "length"}
    for line in lines:
        alone = sample(*RUN, "stop=.", f"prompt={line['prompt']}", f"seed={line['seed']}")
        assert alone == line["prompt"] + line["text"] + "\n"
        assert line["tokens"] == 30 or line["ended"] == "stop"


def test_seeds_wrap_around(trained, sample, workdir):
    (workdir / "p.txt").write_text("The\n")
    sample(*RUN, "prompts=p.txt", "num_samples=2", f"seed={2**32 - 1}", "out=o.jsonl")
    assert [line["seed"] for line in read_jsonl("o.jsonl")] == [2**32 - 1, 0]


def test_prompt_files_are_split_at_line_ends_only(train, sample, workdir):
    """Windows line ends and a byte order mark are not part of a prompt, but form feeds and U+2028 are."""
    (workdir / "text.txt").write_bytes((TEXT + "\x0c\u2028\ufeff\r\n").encode())
    assert train("name=a", "tokenizer=byte") == 0
    (workdir / "p.txt").write_bytes("\ufeffThe\r\nsays\x0c1\u20282\r\n".encode())
    sample(*RUN, "prompts=p.txt", "out=o.jsonl")
    assert [line["prompt"] for line in read_jsonl("o.jsonl")] == ["The", "says\x0c1\u20282"]
    (workdir / "p.JSONL").write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False), encoding="utf-8")
    sample(*RUN, "prompts=p.JSONL", "out=o2.jsonl")
    assert read_jsonl("o2.jsonl")[0]["prompt"] == "a\u2028b"
    (workdir / "crlf.txt").write_bytes(b"The\r\n")
    assert read_prompt("crlf.txt") == "The\r\n", "prompt_file is exact"


def test_output_file_is_never_overwritten_and_removed_if_empty(workdir):
    (workdir / "o.jsonl").touch()
    with pytest.raises(FileExistsError), open_output("o.jsonl"):
        pass
    assert (workdir / "o.jsonl").exists()
    with pytest.raises(ZeroDivisionError), open_output("new.jsonl"):
        raise ZeroDivisionError
    assert not (workdir / "new.jsonl").exists()


def test_interrupted_batch_is_continued_by_the_same_command(trained, workdir, monkeypatch, capsys):
    """Of three samples, the second is interrupted; the first and the third are finished."""
    (workdir / "p.txt").write_text("The\nThe 1\nThe 2\n")
    settings = [*RUN, "prompts=p.txt"]
    assert run(*settings, "out=full.jsonl") == 0
    generate = script.generate

    def interrupted(*args):
        for chunk in generate(*args):
            if chunk.index != 1 or chunk.n_tokens < 30:
                yield chunk
        shutil.copy("o.jsonl", "killed.jsonl")  # the file after kill -9
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "generate", interrupted)
    capsys.readouterr()
    assert run(*settings, "out=o.jsonl") == 75
    assert "interrupted; 1 of 3 samples are in o.jsonl; the same command continues" in capsys.readouterr().err
    assert [line["prompt"] for line in read_jsonl("o.jsonl")] == ["The"]
    monkeypatch.setattr(script, "generate", generate)
    for name in ("o.jsonl", "killed.jsonl"):
        assert run(*settings, f"out={name}") == 0
        assert "\n3 samples, 60 tokens in " in capsys.readouterr().err
        assert Path(name).read_bytes() == Path("full.jsonl").read_bytes()


def test_batch_continues_after_the_last_complete_line(trained, workdir, capsys):
    (workdir / "p.txt").write_text("è 1\nThe 1\nT\n")
    settings = [*RUN, "prompts=p.txt", "num_samples=2", "batch_size=4", "stop=.", "seed=3", "out=o.jsonl"]
    assert run(*settings) == 0
    content = Path("o.jsonl").read_bytes()
    second = content.index(b"\n") + 1
    sizes = (0, 5, 13, 17, 25, second - 1, second, second + 13, len(content) - 30, len(content) - 1)
    for start in [*(content[:size] for size in sizes), content[: second - 5] + b"x" * len(content)]:
        Path("o.jsonl").write_bytes(start)
        assert run(*settings) == 0
        assert Path("o.jsonl").read_bytes() == content, start
    capsys.readouterr()
    assert run(*settings) == 0
    assert "o.jsonl is complete: 6 samples\n" in capsys.readouterr().err
    assert Path("o.jsonl").read_bytes() == content


def test_output_file_with_other_content_is_refused_and_not_changed(trained, workdir, capsys):
    (workdir / "p.jsonl").write_text('{"prompt": "The"}\n{"prompt": "T"}')
    (workdir / "one.jsonl").write_text('{"prompt": "The"}')
    (workdir / "short.txt").write_text("The\n")
    assert run(*RUN, "prompts=p.jsonl", "out=o.jsonl") == 0
    others = [
        ["prompts=p.jsonl", "out=o.jsonl", "seed=3"],
        ["prompts=p.jsonl", "out=o.jsonl", "num_samples=2"],
        ["prompts=p.jsonl", "out=o.jsonl", "temperature=0.5"],
        ["prompts=p.jsonl", "out=o.jsonl", "checkpoint=last"],
        ["prompts=short.txt", "out=o.jsonl"],
        ["prompts=p.jsonl", "out=p.jsonl"],
        ["prompts=one.jsonl", "out=one.jsonl"],
        ["prompts=p.jsonl", "out=text.txt"],
        ["loss=true", "data.path=text.txt", "out=o.jsonl"],
    ]
    contents = {path: path.read_bytes() for path in workdir.iterdir() if path.is_file()}
    for settings in others:
        message = refusal(capsys, *RUN[:1], *settings)
        assert re.search(r"out=[\w.]+ exists.*; set a new file$", message), settings
    assert {path: path.read_bytes() for path in contents} == contents


# Interactive


def test_typed_lines_are_continued(trained, sample, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The 1\n\nUnknown Ü\nline\n"))
    out = sample(*RUN, "interactive=true", "seed=3")
    first = sample(*RUN, "prompt=The 1", "seed=3")
    assert out.startswith(first)
    second = sample(*RUN, f"prompt={first[:-1]}", "seed=4")
    assert out.startswith(first + second.removeprefix(first[:-1])), "an empty line continues the sample"
    assert "line" + out.rpartition("\nline")[2] == sample(*RUN, "prompt=line", "seed=6")


def test_ctrl_c_stops_the_sample_and_ctrl_d_quits(trained):
    """On a terminal: a long sample, Ctrl-C, another long sample, Ctrl-C, Ctrl-D."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, ROOT / "sample.py", "run=a", "interactive=true", "max_new_tokens=100000", "seed=1"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    os.close(slave)
    killer = threading.Timer(SAFETY_TIMEOUT_S, process.kill)
    killer.start()
    printed = b""

    def read_until(text, count):
        nonlocal printed
        while printed.count(text) < count:
            printed += os.read(master, 4096)

    try:
        read_until(b"> ", 1)
        for number in (1, 2):
            os.write(master, b"The 1\n")
            length = len(printed)
            while len(printed) < length + 300:
                printed += os.read(master, 4096)
            os.killpg(process.pid, signal.SIGINT)
            read_until(b"> ", number + 1)
        while process.poll() is None:
            os.write(master, b"\x04")
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
        assert process.returncode == 0
        assert b"Traceback" not in printed
    finally:
        killer.cancel()
        process.kill()
        os.close(master)


# In Python


def test_load_and_stream_give_the_same_sample_as_the_command(trained, sample):
    model, tokenizer = load("a")
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    chunks = list(stream(model, tokenizer, "The 1", seed=3, max_new_tokens=30))
    assert len(chunks) == 30
    assert "The 1" + "".join(chunks) + "\n" == sample(*RUN, "prompt=The 1", "seed=3")
    text = "".join(stream(model, tokenizer, "The 1", stop=["a", "e", " "], temperature=0.0))
    assert not set(text) & set("ae ")
    assert "${x}" not in "".join(stream(model, tokenizer, "The", stop="${x}"))
    assert model(torch.tensor([tokenizer.encode("The")])).shape == (1, 3, tokenizer.n_vocab)


def test_stop_strings_in_python_are_exact(trained):
    model, tokenizer = load("a")
    sample = "".join(stream(model, tokenizer, "The", max_new_tokens=400))
    assert "".join(stream(model, tokenizer, "The", max_new_tokens=400, stop="\n")) == sample[: sample.index("\n")]
    assert "".join(stream(model, tokenizer, "The", max_new_tokens=400, stop=r"\n")) == sample, "not a newline"


def test_python_functions_refuse_invalid_arguments(trained):
    model, tokenizer = load("a")
    for settings, message in [
        (dict(temperature="hot"), "temperature"),
        (dict(temprature=1), "stream has no argument temprature"),
        (dict(top_p=3.0), "top_p=3.0 must be above 0"),
        (dict(stop=("a", 3)), "must be a string that is not empty"),
        (dict(prompt=5), "prompt must be a string, not int"),
    ]:
        with pytest.raises(UserError, match=message):
            next(stream(model, tokenizer, **settings))
    with pytest.raises(UserError, match="load has no argument num_samples"):
        load("a", num_samples=2)
    with pytest.raises(UserError, match="run=b has no checkpoint"):
        load("b")
    with pytest.raises(UserError, match="did you mean naive"):
        load("a", attention="naif")


# The loss of documents


@pytest.mark.parametrize("logits_per_forward", [1, 2**25])
def test_loss_of_the_validation_text_equals_its_evaluation(train, sample, workdir, monkeypatch, logits_per_forward):
    """With one forward pass or many. The reference is the run's last evaluation, on the complete validation split."""
    monkeypatch.setattr("model.generation.perplexity.LOGITS_PER_FORWARD", logits_per_forward)
    assert train("name=a", "eval.batches=null", "data.val_fraction=0.1") == 0
    evaluated = [row for row in read_jsonl("runs/a/metrics.jsonl") if "val/loss" in row][-1]
    (workdir / "val.txt").write_text(TEXT[len(TEXT) - round(len(TEXT) * 0.1) :], encoding="utf-8")
    out = sample("run=a", "checkpoint=last", "loss=true", "data.path=val.txt", "out=o.jsonl")
    (row,) = read_jsonl("o.jsonl")
    assert row["tokens"] == len(TEXT) - round(len(TEXT) * 0.9) - 1
    assert row["loss"] == pytest.approx(evaluated["val/loss"], abs=2e-5)
    assert row["bits_per_byte"] == pytest.approx(evaluated["val/bpb"], abs=2e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert f"{row['loss']:.4f}" in out and f"{row['bits_per_byte']:.4f}" in out


def test_loss_is_reported_for_each_document_and_for_all(train, sample, workdir):
    """The reference is one window per document, after an end-of-text token."""
    documents = [f"line {i} says {i * i}" for i in range(30)] + [""]
    (workdir / "t.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))
    assert train("name=a", "data.path=t.jsonl", "model.block_size=32") == 0
    out = sample("run=a", "loss=true", "data.path=t.jsonl", "out=o.jsonl")
    rows = read_jsonl("o.jsonl")
    assert [row["document"] for row in rows] == list(range(1, 32))
    model, tokenizer = load("a")
    nats = n_tokens = 0
    for document, row in zip(documents, rows, strict=True):
        tokens = [tokenizer.eot_token, *tokenizer.encode(document)]
        assert row["tokens"] == len(tokens) - 1 and row["bytes"] == len(document)
        if len(tokens) == 1:
            assert row["loss"] is None
            continue
        logits = model(torch.tensor([tokens[:-1]]))[0]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        nats, n_tokens = nats + loss.item() * len(logits), n_tokens + len(logits)
    assert f"{nats / n_tokens:.4f}" in out.splitlines()[-2] and "11 more" in out


# Multiple-choice questions


def test_accuracy_on_questions_is_printed_and_scores_are_saved(trained, workdir, capsys):
    """The context of the last question does not fit into block_size=16. Batches of 2 divide its three choices."""
    contexts = {"The 1": ["st", "th line"], "no": [" more", "The", "."], "The 22nd line says ": ["no", "484", "s"]}
    questions = [{"context": context, "choices": choices, "answer": 1} for context, choices in contexts.items()]
    (workdir / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    capsys.readouterr()
    assert run("run=a", "questions=q.jsonl", "out=o.jsonl", "batch_size=2") == 0
    printed = capsys.readouterr()
    assert "the model reads only the end of 1 of 3 questions: model.block_size=16\n" in printed.err
    assert "\n8 choices, " in printed.err and printed.err.endswith("written  o.jsonl\n")
    model, tokenizer = load("a")
    rows = read_jsonl("o.jsonl")
    for number, (question, row) in enumerate(zip(questions, rows, strict=True), start=1):
        assert row["question"] == f"line {number} of questions=q.jsonl" and row["answer"] == 1
        for choice, score in zip(question["choices"], row["scores"], strict=True):
            tokens = torch.tensor(tokenizer.encode(question["context"] + choice)[-17:])
            n = len(choice) + question["context"].endswith(" ")
            log_probs = model(tokens[None, :-1])[0, -n:].log_softmax(1)
            assert score == pytest.approx(log_probs.gather(1, tokens[-n:, None]).sum().item(), rel=1e-5)
        per_character = [s / len(choice) for s, choice in zip(row["scores"], question["choices"], strict=True)]
        best = {"acc": row["scores"].index(max(row["scores"])), "acc_norm": per_character.index(max(per_character))}
        assert row["predictions"] == best
    lines = dict(line.split(maxsplit=1) for line in printed.out.splitlines() if " " in line.strip())
    for key in ("acc", "acc_norm"):
        accuracy = sum(row["predictions"][key] == 1 for row in rows) / 3
        assert lines[key].startswith(f"{accuracy:.4f} ")
    assert lines["guessing"].strip() == f"{(1 / 2 + 1 / 3 + 1 / 3) / 3:.4f}"


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompts=nothing.txt"], "prompts=nothing.txt cannot be read (No such file or directory)"),
        (["prompts=empty.txt"], "prompts=empty.txt contains no prompts"),
        (["prompts=wrong.jsonl"], 'line 2 of prompts=wrong.jsonl has no string "prompt"'),
        (["prompts=latin.txt"], "prompts=latin.txt is not UTF-8 (byte 1)"),
        (["prompts=unknown.txt", "num_samples=3"], "prompt 2 of unknown.txt has the character 'Ü' at position 0"),
        (["prompts=p.csv"], "prompts=p.csv must be a text file with one prompt per line, or a .jsonl file"),
        (["prompts=text.txt", "out=no/o.jsonl"], "out=no/o.jsonl is in a folder that does not exist"),
        (["prompts=text.txt", "out=."], "out=. exists; set a new file"),
        (["prompt_file=."], "prompt_file=. cannot be read"),
        (["prompts=large.txt"], "prompts=large.txt is larger than 67,108,864 bytes; set a smaller file"),
        (["run=no/where"], "run=no/where has no checkpoint"),
        (["loss=true", "data.path=nothing.txt"], "data.path=nothing.txt does not exist"),
        (["loss=true", "data.path=unknown.txt"], "document 1 has the character"),
        (["questions=nothing.jsonl"], "questions=nothing.jsonl cannot be read (No such file or directory)"),
        (["questions=long.jsonl"], "choice 2 in line 1 of questions=long.jsonl has 17 tokens after the context"),
        (["questions=long.jsonl", "out=text.txt"], "out=text.txt exists; set a new file"),
        (["questions=long.jsonl", "prompt=a"], "prompt and questions exclude each other"),
        (["questions=long.jsonl", "num_samples=3"], "num_samples=3 has no effect with questions"),
        (["questions=long.jsonl", "attention_map=true"], "needs one prompt; remove questions"),
        (["interactive=true", "num_samples=3"], "num_samples=3"),
        (["data.path=text.txt"], "set loss=true"),
        (["out=o.jsonl"], "out=o.jsonl"),
        (["prompts=text.txt", "interactive=true"], "prompts and interactive"),
        (["max_new_tokens=0"], "max_new_tokens=0"),
        (["model.n_layer=3"], "from its checkpoint"),
        (["batch_size=0"], "batch_size=0 must be a number greater than 0"),
        (["dtype=int4"], "dtype=int4 is unknown; set auto, float32"),
        (["stop="], "stop= must be a string that is not empty"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(trained, workdir, capsys, overrides, message):
    (workdir / "large.txt").touch()
    os.truncate("large.txt", 2**27)
    (workdir / "empty.txt").write_text("\n \n")
    (workdir / "wrong.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (workdir / "latin.txt").write_bytes("aé".encode("latin-1"))
    (workdir / "unknown.txt").write_text("The\nÜ\n")
    question = {"context": "The", "choices": ["a", "a" * 17], "answer": 0}
    (workdir / "long.jsonl").write_text(json.dumps(question))
    (workdir / "p.csv").write_text("prompt\na\n")
    assert message in refusal(capsys, *overrides)
    assert not Path("o.jsonl").exists()

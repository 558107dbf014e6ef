"""sample.py as a person uses it: on a terminal, for many prompts, in Python, and to measure a text."""

import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TEXT

from common import checkpoint_file
from common.errors import UserError
from configs.cli import parse_config, run_main
from model.generation.prompts import open_output, read_prompt
from sample import load, main, stream

RUN = ["run=a", "max_new_tokens=30"]


def lines(file):
    return Path(file).read_text(encoding="utf-8").splitlines()


def refusal(capsys, *overrides):
    capsys.readouterr()
    try:
        code = run_main(main, parse_config("sample", "", list(overrides)))
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("runs/")]
    return sentence


def test_a_text_comes_out_as_it_is_made_and_its_speed_behind_it(trained, workdir, monkeypatch):
    times = []

    class Watched(io.StringIO):
        def write(self, text):
            times.append((time.perf_counter(), text))
            return super().write(text)

    out, err = Watched(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    assert run_main(main, parse_config("sample", "", [*RUN, "prompt=The 1", "temperature=0"])) == 0
    pieces = [text for _, text in times if text]
    assert pieces[0] == "The 1" and pieces[-1] == "\n" and len(pieces) == 32, "a character at a time"
    assert "30 tokens in " in err.getvalue() and " tokens/s\n" in err.getvalue()


def test_several_texts_are_those_of_their_seeds(trained, sample, workdir, capsys):
    alone = [sample(*RUN, "prompt=The ", f"seed={seed}") for seed in (5, 6, 7)]
    capsys.readouterr()
    assert (
        run_main(main, parse_config("sample", "", [*RUN, "prompt=The ", "seed=5", "num_samples=3", "batch_size=2"]))
        == 0
    )
    both = capsys.readouterr()
    assert both.out == "".join(alone)
    assert [line for line in both.err.splitlines() if line.startswith("---")] == ["--- 1 ---", "--- 2 ---", "--- 3 ---"]


def test_a_text_ends_ahead_of_a_stop_string(trained, sample, workdir):
    whole = sample(*RUN, "prompt=The ")
    stop = whole[12:15]
    assert sample(*RUN, "prompt=The ", f"stop={stop}") == whole[: whole.index(stop, 4)] + "\n"
    assert sample(*RUN, "prompt=The ", f"stop=[{stop}").startswith("The "), "no list, but a text like any other"
    assert sample(*RUN, "prompt=The ", f"stop={json.dumps(['Ω', stop])}") == whole[: whole.index(stop, 4)] + "\n"


def test_prompt_and_stop_understand_the_same_escapes(train, sample, workdir):
    """On the command line and in lines of a file. A prompt_file, JSON strings and Python strings are exact."""
    assert train("name=a", "tokenizer=byte") == 0
    assert sample(*RUN, r"prompt=a\nb\\n\t").startswith("a\nb\\n\t")
    (workdir / "p.txt").write_text("a\\nb\n")
    sample(*RUN, "prompts=p.txt", "out=o.jsonl")
    assert json.loads(lines("o.jsonl")[0])["prompt"] == "a\nb"
    (workdir / "p.jsonl").write_text(json.dumps({"prompt": r"a\nb"}))
    sample(*RUN, "prompts=p.jsonl", "out=o2.jsonl")
    assert json.loads(lines("o2.jsonl")[0])["prompt"] == r"a\nb"
    assert sample(*RUN, "prompt_file=p.txt").startswith("a\\nb\n")
    model, tokenizer = load("a")
    exact = "".join(stream(model, tokenizer, r"a\nb", max_new_tokens=30))
    assert sample(*RUN, r"prompt=a\\nb") == r"a\nb" + exact + "\n"


def test_stop_strings_in_python_are_exact(trained):
    model, tokenizer = load("a")
    sample = "".join(stream(model, tokenizer, "The", max_new_tokens=400))
    assert "".join(stream(model, tokenizer, "The", max_new_tokens=400, stop="\n")) == sample[: sample.index("\n")]
    assert "".join(stream(model, tokenizer, "The", max_new_tokens=400, stop=r"\n")) == sample, "not a newline"


def test_many_prompts_come_out_in_their_order(trained, sample, workdir, capsys):
    prompts = ["The 1", "T", "The 22nd line says", "line", "says 1"]
    (workdir / "p.txt").write_text("\n\n".join(prompts) + "\n")
    (workdir / "p.jsonl").write_text("\n".join(json.dumps({"prompt": prompt, "id": 1}) for prompt in prompts))
    settings = [*RUN, "stop=.", "num_samples=2", "batch_size=3", "seed=4"]
    for file in ("p.txt", "p.jsonl"):
        sample(*settings, f"prompts={file}", f"out={file}.out")
    lines = [json.loads(line) for line in (workdir / "p.txt.out").read_text().splitlines()]
    assert (workdir / "p.txt.out").read_text() == (workdir / "p.jsonl.out").read_text()
    assert sample(*settings, "prompts=p.txt") == (workdir / "p.txt.out").read_text(), "without out: on the terminal"
    assert [line["prompt"] for line in lines] == [prompt for prompt in prompts for _ in range(2)]
    assert [line["seed"] for line in lines] == list(range(4, 14))
    assert {line["ended"] for line in lines} <= {"stop", "length"}
    for line in lines:
        alone = sample(*RUN, "stop=.", f"prompt={line['prompt']}", f"seed={line['seed']}")
        assert alone == line["prompt"] + line["text"] + "\n"
        assert line["tokens"] == 30 or line["ended"] == "stop"
    assert "out=p.txt.out exists" in refusal(capsys, *settings, "prompts=p.txt", "out=p.txt.out")


def test_seeds_begin_anew_behind_the_largest(trained, sample, workdir):
    (workdir / "p.txt").write_text("The\n")
    sample(*RUN, "prompts=p.txt", "num_samples=2", f"seed={2**32 - 1}", "out=o.jsonl")
    assert [json.loads(line)["seed"] for line in lines("o.jsonl")] == [2**32 - 1, 0]


def test_lines_of_a_file_end_where_an_editor_ends_them(train, sample, workdir):
    """Windows' line ends and byte order mark do; a form feed and U+2028 do not, and stand in JSON as they are."""
    text = TEXT + "\x0c\u2028\ufeff\r\n"
    (workdir / "text.txt").write_bytes(text.encode())
    assert train("name=a", "tokenizer=byte") == 0
    (workdir / "p.txt").write_bytes("\ufeffThe\r\nsays\x0c1\u20282\r\n".encode())
    (workdir / "p.JSONL").write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False), encoding="utf-8")
    sample(*RUN, "prompts=p.txt", "out=o.jsonl")
    again = [json.loads(line)["prompt"] for line in (workdir / "o.jsonl").read_text("utf-8").split("\n")[:-1]]
    assert again == ["The", "says\x0c1\u20282"]
    sample(*RUN, "prompts=p.JSONL", "out=o2.jsonl")
    assert json.loads((workdir / "o2.jsonl").read_text("utf-8"))["prompt"] == "a\u2028b"
    (workdir / "crlf.txt").write_bytes(b"The\r\n")
    assert read_prompt("crlf.txt") == "The\r\n", "prompt_file is to the letter"


def test_a_file_of_somebody_elses_is_not_touched(workdir):
    (workdir / "o.jsonl").touch()
    with pytest.raises(FileExistsError), open_output("o.jsonl"):
        pass
    assert (workdir / "o.jsonl").exists()
    with pytest.raises(ZeroDivisionError), open_output("new.jsonl"):
        raise ZeroDivisionError
    assert not (workdir / "new.jsonl").exists(), "nothing was written, so that nothing is left"


def test_what_is_done_of_many_is_written_when_it_is_interrupted(trained, workdir, monkeypatch, capsys):
    """Of three texts side by side the first is the longest: the others, which have ended, are not lost with it."""
    import sample as script

    (workdir / "p.txt").write_text("The\nThe 1\nThe 2\n")
    real = script.generate

    def interrupted(*given, **how):
        for piece in real(*given, **how):
            if piece.index == 0 and piece.tokens == 6:
                raise KeyboardInterrupt
            if piece.index > 0 and piece.tokens == 3:
                yield script_piece(piece)
            else:
                yield piece

    def script_piece(piece):
        from dataclasses import replace

        return replace(piece, ended="length")

    monkeypatch.setattr(script, "generate", interrupted)
    capsys.readouterr()
    assert run_main(main, parse_config("sample", "", [*RUN, "prompts=p.txt", "out=o.jsonl"])) == 75
    assert "interrupted; 2 of 3 texts are in o.jsonl" in capsys.readouterr().err
    assert [json.loads(line)["prompt"] for line in lines("o.jsonl")] == ["The 1", "The 2"]


def test_what_is_typed_is_continued(trained, sample, workdir, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The 1\n\nUnknown Ü\nline\n"))
    out = sample(*RUN, "interactive=true", "seed=3")
    first = sample(*RUN, "prompt=The 1", "seed=3")
    assert out.startswith(first)
    second = sample(*RUN, f"prompt={first[:-1]}", "seed=4")
    assert out.startswith(first + second.removeprefix(first[:-1])), "an empty line goes on with the text"
    assert "line" + out.rpartition("\nline")[2] == sample(*RUN, "prompt=line", "seed=6")


def test_ctrl_c_stops_a_text_and_not_the_program(trained, workdir):
    """On a terminal of its own: a long text, Ctrl-C, another text, Ctrl-D."""
    master, slave = pty.openpty()
    command = [sys.executable, ROOT / "sample.py", "run=a", "interactive=true", "max_new_tokens=100000", "seed=1"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"OMP_NUM_THREADS": "1"}, close_fds=True,
        preexec_fn=os.setsid,
    )  # fmt: skip
    os.close(slave)
    said = b""

    def until(words, count=1):
        nonlocal said
        deadline = time.time() + 60
        while said.count(words) < count:
            assert time.time() < deadline, said[-500:]
            said += os.read(master, 4096)

    killer = threading.Timer(120, process.kill)
    killer.start()
    try:
        until(b"> ")
        for number in (1, 2):
            os.write(master, b"The 1\n")
            length = len(said)
            while len(said) < length + 300:
                said += os.read(master, 4096)
            os.killpg(process.pid, signal.SIGINT)
            until(b"> ", number + 1)
        for _ in range(30):
            os.write(master, b"\x04")
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        assert process.returncode == 0
        assert b"Traceback" not in said
    finally:
        killer.cancel()
        process.kill()
        os.close(master)


def test_in_python_a_model_and_its_text_are_a_line_each(trained, sample, workdir):
    model, tokenizer = load("a")
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    pieces = list(stream(model, tokenizer, "The 1", seed=3, max_new_tokens=30))
    assert len(pieces) == 30
    assert "The 1" + "".join(pieces) + "\n" == sample(*RUN, "prompt=The 1", "seed=3")
    text = "".join(stream(model, tokenizer, "The 1", stop=["a", "e", " "], temperature=0.0))
    assert not set(text) & set("ae ")
    assert model(torch.tensor([tokenizer.encode("The")])).shape == (1, 3, tokenizer.n_vocab)
    for wrong, said in [
        (dict(temperature="hot"), "temperature=hot does not fit: temperature takes a number"),
        (dict(temprature=1), "stream takes no temprature"),
        (dict(top_p=3.0), "top_p=3.0 must be above 0"),
        (dict(stop=("a", 3)), "must be a string that is not empty"),
    ]:
        with pytest.raises(UserError, match=said):
            next(stream(model, tokenizer, "T", **wrong))
    with pytest.raises(UserError, match="the prompt is to be a text, not int"):
        next(stream(model, tokenizer, 5))
    assert "${x}" not in "".join(stream(model, tokenizer, "The", stop="${x}"))
    with pytest.raises(UserError, match="load takes no num_samples"):
        load("a", num_samples=2)
    with pytest.raises(UserError, match="run=b has no checkpoint"):
        load("b")
    with pytest.raises(UserError, match="did you mean naive"):
        load("a", attention="naif")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_weights_cost_next_to_nothing(train, sample, workdir, dtype):
    if dtype == "float16" and "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("NOT RUN: float16 on a CPU is for x86 alone")
    assert train("name=a", "train.steps=30") == 0
    losses = {}
    for name in ("float32", dtype):
        sample("run=a", "loss=true", "data.path=text.txt", f"dtype={name}", f"out={name}.jsonl")
        losses[name] = json.loads((workdir / f"{name}.jsonl").read_text())["loss"]
    assert losses["float32"] != losses[dtype]
    assert losses["float32"] == pytest.approx(losses[dtype], abs={"bfloat16": 1e-2, "float16": 1e-3}[dtype])
    assert sample(*RUN, f"dtype={dtype}", "prompt=The").startswith("The")


@pytest.mark.parametrize("at_once", [1, 2**25])
def test_the_loss_of_the_validation_text_is_that_of_its_evaluation(train, sample, workdir, monkeypatch, at_once):
    """The run's own last evaluation, over the whole validation text, is the reference; in one part or in many."""
    monkeypatch.setattr("model.generation.perplexity.LOGITS", at_once)
    assert train("name=a", "eval.batches=null", "data.val_fraction=0.1") == 0
    last = [row for row in map(json.loads, lines("runs/a/metrics.jsonl")) if "val/loss" in row][-1]
    (workdir / "val.txt").write_text(TEXT[len(TEXT) - round(len(TEXT) * 0.1) :], encoding="utf-8")
    out = sample("run=a", "checkpoint=last", "loss=true", "data.path=val.txt", "out=o.jsonl")
    row = json.loads((workdir / "o.jsonl").read_text())
    assert row["tokens"] == len(TEXT) - round(len(TEXT) * 0.9) - 1
    assert row["loss"] == pytest.approx(last["val/loss"], abs=2e-5)
    assert row["bits_per_byte"] == pytest.approx(last["val/bpb"], abs=2e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert f"{row['loss']:.4f}" in out and f"{row['bits_per_byte']:.4f}" in out


def test_the_loss_of_documents_is_each_ones_own_and_the_wholes(train, sample, workdir):
    """By hand: an end of text ahead of each, one window, the mean over its tokens."""
    rows = [{"text": f"line {i} says {i * i}"} for i in range(30)] + [{"text": ""}]
    (workdir / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert train("name=a", "data.path=t.jsonl", "model.block_size=32") == 0
    out = sample("run=a", "loss=true", "data.path=t.jsonl", "out=o.jsonl")
    scores = [json.loads(line) for line in lines("o.jsonl")]
    assert [score["document"] for score in scores] == list(range(1, 32))
    model, tokenizer = load("a")
    nats = tokens = 0
    for row, score in zip(rows, scores, strict=True):
        ids = [tokenizer.eot_token, *tokenizer.encode(row["text"])]
        assert score["tokens"] == len(ids) - 1 and score["bytes"] == len(row["text"])
        if len(ids) > 1:
            logits = model(torch.tensor([ids[:-1]]))[0]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
            assert score["loss"] == pytest.approx(loss.item(), abs=1e-5)
            nats, tokens = nats + loss.item() * len(logits), tokens + len(logits)
        else:
            assert score["loss"] is None
    assert f"{nats / tokens:.4f}" in out.splitlines()[-2] and "11 more" in out


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["prompts=nothing.txt"], "prompts=nothing.txt cannot be read (No such file or directory)"),
        (["prompts=empty.txt"], "prompts=empty.txt has no line with a prompt in it"),
        (["prompts=wrong.jsonl"], 'line 2 of prompts=wrong.jsonl is no object with a text as "prompt"'),
        (["prompts=latin.txt"], "prompts=latin.txt is not UTF-8 (byte 1)"),
        (["prompts=unknown.txt", "num_samples=3"], "prompt 2 of unknown.txt has the character 'Ü' at position 0"),
        (["prompts=p.csv"], "prompts=p.csv is to be a text with one a line, or .jsonl"),
        (["prompts=text.txt", "out=no/o.jsonl"], "out=no/o.jsonl would lie in a folder that is not there"),
        (["prompts=text.txt", "out=."], "out=. is a folder"),
        (["interactive=true", "num_samples=3"], "num_samples=3 is for prompts"),
        (["run=no/where"], "run=no/where has no checkpoint below /"),
        (["prompt_file=."], "prompt_file=. cannot be read (Is a directory)"),
        (["loss=true", "data.path=nothing.txt"], "data.path=nothing.txt does not exist"),
        (["loss=true", "data.path=unknown.txt"], "document 1 has the character"),
        (["data.path=text.txt"], "set loss=true as well"),
        (["out=o.jsonl"], "out=o.jsonl is for what prompts=FILE or loss=true come to"),
        (["prompts=text.txt", "interactive=true"], "prompts and interactive are set"),
        (["max_new_tokens=0"], "max_new_tokens=0 makes no text; set 1 or more"),
        (["model.n_layer=3"], "a run's model comes from its checkpoint; leave it out"),
        (["batch_size=0"], "batch_size=0 must be at least 1"),
        (["dtype=int8"], "dtype=int8 is unknown; set auto, float32"),
        (["stop="], "stop= must be a string that is not empty"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(trained, workdir, capsys, overrides, said):
    (workdir / "empty.txt").write_text("\n \n")
    (workdir / "wrong.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (workdir / "latin.txt").write_bytes("aé".encode("latin-1"))
    (workdir / "unknown.txt").write_text("The\nÜ\n")
    (workdir / "p.csv").write_text("prompt\na\n")
    assert said in refusal(capsys, *overrides)
    assert not Path("o.jsonl").exists()


def test_a_run_is_found_by_its_folder_too(trained, sample, workdir):
    assert sample("run=runs/a", "max_new_tokens=5") == sample("run=a", "max_new_tokens=5")
    assert sample(f"run={workdir}/runs/a", "max_new_tokens=5") == sample("run=a", "max_new_tokens=5")
    assert sample("run=./runs/a/", "max_new_tokens=5") == sample("run=a", "max_new_tokens=5")


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_whole(trained, workdir, monkeypatch):
    """torch.load opens a file more than once: at each of these moments another takes its place."""
    path = Path("runs/a/checkpoints/last.pt")
    old = checkpoint_file.load_checkpoint(path)
    new = {**old, "step": old["step"] + 1, "model": {name: weight + 1 for name, weight in old["model"].items()}}
    new["padding"] = torch.zeros(1000)  # so that nothing lies where it did
    real_load, real_from_file = torch.load, torch.UntypedStorage.from_file
    for moment in ("before torch.load", "before the weights"):
        checkpoint_file.save_checkpoint(path, old)
        left = [True]

        def replace_once(left=left):
            if left and left.pop():
                checkpoint_file.save_checkpoint(path, new)

        def loading(*given, moment=moment, replace_once=replace_once, **how):
            if moment == "before torch.load":
                replace_once()
            return real_load(*given, **how)

        def from_file(*given, moment=moment, replace_once=replace_once, **how):
            if moment == "before the weights":
                replace_once()
            return real_from_file(*given, **how)

        monkeypatch.setattr(torch, "load", loading)
        monkeypatch.setattr(torch.UntypedStorage, "from_file", from_file)
        read = checkpoint_file.load_checkpoint(path)
        monkeypatch.undo()
        monkeypatch.chdir(workdir)
        assert not left, "it was never replaced"
        whole = old if read["step"] == old["step"] else new
        assert all(torch.equal(read["model"][name], whole["model"][name]) for name in whole["model"])

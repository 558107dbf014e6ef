"""Preparation that is killed, interrupted or disturbed gives identical files or an error of one sentence."""

import hashlib
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from data_helpers import prepare_text, prepared_folders
from helpers import BPE, BYTE, CHAR, ROOT, TEXT_SOURCE

from common.errors import UserError
from data import prepare as data_prepare

RESUMING = "resuming an interrupted preparation after its last finished file"

# Prepares data.path=a in several shards. The process dies in the chunk whose number is the first argument. With one
# thread, it does not matter how fast the machine is.
PREPARE = f"""
import itertools, os, sys
from data import DataConfig, TokenizerConfig, encode
from data.prepare import prepare

encode.CHUNK_CHARS, encode.SHARD_TOKENS, encode.cpu_count = 20_000, 3_000, lambda: 1
numbers, encode_chunk = itertools.count(), encode.encode_chunk

def encode_or_die(*arguments):
    if next(numbers) == int(sys.argv[1]):
        os._exit(9)
    return encode_chunk(*arguments)

encode.encode_chunk = encode_or_die
prepare({replace(TEXT_SOURCE, path="a")}, {BPE}, 16)
print("done", flush=True)
"""
PRINT_PEAK_MEMORY = """
import re
from pathlib import Path
from data import DataConfig, TokenizerConfig
from data.prepare import prepare
prepare({data}, {tokenizer}, 16)
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
"""


def start_python(script: str, *arguments: str) -> subprocess.Popen:
    command, environment = [sys.executable, "-c", script, *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def start_preparation(dies_in_chunk: int = -1) -> subprocess.Popen:
    return start_python(PREPARE, str(dies_in_chunk))


def read_output(process: subprocess.Popen) -> str:
    return process.communicate(timeout=300)[0]


@pytest.fixture
def documents(workdir) -> Path:
    (workdir / "a").mkdir()
    for n in range(12):
        (workdir / f"a/{n}.txt").write_text(f"document {n} says {n * n}; " * (100 + 300 * n))
    return workdir


def hash_files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_prepared_files_split_the_text_like_nanogpt(workdir):
    text = (workdir / "text.txt").read_text()
    prepared = prepare_text(TEXT_SOURCE, CHAR)
    cut = int(len(text) * 0.9)
    decoded = {split: prepared.tokenizer.decode(prepared.tokens(split)[:].tolist()) for split in ("train", "val")}
    assert decoded == {"train": text[:cut], "val": text[cut:]}
    meta = json.loads((prepared.folder / "meta.json").read_text())
    assert meta["dtype"] == "uint16"
    assert meta["vocab_size"] == len(set(text))
    assert meta["tokens"] == {"train": cut, "val": len(text) - cut}
    assert {path.name for path in prepared.folder.iterdir()} == {"train.bin", "val.bin", "meta.json"}


@pytest.mark.slow
def test_killed_preparation_resumes_with_identical_output(documents):
    assert "done" in read_output(start_preparation())
    (folder,) = prepared_folders()
    expected = hash_files(folder)
    assert len(expected) > 5 and "train-00003.bin" in expected
    folder.rename("expected")
    # together at most 7 of 8 chunks, one per shard, regardless of what the other thread has finished
    outputs = [read_output(start_preparation(dies_in_chunk=chunk)) for chunk in (0, 4, 2, 1)]
    assert not any("done" in output for output in outputs)
    assert [RESUMING in output for output in outputs] == [False, True, True, True]
    finished = json.loads(Path(f"{folder}.partial/journal.json").read_text())["splits"]["train"]["files"]
    assert 0 < len(finished) < len(expected) - 2
    output = read_output(start_preparation())
    assert RESUMING in output and "done" in output
    assert hash_files(folder) == expected
    assert prepared_folders() == [folder]


def test_two_commands_at_once_prepare_once(workdir):
    command = [sys.executable, str(ROOT / "prepare.py"), "data=text", "data.path=text.txt", "tokenizer=char"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    output = "".join(read_output(process) for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert output.count("preparing text") == 1
    assert output.count("tokens to train on") == 2
    assert len(list(Path("data/prepared").glob("text-*/meta.json"))) == 1


def test_full_disk_is_reported_and_leaves_no_folder(documents):
    """A limit on the file size makes the system refuse to write, as on a full disk."""
    command = [sys.executable, str(ROOT / "prepare.py"), "data=text", "data.path=a", "tokenizer=byte"]

    def limit_file_size():
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    done = subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=limit_file_size)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "File too large; " in done.stderr
    assert not prepared_folders()


def test_text_that_changes_while_it_is_read_is_rejected(workdir, monkeypatch):
    plan_splits = data_prepare.plan_splits

    def plan_and_change_the_text(*arguments):
        plan = plan_splits(*arguments)
        (workdir / "text.txt").write_text((workdir / "text.txt").read_text().replace("line", "verse"))
        return plan

    monkeypatch.setattr(data_prepare, "plan_splits", plan_and_change_the_text)
    with pytest.raises(UserError, match="changed while it was read; run the same command again"):
        prepare_text(TEXT_SOURCE, BYTE)
    assert not prepared_folders()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's proc files")
@pytest.mark.parametrize("tokenizer", [BYTE, CHAR], ids=lambda tokenizer: tokenizer.name)
def test_memory_does_not_grow_with_the_text(workdir, tokenizer):
    """Four times as much text, 96 MB more, needs at most 40 MiB more memory."""
    script = PRINT_PEAK_MEMORY.format(data=replace(TEXT_SOURCE, path="big.txt"), tokenizer=tokenizer)
    peak = {}
    for megabytes in (32, 128):
        line = "a line of a text that is much longer than the part that is in memory\n"
        (workdir / "big.txt").write_text(line * (megabytes * 10**6 // len(line)))
        peak[megabytes] = int(read_output(start_python(script)).split()[-1]) / 2**20
    assert peak[128] - peak[32] < 40, peak

"""Preparation that is killed, starved of disk or tampered with: it ends in the same bytes, or in a sentence."""

import hashlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import BPE, BYTE, CHAR, ROOT, TEXT_SOURCE

from common.errors import UserError
from data import encode, sources
from data import prepare as data_prepare
from data.prepare import prepare
from data.prepared import read_meta, verify
from data.progress import PrepareProgress

SLOW = f"""
import os, sys, time
from data import DataConfig, TokenizerConfig, encode
from data.prepare import prepare
encode.CHUNK = 20_000  # characters, of which several shards come
slow, encode_one = float(sys.argv[1]), encode._encode

def slowly(*args):
    time.sleep(slow)
    while os.path.exists("wait"):
        time.sleep(0.01)
    return encode_one(*args)

encode._encode = slowly
print("ready", flush=True)
prepare({replace(TEXT_SOURCE, path="a")}, {BPE}, 16, shard=3_000)
print("done", flush=True)
"""
ONCE = """
import resource
from data import DataConfig, TokenizerConfig
from data.prepare import prepare
prepare({data}, {tokenizer}, 16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def python(script: str, *arguments: str) -> subprocess.Popen:
    """A process of its own, which has no need of torch."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def texts(workdir) -> Path:
    (workdir / "a").mkdir()
    for n in range(12):
        (workdir / f"a/{n}.txt").write_text(f"document {n} says {n * n}; " * (100 + 300 * n))
    return workdir


def start(slow: float = 0.0) -> subprocess.Popen:
    return python(SLOW, str(slow))


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def prepared_folders(workdir: Path) -> list[Path]:
    return list((workdir / "data/prepared").glob("[!.]*/"))


def test_killed_at_ten_random_moments_it_ends_in_the_same_bytes(texts):
    clean = start()
    assert "done" in clean.communicate(timeout=60)[0]
    (folder,) = prepared_folders(texts)
    expected = hashes(folder)
    assert len(expected) > 5 and "train-00003.bin" in expected  # in shards
    folder.rename(texts / "kept")
    moment, went_on, kills = random.Random(0), 0, 0
    while kills < 10:
        process = start(slow=0.06)
        assert process.stdout.readline() == "ready\n"
        time.sleep(moment.uniform(0.0, 0.6))
        process.kill()
        out = process.communicate(timeout=60)[0]
        went_on += "going on where it was stopped" in out
        kills += 1
        if prepared_folders(texts) and prepared_folders(texts)[0] == folder:  # it was done before it was killed
            assert hashes(folder) == expected
            folder.rename(texts / f"kept-{kills}")
    assert "done" in start().communicate(timeout=60)[0]
    assert hashes(folder) == expected
    assert prepared_folders(texts) == [folder]
    assert went_on > 0


def test_of_two_at_once_one_works_and_the_other_waits_and_says_so(texts):
    (texts / "wait").touch()
    first = start()
    assert first.stdout.readline() == "ready\n"
    assert first.stdout.readline().startswith("preparing text")
    second = start()
    assert second.stdout.readline() == "ready\n"
    assert second.stdout.readline().startswith("another process prepares data/prepared/text-")
    (texts / "wait").unlink()
    assert [process.communicate(timeout=60)[0] for process in (first, second)] == ["done\n", "done\n"]


def test_ctrl_c_keeps_what_is_finished_and_says_so(texts):
    process = start(slow=0.05)
    assert process.stdout.readline() == "ready\n"
    while not list(texts.glob("data/prepared/*.partial/train-00001.bin")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert "the same command goes on behind the last file that is finished" in process.communicate(timeout=60)[1]
    out = start().communicate(timeout=60)[0]
    assert "going on where it was stopped" in out and "done" in out


def test_a_disk_that_is_full_is_named_and_leaves_nothing(texts):
    """A limit on the size of files, at which the system refuses to write as it does on a full disk."""
    command = [sys.executable, str(ROOT / "prepare.py"), "data=text", "data.path=a", "tokenizer=byte"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "train.bin: File too large; make room" in done.stderr
    assert not prepared_folders(texts)


def quiet(line: str) -> None:
    pass


def test_an_altered_file_is_found_on_request_and_a_short_one_at_once(workdir, capsys):
    prepared = prepare(TEXT_SOURCE, CHAR, 16, say=quiet)
    assert verify(prepared) == "verified: train.bin, val.bin are what was written"
    path = prepared.folder / "val.bin"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    assert prepare(TEXT_SOURCE, CHAR, 16, say=quiet).folder == prepared.folder  # its size is right
    with pytest.raises(UserError, match=r"val.bin was altered since it was written .*; remove that folder"):
        verify(prepared)
    path.write_bytes(content[:-2])
    with pytest.raises(UserError, match=r"val.bin has [\d,]+ bytes where [\d,]+ were written; remove that folder"):
        prepare(TEXT_SOURCE, CHAR, 16, say=quiet)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda meta: meta | {"format": 99}, "has format 99, of a newer trilGPT; use that one, or remove"),
        (lambda meta: meta | {"format": 1}, "has format 1, of another trilGPT"),
        (lambda meta: [], "meta.json is missing or damaged"),
    ],
)
def test_a_meta_file_of_another_format_is_refused(workdir, change, said):
    folder = prepare(TEXT_SOURCE, CHAR, 16, say=quiet).folder
    (folder / "meta.json").write_text(json.dumps(change(read_meta(folder))))
    with pytest.raises(UserError, match=said):
        prepare(TEXT_SOURCE, CHAR, 16, say=quiet)


def test_a_text_that_changes_while_it_is_read_is_refused(workdir, monkeypatch):
    divide = data_prepare.plan_splits

    def meddle(*args):
        parts = divide(*args)
        (workdir / "text.txt").write_text((workdir / "text.txt").read_text().replace("line", "verse"))
        return parts

    monkeypatch.setattr(data_prepare, "plan_splits", meddle)
    with pytest.raises(UserError, match="changed while it was read; start again"):
        prepare(TEXT_SOURCE, BYTE, 16, say=quiet)
    assert not prepared_folders(workdir)


def test_a_large_file_is_hashed_once_and_again_when_it_changes(workdir, monkeypatch):
    monkeypatch.setattr("data.files.LARGE", 1)
    old = time.time() - 60
    os.utime("text.txt", (old, old))
    first = prepare(TEXT_SOURCE, CHAR, 16, say=quiet).folder
    assert "text.txt" in Path("data/prepared/.hashes").read_text()
    monkeypatch.setattr("hashlib.file_digest", None)
    assert prepare(TEXT_SOURCE, CHAR, 16, say=quiet).folder == first
    monkeypatch.undo()
    monkeypatch.chdir(workdir)
    text = Path("text.txt").read_text()
    Path("text.txt").write_text(text.replace("0th", "1th"))
    os.utime("text.txt", (old, old))  # of the same size and time: another nonetheless
    assert prepare(TEXT_SOURCE, CHAR, 16, say=quiet).folder != first


def test_shards_read_as_one(workdir):
    one = prepare(TEXT_SOURCE, CHAR, 16, say=quiet)
    tokens = one.tokens("train")[:]
    one.folder.rename("one")
    many = prepare(TEXT_SOURCE, CHAR, 16, say=quiet, shard=1000)
    assert len(list(many.folder.glob("train*.bin"))) == -(-len(tokens) // 1000)
    read = many.tokens("train")
    assert len(read) == len(tokens)
    for part in (slice(None), slice(990, 1010), slice(999, 3001), slice(1000, 2000), slice(5, 5), slice(-3, None)):
        assert (read[part] == tokens[part]).all()


def test_progress_tells_speed_and_time_left(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    said = []
    with PrepareProgress(said.append) as show:
        show.begin("encoding train", 100_000_000)
        for _ in range(4):
            clock[0] += 6
            show.add(15_000_000)
    assert said == ["encoding train: 30.0 MB of 100.0 MB, 2.5 MB/s, 0:28 left",
                    "encoding train: 60.0 MB of 100.0 MB, 2.5 MB/s, 0:16 left"]  # fmt: skip


def test_inspect_tells_sizes_and_shows_how_text_is_encoded(workdir, capsys):
    from configs.cli import parse_config, run_main
    from prepare import main

    go = ["data=text", "data.path=text.txt", "tokenizer=bpe", "tokenizer.vocab_size=300", "inspect=true", "verify=true"]
    assert run_main(main, parse_config("prepare", "", go)) == 0
    out = capsys.readouterr().out
    meta = json.loads(next(workdir.glob("data/prepared/*/meta.json")).read_text())
    size = len((workdir / "text.txt").read_bytes())
    assert sum(meta["bytes"].values()) == size
    assert f"bpe of 300, {size / sum(meta['tokens'].values()):.2f} bytes a token" in out
    assert f"documents   1, the longest of {max(meta['tokens'].values()):,} tokens" in out
    assert "  The 0th line" in out.replace("│", "")
    assert "\\n" in out  # line ends are visible


@pytest.mark.parametrize("kind", [BYTE, CHAR], ids=lambda kind: kind.name)
def test_memory_is_bounded_and_does_not_grow_with_the_text(workdir, kind):
    """Of four times as much text, 96 MB more, a process takes no more than what is under way at a time."""
    script, peak = ONCE.format(data=replace(TEXT_SOURCE, path="big.txt"), tokenizer=kind), {}
    for times in (4, 16):
        with open("big.txt", "w") as f:
            f.writelines("a line of a text that is far longer than what is read of it at a time\n" * 1000
                         for _ in range(114 * times))  # fmt: skip
        peak[times] = int(python(script).communicate(timeout=120)[0].split()[-1]) / 1024
    assert peak[16] - peak[4] < 40, peak


def test_many_small_documents_are_not_one_chunk():
    pieces = (("", True, "") for _ in range(200_000))
    assert max(map(len, encode.chunks(pieces))) < 50_000


def test_what_is_finished_of_a_text_from_the_network_outlives_an_error(workdir, monkeypatch):
    reads = itertools.count()

    def pieces(places, config):
        breaks = next(reads) == 3  # behind the survey and, of both splits, the vocabulary
        for n in range(400):
            if breaks and n == 300:
                raise UserError("the network is gone")
            yield f"document {n} " * 30, True

    monkeypatch.setattr("data.sources.iter_text", pieces)
    monkeypatch.setattr(encode, "CHUNK", 1000)
    config = replace(TEXT_SOURCE, source="url", path=None, url="https://example.com/a.txt", val_fraction=0.05)
    with pytest.raises(UserError, match="the network is gone"):
        prepare(config, CHAR, 16, say=quiet, shard=5000)
    said = []
    prepared = prepare(config, CHAR, 16, say=said.append, shard=5000)
    assert "going on where it was stopped" in said
    documents = prepared.encoding.decode(prepared.tokens("train")[:].tolist()).split("<|endoftext|>")
    assert documents[:-1] == [f"document {n} " * 30 for n in range(len(documents) - 1)]
    assert len(documents) > 350


def test_what_is_finished_of_a_data_set_waits_for_the_network_and_is_of_one_commit(workdir, monkeypatch):
    network, reads = {"breaks at": 4}, itertools.count(1)

    def pieces(places, config):
        read = next(reads)
        for n in range(400):
            if not network["up"] or (read == network["breaks at"] and n == 300):
                raise UserError("the network is gone")
            yield f"document {n} of the {sources.commit('a/b', None)} " * 30, True

    class Hub:
        def dataset_info(self, repo, revision, timeout):
            assert network["commit"] is not None
            return SimpleNamespace(sha=network["commit"])

    def attempt(commit, up=True):
        network.update(commit=commit, up=up)
        monkeypatch.setattr(sources, "_commits", {})  # as in another process
        return prepare(config, CHAR, 16, say=said.append, shard=5000)

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(sources, "iter_text", pieces)
    monkeypatch.setattr(encode, "CHUNK", 1000)
    config = replace(TEXT_SOURCE, source="hub", path=None, repo="a/b", split="train", val_fraction=0.05)
    said = []
    with pytest.raises(UserError, match="the network is gone"):
        attempt("first")  # it goes while the text is read,
    with pytest.raises(UserError, match="the network is gone"):
        attempt(None, up=False)  # is not yet back,
    prepared = attempt(None)  # and does not tell the commit, but has the text
    assert said.count("going on where it was stopped") == 2
    assert prepared.meta["source"]["revisions"] == {"text": "first"}
    assert prepared.encoding.decode(prepared.tokens("train")[:].tolist()).count("of the first") > 350 * 30
    prepared.folder.rename("first")
    network["breaks at"] = next(reads) + 4
    with pytest.raises(UserError, match="the network is gone"):
        attempt("first")
    prepared = attempt("second")
    assert said.count("going on where it was stopped") == 2
    assert "first" not in prepared.encoding.decode(prepared.tokens("train")[:].tolist())


def test_a_text_from_the_network_that_is_too_short_leaves_nothing(workdir, monkeypatch):
    monkeypatch.setattr("data.sources.iter_text", lambda places, config: iter([("short", True)]))
    config = replace(TEXT_SOURCE, source="url", path=None, url="https://example.com/a.txt")
    with pytest.raises(UserError, match="one window takes"):
        prepare(config, CHAR, 16, say=quiet)
    assert not prepared_folders(workdir)


def test_many_batches_take_no_more_memory(workdir):
    """Windows of a file of 100 MB are read all over it, and its pages do not become this process's memory."""
    from data.loader import Loader

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    prepared = prepare(replace(TEXT_SOURCE, val_fraction=0.5), BYTE, 16, say=quiet)
    with open(prepared.folder / "train.bin", "wb") as f:
        f.truncate(10**8)
    prepared.meta["tokens"]["train"], prepared.meta["parts"][0]["train"] = 5 * 10**7, [0, 5 * 10**7]
    loader = Loader(prepared, 64, seed=0)
    loader.batch("train", 0, 16)
    before = resident()
    for first in range(0, 16 * 3000, 16):
        loader.batch("train", first, 16)
    assert resident() - before < 10

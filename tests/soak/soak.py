"""Soak test: kill and signal the commands and type wrong words, all at random, and check that nothing is lost.

    python tests/soak/soak.py                    everything; Linux, about half an hour on two cores
    python tests/soak/soak.py kill wrong         two of the parts
    python tests/soak/soak.py --scale 0.01       one try of each kind

Each part first runs its commands without a disturbance. After a disturbance, the same command must finish with the
same result: weights, losses, tokens and samples are compared bit by bit. Prints every failure, and a table.

kill       SIGKILL at random moments of training, preparation, a sweep, and sampling to a file
signal     Ctrl-C, SIGTERM and SIGHUP at random moments of every command
pair       the same command twice at the same time
return     an older checkpoint is copied over last.pt, and the run continues with other settings and one SIGKILL:
           best.pt must agree with summary.json, and no checkpoint of the abandoned steps is left
wrong      random wrong command lines: exit code 2, one line that names the wrong word, and no new file
damage     random damage to a file of a sweep or its data: each command prints one line or finishes; if a checkpoint or
           the vocabulary is damaged, training finishes only with the same weights
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
from helpers import TEXT, TINY, run_command, untimed  # noqa: E402

from common.checkpoint_file import load_checkpoint  # noqa: E402
from common.console import PlainConsole, make_table  # noqa: E402
from configs.compose import list_groups  # noqa: E402
from configs.error_messages import SYNONYMS  # noqa: E402
from configs.schema import key_types  # noqa: E402

LIMIT_S = 600  # of a command, for the slowest machines
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
TRAINING = [
    *TINY,
    "train.steps=120",
    "eval.every=20",
    "checkpoint.every=7",
    "checkpoint.keep=2",
    "model.dropout=0.1",
]


@dataclass
class Command:
    """A command, and a function that returns its result in a folder as comparable values.

    needs: a command that runs before it.
    """

    name: str
    words: list[str]
    result: Callable[[Path], Any]
    needs: "Command | None" = None


def run_result(run: Path) -> Any:
    """Bytes of the tensors in both checkpoints, and metrics without times."""
    rows = untimed(
        [
            json.loads(line)
            for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    )
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    weights = {}
    for kind in ("last", "best"):
        saved = load_checkpoint(run / f"checkpoints/{kind}.pt")
        for name, state in {"model": saved["model"], **(saved["optimizer"] or {})}.items():
            weights |= {
                (kind, name, key): torch.as_tensor(value).numpy().tobytes()
                for key, value in state.items()
            }
    results = [
        summary[key] for key in ("status", "step", "best_step", "best_val_loss", "last_val_loss")
    ]
    return weights, rows, results, len(list(run.glob("checkpoints/*")))


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


PREPARE = ["data=text", "data.path=long.txt", "tokenizer.vocab_size=400"]
TRAIN = Command(
    "train", ["train.py", *TRAINING, "name=a"], lambda folder: run_result(folder / "runs/a")
)
SWEEPING = ["train.py", "-m", *TRAINING, "seed=1,2", "name=s"]
SWEEP = Command(
    "sweep",
    SWEEPING,
    lambda folder: [run_result(folder / f"runs/sweeps/s/seed={n}") for n in (1, 2)],
)
SAMPLING = [
    "sample.py",
    "run=a",
    "prompts=prompts.txt",
    "out=o.jsonl",
    "num_samples=40",
    "max_new_tokens=30",
]
COMMANDS = [
    TRAIN,
    Command(
        "prepare",
        ["prepare.py", *PREPARE],
        lambda folder: [*map(read_files, folder.glob("data/prepared/[!.]*"))],
    ),
    SWEEP,
    Command("sample", SAMPLING, lambda folder: (folder / "o.jsonl").read_bytes(), needs=TRAIN),
]
BENCH = Command(
    "bench",
    ["bench.py", "block_sizes=[64]", "rounds=2", "wandb.mode=disabled"],
    lambda folder: None,
)


class Workspace:
    """A folder with the inputs of a command, and the result of the undisturbed command."""

    def __init__(self, command: Command, parent: Path):
        self.command, self.inputs = command, parent / f"{command.name}-inputs"
        self.inputs.mkdir()
        (self.inputs / "text.txt").write_text(TEXT, encoding="utf-8")
        (self.inputs / "long.txt").write_text(TEXT * 100, encoding="utf-8")
        (self.inputs / "prompts.txt").write_text("The 1\nThe 2\n", encoding="utf-8")
        if command.needs is not None:
            finish(command.needs, self.inputs)
        self.folder = parent / command.name
        self.reset()
        started = time.perf_counter()
        finish(command, self.folder)
        self.seconds = time.perf_counter() - started
        self.expected = command.result(self.folder)

    def reset(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.inputs, self.folder)

    def find_failure(self) -> str:
        """Run the command until it ends by itself, and compare its result."""
        try:
            if not (
                self.folder / "o.jsonl"
            ).exists():  # sample.py replaces no file; this one is complete
                finish(self.command, self.folder)
            return "" if self.expected == self.command.result(self.folder) else "another result"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def start(command: Command, folder: Path) -> subprocess.Popen:
    words = [sys.executable, str(ROOT / command.words[0]), *command.words[1:]]
    with open(folder / "log", "a", encoding="utf-8") as log:
        return subprocess.Popen(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def read_log(folder: Path) -> str:
    return (folder / "log").read_text(encoding="utf-8", errors="replace")


def finish(command: Command, folder: Path) -> None:
    """Run a command to its end. Raises RuntimeError if it fails."""
    code = start(command, folder).wait(LIMIT_S)
    if code != 0:
        raise RuntimeError(f"exit code {code}: {read_log(folder)[-300:]}")


def descendants(process: int) -> list[int]:
    """Process ids of the children, their children and so on (Linux)."""
    tasks = Path(f"/proc/{process}/task")
    with suppress(OSError):
        ids = [
            int(word)
            for file in tasks.glob("*/children")
            for word in file.read_text(encoding="utf-8").split()
        ]
        return [*ids, *(inner for child in ids for inner in descendants(child))]
    return []


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL for a process and its descendants, as after a crash of the machine."""
    for number in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


def soak_kills(parent: Path, tries: int) -> Iterator[tuple[str, str]]:
    for command, share in zip(COMMANDS, (0.5, 0.15, 0.15, 0.2), strict=True):
        place = Workspace(command, parent)
        for _ in range(max(1, round(share * tries))):
            place.reset()
            kills = 0
            for _ in range(random.randint(1, 3)):
                process = start(command, place.folder)
                time.sleep(random.uniform(0, place.seconds))
                kills += process.poll() is None
                kill_all(process)
            yield f"{command.name} after {kills} kills", place.find_failure()


def soak_signals(parent: Path, tries: int) -> Iterator[tuple[str, str]]:
    commands = [*COMMANDS, BENCH]
    for command in commands:
        place = Workspace(command, parent)
        for kind in SIGNALS * max(1, tries // (len(commands) * len(SIGNALS))):
            place.reset()
            before, moment = set(place.folder.rglob("*")), random.uniform(0, place.seconds)
            process = start(command, place.folder)
            time.sleep(moment)
            process.send_signal(kind)
            code = process.wait(LIMIT_S)
            log = read_log(place.folder)
            is_early = code == -kind or (code == 1 and str(ROOT) not in log)  # while Python started
            is_early &= len(set(place.folder.rglob("*")) - before) <= 1
            is_right = is_early or (code in (0, 75) and "Traceback" not in log)
            failure = place.find_failure() if is_right else f"exit code {code}: {log[-300:]}"
            yield f"{command.name}, {signal.Signals(kind).name} after {moment:.2f} s", failure


def soak_returns(parent: Path, tries: int) -> Iterator[tuple[str, str]]:
    keep_all = Command("train", [*TRAIN.words, "checkpoint.keep=99"], TRAIN.result)
    place = Workspace(keep_all, parent)
    shutil.copytree(place.folder, place.inputs, dirs_exist_ok=True)
    for _ in range(tries):
        place.reset()
        run, rate = place.folder / "runs/a", random.choice([0.001, 0.01, 0.1])
        older = random.choice([*run.glob("checkpoints/step-*.pt")])
        shutil.copy(older, run / "checkpoints/last.pt")
        words = [*TRAIN.words, f"optimizer.lr={rate}", f"train.steps={random.randint(113, 125)}"]
        command = Command("train", words, TRAIN.result)
        process = start(command, place.folder)
        time.sleep(random.uniform(0, place.seconds))
        kill_all(process)
        yield f"{older.stem}, optimizer.lr={rate}", find_disagreement(command, place.folder)


def find_disagreement(command: Command, folder: Path) -> str:
    """Finish a run that returned to an older checkpoint, and compare best.pt with summary.json."""
    try:
        finish(command, folder)
    except RuntimeError as error:
        return str(error)
    summary = json.loads((folder / "runs/a/summary.json").read_text(encoding="utf-8"))
    best = folder / "runs/a/checkpoints/best.pt"
    saved = load_checkpoint(best)
    recorded = [summary["best_step"], summary["best_val_loss"]]
    steps = [int(path.stem.removeprefix("step-")) for path in best.parent.glob("step-*.pt")]
    if len(steps) > 2 or max(steps) >= summary["step"]:
        return f"finished at step {summary['step']} with checkpoints of steps {sorted(steps)}"
    found = [saved["step"], saved["best_val_loss"]]
    return "" if found == recorded else f"best.pt has {found}, summary.json {recorded}"


def soak_pairs(parent: Path, tries: int) -> Iterator[tuple[str, str]]:
    for command in COMMANDS:
        place = Workspace(command, parent)
        for _ in range(max(1, tries // len(COMMANDS))):
            place.reset()
            pair = [start(command, place.folder) for _ in range(2)]
            codes = [process.wait(LIMIT_S) for process in pair]
            is_right = set(codes) <= {0, 1, 2} and "Traceback" not in read_log(place.folder)
            yield (
                command.name,
                place.find_failure() if is_right else f"{codes}: {read_log(place.folder)[-300:]}",
            )


def soak_damaged_files(parent: Path, tries: int) -> Iterator[tuple[str, str]]:
    place, run = Workspace(SWEEP, parent), "sweeps/s/seed=1"
    shutil.copytree(place.folder, place.inputs, dirs_exist_ok=True)
    longer = [*TRAINING, "train.steps=125", "seed=1", f"name={run}"]
    commands = [
        ("sample", [f"run={run}", "max_new_tokens=3"]),
        ("compare", ["sweeps/s"]),
        ("train", SWEEP.words[1:]),
    ]
    run_forked("train", longer, place.folder)
    expected, *_ = run_result(place.folder / "runs" / run)
    files = [
        f
        for f in place.inputs.rglob("*.*")
        if re.search("(json|jsonl|yaml|bin|best.pt|last.pt)$", f.name)
    ]
    for _ in range(tries):
        place.reset()
        path = place.folder / (file := random.choice(files)).relative_to(place.inputs)
        content = bytearray(path.read_bytes())
        kind, position = (
            random.choice(["flip", "cut", "noise", "null", "[1]", "gone"]),
            random.randrange(len(content)),
        )
        content[position] ^= 1 << random.randrange(8)
        damaged = {
            "flip": content,
            "cut": content[:position],
            "noise": random.randbytes(len(content)),
        }
        path.write_bytes(damaged.get(kind, kind.encode())) if kind != "gone" else path.unlink()
        failure = ""
        for script, words in [*commands, ("train", longer)]:
            code, out, log = run_forked(script, words, place.folder)
            job_logs = place.folder.glob("runs/sweeps/s/*/train.log")
            logs = out + log + "".join(job_log.read_text(encoding="utf-8") for job_log in job_logs)
            if code not in (0, 1, 2) or "Traceback" in logs or (code > 0 and log.count("\n") > 1):
                failure = failure or f"{script}: exit code {code}, {logs[-300:]}"
        if not failure and code == 0 and (file.suffix == ".pt" or file.name == "meta.json"):
            failure = (
                "" if run_result(place.folder / "runs" / run)[0] == expected else "other weights"
            )
        yield f"{kind} {path.relative_to(place.folder)}", failure


def wrong_words(script: str, folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield random wrong command lines of a script, with the parts that its error must name."""
    pick, key_kinds = random.choice, key_types(script).items()
    types = {
        key: set(get_args(kind)) if isinstance(kind, UnionType) else {kind}
        for key, kind in key_kinds
    }
    scalars = [key for key, kinds in types.items() if kinds & {int, float, bool}]
    integers, floats = ([key for key in scalars if kind in types[key]] for kind in (int, float))
    others = [
        key for key in " ".join(SYNONYMS.values()).split() if key not in types
    ]  # of other programs
    right = ["data=text", "data.path=text.txt"] if script in ("train", "prepare") else []
    wrong_files = {
        "latin1.txt": b"caf\xe9 " * 400, "utf16.txt": TEXT.encode("utf-16-le"), "array.json": b'[{"text": "a"}]',
        "open.csv": b'text\na\n"b\n' + b"c\n" * 400, "twice.csv": b"text,text\na,b\n", "ragged.tsv": b"text\na\tb\n",
        "broken.ndjson": b'{"text": oops}\n', "nameless.csv": b"a sentence\n" * 400,
    }  # fmt: skip
    for name, content in wrong_files.items():
        (folder / name).write_bytes(content)
    (folder / "empty").mkdir()
    useless = ["data.repo=a/b", "data.stream=true", "data.prompt_column=q"]
    while True:
        key, scalar, group = pick([*types]), pick(scalars), pick(list_groups(script))
        typo, source = misspell(key, types), pick(["run", "prompts", "prompt_file"])
        form = pick(
            [f"+{key}=1", f"~{key}", key, "=1", f"hydra.{key}=1", "hydra.run.dir=x", f"++{key}=2"]
        )
        flag = pick(
            ["--verbose", "-x", "--config-dir=none", "--cfg=all", "--help=1", "--config-dir="]
        )
        path = pick(
            [
                "missing.txt",
                "/dev/zero",
                "/proc/self/mem",
                "empty",
                "*.none",
                "[a]/*",
                "x" * 999,
                *wrong_files,
            ]
        )
        dashed = pick([key for key in types if "_" in key or "." in key])
        dashed = pick(
            [dashed.replace("_", "-"), re.sub("[._]", "-", dashed), dashed.replace(".", "/")]
        )
        capital, other = pick([key.upper(), key.capitalize()]), pick(others)
        cases = [
            *((f"{wrong}=1", wrong) for wrong in (typo, dashed, capital, other) if wrong not in types),
            (f"--{key}=1", f"--{key}"), (f"-{key}=1", f"-{key}"),
            (f"{pick(['ключ', 'a b', chr(27), chr(0xDCFF)])}=1", ""),
            (f"{scalar}={pick(['abc', '[1,2]', '{a:1}', 'é', '1e', '--', '2020-01-01'])}", scalar),
            (f"{group}={pick(['no', '../x', '[a,b]', '1'])}", group), (flag, flag.split("=")[0]),
            (form, key if key in form else form.split("=")[0].split(".")[0]),
        ]  # fmt: skip
        cases += [(f"{i}={pick(['-' + '9' * 25, '9' * 25, '1e300'])}", i) for i in [pick(integers)]]
        cases += [(f"{i}={pick(['nan', '-inf', '-1e30'])}", i) for i in [pick(floats)] if floats]
        cases += [(no_effect := pick(useless), no_effect.split("=")[0])] * bool(right)
        cases += [(f"data.path={path}", path)] * bool(right) + [(f"{source}={path}", path)] * (
            script == "sample" and not path.endswith("sv")
        )
        word, name = pick(cases)
        yield [*right, word], [name]


def misspell(key: str, types: dict) -> str:
    while key in types:
        letters, position = list(key), random.randrange(len(key))
        letters[position : position + random.randint(0, 1)] = random.choice("abcxyz_.")
        key = "".join(letters).strip(".")
    return key


def soak_wrong_words(parent: Path, tries: int) -> Iterator[tuple[str, str]]:
    scripts = ("train", "sample", "eval", "prepare", "bench")
    for script in scripts:
        folder = parent / f"wrong-{script}"
        folder.mkdir()
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        lines = wrong_words(script, folder)
        for _ in range(max(1, tries // len(scripts))):
            words, names = next(lines)
            before = set(read_files(folder))
            code, out, log = run_forked(script, words, folder)
            new = set(read_files(folder)) - before - {"out", "log"}
            is_right = (
                code == 2
                and log.count("\n") == 1
                and all(name in log for name in names)
                and not new
            )
            is_right &= not out or out.startswith(
                "preparing"
            )  # a file is known to be wrong after it was read
            yield (
                f"{script} {words}",
                "" if is_right else f"exit code {code}, {out + log!r:.300}, new files {new}",
            )


def run_forked(script: str, words: list[str], folder: Path) -> tuple[int, str, str]:
    """Run a command in a forked process, because importing it takes a second -> exit code, stdout, stderr."""
    import_module(script)  # once, before the forks
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        run_in_child(script, words, folder)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out, log = (
        (folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "log")
    )
    return code, out, log


def run_in_child(script: str, words: list[str], folder: Path) -> NoReturn:
    """Run a command in a forked process, with its output in two files, and exit."""
    os.chdir(folder)
    for name, number in (("out", 1), ("log", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [f"{script}.py", *words]
    signal.alarm(LIMIT_S)
    code = 99
    try:
        code = run_command(script, *words)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Functions that yield (what was tried, how it failed or ""), with a number of tries.
PARTS = {"kill": (soak_kills, 100), "signal": (soak_signals, 60), "pair": (soak_pairs, 20)}
PARTS |= {
    "return": (soak_returns, 40),
    "wrong": (soak_wrong_words, 300),
    "damage": (soak_damaged_files, 100),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the numbers of tries")
    parser.add_argument("--seed", type=int, default=None, help="of the random moments and words")
    flags = parser.parse_args(arguments)
    seed = random.randrange(10**6) if flags.seed is None else flags.seed
    table, lost = make_table("part", "tried", "lost", "minutes"), 0
    for name in flags.parts or PARTS:
        random.seed(seed)
        (part, tries), started = PARTS[name], time.perf_counter()
        print(f"{name} (seed {seed})", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            failed = []  # of each try
            for name_of_try, failure in part(Path(folder), max(1, round(tries * flags.scale))):
                failed.append(bool(failure))
                if failure:
                    print(f"FAILED {name_of_try}: {failure}", flush=True)
        table.add_row(
            name,
            f"{len(failed):,}",
            str(sum(failed)),
            f"{(time.perf_counter() - started) / 60:.1f}",
        )
        lost += sum(failed)
    PlainConsole().print(table)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Soak test: kill and signal the commands and type wrong words, at random, and check the results.

    python tests/soak/soak.py                    everything; Linux, about half an hour on two cores
    python tests/soak/soak.py kill wrong         two of the parts
    python tests/soak/soak.py --scale 0.01       one try of each kind

Each part first runs its commands without a disturbance. After a disturbance, the same command must
finish with the same result: weights, losses, tokens and samples are compared bit by bit. Prints
every failure, and a table.

kill       SIGKILL at random moments of training, preparation, a sweep, and sampling to a file
signal     Ctrl-C, SIGTERM and SIGHUP at random moments of every command
pair       the same command twice at the same time
return     an older checkpoint is copied over last.pt, and the run continues with other settings and
           one SIGKILL: best.pt must agree with summary.json, and no checkpoint of the abandoned
           steps is left
wrong      random wrong command lines: exit code 2, one line that names the wrong word, and no file
damage     random damage to a file of a sweep or its data: each command prints one line or finishes;
           if a checkpoint or vocabulary is damaged, training finishes only with equal weights
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
from run_helpers import read_files  # noqa: E402

from common.checkpoint_file import load_checkpoint  # noqa: E402
from common.console import PlainConsole, make_table  # noqa: E402
from configs.compose import list_groups  # noqa: E402
from configs.error_messages import SYNONYMS  # noqa: E402
from configs.schema import key_types  # noqa: E402

LIMIT_S = 600  # of a command, for the slowest machines
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
Tries = Iterator[tuple[str, str]]  # what was tried, and how it failed, or ""


# Commands and their results


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
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = untimed([json.loads(line) for line in lines])
    summary = read_summary(run)
    weights = {}
    for kind in ("last", "best"):
        saved = load_checkpoint(run / f"checkpoints/{kind}.pt")
        tensors = {"model": saved["model"]}
        if saved["optimizer"] is not None:
            tensors |= saved["optimizer"]
        for name, state in tensors.items():
            for key, value in state.items():
                weights[kind, name, key] = torch.as_tensor(value).numpy().tobytes()
    keys = ("status", "step", "best_step", "best_val_loss", "last_val_loss")
    num_checkpoints = len(list(run.glob("checkpoints/*")))
    return weights, rows, [summary[key] for key in keys], num_checkpoints


def read_summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def train_result(folder: Path) -> Any:
    return run_result(folder / "runs/a")


def prepare_result(folder: Path) -> Any:
    return [read_files(prepared) for prepared in folder.glob("data/prepared/[!.]*")]


def sweep_result(folder: Path) -> Any:
    return [run_result(folder / f"runs/sweeps/s/seed={seed}") for seed in (1, 2)]


def sample_result(folder: Path) -> Any:
    return (folder / "o.jsonl").read_bytes()


def no_result(folder: Path) -> Any:
    return None


TRAINING = [
    *TINY,
    "train.steps=120",
    "eval.every=20",
    "checkpoint.every=7",
    "checkpoint.keep=2",
    "model.dropout=0.1",
]
PREPARING = ["data=text", "data.path=long.txt", "tokenizer.vocab_size=400"]
SAMPLING = ["run=a", "prompts=prompts.txt", "out=o.jsonl", "num_samples=40", "max_new_tokens=30"]
BENCHMARKING = ["block_sizes=[64]", "rounds=2", "wandb.mode=disabled"]

TRAIN = Command("train", ["train.py", *TRAINING, "name=a"], train_result)
PREPARE = Command("prepare", ["prepare.py", *PREPARING], prepare_result)
SWEEP = Command("sweep", ["train.py", "-m", *TRAINING, "seed=1,2", "name=s"], sweep_result)
SAMPLE = Command("sample", ["sample.py", *SAMPLING], sample_result, needs=TRAIN)
BENCH = Command("bench", ["bench.py", *BENCHMARKING], no_result)
COMMANDS = [TRAIN, PREPARE, SWEEP, SAMPLE]


class Workspace:
    """A folder with the inputs of a command, and the result of the undisturbed command."""

    def __init__(self, command: Command, parent: Path):
        self.command = command
        self.inputs = parent / f"{command.name}-inputs"
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
        """Start again from the inputs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.inputs, self.folder)

    def start_from_result(self) -> None:
        """Make the results of the undisturbed command inputs of the next tries."""
        shutil.copytree(self.folder, self.inputs, dirs_exist_ok=True)

    def find_failure(self) -> str:
        """Run the command until it ends by itself, and compare its result."""
        # sample.py replaces no file; one that exists is complete
        has_samples = (self.folder / "o.jsonl").exists()
        try:
            if not has_samples:
                finish(self.command, self.folder)
            is_equal = self.expected == self.command.result(self.folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "" if is_equal else "another result"

    def random_moment(self) -> float:
        """Seconds from the start to a moment of the command."""
        return random.uniform(0, self.seconds)


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
    children: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            children += [int(word) for word in file.read_text(encoding="utf-8").split()]
    found = list(children)
    for child in children:
        found += descendants(child)
    return found


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL for a process and its descendants, as after a crash of the machine."""
    for number in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


# kill, signal, pair


def soak_kills(parent: Path, tries: int) -> Tries:
    for command, share in zip(COMMANDS, (0.5, 0.15, 0.15, 0.2), strict=True):
        place = Workspace(command, parent)
        for _ in range(max(1, round(share * tries))):
            place.reset()
            kills = 0
            for _ in range(random.randint(1, 3)):
                process = start(command, place.folder)
                time.sleep(place.random_moment())
                if process.poll() is None:
                    kills += 1
                kill_all(process)
            yield f"{command.name} after {kills} kills", place.find_failure()


def soak_signals(parent: Path, tries: int) -> Tries:
    commands = [*COMMANDS, BENCH]
    for command in commands:
        place = Workspace(command, parent)
        for signum in SIGNALS * max(1, tries // (len(commands) * len(SIGNALS))):
            place.reset()
            moment = place.random_moment()
            failure = find_failure_after(signum, moment, command, place)
            yield f"{command.name}, {signum.name} after {moment:.2f} s", failure


def find_failure_after(
    signum: signal.Signals, moment: float, command: Command, place: Workspace
) -> str:
    """Send a signal to a command. It must end as after an interruption, and continue."""
    before = set(place.folder.rglob("*"))
    process = start(command, place.folder)
    time.sleep(moment)
    process.send_signal(signum)
    code = process.wait(LIMIT_S)
    log = read_log(place.folder)
    new = set(place.folder.rglob("*")) - before
    is_interrupted = code in (0, 75) and "Traceback" not in log
    # while Python itself starts, the signal kills it, or raises outside of the project
    is_killed = code == -signum or (code == 1 and str(ROOT) not in log)
    if is_interrupted or (is_killed and len(new) <= 1):
        return place.find_failure()
    return f"exit code {code}: {log[-300:]}"


def soak_pairs(parent: Path, tries: int) -> Tries:
    for command in COMMANDS:
        place = Workspace(command, parent)
        for _ in range(max(1, tries // len(COMMANDS))):
            place.reset()
            pair = [start(command, place.folder) for _ in range(2)]
            codes = [process.wait(LIMIT_S) for process in pair]
            log = read_log(place.folder)
            failure = f"{codes}: {log[-300:]}"
            if set(codes) <= {0, 1, 2} and "Traceback" not in log:
                failure = place.find_failure()
            yield command.name, failure


# return


def soak_returns(parent: Path, tries: int) -> Tries:
    keep_all = Command("train", [*TRAIN.words, "checkpoint.keep=99"], TRAIN.result)
    place = Workspace(keep_all, parent)
    place.start_from_result()
    for _ in range(tries):
        place.reset()
        checkpoints = place.folder / "runs/a/checkpoints"
        older = random.choice([*checkpoints.glob("step-*.pt")])
        shutil.copy(older, checkpoints / "last.pt")
        rate = random.choice([0.001, 0.01, 0.1])
        steps = random.randint(113, 125)
        words = [*TRAIN.words, f"optimizer.lr={rate}", f"train.steps={steps}"]
        command = Command("train", words, TRAIN.result)
        process = start(command, place.folder)
        time.sleep(place.random_moment())
        kill_all(process)
        yield f"{older.stem}, optimizer.lr={rate}", find_disagreement(command, place.folder)


def find_disagreement(command: Command, folder: Path) -> str:
    """Finish a run that returned to an older checkpoint, and compare best.pt with summary.json."""
    try:
        finish(command, folder)
    except RuntimeError as error:
        return str(error)
    summary = read_summary(folder / "runs/a")
    best = folder / "runs/a/checkpoints/best.pt"
    saved = load_checkpoint(best)
    steps = [int(path.stem.removeprefix("step-")) for path in best.parent.glob("step-*.pt")]
    if len(steps) > 2 or max(steps) >= summary["step"]:
        return f"finished at step {summary['step']} with checkpoints of steps {sorted(steps)}"
    recorded = [summary["best_step"], summary["best_val_loss"]]
    found = [saved["step"], saved["best_val_loss"]]
    return "" if found == recorded else f"best.pt has {found}, summary.json {recorded}"


# damage

JOB = "sweeps/s/seed=1"
LONGER = [*TRAINING, "train.steps=125", "seed=1", f"name={JOB}"]
AFTER_DAMAGE = [
    ("sample", [f"run={JOB}", "max_new_tokens=3"]),
    ("compare", ["sweeps/s"]),
    ("train", SWEEP.words[1:]),
    ("train", LONGER),
]


def soak_damaged_files(parent: Path, tries: int) -> Tries:
    place = Workspace(SWEEP, parent)
    place.start_from_result()
    run_forked("train", LONGER, place.folder)
    expected, *_ = run_result(place.folder / "runs" / JOB)
    pattern = re.compile("(json|jsonl|yaml|bin|best.pt|last.pt)$")
    files = [path for path in place.inputs.rglob("*.*") if pattern.search(path.name)]
    for _ in range(tries):
        place.reset()
        file = random.choice(files).relative_to(place.inputs)
        kind = damage(place.folder / file)
        failure = find_failure_after_damage(place.folder, file, expected)
        yield f"{kind} {file}", failure


def damage(path: Path) -> str:
    """Damage a file at random. Returns the kind of damage."""
    content = path.read_bytes()
    position = random.randrange(len(content))
    kind = random.choice(["flip", "cut", "noise", "null", "[1]", "gone"])
    if kind == "gone":
        path.unlink()
    elif kind == "flip":
        flipped = bytearray(content)
        flipped[position] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
    elif kind == "cut":
        path.write_bytes(content[:position])
    elif kind == "noise":
        path.write_bytes(random.randbytes(len(content)))
    else:
        path.write_text(kind, encoding="utf-8")
    return kind


def find_failure_after_damage(folder: Path, file: Path, expected: dict) -> str:
    """Run all commands. expected: the weights of the longer run."""
    code = 0
    for script, words in AFTER_DAMAGE:
        code, out, log = run_forked(script, words, folder)
        logs = out + log
        for job_log in folder.glob("runs/sweeps/s/*/train.log"):
            logs += job_log.read_text(encoding="utf-8")
        is_one_line = code == 0 or log.count("\n") <= 1
        if code not in (0, 1, 2) or "Traceback" in logs or not is_one_line:
            return f"{script}: exit code {code}, {logs[-300:]}"
    is_checked = file.suffix == ".pt" or file.name == "meta.json"
    if is_checked and code == 0 and run_result(folder / "runs" / JOB)[0] != expected:
        return "other weights"
    return ""


# wrong

READING = {  # the keys of files that a script reads
    "train": ["data.path"],
    "prepare": ["data.path"],
    "sample": ["run", "prompts", "prompt_file"],
}
WRONG_FILES = {
    "latin1.txt": b"caf\xe9 " * 400,
    "utf16.txt": TEXT.encode("utf-16-le"),
    "array.json": b'[{"text": "a"}]',
    "open.csv": b'text\na\n"b\n' + b"c\n" * 400,
    "twice.csv": b"text,text\na,b\n",
    "ragged.tsv": b"text\na\tb\n",
    "broken.ndjson": b'{"text": oops}\n',
    "nameless.csv": b"a sentence\n" * 400,
}
WRONG_PATHS = ["missing.txt", "/dev/zero", "/proc/self/mem", "empty", "*.none", "[a]/*", "x" * 999]
pick = random.choice
Wrong = tuple[str, str]  # a wrong word, and the part that its error must name


class WrongWords:
    """Random wrong words of a script."""

    def __init__(self, script: str):
        self.script = script
        self.types: dict[str, set] = {}
        for key, kind in key_types(script).items():
            self.types[key] = set(get_args(kind)) if isinstance(kind, UnionType) else {kind}
        self.kinds = [
            self.misspelled_key,
            self.key_with_other_separators,
            self.key_with_capitals,
            self.key_of_another_program,
            self.key_with_unusual_characters,
            self.key_as_flag,
            self.form_that_is_no_setting,
            self.unknown_flag,
            self.unknown_choice,
            self.value_of_another_type,
            self.value_out_of_range,
        ]
        if script in READING:
            self.kinds.append(self.unreadable_file)
        if script in ("train", "prepare"):
            self.kinds.append(self.key_without_effect)

    def pick(self) -> Wrong:
        return pick(self.kinds)()

    def pick_key(self, *kinds: type) -> str | None:
        """A key with a value of one of these types, or any key. None if there is none."""
        keys = [key for key, types in self.types.items() if not kinds or types & {*kinds}]
        return pick(keys) if keys else None

    def _set(self, key: str) -> Wrong:
        """A setting with an unknown key. Another kind of word if the script has the key."""
        return self.pick() if key in self.types else (f"{key}=1", key)

    def misspelled_key(self) -> Wrong:
        key = self.pick_key()
        while key in self.types:
            letters = list(key)
            position = random.randrange(len(key))
            replaced = random.randint(0, 1)
            letters[position : position + replaced] = pick("abcxyz_.")
            key = "".join(letters).strip(".")
        return self._set(key)

    def key_with_other_separators(self) -> Wrong:
        key = pick([key for key in self.types if "_" in key or "." in key])
        dashed = re.sub("[._]", "-", key)
        return self._set(pick([dashed, key.replace("_", "-"), key.replace(".", "/")]))

    def key_with_capitals(self) -> Wrong:
        key = self.pick_key()
        return self._set(pick([key.upper(), key.capitalize()]))

    def key_of_another_program(self) -> Wrong:
        return self._set(pick(" ".join(SYNONYMS.values()).split()))

    def key_with_unusual_characters(self) -> Wrong:
        return f"{pick(['ключ', 'a b', chr(27), chr(0xDCFF)])}=1", ""

    def key_as_flag(self) -> Wrong:
        flag = f"{pick(['-', '--'])}{self.pick_key()}"
        return f"{flag}=1", flag

    def form_that_is_no_setting(self) -> Wrong:
        key = self.pick_key()
        forms = {
            f"+{key}=1": key,
            f"++{key}=2": key,
            f"~{key}": key,
            key: key,
            f"hydra.{key}=1": key,
            "hydra.run.dir=x": "hydra",
            "=1": "",
        }
        return pick(list(forms.items()))

    def unknown_flag(self) -> Wrong:
        flags = ["--verbose", "-x", "--config-dir=none", "--cfg=all", "--help=1", "--config-dir="]
        flag = pick(flags)
        return flag, flag.partition("=")[0]

    def unknown_choice(self) -> Wrong:
        group = pick(list_groups(self.script))
        return f"{group}={pick(['no', '../x', '[a,b]', '1'])}", group

    def value_of_another_type(self) -> Wrong:
        key = self.pick_key(int, float, bool)
        value = pick(["abc", "[1,2]", "{a:1}", "é", "1e", "--", "2020-01-01"])
        return f"{key}={value}", key

    def value_out_of_range(self) -> Wrong:
        key = self.pick_key(float)
        value = pick(["nan", "-inf", "-1e30"])
        if key is None or pick([True, False]):
            key = self.pick_key(int)
            value = pick(["-" + "9" * 25, "9" * 25, "1e300"])
        return f"{key}={value}", key

    def key_without_effect(self) -> Wrong:
        word = pick(["data.repo=a/b", "data.stream=true", "data.prompt_column=q"])
        return word, word.partition("=")[0]

    def unreadable_file(self) -> Wrong:
        key = pick(READING[self.script])
        paths = [*WRONG_PATHS, "latin1.txt", "utf16.txt"]
        if key != "prompt_file":  # which may be any text
            paths.append("array.json")
        if key == "data.path":
            paths += WRONG_FILES
        path = pick(paths)
        return f"{key}={path}", path


def soak_wrong_words(parent: Path, tries: int) -> Tries:
    scripts = ("train", "sample", "eval", "prepare", "bench")
    for script in scripts:
        folder = parent / f"wrong-{script}"
        (folder / "empty").mkdir(parents=True)
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        for name, content in WRONG_FILES.items():
            (folder / name).write_bytes(content)
        wrong_words = WrongWords(script)
        right = ["data=text", "data.path=text.txt"] if script in ("train", "prepare") else []
        for _ in range(max(1, tries // len(scripts))):
            word, name = wrong_words.pick()
            words = [*right, word]
            yield f"{script} {words}", find_wrong_refusal(script, words, name, folder)


def find_wrong_refusal(script: str, words: list[str], name: str, folder: Path) -> str:
    """Run a command that must be refused, with one line that has `name`, and without a new file."""
    before = set(read_files(folder))
    code, out, log = run_forked(script, words, folder)
    new = set(read_files(folder)) - before - {Path("out"), Path("log")}
    is_one_line = log.count("\n") == 1
    prints_nothing = out == "" or out.startswith("preparing")  # a wrong file must be read first
    if code == 2 and is_one_line and name in log and prints_nothing and not new:
        return ""
    return f"exit code {code}, {out + log!r:.300}, new files {new}"


def run_forked(script: str, words: list[str], folder: Path) -> tuple[int, str, str]:
    """Run a command in a forked process, because importing it takes a second.

    Returns the exit code, stdout and stderr.
    """
    import_module(script)  # once, before the forks
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        run_in_child(script, words, folder)
    _, status = os.waitpid(child, 0)
    out = (folder / "out").read_text(encoding="utf-8", errors="replace")
    log = (folder / "log").read_text(encoding="utf-8", errors="replace")
    return os.waitstatus_to_exitcode(status), out, log


def run_in_child(script: str, words: list[str], folder: Path) -> NoReturn:
    """Run a command in a forked process, with its output in two files, and exit."""
    os.chdir(folder)
    for name, descriptor in (("out", 1), ("log", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
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


PARTS = {  # functions that yield tries, with a number of tries
    "kill": (soak_kills, 100),
    "signal": (soak_signals, 60),
    "pair": (soak_pairs, 20),
    "return": (soak_returns, 40),
    "wrong": (soak_wrong_words, 300),
    "damage": (soak_damaged_files, 100),
}


def run_part(name: str, scale: float) -> list[bool]:
    """Run a part, and print its failures. Returns whether each try has failed."""
    soak, tries = PARTS[name]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for tried, failure in soak(Path(folder), max(1, round(tries * scale))):
            failed.append(bool(failure))
            if failure:
                print(f"FAILED {tried}: {failure}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the numbers of tries")
    parser.add_argument("--seed", type=int, default=None, help="of the random moments and words")
    flags = parser.parse_args()
    seed = random.randrange(10**6) if flags.seed is None else flags.seed
    table = make_table("part", "tried", "lost", "minutes")
    lost = 0
    for name in flags.parts or PARTS:
        random.seed(seed)
        print(f"{name} (seed {seed})", flush=True)
        started = time.perf_counter()
        failed = run_part(name, flags.scale)
        minutes = (time.perf_counter() - started) / 60
        table.add_row(name, f"{len(failed):,}", str(sum(failed)), f"{minutes:.1f}")
        lost += sum(failed)
    PlainConsole().print(table)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())

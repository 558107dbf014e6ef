"""Compare the speed of data preparation: trilGPT and a plain tiktoken script on one core, on 100 MB of Python code.

    python benchmarks/preparation_speed.py                        gpt2 and a trained BPE, 100 MB, three rounds
    python benchmarks/preparation_speed.py --megabytes 2000 --rounds 1 --tokenizers gpt2

trilGPT's time covers the complete process: hashing, reading, BPE training, encoding, writing and fsync. The plain
script gets the trained vocabulary, reads all documents, encodes them one by one, and writes arrays. Its complete time
and the time of its encoding loop are reported. The programs run in alternation. Peak memory is of one process.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.process import cpu_count  # noqa: E402

# The simplest script: keeps everything in memory and uses one core.
PLAIN_SCRIPT = """
import json, sys
import numpy as np
import tiktoken
sys.path.insert(0, sys.argv[1])
from data.tokenizer import end_of_text, from_spec
from pathlib import Path
tokenizer = from_spec(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))["tokenizer"])
end = end_of_text(tokenizer)
rows = [json.loads(line)["text"] for line in open(sys.argv[3], encoding="utf-8")]
import time
start = time.perf_counter()
documents = [tokenizer.encode_ordinary(row) + [end] for row in rows]
print(time.perf_counter() - start)
first = int(len(documents) * 0.9)
for name, part in (("train", documents[:first]), ("val", documents[first:])):
    np.array([token for ids in part for token in ids], dtype=np.uint16).tofile(f"{name}.bin")
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tokenizers", nargs="+", default=["gpt2", "bpe"], choices=["gpt2", "bpe", "byte", "char"]
    )
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument(
        "--one-file", action="store_true", help="one .txt file; does not run the plain script"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        table = write_documents(arguments.megabytes * 10**6, arguments.one_file)
        size = count_text_bytes(table)
        print(f"{size / 1e6:,.1f} MB of text, {cpu_count()} cores", flush=True)
        for name in arguments.tokenizers:
            rounds = []
            for _ in range(arguments.rounds):
                vocab_size = (
                    [f"tokenizer.vocab_size={arguments.vocab_size}"] if name == "bpe" else []
                )
                seconds, peak, _ = run_timed(
                    [
                        ROOT / "prepare.py",
                        "data=text",
                        f"data.path={table}",
                        f"tokenizer={name}",
                        *vocab_size,
                    ]
                )
                line = f"{name}: {seconds:.1f} s, {size / seconds / 1e6:.1f} MB/s, peak {peak:,.0f} MiB"
                if not arguments.one_file:
                    (meta,) = Path("data/prepared").glob("*/meta.json")
                    script_seconds, script_peak, out = run_timed(
                        ["-c", PLAIN_SCRIPT, ROOT, meta, table]
                    )
                    rounds.append((seconds, script_seconds, float(out)))
                    line += f"; plain script {script_seconds:.1f} s, peak {script_peak:,.0f} MiB, loop {float(out):.1f} s"
                print(line, flush=True)
                shutil.rmtree("data")
            for label, column in (
                (("plain script", 1), ("plain script's loop alone", 2)) if rounds else ()
            ):
                ratios = sorted(times[column] / times[0] for times in rounds)
                print(
                    f"{name}: {statistics.median(ratios):.2f} times as fast as the {label} "
                    f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
                    flush=True,
                )


def write_documents(size: int, one_file: bool) -> Path:
    """Write the files of the standard library repeatedly, with a first line that is unique per repetition."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [path for path in files if "site-packages" not in path.parts]
    path, written, repetition = Path("texts.txt" if one_file else "texts.jsonl"), 0, 0
    with open(path, "w", encoding="utf-8") as out:
        while written < size:
            for file in files:
                text = f"# {repetition}\n" + file.read_text(encoding="utf-8", errors="replace")
                out.write(
                    text if one_file else json.dumps({"text": text}, ensure_ascii=False) + "\n"
                )
                written += len(text.encode())
                if written >= size:
                    break
            repetition += 1
    return path


def count_text_bytes(path: Path) -> int:
    if path.suffix == ".txt":
        return path.stat().st_size
    with open(path, encoding="utf-8") as lines:
        return sum(len(json.loads(line)["text"].encode()) for line in lines)


def run_timed(arguments: list) -> tuple[float, float, str]:
    """Run a Python process. Returns (seconds, peak MiB, output)."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{arguments[0]} failed")
    return time.perf_counter() - start, usage.ru_maxrss / 1024, out


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compares the speed of //train:tokenize with tiktoken (GPT-2's files) or tokenizers (tokenizer.json).

The two alternate on the same files, with one thread each. Prints the median MB/s of processor time and of wall
time.

  tests/interop/tokenizer_speed.py --tokenizer=FOLDER [--rounds=5] TEXT_OR_CODE ...

//train:tokenize is timed as a whole program: it also loads the tokenizer, reads and writes.
"""
import argparse
import os
import resource
import statistics
import subprocess
import tempfile
import time

import tokenizer_parity as parity


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenize", default="bazel-bin/train/tools/tokenize")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=30)
    parser.add_argument("paths", nargs="+")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"

    files = [data for name, data in parity.parts_of(args.paths, args.megabytes * 5 // 3, 1) if name == "files"]
    size = sum(map(len, files)) / 1e6
    gpt2 = not os.path.exists(os.path.join(args.tokenizer, "tokenizer.json"))
    reference = (parity.Tiktoken if gpt2 else parity.Tokenizers)(args.tokenizer)
    texts = [data.decode() for data in files]
    rows = {"tokenize": [], "tiktoken" if gpt2 else "tokenizers": []}
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "data")
        os.mkdir(data)
        for i, content in enumerate(files):
            open(os.path.join(data, f"{i:06}"), "wb").write(content)
        for i in range(args.rounds):
            before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            subprocess.run([args.tokenize, f"--data={data}", f"--tokenizer={args.tokenizer}",
                            f"--out={folder}/out{i}", "--threads=1"], check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            rows["tokenize"].append((size / cpu, size / (time.monotonic() - wall)))
            cpu, wall = time.process_time(), time.monotonic()
            for text in texts:
                if gpt2:
                    reference.encoding.encode_ordinary(text)
                else:
                    reference.tokenizer.encode(text, add_special_tokens=False)
            rows["tiktoken" if gpt2 else "tokenizers"].append(
                (size / (time.process_time() - cpu), size / (time.monotonic() - wall)))
    for name, row in rows.items():
        print(f"{name}: {statistics.median(cpu for cpu, _ in row):.1f} MB/s of processor time, "
              f"{statistics.median(wall for _, wall in row):.1f} MB/s; {size:.1f} MB, {args.rounds} rounds")


if __name__ == "__main__":
    main()

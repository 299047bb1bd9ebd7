"""What rows cost before the first step: CPU time per row beside a floor and TRL, the second start, memory, two ranks.

    python -m bench rows --model SmolLM2-135M-Instruct --rows 1000000

The floor is the CPU time in which transformers alone renders each row once and tokenises it once. Each other line is of
processes of its own, and its CPU time is that of a process with all its workers, less that of one which only imports
the same modules. `two ranks` are two processes that start together, and TRL's line is its `SFTTrainer` up to where it
has prepared the same file.
"""

import argparse
import itertools
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.machine import ROOT

# Rows of the floor; a mean over more of them is the same.
SAMPLED = 4000


class Taken(NamedTuple):
    """What processes took together."""

    cpu: float
    wall: float
    """Seconds."""
    megabytes: int
    """The memory of the one with most, at its end, without the pages of files that it has mapped."""


def command(name: str, words: list[str]) -> int:
    """Measure all lines, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(prog="python -m bench rows", description=__doc__)
    parser.add_argument(
        "--model", required=True, help="a folder with a tokenizer and a chat template"
    )
    parser.add_argument("--rows", type=int, default=200_000, help="rows of 1 KB (default: 200000)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.part:
        PARTS[args.part](args.model)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        os.chdir(folder)
        write_rows(Path("rows.jsonl"), args.rows)
        print(
            f"{args.rows} rows, {os.path.getsize('rows.jsonl') / 1e6:.0f} MB, {os.cpu_count()} cores"
        )
        floor = float(run_parts(args.model, "floor")[1])
        print(f"{'floor':14} {floor:6.3f} ms of CPU a row: rendered once and tokenised once")
        imports = run_parts(args.model, "imports")[0]
        for label, parts in (
            ("first start", ["encode"]),
            ("second start", ["encode"]),
            ("two ranks", ["other", "other"]),
            ("TRL", ["trl"]),
        ):
            base = run_parts(args.model, "trl_imports")[0] if label == "TRL" else imports
            taken, _ = run_parts(args.model, *parts)
            per_row = 1000 * (taken.cpu - len(parts) * base.cpu) / args.rows
            print(
                f"{label:14} {per_row:6.3f} ms of CPU a row ({per_row / floor:.2f} of the floor), "
                f"{taken.wall:.0f} s, {taken.megabytes} MB in a process (imports {base.megabytes})"
            )
    return 0


def write_rows(path: Path, count: int) -> None:
    """Write conversations of one question and one answer, of about 1 KB."""
    chosen = random.Random(0)
    words = [word for word in (ROOT / "docs/data.md").read_text().split() if word.isalpha()]
    with path.open("w") as file:
        for _ in range(count):
            question = "tell me about " + " ".join(chosen.choices(words, k=30))
            answer = " ".join(chosen.choices(words, k=130))
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def run_parts(model: str, *parts: str) -> tuple[Taken, str]:
    """Run parts at once, each as a process; return what they took together, and what they printed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    words = [sys.executable, "-m", "bench", "rows", "--model", model, "--part"]
    running = [
        subprocess.Popen([*words, part], env=environment, stdout=subprocess.PIPE, text=True)
        for part in parts
    ]
    printed = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{' and '.join(parts)} failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    megabytes = max(int(text.split()[-1]) for text in printed)
    return Taken(cpu, time.monotonic() - began, megabytes), printed[0].split()[0]


def done(value: float = 0.0) -> None:
    """Print a figure, and the memory that is this process's own, without the pages of files that it has mapped."""
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    print(value, int(kilobytes) // 1024)


def measure_floor(model: str) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    with open("rows.jsonl") as file:
        rows = [json.loads(line)["messages"] for line in itertools.islice(file, SAMPLED)]
    began = time.process_time()
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    tokenizer(texts, add_special_tokens=False)
    done(1000 * (time.process_time() - began) / len(rows))


def import_ours(model: str) -> None:
    from fused_rl.trainers import sft

    assert sft
    done()


def encode(model: str, name: str = "rows.jsonl") -> None:
    from fused_rl.trainers import sft
    from fused_rl.trainers.data.encode import Encoder, load_tokenizer
    from fused_rl.trainers.data.reading import RowReport, load_train_eval

    config = sft.SFTConfig(model=model, dataset=name, output_dir="run")
    with RowReport() as reading:
        encoder = Encoder.of(config, load_tokenizer(model))
        parts = load_train_eval(config, reading=reading)
        examples, _ = (sft.encoded(config, part, encoder) for part in parts)
    # A step takes rows from all over the file.
    for i in range(0, len(examples), max(len(examples) // 10_000, 1)):
        assert examples[i].completion
    sys.stdout.flush()
    print()
    done()


def encode_other(model: str) -> None:
    """Encode rows that no process has encoded yet."""
    with (
        open("rows.jsonl", "rb") as file,
        open(f"other-{os.getppid()}.jsonl.{os.getpid()}", "wb") as to,
    ):
        to.writelines([b'{"prompt": "a", "completion": "b"}\n', *file])
    os.replace(to.name, f"other-{os.getppid()}.jsonl")
    encode(model, f"other-{os.getppid()}.jsonl")


def import_trl(model: str) -> None:
    import trl

    assert trl.SFTTrainer
    done()


def prepare_by_trl(model: str) -> None:
    import datasets
    import transformers
    import trl

    rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
    config = transformers.LlamaConfig(
        vocab_size=50_000,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
    )
    args = trl.SFTConfig("trl", use_cpu=True, bf16=False, report_to="none", max_length=1024)
    args.dataset_num_proc = os.cpu_count()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lm = transformers.LlamaForCausalLM(config)
    trl.SFTTrainer(lm, args, train_dataset=rows, processing_class=tokenizer)
    sys.stdout.flush()
    print()
    done()


PARTS = {
    "floor": measure_floor,
    "imports": import_ours,
    "encode": encode,
    "other": encode_other,
    "trl_imports": import_trl,
    "trl": prepare_by_trl,
}

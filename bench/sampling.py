"""Tokens per CPU second of the sampler in this process, beside transformers' `generate` and a server.

    python -m bench sampling --device cpu
    vllm serve runs/bench-sampling/model & BENCH_SERVER=http://localhost:8000/v1 python -m bench sampling --device cpu

The demo's small Llama with random weights continues prompts of 24 tokens by 128, four times each, as a step of GRPO
does; no response ends before. On one thread, in turns. Greedy tokens of all must be equal. A server's own CPU time is
not known here: its rate is per second on the clock.
"""

import json
import os
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch

from bench import machine, options, pages, results
from bench.peers import Unavailable
from fused_rl.recipes import demo
from fused_rl.trainers.base import engine
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.sampling import Sampling

SECONDS = 30  # unless --budget says otherwise
LEAST, MOST = 3, 20  # samples of a row
PROMPTS, COPIES, PROMPT_TOKENS, NEW_TOKENS = 16, 4, 24, 128
MODEL = machine.ROOT / "runs" / "bench-sampling" / "model"
SERVER = "BENCH_SERVER"
TEMPERATURES = {"greedy": 0.0, "temperature 1": 1.0}
Draw = Callable[[list[list[int]], float], list[list[int]]]
"""Prompts as token ids, temperature -> a response of NEW_TOKENS to each."""


def load(folder: Path = MODEL):
    """The model, made where it is not there yet."""
    import transformers

    if not (folder / "config.json").exists():
        texts = [entry["question"] + entry["answer"] for entry in demo.problems(1, 200)]
        demo.build_model(folder, texts, seed=1)
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lm.generation_config.eos_token_id = None  # or `generate` would end where it is drawn
    return lm


def prompts_for(vocabulary: int) -> list[list[int]]:
    """Random token ids, each prompt COPIES times."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    return sorted(ids * COPIES)  # copies are neighbours, as the trainers have them


def ours(lm) -> Draw:
    """The trainers' sampler."""
    sampler = TransformersSampler(lm, pad_id=0, batch_size=PROMPTS * COPIES)

    def draw(prompts, temperature):
        drawn = sampler.sample(prompts, Sampling(temperature, NEW_TOKENS, stop_ids=()))
        return [response.ids for response in drawn]

    return draw


def generate(lm) -> Draw:
    """transformers' own."""
    import transformers

    @torch.no_grad()
    def draw(prompts, temperature):
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        config = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, pad_token_id=0, **drawn)
        ids = torch.tensor(prompts)
        tokens = lm.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return tokens[:, PROMPT_TOKENS:].tolist()

    return draw


def server(lm) -> Draw:
    """An OpenAI-compatible server that holds the same model; Unavailable where none is named."""
    url = os.environ.get(SERVER)
    if not url:
        where = MODEL.relative_to(machine.ROOT)
        raise Unavailable(
            f"none is running: vllm serve {where}, then {SERVER}=http://localhost:8000/v1 before the command"
        )

    def draw(prompts, temperature):
        asked = {"model": str(MODEL), "prompt": prompts, "max_tokens": NEW_TOKENS, "temperature": temperature}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        body = json.dumps(asked).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            choices = json.load(answer)["choices"]
        return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]

    return draw


# name -> what makes it, and what its seconds are.
SAMPLERS = {
    "fused_rl": (ours, time.thread_time, "CPU"),
    "transformers generate": (generate, time.thread_time, "CPU"),
    "server": (server, time.perf_counter, "clock"),
}


def in_turns(draws: dict[str, Draw], prompts: list[list[int]], temperature: float, seconds: float):
    """({name: seconds of each run}, {name: tokens of the last}): the first run of each is not counted."""
    taken = {name: [] for name in draws}
    tokens = {}
    ends = time.perf_counter() + seconds
    for number in range(1 + MOST):
        if number > LEAST and time.perf_counter() > ends:
            break
        for name, draw in draws.items():
            clock = SAMPLERS[name][1]
            began = clock()
            tokens[name] = draw(prompts, temperature)
            taken[name].append(clock() - began)
    return {name: found[1:] for name, found in taken.items()}, tokens


def row_of(name: str, mode: str, taken: list[float], tokens: dict[str, list]) -> dict:
    """A sampler's row, with its rate, and whether its greedy tokens are `generate`'s."""
    count = sum(map(len, tokens[name]))
    rates = [count / seconds for seconds in taken]
    row = {
        "op": "sampling",
        "task": mode,
        "implementation": name,
        "status": results.OK,
        "version": machine.version("transformers") if name.startswith("transformers") else None,
        "per": SAMPLERS[name][2],
        "tokens": count,
        "samples_tokens_per_second": rates,
        "tokens_per_second": statistics.median(rates),
    }
    if TEMPERATURES[mode]:
        return row
    row["same_tokens"] = tokens[name] == tokens["transformers generate"]
    if not row["same_tokens"]:
        status = results.FAILED_CHECK if results.ours(row) else results.WRONG
        row |= {"status": status, "reason": "other greedy tokens than transformers' generate"}
    return row


def rows_of(lm, seconds: float) -> list[dict]:
    """Every sampler at every temperature."""
    draws, rows = {}, []
    for name, (make, *_) in SAMPLERS.items():
        try:
            draws[name] = make(lm)
        except Unavailable as reason:
            rows.append(results.not_run(name, reason.status, str(reason), "sampling"))
    prompts = prompts_for(lm.config.vocab_size)
    timed = []
    for mode, temperature in TEMPERATURES.items():
        taken, tokens = in_turns(draws, prompts, temperature, seconds / len(TEMPERATURES))
        found = [row_of(name, mode, taken[name], tokens) for name in draws]
        base = found[1]["tokens_per_second"]
        for row in found:
            row["over_generate"] = row["tokens_per_second"] / base
        timed += found
    return timed + rows


def main(args) -> int:
    """Run the group; 1 where ours is wrong."""
    if args.device != "cpu":
        print("measured in CPU seconds: --device cpu")
        return 0
    engine.quiet()
    torch.set_num_threads(1)
    print(machine.heading(args.device), flush=True)
    rows = rows_of(load(), args.budget or SECONDS)
    print(pages.sampling_table(rows))
    results.show_missing(rows)
    results.save(args, rows)
    return results.failed(rows)


def command(group: str, words: list[str] | None = None) -> int:
    """The group by its command line."""
    return main(options.arguments(__doc__, group, words))

"""What a server answers with HTTP 200 and gets wrong: each trap on a real vLLM, the size of its error, what finds it.

    python bench/repro/stale_server.py

The demo's model, warm-started and after 60 steps of GRPO: the old weights and the new. A server has the old, then comes
what should be a push of the new; what the server tells of the tokens that it draws from then on is compared with the
log-probabilities that the new weights give them. The prompts are problems with their answers, 18 in a row. What finds
a trap is the trainer's own check at that moment. Needs .venv-vllm (`make test-server`), no GPU.
"""

import itertools
import json
import shutil
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # run as a file

import torch

from bench import machine, results, vllm_server
from bench.repro import ppo_step
from fused_rl.recipes import demo
from fused_rl.trainers import grpo
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_atomically
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.mismatch import EXACT
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.inference import Http
from fused_rl.trainers.servers.probe import TEXT, Probe
from fused_rl.trainers.servers.sampler import connect

RESULTS = results.RESULTS / "repro" / "stale_server.json"
COPIES, TOKENS = 8, 8
STEPS = 60  # of GRPO between the old weights and the new
PROMPTS, SHOTS = 16, 18
POSITIONS = 512
LACKING = "model.layers.0.mlp.down_proj.weight"  # of the partial folder
PASSES = "all checks pass"
# Of every request that says nothing else: what is left out has the server's default.
FIELDS = {
    "model": "policy",
    "n": COPIES,
    "max_tokens": TOKENS,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
    "logprobs": 0,
    "return_token_ids": True,
}


class Answer(NamedTuple):
    """A response, and what the server says of it."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str


class Scene(NamedTuple):
    """A server, and the weights that it should have."""

    url: str
    old: Path
    new: Path
    lm: object
    """Of the new weights, in fp32."""
    tokenizer: object
    prompts: list[list[int]]


# What is pushed, and the requests to a server.


def prepare(folder: Path) -> tuple[Path, Path]:
    """Folders of the old weights and the new, with room for long prompts; trained where they are not there yet."""
    ppo_step.warm_start(folder)
    config = ppo_step.grpo_config(folder, 1, "grpo", steps=STEPS, eval_every=STEPS)
    if not (folder / "grpo" / "model").exists():
        grpo.train(config)
    return with_room(folder / "sft" / "model", folder / "old"), with_room(
        folder / "grpo" / "model", folder / "new"
    )


def with_room(source: Path, target: Path) -> Path:
    """A copy of a model's folder for POSITIONS tokens, with sampling defaults as many a model has them."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (target / "generation_config.json").write_text(json.dumps(defaults))
    return target


def partial(folder: Path) -> Path:
    """A copy that lacks one tensor."""
    from safetensors.torch import load_file, save_file

    target = folder.with_name("partial")
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    del tensors[LACKING]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def long_prompts(tokenizer) -> list[list[int]]:
    """Problems and their answers, SHOTS in a row, and one without its answer."""
    entries = iter(demo.problems(2, PROMPTS * (SHOTS + 1)))
    made = []
    for _ in range(PROMPTS):
        *shown, last = itertools.islice(entries, SHOTS + 1)
        text = "".join(
            f"{entry['question']}{entry['answer']}{tokenizer.eos_token}" for entry in shown
        )
        made.append(tokenizer(text + last["question"]).input_ids)
    return made


def call(url: str, path: str, body: dict | None = None) -> dict | None:
    """The answer to a POST."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def push(url: str, folder: Path, *, reset: bool = True) -> None:
    """The server reads the weights of a folder; without a reset its prefix cache keeps what the old ones made."""
    call(url, "/pause?mode=wait&clear_cache=false")
    call(
        url,
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
    )
    if reset and not call(url, "/reset_prefix_cache")["success"]:
        raise RuntimeError("the prefix cache was not reset")
    call(url, "/resume")


def ask(
    url: str, prompts: list[list[int]], *, without: tuple[str, ...] = (), **fields
) -> list[Answer]:
    """`n` responses to each prompt; `without` are fields that the request leaves out."""
    answers = []
    for number, prompt in enumerate(prompts):
        body = FIELDS | {"prompt": prompt, "seed": 1000 * number} | fields
        for name in without:
            del body[name]
        for choice in call(url, "/v1/completions", body)["choices"]:
            logprobs = choice["logprobs"]["token_logprobs"]
            answers.append(Answer(prompt, choice["token_ids"], logprobs, choice["finish_reason"]))
    return answers


@torch.no_grad()
def right(lm, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """(len(ids),) fp64 nats of a response under the model's softmax at a temperature."""
    logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    logp = (logits.double() / temperature).log_softmax(-1)
    return logp.gather(-1, torch.tensor(ids)[:, None])[:, 0]


def errors(lm, answers: list[Answer], temperature: float) -> torch.Tensor:
    """(tokens,) fp64 nats: what the server tells of each token less what the model gives it."""
    found = []
    for response in answers:
        exact = right(lm, response.prompt, response.ids, temperature)
        found.append(torch.tensor(response.logprobs, dtype=torch.float64) - exact)
    return torch.cat(found)


# Traps that log-probabilities show: what is done in place of a push of the new weights, and the request after it.


def pushed(scene: Scene) -> None:
    push(scene.url, scene.new)


def nothing(scene: Scene) -> None:
    """As a server that takes no weights, or reads another folder."""


def cache_kept(scene: Scene) -> None:
    # The old weights' keys and values of all prompts.
    ask(scene.url, scene.prompts, n=1, max_tokens=1)
    push(scene.url, scene.new, reset=False)


def partly(scene: Scene) -> None:
    push(scene.url, partial(scene.new))


class Trap(NamedTuple):
    """How the new weights come, on a server with which flags, and the request then."""

    name: str
    act: Callable[[Scene], None] = pushed
    temperature: float = 1.0
    flags: str = "right"
    request: dict = {}
    prevented: str = ""
    """What the trainer does that it cannot happen; empty where the probe finds it."""


SERVERS = {
    "right": ("--generation-config", "auto"),
    "raw": ("--logprobs-mode", "raw_logprobs"),
    "bfloat16": ("--dtype", "bfloat16"),
}
DEFAULTS = {"without": ("temperature", "top_k", "top_p"), "temprature": 1.0}
TRAPS = (
    Trap("none: as it should be, T = 1"),
    Trap("none: as it should be, T = 0.5", temperature=0.5),
    Trap("no reset of the prefix cache", cache_kept),
    Trap("weights never read", nothing),
    Trap("one tensor of 21 missing in the folder", partly),
    Trap(
        "`temprature`: the folder's own defaults", request=DEFAULTS, prevented="every field is sent"
    ),
    Trap("raw log-probabilities, T = 0.7", temperature=0.7, flags="raw"),
    Trap("raw log-probabilities, T = 0.5", temperature=0.5, flags="raw"),
    Trap("bf16 server, fp32 trainer", flags="bfloat16"),
)


def sprung(trap: Trap, scene: Scene) -> dict:
    """Return the row of a trap: its error in nats, and what the trainer's probe said."""
    push(scene.url, scene.old)
    server = connect(Http(), scene.url)
    ids = scene.tokenizer.encode(TEXT, add_special_tokens=False)
    probe = Probe(None, ids, True, Sampling(trap.temperature, TOKENS, ()))
    server.http.run([probe.sample(server, 0)])
    trap.act(scene)
    answers = ask(scene.url, scene.prompts, **{"temperature": trap.temperature} | trap.request)
    found = errors(scene.lm, answers, trap.temperature)
    try:
        (responses,) = server.http.run([probe.sample(server, 1)])
        own = []
        prompts, hot = probe.prompts(server.room)
        for prompt, response in zip(prompts, responses, strict=True):
            own.append(
                torch.tensor(response.logprobs)
                - right(scene.lm, prompt, response.ids, hot.temperature)
            )
        probe.judge(server, 1, responses, own)
        said = trap.prevented or PASSES
    except InputError as error:
        said = str(error).replace(scene.url, "")
    sizes = found.abs()
    return {
        "trap": trap.name,
        "status": results.OK,
        "tokens": len(found),
        "mean": found.mean().item(),
        "mean_abs": sizes.mean().item(),
        "max_abs": sizes.max().item(),
        "said": said,
    }


# Traps that show in the tokens.


def cut(scene: Scene) -> str:
    (answer,) = ask(scene.url, scene.prompts[:1], n=1, max_tokens=POSITIONS)
    return f"{len(answer.ids)} of {POSITIONS} tokens, finish_reason {answer.finish!r}"


def own_eos(scene: Scene) -> str:
    """Where the run's stop tokens are not the EOS of the model's config; here there are none."""
    answers = ask(scene.url, scene.prompts, ignore_eos=False)
    ended = sum(response.finish == "stop" for response in answers)
    return f"{ended} of {len(answers)} responses end before {TOKENS} tokens, at an EOS that is no stop token of the run"


IN_TOKENS = {
    "longer than max_model_len": (
        cut,
        "refused before it is sent; 'length' has max_new_tokens ids",
    ),
    "no ignore_eos": (own_eos, "ignore_eos is sent; 'stop' ends with a stop token of the run"),
}


# What came of them.


def spring_all(folder: Path) -> list[dict]:
    """A row of every trap; one server after the other."""
    import transformers

    old, new = prepare(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(new)
    lm = transformers.AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).eval()
    prompts = long_prompts(tokenizer)
    rows = []
    for name, flags in SERVERS.items():
        with vllm_server.serving(old, folder / f"{name}.log", *flags) as server:
            scene = Scene(server.url, old, new, lm, tokenizer, prompts)
            for trap in TRAPS:
                if trap.flags == name:
                    rows.append(sprung(trap, scene))
                    print(f"{trap.name}: {rows[-1]['max_abs']:.2g} nats", flush=True)
            if name == "right":
                push(server.url, new)
                for title, (spring, prevented) in IN_TOKENS.items():
                    rows.append(
                        {
                            "trap": title,
                            "status": results.OK,
                            "shows": spring(scene),
                            "said": prevented,
                        }
                    )
    return rows


def table(rows: list[dict]) -> str:
    """Markdown, a line per trap."""
    lines = []
    for row in rows:
        shown = row.get("shows") or f"{row['mean_abs']:.1e} mean, {row['max_abs']:.1e} max"
        said = row["said"].rpartition("): ")[2]  # without the server and its figures
        lines.append(
            {"trap": row["trap"], "off by, in nats of a token": shown, "what finds it": said}
        )
    return results.table_of(lines, markdown=True)


def check(rows: list[dict]) -> None:
    """Raises AssertionError where the probe missed a trap, or found one where there is none."""
    for row in rows:
        if "max_abs" in row:
            right = row["trap"].startswith("none")
            passed = row["said"] == PASSES
            assert right == passed == (row["max_abs"] < EXACT), row


def main() -> None:
    torch.set_num_threads(1)
    engine.silence_libraries()
    environment = machine.environment("cpu")  # before: the commit may change while it lasts
    rows = spring_all(machine.ROOT / "runs" / "stale_server")
    write_atomically(
        RESULTS, results.dumps({"group": "stale_server", "environment": environment, "rows": rows})
    )
    print(f"\n{table(rows)}")
    check(rows)
    print("each trap is found, and nothing else")


if __name__ == "__main__":
    main()

r"""The accuracy of a model: greedily and of several samples, with every response written down.

    fused-rl eval --model runs/demo/grpo/model --dataset runs/demo/data/eval.jsonl --output_dir runs/eval
    torchrun --nproc-per-node 8 -m fused_rl.trainers.commands.eval \
        --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k

The prompts, the sampler and the scorers are those of GRPO and PPO; docs/evaluation.md defines the figures. Left out:
ZeRO (a model must fit on one device), an inference server, several turns.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import yaml

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.files import as_json, hash_of_rows, storing, write_atomically, write_rows
from fused_rl.trainers.base.screen import phase, tell
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.rows import Given, chosen_rows
from fused_rl.trainers.models import language_model
from fused_rl.trainers.options import (
    TEMPLATE_NEEDS,
    InputError,
    Needs,
    NonNegativeInt,
    PositiveInt,
    Seed,
    check_revision,
    names_of,
    of_hub,
    without,
)
from fused_rl.trainers.policy.evaluate import share_of_rank
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.options import SamplingConfig
from fused_rl.trainers.rollouts.roll_out import prompts_of, roll_out
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.solved import judged, outcome_sums, outcomes, pass_at, why_unknown
from fused_rl.trainers.rollouts.types import Prompt, Rollout, Sampler, Scorer
from fused_rl.trainers.run import command
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.scorers.load import load_chosen
from fused_rl.trainers.scorers.options import ScorerConfig, with_scorers
from fused_rl.trainers.scorers.reward_model import Reader

MAX_NEW_TOKENS = 512
JUDGED = ("verifiers", "verifier_weights", "solved_at")  # of a run all or none
OF_THE_RUN = (
    "prompt_column",
    "answer_column",
    "raw_prompt",
    "system_prompt",
    "chat_template_kwargs",
    "max_new_tokens",
)
NO_SAMPLES = "has no meaning with samples=0: the greedy response does not use it; leave it out"


class EvalConfig(ScorerConfig, SamplingConfig):
    """Score a causal language model's responses to the rows of a dataset: pass@k, lengths, and every response."""

    command: ClassVar = "eval"
    main: ClassVar = ("model", "dataset", "dataset_split", "output_dir", "verifiers", "samples", "max_new_tokens", "k")
    model: str
    """A causal language model, or adapters to one: a Hub name, a local folder, or the folder of a run."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    attn_implementation: str | None = None
    """As transformers names them: eager, sdpa, flash_attention_2, …; None is the model's own choice."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto is bfloat16 on a GPU, float32 on a CPU."""
    dataset: str | None = None
    """A local file (.jsonl, .json, .csv, .parquet) or folder (of save_to_disk too), or the name of a Hub dataset."""
    dataset_config: str | None = None
    """The Hub dataset's configuration; None takes its only one, or the one named default or main."""
    dataset_split: str = "test"
    """The Hub dataset's split."""
    max_rows: PositiveInt | None = None
    """Evaluate on so many of the rows, from the first on; None is all."""
    prompt_column: str | None = None
    """Text or messages; None is the run's where `model` is of a run, else prompt, messages or question."""
    raw_prompt: bool | None = None
    """Give text prompts to the model as they are, even where it has a chat template; None is the run's, else false."""
    system_prompt: str | None = None
    """System message before a text prompt; None is the run's, else none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template besides the messages, as YAML or JSON; None is the run's, else nothing."""
    max_prompt_length: PositiveInt = 2048
    """Longer prompts (in tokens) are dropped, counted and reported."""
    verifiers: str | list[str] | None = None
    """Scorers as in grpo (docs/verifiers.md); None is the run's with its weights and thresholds where `model` is of a
    run, else that of the rows, if they name their reasoning_gym dataset."""
    samples: NonNegativeInt = 4
    """Sampled responses per problem, beside the greedy one."""
    k: PositiveInt | None = None
    """Report pass@k for this k alone, at most `samples`; None is 1, 2, 4, … and `samples`."""
    max_new_tokens: PositiveInt | None = None
    """Longer responses are truncated; None is the run's, else as many as the model has positions for, at most 512."""
    batch_size: PositiveInt = 64
    """Responses generated together; changes speed and memory, and which responses are sampled."""
    seed: Seed = 1
    """Random seed. Equal seeds, batch sizes and numbers of processes give equal responses, on a CPU."""
    output_dir: str | None = None
    """Folder for responses.jsonl and summary.json; None writes nothing."""
    overwrite: bool = False
    """Replace responses.jsonl and summary.json in output_dir."""

    needs: ClassVar = (
        *of_hub("dataset", "dataset_config", "dataset_split"),
        *TEMPLATE_NEEDS,
        *(Needs(name, lambda config: config.samples > 0, NO_SAMPLES) for name in names_of(SamplingConfig)),
        *(Needs(name, lambda config: config.verifiers is not None, without("--verifiers")) for name in JUDGED[1:]),
        Needs("overwrite", lambda config: config.output_dir is not None, without("--output_dir")),
    )

    def check(self) -> None:
        super().check()
        if self.k is not None and self.k > self.samples:
            raise InputError(f"k={self.k} is more than samples={self.samples}: pass@k needs k responses to a problem")
        check_revision(self.model, self.revision)


def as_its_run(config: EvalConfig) -> EvalConfig:
    """Return the config for a model of a run: the model in its folder, and its options where none are given."""
    folder = Path(config.model)
    is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not is_model and (folder / "config.yaml").is_file():
        folder = folder / "model"
        config = config.changed(model=str(folder))
        _say(f"model: {folder}")
    described = folder.parent / "config.yaml"
    if folder.name != "model" or not described.is_file():
        return config
    run = yaml.safe_load(described.read_text(encoding="utf-8"))
    open_options = [name for name in OF_THE_RUN if getattr(config, name) is None]
    open_options = [*JUDGED, *open_options] if config.verifiers is None else open_options
    taken = {name: run[name] for name in open_options if run.get(name) is not None}
    if taken:
        _say(f"as in {described}: {', '.join(f'{name} {value}' for name, value in taken.items())}")
    return config.changed(**taken)


def _say(line: str) -> None:
    if ranks.rank() == 0:
        tell(line)


def evaluate(
    config: EvalConfig, *, dataset: Given = None, scorers: Sequence[Callable | str] | None = None
) -> dict[str, Any]:
    """Run the whole evaluation, of rows and scorers that are given or that the config names; return the figures."""
    config = with_scorers(config, scorers)
    device = engine.setup(config.seed, trains=False)
    ranks.check_equal(config.plain())
    config = as_its_run(config)
    out = None if config.output_dir is None else Path(config.output_dir)
    if out is not None and not config.overwrite:
        for name in ("responses.jsonl", "summary.json"):
            if os.path.lexists(out / name):
                raise InputError(f"output_dir={out} already holds {name}; replace it with --overwrite")

    # Greedy and sampled responses, those of all ranks in the order of the problems.
    config, subject, sampling = _load(config, device, dataset)
    likeliest = dataclasses.replace(sampling, temperature=0.0)
    greedy, seconds, incidents = _respond(config, subject, likeliest, 1)
    sampled, more_seconds, more_incidents = _respond(config, subject, sampling, config.samples)
    figures = summarize(greedy, sampled, config.k)
    tokens = sum(row["tokens"] for row in greedy + sampled)
    figures["tokens_per_second"] = tokens / max(ranks.gather(seconds + more_seconds))
    for key, count in incidents.items():
        figures[key] = count + more_incidents.get(key, 0.0)
    _say(table(figures, config.samples))
    if "accuracy_greedy" not in figures:
        _say(why_unknown(subject.scorers, len(greedy + sampled)))
    if out is not None and ranks.rank() == 0:
        options = config.plain() | {"max_new_tokens": sampling.max_new_tokens}
        with storing("the evaluation", out):
            lines = [{"drawn": "greedy", **row} for row in greedy]
            lines += [{"drawn": "sampled", **row} for row in sampled]
            write_rows(out / "responses.jsonl", lines)
            write_atomically(out / "summary.json", as_json(figures | {"options": options}, indent=2) + "\n")
        tell(f"responses: {out / 'responses.jsonl'}, figures: {out / 'summary.json'}")
    return figures


class Subject(NamedTuple):
    """A model that responds, and what judges it."""

    sampler: Sampler
    scorers: list[Scorer]
    problems: list[Prompt]
    tokenizer: Any
    device: torch.device


def _load(config: EvalConfig, device: torch.device, dataset: Given) -> tuple[EvalConfig, Subject, Sampling]:
    """Return the config with its verifiers, the subject, and how it is sampled; every scorer has checked every row."""
    options = {"revision": config.revision, "attn_implementation": config.attn_implementation}
    options["dtype"] = engine.fastest_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    with phase("read tokenizer and rows"):
        tokenizer = encode.load_tokenizer(config.model, config.revision)
        rows = chosen_rows("dataset", dataset, config.dataset, config.dataset_config, config.dataset_split)
        rows.rows = rows.rows[: config.max_rows]
        reader = Reader(config, engine.EngineConfig(dtype=config.dtype), tokenizer, device, config.batch_size)
        config, scorers = load_chosen(config, [rows], reader, {})
        chosen = {"column": config.prompt_column, "max_length": config.max_prompt_length}
        problems = prompts_of(rows, encode.Encoder.of(config, tokenizer), scorers, **chosen)
    ranks.check_equal({"rows": hash_of_rows(problems)})
    with phase("loaded the model"):
        lm = language_model.load_to_sample(config.model, device=device, **options)
    length = _response_length(config, lm, tokenizer, problems)
    sampling = config.sampling(length, tuple(encode.stop_ids(tokenizer, lm.saved_generation_config)))
    sampler = TransformersSampler(lm, pad_id=tokenizer.pad_token_id, batch_size=config.batch_size)
    return config, Subject(sampler, scorers, problems, tokenizer, device), sampling


def _respond(
    config: EvalConfig, subject: Subject, sampling: Sampling, copies: int
) -> tuple[list[dict], float, dict[str, float]]:
    """Return `copies` scored responses of all ranks to each problem, this rank's seconds, and broken limits."""
    # Problems of like length are sampled together, every rank gets some of each length, and the ranks keep in step.
    problems = subject.problems
    order = sorted(range(len(problems)), key=lambda i: len(problems[i].ids))
    share = share_of_rank([problems[i] for i in order]).prompts
    own = order[ranks.rank() :: ranks.world_size()]
    rows: list[dict] = []
    seconds, incidents, printed = 0.0, {}, time.monotonic()
    together = -(-config.batch_size // max(copies, 1))
    for start in range(0, len(share) if copies else 0, together):
        part = slice(start, start + together)
        by = (subject.tokenizer, subject.device)
        rollout = roll_out(subject.sampler, subject.scorers, share[part], sampling, *by, copies=copies)
        known = judged(subject.scorers, rollout).tolist()
        rows += _rows_of(rollout, own[part], copies, known, subject.tokenizer)
        seconds += rollout.seconds["time/rollout"]
        for key, count in rollout.incidents.items():
            incidents[key] = incidents.get(key, 0.0) + count
        if time.monotonic() - printed > 10:
            printed = time.monotonic()
            _say(f"{min(part.stop, len(share))} of {len(share)} problems of this process, {copies} responses each")
    rows = sum(ranks.gather(rows), [])
    rows.sort(key=lambda row: row["problem"])
    return rows, seconds, incidents


def _response_length(config: EvalConfig, lm, tokenizer, problems: list[Prompt]) -> int:
    """Return the most tokens of a response; refuse prompts that leave the model no position for it."""
    length = config.max_new_tokens
    if length is None:
        positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or math.inf
        longest = max(len(problem.ids) for problem in problems)
        length = max(1, min(MAX_NEW_TOKENS, positions - longest))
        _say(f"max_new_tokens: {length}")
    rows = ((problem.ids, problem.where) for problem in problems)
    language_model.check_fits(lm, tokenizer, rows, length, "max_new_tokens or max_prompt_length")
    return length


def _rows_of(rollout: Rollout, problems: list[int], copies: int, known: list[bool], tokenizer) -> list[dict]:
    """Return lines of responses.jsonl, `copies` to each of the problems; later samples only fill up a rank's share.

    `known`: True where a scorer says whether the response solves its problem.
    """
    rows = []
    for i, sample in enumerate(rollout.samples[: len(problems) * copies]):
        scores = {name: values[i].item() for name, values in rollout.scores.items()}
        row = {
            "problem": problems[i // copies],
            "row": sample.where,
            "prompt": tokenizer.decode(sample.prompt_ids),
            "response": sample.text,
            "score": rollout.rewards[i].item(),
            "scores": {name: None if math.isnan(score) else score for name, score in scores.items()},
            "solved": rollout.solved[i].item() if known[i] else None,
            "finish": sample.response.finish,
            "tokens": len(sample.response.ids),
        }
        rows.append(row)
    return rows


def summarize(greedy: list[dict], sampled: list[dict], k: int | None = None) -> dict[str, Any]:
    """Return the figures of responses as responses.jsonl has them; none of solved problems where nobody judged.

    Args:
        greedy: one response per problem.
        sampled: n per problem, those to one problem adjacent; may be empty.
        k: of pass@k; None takes the usual ones.
    """
    figures: dict[str, Any] = {"problems": len(greedy)}
    known = any(row["solved"] is not None for row in greedy + sampled)
    if known:
        figures["accuracy_greedy"] = _over_problems(torch.tensor([bool(row["solved"]) for row in greedy]))
    if known and sampled:
        right = torch.tensor([bool(row["solved"]) for row in sampled])
        right = right.view(len(greedy), -1)
        figures |= {name: _over_problems(values) for name, values in pass_at(right, k).items()}
    for name, rows in (("greedy", greedy), ("sampled", sampled)):
        if rows:
            figures[name] = _described(rows, known)
    return figures


def _over_problems(values: torch.Tensor) -> dict[str, float]:
    """Return the mean over problems and its standard error, which is 0 for a single problem."""
    values = values.double()
    error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": values.mean().item(), "standard_error": error}


def _described(rows: list[dict], known: bool) -> dict[str, Any]:
    """Return scores, lengths and truncation of responses."""
    solved = torch.tensor([row["solved"] is True for row in rows])
    lengths = torch.tensor([row["tokens"] for row in rows])
    stopped = torch.tensor([row["finish"] == "stop" for row in rows])
    sums = outcome_sums(solved, lengths, stopped)
    sums = {name: value.item() for name, value in sums.items()}
    means = {}
    for name in rows[0]["scores"]:
        scores = [row["scores"][name] for row in rows if row["scores"][name] is not None]
        means[name] = sum(scores) / len(scores) if scores else None
    score = sum(row["score"] for row in rows) / len(rows)
    return {"score": score, "scores": means} | outcomes(sums, known)


def table(figures: dict[str, Any], samples: int) -> str:
    """Return the figures in columns, of the greedy response to a problem and of the `samples` sampled ones."""
    lines = [("", "greedy", f"{samples} samples" if samples else "")]
    for name, value in figures.items():
        if name == "accuracy_greedy" or name.startswith("pass_at_"):
            percent = f"{100 * value['mean']:.1f} ± {100 * value['standard_error']:.1f} %"
            cells = ("solved", percent, "") if name == "accuracy_greedy" else (name.replace("_at_", "@"), "", percent)
            lines.append(cells)
    columns = [figures["greedy"], figures.get("sampled", {})]
    for name in columns[0] | columns[1]:
        if name != "scores":
            lines.append((name.replace("_", " "), *[_cell(column.get(name)) for column in columns]))
    for name in columns[0]["scores"]:
        scores = [column.get("scores", {}) for column in columns]
        lines.append((f"score of {name}", *[_cell(column.get(name)) for column in scores]))
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    shown = [f"{line[0]:<{widths[0]}}  {line[1]:>{widths[1]}}  {line[2]:>{widths[2]}}".rstrip() for line in lines]
    end = f"{figures['problems']} problems, {figures['tokens_per_second']:.0f} tokens/s"
    return "\n".join([*shown, end])


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def main(argv: list[str] | None = None) -> None:
    """`fused-rl eval`."""
    with command.around("fused-rl eval"):
        evaluate(parse(EvalConfig, sys.argv[1:] if argv is None else argv))
        ranks.barrier()  # else two processes can abort at exit


if __name__ == "__main__":
    main()

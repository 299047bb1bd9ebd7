r"""How many problems a model solves: greedily, and of several samples, with every response written down.

    fused-rl eval --model runs/demo/grpo/model --dataset runs/demo/data/eval.jsonl --output_dir runs/eval
    torchrun --nproc-per-node 8 -m fused_rl.trainers.commands.eval \
        --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k

The prompts, the sampler and the scorers are those of GRPO and PPO; docs/evaluation.md defines the figures. Left out:
ZeRO (a model must fit on one device), an inference server, several turns.
"""

import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import yaml

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.commands.eval_report import is_of_an_evaluation, summarize, table, write
from fused_rl.trainers.data import encode, fingerprints
from fused_rl.trainers.data.rows import Given, chosen_rows
from fused_rl.trainers.models import language_model
from fused_rl.trainers.models.pretrained import check_fits
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
from fused_rl.trainers.rollouts.solved import judged, why_unknown
from fused_rl.trainers.rollouts.types import Prompt, Rollout, Sampler, Scorer
from fused_rl.trainers.run import command, there
from fused_rl.trainers.run.logger import phase
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.scorers.load import load_chosen
from fused_rl.trainers.scorers.options import ScorerConfig, with_scorers
from fused_rl.trainers.scorers.reward_model import Reader

MAX_NEW_TOKENS = 512
LEFT = ("responses.jsonl", "summary.json")
JUDGED = ("verifiers", "verifier_weights", "solved_at")  # of a run all or none
OF_THE_RUN = (
    "prompt_column",
    "answer_column",
    "raw_prompt",
    "system_prompt",
    "chat_template_kwargs",
    "max_new_tokens",
)


NO_SAMPLES = "has no meaning with samples=0, which draws nothing: the greedy response takes none of it; leave it out"


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
    """What the chat template is told besides the messages, as YAML or JSON; None is the run's, else nothing."""
    max_prompt_length: PositiveInt = 2048
    """Longer prompts (in tokens) are dropped, counted and reported."""
    verifiers: str | list[str] | None = None
    """Scorers as in grpo (docs/verifiers.md); None is the run's with its weights and thresholds where `model` is of a
    run, else that of the rows, if they name their reasoning_gym dataset."""
    samples: NonNegativeInt = 4
    """Sampled responses per problem, beside the greedy one."""
    k: PositiveInt | None = None
    """Tell pass@k for this k alone, at most `samples`; None is 1, 2, 4, … and `samples`."""
    max_new_tokens: PositiveInt | None = None
    """Longer responses are cut; None is the run's, else as many as the model has positions for, at most 512."""
    batch_size: PositiveInt = 64
    """Responses generated together; changes speed and memory, and which responses are drawn."""
    seed: Seed = 1
    """Of sampling. Equal seeds, batch sizes and numbers of processes are equal responses, on a CPU."""
    output_dir: str | None = None
    """Folder for responses.jsonl and summary.json; None writes nothing."""
    overwrite: bool = False
    """Replace what an evaluation before this one left in output_dir."""

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
    """The config for a model of a run: the model in the run's folder, and the run's options where none are given."""
    folder = Path(config.model)
    is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not is_model and (folder / "config.yaml").is_file() and (folder / "model").is_dir():
        folder = folder / "model"
        config = config.changed(model=str(folder))
        _say(f"model: {folder}")
    described = folder.parent / "config.yaml"
    if folder.name != "model" or not described.is_file():
        return config
    try:
        run = yaml.safe_load(described.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{described}, the config of the model's run, cannot be read: {in_a_line(error)}") from error
    run = run if isinstance(run, dict) else {}
    open_options = [name for name in OF_THE_RUN if getattr(config, name) is None]
    open_options = [*JUDGED, *open_options] if config.verifiers is None else open_options
    taken = {name: run[name] for name in open_options if run.get(name) is not None}
    if taken:
        _say(f"as in {described}: {', '.join(f'{name} {value}' for name, value in taken.items())}")
    return config.changed(**taken)


def _say(line: str) -> None:
    if ranks.rank() == 0:
        tell(line)


def _check_folder(config: EvalConfig) -> None:
    """Refuse a folder that cannot be written, or that holds another evaluation."""
    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json.tmp").touch()
        (folder / "summary.json.tmp").unlink()
    except OSError as error:
        raise InputError(f"output_dir={folder} cannot be used: {error.strerror}; choose another folder") from error
    found = [folder / name for name in LEFT if os.path.lexists(folder / name)]
    if found and not config.overwrite:
        names = ", ".join(path.name for path in found)
        raise InputError(f"output_dir={folder} already holds {names}; replace them with --overwrite")
    for path in found:
        if not is_of_an_evaluation(path):
            raise InputError(f"output_dir={folder}: no evaluation wrote {path.name}; move it, or choose another folder")


@dataclass
class Subject:
    """What is evaluated: a model that responds, and what judges it."""

    config: EvalConfig
    """With the verifiers that judge."""
    sampler: Sampler
    scorers: list[Scorer]
    problems: list[Prompt]
    tokenizer: object
    device: torch.device
    batch_size: int
    """Responses drawn together."""


def load(config: EvalConfig, device: torch.device, dataset: Given = None) -> tuple[Subject, Sampling]:
    """The subject, and how its responses are drawn; every row has been checked by every scorer."""
    with phase("read tokenizer and rows"):
        tokenizer = encode.load_tokenizer(config.model, config.revision)
        rows = chosen_rows("dataset", dataset, config.dataset, config.dataset_config, config.dataset_split)
        rows.rows = rows.rows[: config.max_rows]
        dtype = _dtype(config, device)
        attention = config.attn_implementation
        reader = Reader(config.model, config.revision, tokenizer, device, dtype, attention, config.batch_size)
        config, scorers = load_chosen(config, [rows], reader, {})
        encoder = encode.Encoder.of(config, tokenizer)
        chosen = {"column": config.prompt_column, "max_length": config.max_prompt_length}
        problems = prompts_of(rows, encoder, scorers, **chosen)
    fingerprints.check_ranks({"rows": fingerprints.of_rows(problems)})
    with phase("loaded the model"):
        options = {"revision": config.revision, "attn_implementation": attention}
        lm = language_model.load_to_sample(config.model, device=device, dtype=dtype, **options)
    sampler = TransformersSampler(lm, pad_id=tokenizer.pad_token_id, batch_size=config.batch_size)
    subject = Subject(config, sampler, scorers, problems, tokenizer, device, config.batch_size)
    return subject, _sampling(config, lm, tokenizer, problems)


def _dtype(config: EvalConfig, device: torch.device) -> torch.dtype:
    return engine.fastest_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)


def _sampling(config: EvalConfig, lm, tokenizer, problems: list[Prompt]) -> Sampling:
    """At the temperature; refuses prompts that leave the model no position for a response."""
    length = config.max_new_tokens
    if length is None:
        positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or math.inf
        longest = max(len(problem.ids) for problem in problems)
        length = max(1, min(MAX_NEW_TOKENS, positions - longest))
        _say(f"max_new_tokens: {length}")
    rows = ((problem.ids, problem.where) for problem in problems)
    check_fits(lm, tokenizer, rows, length, "max_new_tokens or max_prompt_length")
    stop_ids = tuple(encode.stop_ids(tokenizer, lm.saved_generation_config))
    return config.sampling(length, stop_ids)


@dataclass
class Responses:
    """Of this rank: what was drawn, as it is written down, and how long drawing took."""

    rows: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    incidents: dict[str, float] = field(default_factory=dict)

    def add(self, rollout: Rollout, problems: list[int], copies: int, known: torch.Tensor) -> None:
        """The responses to the problems of these numbers, `copies` each; later ones in the rollout do not count.

        `known` (B,) bool: of which somebody says whether they solve their problem.
        """
        self.seconds += rollout.seconds["time/rollout"]
        for key, count in rollout.incidents.items():
            self.incidents[key] = self.incidents.get(key, 0.0) + count
        for i, sample in enumerate(rollout.samples[: len(problems) * copies]):
            scores = {name: values[i].item() for name, values in rollout.scores.items()}
            row = {
                "problem": problems[i // copies],
                "row": sample.where,
                "response": sample.text,
                "score": rollout.rewards[i].item(),
                "scores": {name: None if math.isnan(score) else score for name, score in scores.items()},
                "solved": rollout.solved[i].item() if known[i] else None,
                "finish": sample.response.finish,
                "tokens": len(sample.response.ids),
            }
            self.rows.append(row)


def respond(subject: Subject, sampling: Sampling, copies: int) -> Responses:
    """`copies` scored responses to each problem of this rank's share; the ranks keep in step."""
    # Problems of like length are drawn together, and every rank gets some of each length.
    order = sorted(range(len(subject.problems)), key=lambda i: len(subject.problems[i].ids))
    share = share_of_rank([subject.problems[i] for i in order])
    own = order[ranks.rank() :: ranks.world_size()]

    found = Responses()
    at_once = -(-subject.batch_size // copies)
    what = "sampled" if sampling.temperature else "greedy"
    with _progress(f"{what} responses", len(share.prompts)) as advance:
        for start in range(0, len(share.prompts), at_once):
            part = slice(start, start + at_once)
            chunk = share.prompts[part]
            read_by = (subject.tokenizer, subject.device)
            rollout = roll_out(subject.sampler, subject.scorers, chunk, sampling, *read_by, copies=copies)
            found.add(rollout, own[part], copies, judged(subject.scorers, rollout))
            advance(len(chunk))
    return found


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator:
    """A function that moves rank 0's bar on; without a terminal a line now and then."""
    if sys.stdout.isatty() and ranks.rank() == 0:
        from rich import progress

        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
        with progress.Progress(*columns, progress.TimeRemainingColumn(), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
        return
    told = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal told, done
        done += count
        if time.monotonic() - told > 10 and done < total:
            told = time.monotonic()
            _say(f"{what}: {done} of {total} problems of this process")

    yield advance


def evaluate(
    config: EvalConfig, *, dataset: Given = None, scorers: Sequence[Callable | str] | None = None
) -> dict[str, Any]:
    """Run the whole evaluation, of rows and scorers that are given or that the config names; returns the figures."""
    config = with_scorers(config, scorers)
    device = engine.setup(config.seed, trains=False)
    fingerprints.check_ranks(config.plain())
    config = as_its_run(config)
    there.check(config.model, config.revision, [config.dataset])
    if config.output_dir is not None:
        ranks.on_first_rank(lambda: _check_folder(config))
    subject, sampling = load(config, device, dataset)
    began = time.monotonic()
    greedy = respond(subject, dataclasses.replace(sampling, temperature=0.0), 1)
    sampled = Responses()
    if config.samples:
        sampled = respond(subject, sampling, config.samples)

    # Over all ranks.
    drawn = {"greedy": _gathered(greedy), "sampled": _gathered(sampled)}
    tokens = sum(row["tokens"] for row in drawn["greedy"] + drawn["sampled"])
    seconds = max(ranks.gather(greedy.seconds + sampled.seconds))
    figures = summarize(drawn["greedy"], drawn["sampled"], config.k)
    figures["tokens_per_second"] = tokens / seconds
    figures |= {key: greedy.incidents[key] + sampled.incidents.get(key, 0.0) for key in greedy.incidents}
    if ranks.rank() == 0:
        tell(table(figures, config.samples))
        if "accuracy_greedy" not in figures:
            tell(why_unknown(subject.scorers, len(drawn["greedy"] + drawn["sampled"])))
    _say(f"{len(drawn['greedy'] + drawn['sampled'])} responses in {time.monotonic() - began:.1f} s")
    if config.output_dir is not None:
        described = subject.config.plain() | {"max_new_tokens": sampling.max_new_tokens}
        ranks.on_first_rank(lambda: write(Path(config.output_dir), drawn, figures, described))
    return figures


def _gathered(responses: Responses) -> list[dict]:
    """The responses of all ranks, in the order of the problems."""
    rows = sum(ranks.gather(responses.rows), [])
    return sorted(rows, key=lambda row: row["problem"])


def main(argv: list[str] | None = None) -> None:
    """`fused-rl eval`."""
    with command.around("fused-rl eval"):
        evaluate(parse(EvalConfig, sys.argv[1:] if argv is None else argv))
        ranks.barrier()  # else two processes can abort at exit


if __name__ == "__main__":
    main()

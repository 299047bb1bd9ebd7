r"""The accuracy of a model with greedy decoding and over several samples, with every response written to a file.

    fused-rl eval --model runs/demo/grpo/model --dataset runs/demo/data/eval.jsonl --output_dir runs/eval
    torchrun --nproc-per-node 8 -m fused_rl.trainers.commands.eval \
        --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k

The prompts, the sampler and the scorers are those of GRPO and PPO; docs/evaluation.md defines the figures. Left out:
ZeRO (the model must fit on one device), inference servers, and responses of several turns.
"""

import dataclasses
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import yaml

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.files import as_json, hash_of, write_atomically, write_rows
from fused_rl.trainers.base.screen import bar, phase, print_line, print_rank0
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.examples import Examples
from fused_rl.trainers.data.reading import Reading, RowsLike, chosen_rows
from fused_rl.trainers.models import language_model
from fused_rl.trainers.options import (
    TEMPLATE_NEEDS,
    EngineConfig,
    PositiveInt,
    Requirement,
    Seed,
    Unit,
    check_revision,
    splits,
    without,
)
from fused_rl.trainers.policy.evaluate import held_out_share, solved_metrics, solved_sums
from fused_rl.trainers.policy.groups import spread
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.options import SamplingConfig
from fused_rl.trainers.rollouts.roll_out import means_of, prompts_of, right_answer, roll_out
from fused_rl.trainers.rollouts.solved import has_verdict
from fused_rl.trainers.rollouts.types import Rollout
from fused_rl.trainers.run import command
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.run.positions import check_fits
from fused_rl.trainers.scorers.load import load_scorers
from fused_rl.trainers.scorers.options import ScorerConfig, with_scorers

MAX_NEW_TOKENS = 512
# Options that are taken from the run of a model if they are not given. Those of the scorers are taken all together or
# not at all, because weights and thresholds belong to their verifiers; those of the prompts are taken one by one.
SCORING = ("verifiers", "verifier_weights", "solved_at")
PROMPTING = (
    "prompt_column",
    "answer_column",
    "raw_prompt",
    "system_prompt",
    "chat_template_kwargs",
    "max_new_tokens",
)


class EvalConfig(ScorerConfig, SamplingConfig):
    """Score a causal language model's responses to the rows of a dataset: pass@k, lengths, and every response."""

    command: ClassVar = "eval"
    main: ClassVar = (
        "model",
        "dataset",
        "dataset_split",
        "output_dir",
        "verifiers",
        "samples",
        "max_new_tokens",
        "overwrite",
    )
    model: str
    """A causal language model, or adapters to one: a Hub name or a local folder."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    attn_implementation: str | None = None
    """Attention, by its name in transformers: eager, sdpa, flash_attention_2, …; None is the model's own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations: auto is bfloat16 on a GPU and float32 on a CPU."""
    dataset: str | None = None
    """A local file (.jsonl, .json, .csv or .parquet, each also with .gz), a folder of such files or from save_to_disk,
    or the name of a Hub dataset."""
    dataset_config: str | None = None
    """The Hub dataset's configuration; None takes its only one, or the one named default or main."""
    dataset_split: str = "test"
    """The Hub dataset's split."""
    max_rows: PositiveInt | None = None
    """Number of rows to evaluate on, beginning with the first; None takes all."""
    prompt_column: str | None = None
    """Text or messages; None is the run's if `model` is from a run, else the first of prompt, messages, conversations,
    question, instruction and problem that a row has."""
    raw_prompt: bool | None = None
    """Give text prompts to the model unchanged, even if it has a chat template; None is the run's, else false."""
    system_prompt: str | None = None
    """System message before a text prompt; None is the run's, else none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template besides the messages, as YAML or JSON; None is the run's, else nothing."""
    max_prompt_length: PositiveInt = 2048
    """Longer prompts (in tokens) are dropped, counted and reported."""
    bad_rows: Unit = 0.01
    """Share of the rows that may be left out because they cannot be used; summary.json lists them. More end the
    evaluation."""
    verifiers: str | list[str] | None = None
    """Scorers as in grpo (docs/verifiers.md); None takes the run's, with its weights and thresholds, if `model` is
    of a run."""
    samples: PositiveInt = 4
    """Sampled responses per problem, beside the greedy one."""
    max_new_tokens: PositiveInt | None = None
    """Maximum response length in tokens; None is the run's, else as many as fit into the model, at most 512."""
    batch_size: PositiveInt = 64
    """Responses generated together; changes speed and memory, and which responses are sampled."""
    seed: Seed = 1
    """Random seed. Equal seeds, batch sizes and numbers of processes give equal responses, on a CPU."""
    output_dir: str | None = None
    """Folder for responses.jsonl and summary.json; None writes nothing."""
    overwrite: bool = False
    """Replace responses.jsonl and summary.json in output_dir."""

    needs: ClassVar = (
        *TEMPLATE_NEEDS,
        splits("dataset_split", "dataset", "test"),
        *(
            Requirement(name, lambda config: config.verifiers is not None, without("--verifiers"))
            for name in SCORING[1:]
        ),
    )

    def check(self) -> None:
        super().check()
        check_revision(self.model, self.revision)


def with_run_options(config: EvalConfig) -> EvalConfig:
    """Return the config with options from the run that made the model, for those that were not given."""
    # A run saves its model as RUN/model, beside its config.yaml.
    run_config = Path(config.model).parent / "config.yaml"
    if Path(config.model).name != "model" or not run_config.is_file():
        return config
    run = yaml.safe_load(run_config.read_text(encoding="utf-8"))

    # Options that are given win, so a model can be evaluated with other prompts or other scorers than those of its run.
    names = [name for name in PROMPTING if getattr(config, name) is None]
    names += SCORING if config.verifiers is None else ()
    taken_over = {name: run[name] for name in names if run.get(name) is not None}
    shown = ", ".join(f"{name} {value}" for name, value in taken_over.items())
    print_rank0(f"as in {run_config}, where not given here: {shown}")
    return config.replace(**taken_over)


def evaluate(
    config: EvalConfig,
    *,
    dataset: RowsLike = None,
    scorers: Sequence[Callable[..., object] | str] | None = None,
) -> dict[str, float]:
    """Run the whole evaluation, print and write its results, and return the figures by name.

    Args:
        config: the options of `fused-rl eval`.
        dataset: rows from Python, in place of those that the config names.
        scorers: scorers from Python, in place of those that the config names.

    Raises:
        InputError: an option, a row or a scorer cannot be used, or `output_dir` already has results.
    """
    config = with_scorers(config, scorers)

    # Before anything is read, compare the options of all ranks, and refuse a folder whose files would be replaced.
    device = engine.setup(config.seed, trains=False)
    ranks.check_equal(config.to_dict())
    config = with_run_options(config)
    out = None if config.output_dir is None else Path(config.output_dir).absolute()
    existing = [
        name
        for name in ("responses.jsonl", "summary.json")
        if out is not None and os.path.lexists(out / name)
    ]
    if existing and not config.overwrite:
        raise InputError(
            f"output_dir={out} already holds {existing[0]}; replace it with --overwrite"
        )

    # Tokenizer, scorers, rows, model. Reward models that score have the dtype of the model that is evaluated.
    held = EngineConfig(dtype=config.dtype)
    with phase("read tokenizer and rows"), Reading(config.bad_rows) as reader:
        tokenizer = encode.load_tokenizer(config.model, config.revision)
        dataset_options = (config.dataset, config.dataset_config, config.dataset_split)
        rows = chosen_rows("dataset", dataset, *dataset_options, reader.bad)
        rows = reader.add(rows.subset(range(len(rows))[: config.max_rows]))
        reading = {"tokenizer": tokenizer, "device": device, "batch_size": config.batch_size}
        judges = load_scorers(config, policy=config, held=held, **reading)
        problems = prompts_of(
            rows,
            encode.Encoder.of(config, tokenizer),
            judges,
            column=config.prompt_column,
            max_length=config.max_prompt_length,
        )
    ranks.check_equal({"rows": hash_of(problems.digests)})
    with phase("loaded the model"):
        options = {"revision": config.revision, "attn_implementation": config.attn_implementation}
        lm = language_model.load_to_sample(
            config.model, device=device, dtype=engine.torch_dtype(held), **options
        )

    # Responses are sampled as in GRPO, but from a model that is not trained.
    length = _response_length(config, lm, tokenizer, problems)
    sampling = config.sampling(
        length, tuple(encode.stop_ids(tokenizer, lm.saved_generation_config))
    )
    sampler = TransformersSampler(lm, pad_id=tokenizer.pad_token_id, batch_size=config.batch_size)
    responses, sums, incidents, logged = _sample(
        config, problems, sampler, judges, sampling, tokenizer, device
    )

    # The figures, from the sums of all ranks.
    totals = ranks.global_sums(sums)
    figures = {"problems": len(problems)} | solved_metrics(judges, totals) | incidents
    figures |= means_of(logged, figures)
    in_groups = torch.tensor([row["score"] for row in responses]).view(len(problems), -1).double()
    rewards = in_groups[:, 1:]  # the first response of each problem is the greedy one
    if judges:
        figures |= {"score_error": _error(rewards.mean(1))} | spread(rewards)
    # The standard errors are over problems, because the responses to one problem depend on each other.
    if "accuracy_greedy" in figures:
        right = (
            torch.tensor([bool(row["solved"]) for row in responses])
            .view(len(problems), -1)
            .double()
        )
        for name, values in (("greedy", right[:, 0]), ("sampled", right[:, 1:].mean(1))):
            figures[f"accuracy_{name}_error"] = _error(values)
    print_rank0("\n".join(f"{name:<24}{value:.4g}" for name, value in figures.items()))
    if judges and ranks.process_index() == 0:
        from fused_rl.trainers.policy import signal

        one = next(row for row in responses if row["decoding"] == "sampled")
        problem = problems[one["problem"]]
        answer = right_answer(problem.row, problem.prompt, judges)
        counts = Counter(row["response"] for row in responses).values()
        signal.say(figures, totals, rewards.shape[1], one["response"], answer, length, counts)
    if out is not None and ranks.process_index() == 0:
        write_rows(out / "responses.jsonl", responses)
        summary = figures | {"options": config.to_dict() | {"max_new_tokens": length}}
        summary["bad_rows"] = [*map(vars, reader.bad)]
        write_atomically(out / "summary.json", as_json(summary, indent=2) + "\n")
        print_line(f"responses: {out / 'responses.jsonl'}, figures: {out / 'summary.json'}")
    return figures


def _error(values: torch.Tensor) -> float:
    """Return the standard error of the mean of values (N,), one per problem; 0 for a single problem."""
    return (values.std() / len(values) ** 0.5).item() if len(values) > 1 else 0.0


def _sample(
    config, problems, sampler, scorers, sampling, tokenizer, device
) -> tuple[list, dict, dict, list]:
    """Return the responses of all ranks, the sums of this rank, its incidents, and what its scorers logged.

    Problems of similar lengths are sampled together, and every rank gets some of each length.
    """
    greedy_sampling = dataclasses.replace(sampling, temperature=0.0)

    # All ranks sample equally many problems, because they meet in collectives. A rank with fewer problems of its own
    # has copies of others after them, which no figure counts.
    order = sorted(range(len(problems)), key=lambda i: len(problems[i].ids))
    share = held_out_share([problems[i] for i in order])
    problems_of_rank = order[ranks.rank() :: ranks.world_size()]
    responses, sums, incidents = [], {}, {}
    logged: list[tuple[str, float]] = []
    for start in bar(range(0, len(share.prompts), config.batch_size), "sampled"):
        rows = slice(start, start + config.batch_size)
        greedy, sampled = (
            roll_out(sampler, scorers, share.prompts[rows], by, tokenizer, device, copies=copies)
            for by, copies in ((greedy_sampling, 1), (sampling, config.samples))
        )
        for name, value in solved_sums(
            scorers, greedy, sampled, len(problems_of_rank[rows])
        ).items():
            sums[name] = sums.get(name, 0.0) + value.double()
        for rollout, kind, copies in ((greedy, "greedy", 1), (sampled, "sampled", config.samples)):
            is_judged = has_verdict(scorers, rollout).tolist()
            # Each rank keeps the rows of its own problems; those of all ranks are sorted at the end.
            responses += _rows_of(
                rollout, kind, problems_of_rank[rows], copies, is_judged, tokenizer
            )
            for key, count in rollout.incidents.items():
                incidents[key] = incidents.get(key, 0.0) + count
            logged += rollout.logged
    in_order = sorted(sum(ranks.gather(responses), []), key=lambda row: row["problem"])
    return in_order, sums, incidents, logged


def _response_length(config: EvalConfig, lm, tokenizer, problems: Examples) -> int:
    """Return the maximum length of a response in tokens; raise `InputError` for a prompt that leaves no room for it."""
    # By default this is what the longest prompt leaves of the model's positions, so that no problem is refused.
    length = config.max_new_tokens
    if length is None:
        # Some models, such as those with relative positions, have no limit of their own.
        positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
        longest = int(problems.column("prompt").max())
        length = MAX_NEW_TOKENS
        if positions is not None:
            length = max(1, min(length, positions - longest))
        print_rank0(f"max_new_tokens: {length}")

    # A prompt that leaves no room for a response is an error; it is not cut.
    check_fits(config, tokenizer, [problems], length)
    return length


def _rows_of(
    rollout: Rollout, kind: str, problems: list[int], copies: int, is_judged: list[bool], tokenizer
) -> list[dict]:
    """Return lines of responses.jsonl, with `copies` responses to each of the problems.

    Args:
        rollout: the responses; those after the problems' own only fill up the rank's share.
        kind: "greedy" or "sampled".
        problems: the numbers of the problems.
        copies: responses per problem.
        is_judged: whether a scorer decided if a response solves its problem.
        tokenizer: decodes the prompts.
    """
    # JSON has no NaN, so a score that does not apply is null, and so is `solved` where no scorer decides it.
    rows = []
    for i, sample in enumerate(rollout.samples[: len(problems) * copies]):
        scores = {name: values[i].item() for name, values in rollout.scores.items()}
        row = {
            "decoding": kind,
            "problem": problems[i // copies],
            "row": sample.where,
            "prompt": tokenizer.decode(sample.prompt_ids),
            "response": sample.text,
            "score": rollout.rewards[i].item(),
            "scores": {
                name: None if math.isnan(score) else score for name, score in scores.items()
            },
            "solved": rollout.solved[i].item() if is_judged[i] else None,
            "finish": sample.response.finish,
            "tokens": len(sample.response.ids),
        }
        if sample.logged:
            row["logged"] = sample.logged
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run `fused-rl eval`."""
    with command.around("fused-rl eval"):
        evaluate(parse(EvalConfig, sys.argv[1:] if argv is None else argv))
        # A process that exits while another is still in a collective makes that one abort.
        ranks.barrier()


if __name__ == "__main__":
    main()

"""On-policy distillation: the student samples responses, and a teacher corrects every token of them.

    fused-rl distill --model runs/sft/model --teacher runs/grpo/model --dataset rows.jsonl --output_dir runs/distill

The loss of a token is a divergence between p, the student's distribution of it, and q, the teacher's, over the whole
vocabulary, averaged over the tokens of a step; policy/teacher.py computes it from the hidden states of both, or from
the K likeliest tokens of a teacher behind a server:

    reverse          arXiv:2306.08543, eq. 1   KL(p || q)
    forward          arXiv:1503.02531          KL(q || p)
    jensen-shannon   arXiv:2306.13649, eq. 1   b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p, b = jsd_beta

No gradient flows through the sampling. Left out: a teacher with another vocabulary.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pydantic
import torch

from fused_rl.ops.kl import Direction

from .base import ranks
from .base.options import Fraction, PositiveInt, Requirement, Temperature, Unit, without
from .base.screen import phase
from .data.reading import RowsLike
from .data.rows import BadRow
from .options import MAIN
from .policy.balance import deal
from .policy.evaluate import evaluate
from .policy.options import ScoredRunConfig
from .policy.policy import Policy
from .policy.setup import EnvironmentFactory, SamplerFactory, ToolsLike, read_inputs
from .policy.teacher import (
    is_url,
    load_teachers,
    teacher_divergence,
)
from .rollouts.options import check_url
from .rollouts.roll_out import batch_of, rollout_metrics
from .rollouts.types import Prompt, Response, Sample
from .run import command
from .run.hooks import OnStep
from .run.metrics import Sums
from .scorers.load import check_scorers
from .scorers.options import ScorersLike


class DistillConfig(ScoredRunConfig):
    """On-policy distillation of a teacher into a student that has the same vocabulary."""

    command: ClassVar = "distill"
    main: ClassVar = (
        *MAIN,
        "teacher",
        "on_policy",
        "direction",
        "prompts_per_step",
        "max_new_tokens",
    )

    teacher: str | dict[str, str]
    """A causal language model with the student's tokens, or adapters to one: a Hub name, a local folder, or the URL of
    a vLLM server. Several by name, {math: models/a, code: models/b}, are chosen by a column of the rows."""
    teacher_column: str = "teacher"
    """Column that names a row's teacher, if there are several."""
    teacher_in_4bit: bool = False
    """Keep the weights of teachers in 4 bits (NF4, needs bitsandbytes)."""
    teacher_top_k: PositiveInt = 20
    """Number of tokens whose log-probabilities a teacher behind a server returns; all others are compared as one."""
    direction: Direction = "reverse"
    """Divergence of a token: reverse KL(student || teacher), forward KL(teacher || student), or jensen-shannon."""
    jsd_beta: Fraction = 0.5
    """Weight of the teacher in the mixture that jensen-shannon compares both with."""
    distill_temperature: Temperature = 1.0
    """Temperature of both distributions in the divergence."""
    packing: bool | None = None
    """Put several sequences into one row of the models' inputs; None does so where that is cheaper."""
    on_policy: Unit = 1.0
    """Share of rows trained on sampled responses; the others are trained on the completion that they have."""
    completion_column: str = "completion"
    """Text of that completion, or messages with one turn of the assistant; truncated at max_new_tokens."""
    verifiers: str | list[str] | None = None
    """Scorers of the responses, as of grpo (docs/verifiers.md): they show accuracy, and nothing is trained on them."""

    needs: ClassVar = (
        Requirement(
            "teacher_column",
            lambda config: isinstance(config.teacher, dict),
            without("several teachers by name"),
        ),
        Requirement(
            "sequence_parallel",
            lambda config: config.sequence_parallel == 1,
            "divides sequences that a teacher reads whole: no distillation has it; leave it out",
        ),
        Requirement(
            "teacher_top_k", lambda config: config.served, without("a teacher behind a server")
        ),
        Requirement(
            "distill_temperature",
            lambda config: not config.served,
            "must be 1 with a teacher behind a server",
        ),
        Requirement(
            "jsd_beta",
            lambda config: not config.served,
            "must be 0.5 with a teacher behind a server",
        ),
        Requirement(
            "teacher_in_4bit",
            lambda config: config.zero_stage < 3,
            "cannot be split by ZeRO 3; use --zero_stage 2",
        ),
        Requirement(
            "jsd_beta",
            lambda config: config.direction == "jensen-shannon",
            without("--direction jensen-shannon"),
        ),
        Requirement(
            "completion_column", lambda config: config.on_policy < 1, without("--on_policy below 1")
        ),
        Requirement(
            "lag",
            lambda config: config.on_policy == 1,
            "samples all rows of a later step; drop it, or --on_policy",
        ),
        Requirement(
            "loss_from",
            lambda config: config.loss_from == "linear",
            "has no meaning here: leave it out",
        ),
    )

    @pydantic.field_validator("teacher")
    @classmethod
    def _is_url(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        """Refuse a teacher that is meant as a URL, and is none."""
        for teacher in value.values() if isinstance(value, dict) else [value]:
            # No name on the Hub has an @.
            if "://" in teacher or ("@" in teacher and not Path(teacher).exists()):
                check_url("teacher", teacher)
        return value

    @property
    def trained_column(self) -> str | None:
        return self.completion_column if self.on_policy < 1 else None

    def for_held_out(self) -> "DistillConfig":
        # They are sampled alone, so they need no completion.
        return self.replace(on_policy=1.0)

    def check_row(self, row: dict) -> None:
        # A row that names no teacher is found now, and not at the step that comes to it.
        name = row.get(self.teacher_column)
        if len(self.teachers) > 1 and name not in self.teachers:
            expected = f"expected one of {', '.join(self.teachers)} (--teacher_column)"
            raise BadRow(f"column {self.teacher_column!r} is {name!r:.80}", expected)

    @property
    def served(self) -> bool:
        """True if a teacher is behind a server."""
        return any(map(is_url, self.teachers.values()))

    @property
    def teachers(self) -> dict[str, str]:
        """The teachers by name; a single one has none."""
        return self.teacher if isinstance(self.teacher, dict) else {"": self.teacher}


def batch_plan(config: DistillConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    local = ranks.divide_over("prompts_per_step", config.prompts_per_step, world)
    return {
        "processes": world,
        "rows per step": f"{config.prompts_per_step} = {world} processes x {local}",
        "optimizer steps": config.in_run(1),
        "sampled responses": f"{config.group_size} to each of {config.on_policy:.0%} of the rows",
        "scores, which are only shown": check_scorers(config) if config.verifiers else "none",
    }


def completion_as_sample(prompt: Prompt, max_tokens: int) -> Sample:
    """Return the completion that a row has as a response to its prompt."""
    assert prompt.completion is not None
    response = Response(prompt.completion[:max_tokens], "stop")
    # No scorer reads these samples, so they have no text.
    return Sample(prompt.row, prompt.ids, response, "", prompt.where)


def accumulate(
    policy: Policy[DistillConfig],
    teachers: Mapping[str, Any],
    samples: list[Sample],
    step: int,
    response_sums: torch.Tensor | None = None,
) -> dict[str, float]:
    """Run forward, and where gradients are enabled backward, on this rank's samples; return metrics over all ranks.

    `response_sums` (N, 2), if given, gets the divergence and the number of tokens of each sample.
    """
    # The divergence is over the whole vocabulary, whatever the sampling left out.
    batch = dataclasses.replace(
        batch_of(samples, policy.tokenizer.pad_token_id, policy.device), support=None
    )
    # The mean is over the tokens of all ranks, so the number of processes changes nothing.
    (num_tokens,) = ranks.global_counts(batch.token_counts.sum())
    policy.model.train(torch.is_grad_enabled())
    sums = Sums(step)
    column, names = policy.config.teacher_column, list(teachers)
    teacher_of = torch.tensor(
        [names.index(sample.row[column]) if len(names) > 1 else 0 for sample in samples]
    )
    by_length = (batch.prompt_lengths + batch.response_lengths).argsort(stable=True)  # fewer pads
    for rows in policy.divide(batch, by_length):
        micro = batch.rows(rows)
        terms = teacher_divergence(policy, list(teachers.values()), micro, teacher_of[rows])
        sequence_kl = terms.pop("kl_of_sequences")
        if response_sums is not None:
            response_sums[rows, 0] = sequence_kl.cpu()
            response_sums[rows, 1] = batch.token_counts[rows].double()
        terms["kl"] = terms["kl"] / max(num_tokens, 1)
        if torch.is_grad_enabled():
            policy.backward(terms["kl"])
        sums.add(terms, micro.where)
    totals = sums.over_ranks()
    metrics: dict[str, float] = {"distill/num_tokens": num_tokens}
    # Without a token there is no mean, which would look like a student that is its teacher.
    if num_tokens:
        metrics["distill/kl"] = totals["kl"]
    # The likeliest tokens are compared at some tokens only, which are counted apart.
    if compared := totals["compared"]:
        metrics["distill/top1_agreement"] = totals["agrees"] / compared
        metrics["distill/topk_mass"] = totals["mass"] / compared
    return metrics


@torch.no_grad()
def compare(
    policy: Policy[DistillConfig], teachers: Mapping[str, Any], samples: list[Sample], count: int
) -> tuple[dict[str, float], torch.Tensor]:
    """Return `distill/*` of the first `count` responses of this rank, of all ranks, and of each of them the divergence
    and the tokens (count, 2); the others only make the ranks even.
    """
    # An empty response keeps the ranks' passes equal in number, and adds 0 to every sum.
    empty = [
        dataclasses.replace(sample, response=Response([], "length")) for sample in samples[count:]
    ]
    response_sums = torch.zeros(len(samples), 2, dtype=torch.float64)
    assert policy.published is not None  # as something was sampled
    metrics = accumulate(policy, teachers, samples[:count] + empty, policy.published, response_sums)
    return metrics, response_sums[:count]


def train_step(
    policy: Policy[DistillConfig],
    teachers: Mapping[str, Any],
    prompts: list[Prompt],
    dataset_samples: list[Sample],
    step: int,
) -> dict[str, float]:
    """Sample responses to the prompts, and do one update on these and on the `dataset_samples`; return its metrics."""
    began = time.monotonic()
    metrics, samples = {}, dataset_samples
    # With on_policy below 1 there may be steps without a prompt to sample for.
    if prompts:
        rollout = policy.roll_out(prompts, policy.sampling, policy.config.group_size)
        metrics, samples = rollout_metrics(rollout, {}, step), rollout.samples + dataset_samples
    policy.rest()
    sampled_at = time.monotonic()
    if ranks.world_size() > 1:
        tokens = [len(sample.prompt_ids) + len(sample.response.ids) for sample in samples]
        sources, balance = deal(tokens, [[0]] * len(samples))
        samples, metrics = ranks.exchange(samples, sources), metrics | balance
    metrics |= accumulate(policy, teachers, samples, step) | policy.optimizer_step(step)
    metrics["time/train"] = time.monotonic() - sampled_at
    # The teacher is to correct the student's own mistakes, so the sampler gets the new weights.
    metrics |= policy.publish(step)
    seconds = time.monotonic() - began
    return metrics | {
        "perf/tokens_per_second": metrics["distill/num_tokens"] / seconds,
        "perf/padding": policy.padding.fraction(),
    }


def train(
    config: DistillConfig,
    *,
    dataset: RowsLike = None,
    eval_dataset: RowsLike = None,
    scorers: ScorersLike = None,
    sampler: SamplerFactory | None = None,
    on_step: OnStep | None = None,
    tools: ToolsLike = None,
    environment_factory: EnvironmentFactory = None,
) -> str:
    """Run the whole training, on what is given or on what the config names; return the trained model's folder."""
    # Tokenizer, scorers, rows, models.
    # A resumed run must have the same teachers, but the weights behind a URL cannot be hashed.
    models = {
        f"teacher {name}".strip(): model
        for name, model in config.teachers.items()
        if not is_url(model)
    }
    rows = (dataset, eval_dataset)
    inputs = read_inputs(
        config, batch_plan, rows, scorers, sampler, models, on_step, tools, environment_factory
    )
    config, run, held_out = inputs.config, inputs.run, inputs.held_out
    # There is no reference, because the student is compared with the teacher.
    policy = inputs.load_policy(
        needs_reference=False, packing_option="packing", packing=config.packing
    )
    with phase("loaded the teacher"):
        teachers = load_teachers(config, policy)
    # An evaluation compares the student with its teachers, too, on what it samples.
    judge = functools.partial(
        evaluate, policy, held_out, functools.partial(compare, policy, teachers)
    )

    # Where the run begins, or goes on.
    run.fit_micro_batches(policy.model)
    run.start({"policy": policy.model}, rank_state=policy.rank_state, evaluate=judge)
    policy.publish(run.step)

    # Step by step; where the share is no whole number of rows, its remainder comes later.
    share = config.on_policy * config.prompts_per_step / ranks.world_size()
    for step, prompts in inputs.steps(policy):
        # Rounded totals and not a rounded share: 0.3 of a row is one in about three steps.
        num_sampled = round(share * step) - round(share * (step - 1))
        completions = [
            completion_as_sample(prompt, config.max_new_tokens) for prompt in prompts[num_sampled:]
        ]
        metrics = train_step(policy, teachers, prompts[:num_sampled], completions, step)
        # Episodes are of sampled responses alone.
        metrics["episode"] = round(share * step) * ranks.world_size() * config.group_size
        run.log(metrics)
    return run.finish(lambda folder: policy.save(folder, merged=config.save_merged))


main = functools.partial(command.run, DistillConfig, train)

if __name__ == "__main__":
    main()

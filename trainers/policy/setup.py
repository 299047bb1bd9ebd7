"""The setup of every trainer that samples: how a batch divides, the rows and scorers, the policy and its sampler."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ..base import engine, ranks
from ..base.ranks import divide_over
from ..base.screen import phase, print_rank0
from ..base.text import InputError, users_function
from ..data import encode
from ..data.examples import Examples
from ..data.reading import RowReport, RowsLike, load_train_eval
from ..data.rows import BadRow, Rows
from ..models import language_model
from ..models.packing import packing_costs, unpadded_costs
from ..rollouts.generate import TransformersSampler
from ..rollouts.options import ROLLOUT_BATCH_SIZE
from ..rollouts.returned import check_scores
from ..rollouts.roll_out import prompts_of, right_answer
from ..rollouts.sampling import Seeds
from ..rollouts.types import Prompt, Response, Sample, Sampler, Scorer
from ..run.hooks import OnStep
from ..run.loop import Run
from ..run.metrics import EMPTY
from ..run.store import remove_at_end
from ..scorers.builtin import answers_of
from ..scorers.load import load_scorers
from ..scorers.options import ScorersLike, with_scorers
from .evaluate import HeldOut, held_out_share
from .options import PolicyConfig, SamplingRunConfig, ScoredRunConfig
from .policy import Policy, eager_layers
from .reference import PolicyWithoutAdapters, Reference

if TYPE_CHECKING:
    from ..servers.inference import Http

CORRECTIONS = ("rollout_correction", "rollout_low", "rollout_high", "rollout_gate", "old_logprobs")
WHEN_OFF = {  # what happens without an option, for the message that says why the option is off
    "share_prompts": "prompts are computed once per response",
    "packing": "sequences are padded",
}
SamplerFactory = Callable[[Sampler, object], Sampler]
"""(the sampler that the options describe, the tokenizer) -> the sampler of the run."""
ToolsLike = Sequence[Callable[..., Any]] | None
EnvironmentFactory = Callable[..., Any] | Mapping[str, Callable[..., Any]] | None


def rollout_batch_plan(config: PolicyConfig, world: int) -> dict[str, object]:
    """Return how the batch of a step divides over `world` processes, minibatches and micro-batches, by title.

    Raises:
        InputError: it does not divide, or the surrogate needs all tokens of an update at once.
    """
    local = divide_over("prompts_per_step", config.prompts_per_step, world) * config.group_size
    # A remainder would become an update of its own, with fewer responses at the same learning rate.
    if local % config.minibatches:
        problem = f"minibatches={config.minibatches} does not divide the {local} responses of each process"
        raise InputError(f"{problem}; choose a number that does")
    minibatch = local // config.minibatches
    updates = config.updates_per_step
    largest = config.micro_batch_size
    if config.micro_batch_tokens is not None:
        # The sequences are taken to be as long as they may be.
        largest = max(1, config.micro_batch_tokens // config.longest_sequence)
    micro_batches = 1 if largest is None else math.ceil(minibatch / largest)
    if micro_batches * world > 1 and not config.may_divide_updates:
        raise InputError(
            f"surrogate={config.surrogate} compares all tokens of an update, {minibatch * world} responses: give one "
            f"process and --micro_batch_size {minibatch * world} without --micro_batch_tokens, or another surrogate"
        )
    return {
        "responses per step": f"{local * world} = {config.prompts_per_step} prompts x {config.group_size}",
        "responses per process and step": local,
        "responses per process and minibatch": minibatch,
        "micro-batches per process and minibatch": config.micro_batches_of(minibatch),
        "optimizer updates per step": updates,
        "optimizer updates in the run": config.in_run(updates),
        "responses in the run": config.in_run(local * world),
    }


Config = TypeVar("Config", bound=ScoredRunConfig)


@dataclass
class Inputs(Generic[Config]):
    """A run and all that it has read, except its models."""

    run: Run
    config: Config
    """The options, in which the number of steps and the scorers are resolved."""
    tokenizer: Any
    scorers: Sequence[Scorer]
    prompts: Examples
    held_out: HeldOut
    users_sampler: SamplerFactory | None = None
    """The user's own sampler, if any, which is built around that of the options."""

    @property
    def updates(self) -> int:
        """The number of optimizer updates in the whole run, by which learning rates are scheduled."""
        return self.config.total_steps * self.config.updates_per_step

    def prompts_of_rank(self, indices: list[int]) -> list[Prompt]:
        """Return this rank's share of the prompts at `indices`."""
        return [self.prompts[i] for i in indices[ranks.rank() :: ranks.world_size()]]

    def steps(self, policy: Policy) -> Iterator[tuple[int, list[Prompt]]]:
        """Yield each step of the run with this rank's prompts; with `lag`, later steps begin to be sampled."""
        order = self.run.order
        for step, indices in self.run:
            policy.begin_step(step, lambda later: self.prompts_of_rank(order.after(later)))
            yield step, self.prompts_of_rank(indices)

    @phase("loaded the policy")
    def load_policy(
        self,
        *,
        packing_option: str | None = None,
        packing: bool | None = None,
        needs_reference: bool = True,
        frozen: bool = False,
    ) -> Policy[Config]:
        """Return the policy in a DeepSpeed engine, with its reference and its sampler. All ranks must call this.

        Args:
            packing_option: the option which puts several sequences into a row; None does so where none is padded.
            packing: the value of that option; None packs if the model can.
            needs_reference: whether the policy is compared with the model that it starts from.
            frozen: True if the policy is not trained.
        """
        # The model, its reference, and its engine.
        config, tokenizer, device = self.config, self.tokenizer, self.run.device
        lm = language_model.load_lm(config, device)
        # Whether rows may be shared is tried before there is an engine.
        longest = config.longest_sequence
        if packing_option is None:
            costs = unpadded_costs(lm.base, longest)
        else:
            otherwise = WHEN_OFF[packing_option]
            costs = packing_costs(
                lm.base, longest, packing, option=packing_option, otherwise=otherwise
            )
        # With LoRA the policy without its adapters is the reference; otherwise it is a second, frozen model.
        reference = None
        if needs_reference and not lm.lora:
            starting = language_model.load_lm(config, device, trainable=False)
            reference = Reference(engine.initialize_frozen(starting, config))
        model = engine.initialize(lm, config, self.updates)
        if needs_reference and lm.lora:
            reference = PolicyWithoutAdapters(model)

        # The sampler, and what each rank saves in checkpoints for itself. The seeds differ by rank, because otherwise
        # equal prompts on two ranks would get equal responses.
        with eager_layers(config):
            sampler = build_sampler(config, model, tokenizer, self.users_sampler)
        seeds = Seeds(config.seed + ranks.rank() * 100_003)
        stop_ids = tuple(encode.stop_ids(tokenizer, lm.base.saved_generation_config))
        return Policy(
            config,
            model,
            reference,
            sampler,
            config.sampling(config.max_new_tokens, stop_ids),
            self.scorers,
            tokenizer,
            device,
            costs,
            frozen=frozen,
            seeds=seeds,
            rank_state={"seeds": seeds} | ({"rollouts": sampler} if config.lag else {}),
            steps_per_epoch=len(self.prompts) / config.prompts_per_step,
        )


def read_inputs(
    config: Config,
    batch_plan: Callable,
    rows: tuple[RowsLike, RowsLike],
    scorers: ScorersLike = None,
    sampler: SamplerFactory | None = None,
    models: Mapping[str, str] = EMPTY,  # beside those of the config, by option
    on_step: OnStep | None = None,
    tools: ToolsLike = None,
    environment: EnvironmentFactory = None,
) -> Inputs[Config]:
    """Begin a run, read all but its models, and compare that with the other processes and with a resumed run.

    Args:
        config: the options.
        batch_plan: returns how the batch divides, such as `rollout_batch_plan`.
        rows: the training rows and the held-out rows, if they come from Python.
        scorers: scorers from Python.
        sampler: a sampler from Python.
        models: the models that the run reads beside those of the config, by option.
        on_step: the hook, if it comes from Python.
        tools: functions from Python that the policy may call.
        environment: what makes the environments of responses, by their names if rows choose one.
    """
    config = with_scorers(config, scorers)
    checks = []
    if tools or environment or config.tools or config.environment:
        from ..rollouts.tools import ToolSampler

        if sampler or config.sampler:
            raise InputError("sampler and tools are both given; give one of them")
        if config.zero_stage == 3 and config.server is None:
            raise InputError(
                "tools with zero_stage=3 would let ranks sample other numbers of turns: give --server or --zero_stage 2"
            )
        # Without a dataset; what an environment says takes the place of a blank prompt.
        if (environment or config.environment) and rows[0] is None and config.dataset is None:
            rows = [{"prompt": " "}] * (config.prompts_per_step + config.eval_size), rows[1]
        sampler = ToolSampler(config, tools or (), environment)
        config, checks = sampler.config, [sampler.environment_of]
    run = Run(config, batch_plan, on_step)
    with phase("read tokenizer, scorers and rows"), RowReport(config.bad_rows) as reading:
        tokenizer = encode.load_tokenizer(config.model, config.revision)
        read = load_train_eval(config, *rows, reading)
        # The scorers come before the prompts, because each of them checks every row.
        judges = []
        if config.verifiers:
            size = config.rollout_batch_size or ROLLOUT_BATCH_SIZE
            options = {"tokenizer": tokenizer, "device": run.device, "batch_size": size}
            judges = load_scorers(config, policy=config, held=config, **options)
        prompts, held_out = load_prompts(config, tokenizer, judges, read, *checks)
        sampler = users_function("sampler", config.sampler, sampler, "built", "tokenizer")
    for scorer in judges:
        count = len(tokenizer.tokenize(scorer.longest))
        if count > config.max_new_tokens:
            print_rank0(
                f"max_new_tokens={config.max_new_tokens} is too small for the answer {scorer.longest!r:.80} of {count} "
                "tokens: no response there can repeat it; raise it, or leave such rows out"
            )
        # A function may take a second for each, or money; beside a user's sampler it may read more than a text.
        if config.dry_run and not sampler:
            score_answers(scorer, prompts[:100], tokenizer)
    # All processes must have read the same, and a resumed run must read what it began with.
    first = prompts[0]
    answer = right_answer(first.row, first.prompt, judges)
    config = run.check_inputs(
        config,
        tokenizer,
        {**config.reward_models(), **models},
        rows=prompts,
        held_out=held_out,
        scorers_read=answer.get("columns", answer),
    )
    return Inputs(run, config, tokenizer, judges, prompts, held_out_share(held_out), sampler)


def score_answers(scorer: Any, prompts: Sequence[Prompt], tokenizer) -> None:
    """Print the scores of the rows' own answers by a scorer that tells right from wrong and is no model."""
    samples = []
    for prompt in prompts:
        with contextlib.suppress(BadRow):  # a row of a function may have no answer
            text = answers_of(prompt.row, scorer.answer_column)[0]
            response = Response(tokenizer.encode(text, add_special_tokens=False), "stop")
            samples.append(
                Sample(prompt.row, prompt.ids, response, text, prompt.where, prompt.prompt)
            )
    if samples and scorer.solved_at is not None and not hasattr(scorer, "shares_work"):
        scores = check_scores(scorer.name, scorer(samples), samples).nan_to_num()
        print_rank0(
            f"{scorer.name} gives the rows' own answers {scores.mean():.3g} on average, and at least "
            f"{scores.min():.3g} ({samples[scores.argmin()].where})"
        )


def check_sampler(config: SamplingRunConfig, sampler: Sampler) -> None:
    """Raise `InputError` for options that need something which the sampler does not record or report."""
    if config.sampling(1, ()).truncates and not sampler.records_support:
        raise InputError(
            f"top_p={config.top_p:g} top_k={config.top_k} min_p={config.min_p:g} with a sampler that reports no kept "
            f"sets ({type(sampler).__name__}): every log-probability would be off by -ln(kept mass); drop the option, "
            "or have the sampler record the sets"
        )
    if sampler.reports_logprobs:
        return
    corrections = [name for name in CORRECTIONS if getattr(config, name, None) is not None]
    if corrections:
        raise InputError(
            f"{', '.join(corrections)} corrects for a sampler that differs from the policy, but here the policy itself "
            "is sampled; leave it out"
        )
    if config.lag:
        raise InputError(
            f"lag={config.lag} trains on responses of earlier weights, whose log-probabilities must be known, and the "
            "sampler declares reports_logprobs = False; have it report them, or leave lag out"
        )


def load_prompts(
    config: SamplingRunConfig,
    tokenizer,
    scorers: Sequence[Scorer],
    rows: tuple[Rows, Rows],
    *checks: Callable[[dict], object],
) -> tuple[Examples, Examples]:
    """Return the prompts of the training rows and of the held-out ones; scorers and `checks` check each row."""
    encoder = encode.Encoder.of(config, tokenizer)
    train, held_out = rows
    prompts = []
    for split, split_config in ((train, config), (held_out, config.for_held_out())):
        read = prompts_of(
            split,
            encoder,
            scorers,
            split_config.check_row,
            *checks,
            column=split_config.prompt_column,
            max_length=split_config.max_prompt_length,
            completion_column=split_config.trained_column,
        )
        prompts.append(read)
    return prompts[0], prompts[1]


def build_sampler(
    config: SamplingRunConfig, model, tokenizer, users_sampler: SamplerFactory | None = None
) -> Sampler:
    """Return the run's sampler: the policy in this process, servers, or the user's own. All ranks must call this."""
    # The policy in this process, or servers.
    lm = model.module.base
    if config.server is None:
        kind = TransformersSampler
        if config.lag:
            # The next rollout is sampled while the policy is trained, so it needs a copy of the weights.
            from ..rollouts.lag import CopySampler as kind
        built = kind(
            lm,
            pad_id=tokenizer.pad_token_id,
            batch_size=config.rollout_batch_size,
            # Under ZeRO 3 a rank that has finished keeps generating, because the others gather weights with it.
            synced_gpus=model.zero_optimization_stage() == 3,
        )
        built.graphs.is_compiled = config.torch_compile
    elif config.dry_run:
        from ..servers.sampler import ServerSampler

        built = Sampler(ServerSampler)  # which reports the same, and asks no server
    else:
        from ..servers.probe import TEXT, Probe
        from ..servers.published import folder_of
        from ..servers.sampler import ServerSampler

        # A server with other weights or a stale cache raises no error, so a probe compares what it returns.
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        probe = Probe(model, ids, lm.dtype == torch.float32, config.sampling(1, ()))
        output_dir = Path(config.output_dir).absolute()
        folder = folder_of(config.server, config.published_dir, output_dir, lm)
        if folder != output_dir / "published" and ranks.process_index() == 0:
            remove_at_end(folder)
        built = ServerSampler(
            config.server,
            http_of(config),
            folder,
            probe,
            config.longest_sequence,
            sleeps=config.server_sleeps,
        )
    # The user's own sampler is built around this one, and may use it.
    if users_sampler is not None:
        built = users_sampler(built, tokenizer)
        if not isinstance(built, Sampler):
            raise InputError(
                f"sampler={config.sampler}: expected a fused_rl.trainers.rollouts.types.Sampler, got {built!r:.80}"
            )
        if built.built is None and type(built).publish is Sampler.publish:
            remedy = "call super().__init__(built, tokenizer) in its __init__, or give it its own publish"
            raise InputError(f"the sampler {type(built).__name__} takes no new weights: {remedy}")
    check_sampler(config, built)
    if config.lag:
        from ..rollouts.lag import LaggedSampler

        return LaggedSampler(built, config.lag)
    return built


def http_of(config: SamplingRunConfig) -> "Http":
    """Return the HTTP client for servers, with the API key that the options name."""
    from ..servers.inference import Http

    variable = config.server_api_key_env
    key = None if variable is None else os.environ[variable].strip()
    return Http(config.server_timeout, key=key)

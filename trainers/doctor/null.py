"""`fused-rl doctor --null`: how far ratios are from 1 while nothing is learned, and what each part of that comes from.

    fused-rl doctor --null --config recipes/demo_grpo.yaml
    fused-rl doctor --null ppo --model m --dataset rows.jsonl --output_dir o        # where the options leave it open

A few steps of a run of GRPO or PPO at learning rate 0, in a temporary folder: the run's own is neither read nor
touched. The policy stays what it was, so each ratio is 1, and what differs is noise. In this process there is none:
the update repeats the pass before it, in the same micro-batches, bit for bit. No response is left out of that. Then
one more rollout is scored again with one thing changed at a time. Servers get the weights of the starting model, from
a folder beside the run's own, where they see it too: no other run may be drawing from them. Left out: several
processes, the noise of a critic.

The exit status is 0 where the run's own noise is exactly 0, 1 where it is not, 2 where it could not be measured.
"""

import contextlib
import dataclasses
import importlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import yaml

import fused_rl
from fused_rl import tiles
from fused_rl.presets import resolve_options
from fused_rl.surrogates import CLIPPED
from fused_rl.trainers.base import launch
from fused_rl.trainers.base.files import storing
from fused_rl.trainers.base.screen import kept_up, tell
from fused_rl.trainers.data.order import RowOrder
from fused_rl.trainers.models.packing import Costs, why_not
from fused_rl.trainers.options.config import InputError, Options, OutputConfig, names_of
from fused_rl.trainers.options.parse import config_files, parse
from fused_rl.trainers.options.text import table
from fused_rl.trainers.policy import prepare
from fused_rl.trainers.policy.critic import load_critic
from fused_rl.trainers.policy.groups import keeps_groups
from fused_rl.trainers.policy.options import loss_options
from fused_rl.trainers.policy.policy import Policy, measure
from fused_rl.trainers.policy.reference import needs_reference
from fused_rl.trainers.rollouts.types import Rollout
from fused_rl.trainers.run import beginning, command
from fused_rl.trainers.samplers.generate import TransformersSampler, keeps_keys_and_values
from fused_rl.trainers.scorers.load import load_chosen
from fused_rl.trainers.scorers.reward_model import Reader

PROG = "fused-rl doctor --null"
STEPS = 3
TRAINERS = {"grpo": "GRPOConfig", "ppo": "PPOConfig"}
# What a run does beside training, its evaluations, what says how it learns, and what leaves responses out of the loss,
# which would then not be compared: as if not given.
LEFT_OUT = {
    *names_of(OutputConfig),
    *("num_train_epochs", "eval_dataset", "eval_dataset_config", "eval_split", "eval_every", "eval_samples"),
    *("show_samples", "lr_schedule", "warmup_steps", "critic_lr", "critic_lr_schedule", "critic_warmup_steps"),
    *("critic_only", "ref_sync_every", "ref_mixup_alpha", "target_kl"),
    *("zero_variance", "max_refills", "mask_truncated"),
    "epochs",  # a later pass has other micro-batches, whose noise has a row of its own
}
# Of a step's metrics: what they are where nothing is learned, and what they are called here.
STILL = {
    "val/ratio": ("mean ratio", 1.0),
    "val/ratio_var": ("variance of the ratio", 0.0),
    "policy/clipfrac_avg": ("fraction clipped", 0.0),
    "policy/approxkl_avg": ("KL to the sampling policy", 0.0),
}
TO_REFERENCE = {"objective/kl": ("KL to the reference", 0.0), "objective/kl_exact": ("exact KL to the reference", 0.0)}
UNCHANGED = "nothing changed"
COLUMNS = ["scored again", "max |r - 1|", "variance of r", "clipped", "KL", "mean |d|", "max |d|"]


class Again(NamedTuple):
    """One way to score the same responses."""

    source: str
    logprobs: Callable[[], torch.Tensor]
    """() -> (B, T - 1) nats."""


@dataclass
class Still:
    """A run that is at rest."""

    policy: Policy
    train_step: Callable[[list, int, Callable], dict[str, float]]
    """(prompts, step, more prompts) -> the step's metrics."""


def algorithm(trainer: str) -> ModuleType:
    """Its module, by name as in cli.py: the algorithms stand above this room."""
    return importlib.import_module(f"fused_rl.trainers.{trainer}")


def config_of(trainer: str) -> type[Options]:
    """The class of its options."""
    return getattr(algorithm(trainer), TRAINERS[trainer])


def trainer_of(argv: list[str]) -> tuple[str, list[str]]:
    """grpo or ppo, as the first word says, else as the options do: their names, and the preset's advantages."""
    if argv[:1] and argv[0] in TRAINERS:
        return argv[0], argv[1:]
    given = {}
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        name, joined, value = word.partition("=")
        given |= {name[2:]: value if joined else after} if word.startswith("--") else {}
    files, unread = {}, sum(word.split("=")[0] == "--config" for word in argv)
    for path in config_files(argv):
        with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
            found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            if isinstance(found, dict):
                files, unread = files | found, unread - 1
    given = {name: value for name, value in (files | given).items() if name not in ("config", "local_rank")}

    # A file that cannot be read, or what neither of them takes: the parser of the nearer one says which.
    foreign = {name: sorted(set(given).difference(names_of(config_of(name))), key=str) for name in TRAINERS}
    for name, kind in (("sft", "SFTConfig"), ("reward", "RewardConfig")):
        if not unread and all(foreign.values()) and set(given) <= set(names_of(getattr(algorithm(name), kind))):
            raise InputError(f"these are the options of a run of {name}; --null is of grpo and ppo, which sample")
    if unread or set.intersection(*map(set, foreign.values())) or not all(word.startswith("-") for word in argv[:1]):
        parse(config_of(min(foreign, key=lambda name: len(foreign[name]))), argv, PROG)

    # What only one of them takes.
    preset = fused_rl.PRESETS.get(str(given.get("preset")))
    if preset is not None:
        foreign["grpo" if preset.advantage == "gae" else "ppo"].append(f"preset={given['preset']}")
    fits = [name for name in TRAINERS if not foreign[name]]
    if len(fits) == 1:
        return fits[0], argv
    neither = "; ".join(f"{name} has no {', '.join(options)}" for name, options in foreign.items())
    why = "fit both" if fits else f"fit neither grpo nor ppo ({neither})"
    raise InputError(f"the options {why}; say which run it is: {PROG} grpo … or ppo …")


def at_rest(config: Options, folder: str) -> Options:
    """The config of a run that trains at learning rate 0, in `folder`, and evaluates and saves nothing."""
    given = {}
    for field in dataclasses.fields(config):
        given[field.name] = field.default if field.name in LEFT_OUT else getattr(config, field.name)
    given |= {"output_dir": folder, "lr": 0.0, "steps": STEPS + 1, "eval_size": 0, "save_every": 0}
    return type(config)(**given)


def of_grpo(grpo: ModuleType, config: Options, read: prepare.Read) -> Still:
    """As grpo.train begins."""
    shared = config.share_prompts if keeps_groups(config, 1) else False
    policy = read.load_policy(share_prompts=shared, needs_reference=needs_reference(config))
    return Still(policy, lambda prompts, step, more: grpo.train_step(policy, prompts, step, more))


def of_ppo(ppo: ModuleType, config: Options, read: prepare.Read) -> Still:
    """As ppo.train begins."""
    critic = load_critic(config, read.tokenizer, read.device, read.updates)
    policy = read.load_policy(extend=critic.extend)
    stop_ids = ppo.stop_ids_of(config, read.tokenizer, policy.sampling.stop_ids)
    policy.sampling = dataclasses.replace(policy.sampling, stop_ids=stop_ids)
    return Still(policy, lambda prompts, step, more: ppo.train_step(policy, critic, prompts, step, config.kl_coef))


def trained(config: Options) -> tuple[Policy, list[dict[str, float]], Rollout]:
    """The policy of a run at rest, the metrics of its steps, and one rollout more, which nothing was trained on."""
    run = beginning.begin(config, algorithm(config.command).arithmetic)
    read = prepare.read(config, run, load_chosen, Reader.beside)
    still = (of_grpo if config.command == "grpo" else of_ppo)(algorithm(config.command), config, read)
    policy, order = still.policy, RowOrder(len(read.prompts), config.prompts_per_step, config.seed)
    policy.publish(0)
    history = []
    for step in range(1, STEPS + 2):
        prompts = read.mine(next(order))
        policy.begin(step, lambda later: read.mine(order.after(later)))
        if step <= STEPS:
            history.append(still.train_step(prompts, step, lambda count: read.mine(order.take(count))))
    sampler = policy.sampler
    if isinstance(sampler, TransformersSampler) and keeps_keys_and_values(sampler.lm):
        sampler.tells_logprobs = True  # of no use to a run, which computes the same
    return policy, history, policy.roll_out(prompts, policy.sampling, config.group_size)


def scored(policy: Policy, rollout: Rollout, size: int) -> torch.Tensor:
    """(B, T - 1) nats, as a run measures them before its updates, in micro-batches of `size`."""
    parts = list(torch.arange(len(rollout.samples)).split(size))
    alone = dataclasses.replace(policy, has_reference=False)
    return measure(alone, rollout.batch, parts, exact_kl=False).old_logprobs


@torch.no_grad()
def rounded(policy: Policy, rollout: Rollout, size: int) -> torch.Tensor:
    """The same with each logit rounded to bfloat16."""
    found = torch.zeros(rollout.batch.response_mask.shape, device=policy.device)
    for index in torch.arange(len(rollout.samples)).split(size):
        part = rollout.batch.rows(index)
        mask = part.response_mask
        logits = policy.model(**policy.inputs(part), want_logits=True).logits.bfloat16()
        options = {"temperature": policy.config.temperature, "support": part.support}
        logprobs = fused_rl.token_logprobs(logits, part.input_ids[:, 1:][mask], **options).logprobs
        found[index, : mask.shape[1]] = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, logprobs)
    return found


@contextlib.contextmanager
def changed(module, **attributes) -> Iterator[None]:
    """Inside, a module has other attributes."""
    before = {name: getattr(module, name) for name in attributes}
    try:
        vars(module).update(attributes)
        yield
    finally:
        vars(module).update(before)


def ways(policy: Policy, rollout: Rollout) -> list[Again]:
    """One for each source of noise that this run could have."""
    size = min(policy.config.micro_batch_size, len(rollout.samples))
    other, module = max(1, size // 2) if size > 1 else 2, policy.model.module
    found = [Again(UNCHANGED, lambda: scored(policy, rollout, size))]
    if rollout.rollout_logprobs is not None:
        who = "server" if policy.config.server else "sampler"
        found.append(Again(f"by the {who}, as it drew them", lambda: rollout.rollout_logprobs))
    found.append(Again(f"in micro-batches of {other}, not {size}", lambda: scored(policy, rollout, other)))

    # Packing: the other way round.
    parts = [rollout.batch.rows(index) for index in torch.arange(len(rollout.samples)).split(size)]
    longest = policy.config.max_prompt_length + policy.config.max_new_tokens
    if any(policy.inputs(part)["packed"] is not None for part in parts):
        apart = dataclasses.replace(policy, costs=None)
        found.append(Again("with prompts apart, not shared", lambda: scored(apart, rollout, size)))
    elif policy.config.group_size > 1 and why_not(module.base, longest) is None:
        shared = dataclasses.replace(policy, costs=Costs(token=1.0, pair=0.0))
        found.append(Again("with prompts shared, not apart", lambda: scored(shared, rollout, size)))

    # The head: from whole logits, and in the other precision.
    def with_head(**attributes):
        with changed(module, **attributes):
            return scored(policy, rollout, size)

    weight = module.head.weight
    logits = weight.dtype
    if module.loss_from == "linear":
        found.append(Again("from whole logits, not in tiles", lambda: with_head(loss_from="logits")))
        logits = module.head_dtype or tiles.default_logits_dtype(weight.dtype, weight.device)
    if logits == torch.float32:
        found.append(Again("with logits in bfloat16, not float32", lambda: rounded(policy, rollout, size)))
    elif module.loss_from == "linear":
        wide = {"head_dtype": torch.float32}
        found.append(Again("with logits in float32, not bfloat16", lambda: with_head(**wide)))
    return found


def figures(policy: Policy, rollout: Rollout, before: torch.Tensor, after: torch.Tensor) -> list[str]:
    """The cells of one way: of ratios r = exp(d) at the level of the loss, d = after - before (B, T - 1)."""
    mask = rollout.batch.response_mask
    options = loss_options(policy.config)
    chosen = resolve_options(options.pop("preset"), options)
    ratio = fused_rl.importance_ratio(after.double(), before.double(), mask, ratio_level=chosen.ratio_level)[mask]
    d, kl = (after - before).double()[mask], fused_rl.kl_estimate(after.double(), before.double(), "k3")[mask]
    clipped = "none"  # by a surrogate that clips nothing
    if not callable(chosen.surrogate) and chosen.surrogate in CLIPPED:
        beyond = CLIPPED[chosen.surrogate](ratio.log(), ratio.log().sign(), chosen)
        clipped = f"{beyond.double().mean().item():.2%}"
    minus_1 = ratio - 1
    numbers = [kl.mean(), d.abs().mean(), d.abs().max()]
    spread = [minus_1.abs().max(), minus_1.var(correction=0)]
    return [f"{x.item():.2g}" for x in spread] + [clipped] + [f"{x.item():.2g}" for x in numbers]


@contextlib.contextmanager
def a_folder(config: Options) -> Iterator[str]:
    """A temporary folder for the run; for servers beside the run's own, under a path that they can see and read."""
    beside = None
    if config.server:
        beside = next(path for path in Path(config.output_dir).resolve().parents if path.is_dir())
        who = f"server={','.join(config.server)}"
        tell(f"{who} gets the weights of {config.model}: no other run may be drawing from it meanwhile")
    with contextlib.ExitStack() as stack:
        with storing("the weights for the servers", beside or Path(tempfile.gettempdir())):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fused-rl-null-", dir=beside))
            if beside:
                Path(folder).chmod(0o755)  # it is made for this user alone
        yield folder


def moved(policy: Policy, history: list[dict[str, float]]) -> list[str]:
    """What of the steps' metrics is not what it is where nothing is learned, in words; [] in a run without noise."""
    expected = STILL | (TO_REFERENCE if policy.reference is not None else {})
    found = []
    for name, (said, still) in expected.items():
        values = [metrics[name] for metrics in history if name in metrics]
        worst = max(values, key=lambda value: math.inf if math.isnan(value) else abs(value - still), default=still)
        if worst != still:
            found.append(f"{said} {worst!r}")
    return found


def report(config: Options) -> bool:
    """Print the noise floor of a run with these options; returns whether its own, without a server's, is exactly 0."""
    if launch.processes() > 1:
        raise InputError("doctor --null measures one process: leave out the launcher")
    epochs = config.epochs
    with a_folder(config) as folder:
        config = at_rest(config, str(Path(folder) / "run"))
        policy, history, rollout = trained(config)
        size = min(config.micro_batch_size, len(rollout.samples))
        before, tokens = scored(policy, rollout, size), int(rollout.batch.response_mask.sum())
        again = {way.source: way.logprobs() for way in ways(policy, rollout)}
    rows = [[source, *figures(policy, rollout, before, after)] for source, after in again.items()]
    found = moved(policy, history)
    apart = (again[UNCHANGED] - before)[rollout.batch.response_mask].abs().max().item()
    if apart != 0:  # NaN too
        found.append(f"the same responses scored twice, up to {apart:.2g} nats apart")
    of_what = f"{STEPS} steps of {len(rollout.samples)} responses at learning rate 0, {config.minibatches} updates each"
    said = f"not 0: {'; '.join(found)}" if found else "exactly 0: ratio 1, variance 0, nothing clipped, KL 0"
    tell(f"noise of the run itself ({of_what}): {said}")
    if epochs > 1:
        tell(
            f"epochs={epochs}: of the first; later ones have other micro-batches, and their noise is that of such a row"
        )
    tell(f"the noise that each source would bring, on one more rollout ({tokens} tokens; d in nats, r = exp(d)):", "")
    tell(table([COLUMNS, *rows]))
    return not found


def main(argv: list[str]) -> None:
    """`fused-rl doctor --null`; status 1 where the run's own noise is not exactly 0, 2 where nothing was measured."""
    if argv in (["-h"], ["--help"]):
        tell(__doc__.strip())
        return
    exact: list[bool] = []
    with kept_up():
        try:
            with command.around(PROG):
                trainer, argv = trainer_of(argv)
            config_class, module = config_of(trainer), algorithm(trainer)
            command.run(config_class, module.arithmetic, lambda config: exact.append(report(config)), argv)
        except SystemExit as ended:
            if not isinstance(ended.code, str):
                raise
            tell(ended.code, to_errors=True)  # an error in a line, whose status would be 1
            sys.exit(2)
    if not all(exact):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

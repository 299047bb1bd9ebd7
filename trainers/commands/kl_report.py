"""Which KL estimator tells the truth: all of them beside the exact KL, for a worked example or for two models.

    fused-rl kl-report
    fused-rl kl-report --model runs/grpo/model --reference runs/sft/model --prompts problems.jsonl

The example has five tokens, so that every expectation is a sum: what the table says of an estimator is what a run with
it converges to. For models the tokens are sampled, from the model or (`--behaviour`) from a third one, and the exact KL
is that of the next-token distributions at the same positions. Left out: several processes.
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch

import fused_rl
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.batch import Batch, make_batch
from fused_rl.trainers.data.rows import load_rows
from fused_rl.trainers.models.language_model import LanguageModel, load_to_sample
from fused_rl.trainers.models.pretrained import check_fits
from fused_rl.trainers.options.config import InputError, Options, PositiveInt, Seed, Temperature, names_of
from fused_rl.trainers.options.needs import TEMPLATE_NEEDS, Needs, check_needs, without
from fused_rl.trainers.options.text import table
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.run import command, there
from fused_rl.trainers.samplers.generate import TransformersSampler

PAIR = ("model", "reference", "prompts")  # all of them, or none for the worked example
ESTIMATORS = ("k1", "k2", "k3", "k4", "rk3", "k1+", "k3+")
POLICY = (0.5, -0.3, 0.8, -1.0, 0.2)
REFERENCE = (0.1, 0.4, -0.2, 0.3, -0.6)
BEHAVIOUR = (0.3, -0.1, 0.5, -0.6, 0.0)


@dataclass(kw_only=True)
class KLReportConfig(Options):
    """All KL estimators beside the exact KL: of a worked example, or of two causal language models on prompts."""

    command: ClassVar[str] = "kl-report"
    sections: ClassVar[dict[str, str]] = {
        "model reference behaviour": "model",
        "prompts prompt_column raw_prompt chat_template_kwargs num_prompts": "data",
        "samples max_new_tokens temperature batch_size": "rollout",
    }

    model: str | None = None
    """The policy: a Hub name or a local folder. None prints the worked example."""
    reference: str | None = None
    """The reference model, with the same vocabulary."""
    behaviour: str | None = None
    """The model that samples the responses; None is the policy itself."""
    prompts: str | None = None
    """A .jsonl, .json, .csv or .parquet file, a folder, or a Hub dataset, with prompts."""
    prompt_column: str | None = None
    """Text or messages; None takes prompt, messages or question, whichever is there."""
    raw_prompt: bool = False
    """Give text prompts to the model as they are, even where its tokenizer has a chat template."""
    chat_template_kwargs: dict | None = None
    """What the chat template is told besides the messages, as YAML or JSON: {enable_thinking: false}."""
    num_prompts: PositiveInt = 32
    """How many of the prompts to use, from the first on."""
    samples: PositiveInt = 4
    """Responses per prompt."""
    max_new_tokens: PositiveInt = 64
    """Longer responses are cut."""
    temperature: Temperature = 1.0
    """Of sampling and of every probability."""
    batch_size: PositiveInt = 8
    """Responses at a time."""
    seed: Seed = 1
    """Of sampling."""

    def __post_init__(self):
        super().__post_init__()
        missing = [f"--{name}" for name in PAIR if getattr(self, name) is None]
        if missing and len(missing) < len(PAIR):
            raise InputError(f"two models need --model, --reference and --prompts; missing: {', '.join(missing)}")
        check_needs(self, NEEDS)


OF_MODELS = [name for name in names_of(KLReportConfig) if name not in PAIR]
NEEDS = (
    *(Needs(name, lambda config: config.model is not None, without("two models (--model)")) for name in OF_MODELS),
    *(need for need in TEMPLATE_NEEDS if need.option in OF_MODELS),
)


def exact(direction: str = "reverse") -> tuple[float, torch.Tensor]:
    """KL(policy || reference) of the example ("forward": the other way round) and its gradient (5,) on the logits."""
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    logp, ref = logits.log_softmax(0), torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(0)
    first, second = (logp, ref) if direction == "reverse" else (ref, logp)
    kl = (first.exp() * (first - second)).sum()
    return kl.item(), torch.autograd.grad(kl, logits)[0]


def expected(kl_estimator: str, *, on_policy: bool) -> tuple[float, torch.Tensor]:
    """The example's expected value of an estimator, and the expected gradient (5,) of it as a loss."""
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    logp, ref = logits.log_softmax(0), torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(0)
    old = logp.detach() if on_policy else torch.tensor(BEHAVIOUR, dtype=torch.float64).log_softmax(0)
    loss = (old.exp() * fused_rl.kl_estimate(logp, ref, kl_estimator, old_logprobs=old)).sum()
    return loss.item(), torch.autograd.grad(loss, logits)[0]


def verdict(gradient: torch.Tensor) -> str:
    """What an expected gradient (5,) of the example is, in words."""
    if gradient.abs().max() < 1e-12:
        return "all zero"
    for name, direction in (("the KL's", "reverse"), ("that of KL(ref||policy)", "forward")):
        if (gradient - exact(direction)[1]).abs().max() < 1e-9:
            return name
    return f"cosine with the KL's {torch.cosine_similarity(gradient, exact()[1], 0):+.3f}"


def example_rows() -> list[list[str]]:
    """Per estimator: expected value and gradient, on-policy, then off-policy."""
    rows = []
    for name in ESTIMATORS:
        (on, on_gradient), (off, off_gradient) = expected(name, on_policy=True), expected(name, on_policy=False)
        rows.append([name, f"{on:.6f}", verdict(on_gradient), f"{off:.6f}", verdict(off_gradient)])
    return rows


def example() -> str:
    """The report of the worked example."""
    lines = ["KL of a categorical over 5 tokens, by enumeration; every estimator as a loss."]
    for name, direction in (("KL(policy||ref)", "reverse"), ("KL(ref||policy)", "forward")):
        value, gradient = exact(direction)
        lines.append(f"{name} = {value:.6f}, gradient [{', '.join(f'{g:.6f}' for g in gradient.tolist())}]")
    header = ["as a loss", "E on-policy", "E[gradient] on-policy", "E off-policy", "E[gradient] off-policy"]
    return "\n".join([*lines, "", table([header, *example_rows()])])


@torch.no_grad()
def collect(config: KLReportConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """All estimates and the exact KL, each (tokens,) fp32 nats; and the responses' lengths."""
    torch.manual_seed(config.seed)
    policy, reference = load_to_sample(config.model), load_to_sample(config.reference, option="reference")
    behaviour = policy if config.behaviour is None else load_to_sample(config.behaviour, option="behaviour")
    sizes = {lm.get_output_embeddings().weight.shape[0] for lm in (policy, reference, behaviour)}
    if len(sizes) > 1:
        raise InputError(f"the models must share one vocabulary, got sizes {sorted(sizes)}")
    tokenizer, rows = encode.load_tokenizer(config.model), load_rows(config.prompts)
    encoder = encode.Encoder(tokenizer, raw_prompt=config.raw_prompt, chat_template_kwargs=config.chat_template_kwargs)
    which = range(min(config.num_prompts, len(rows)))
    encoded = [encoder.prompt(rows, i, config.prompt_column) for i in which]
    for lm in (policy, reference, behaviour):
        where = zip(encoded, map(rows.where, which), strict=True)
        check_fits(lm, tokenizer, where, config.max_new_tokens, "max_new_tokens")

    # Sampled by the behaviour policy, then scored by all three.
    prompts, pad_id = sum(([ids] * config.samples for ids in encoded), []), tokenizer.pad_token_id
    stop_ids = tuple(encode.stop_ids(tokenizer, behaviour.saved_generation_config))
    sampler = TransformersSampler(behaviour, pad_id=pad_id, batch_size=config.batch_size)
    drawn = sampler.sample(prompts, Sampling(config.temperature, config.max_new_tokens, stop_ids))
    responses = [response.ids for response in drawn]
    scored_by, parts = [LanguageModel(lm, "logits") for lm in (policy, reference, behaviour)], []
    for i in range(0, len(prompts), config.batch_size):
        part = slice(i, i + config.batch_size)
        batch = make_batch(prompts[part], responses[part], pad_id, policy.device)
        parts.append(estimates(batch, config.temperature, *scored_by))
    merged = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return merged, torch.tensor(list(map(len, responses)))


def estimates(batch: Batch, temperature: float, policy, reference, behaviour) -> dict[str, torch.Tensor]:
    """Of each response token in the batch, (tokens,)."""
    mask = batch.response_mask

    def score(lm):
        rows = lm(batch.input_ids, mask, temperature, want_logits=True)
        return rows.logits, rows.logprobs[mask]

    (logits, logprobs), (ref_logits, ref_logprobs) = score(policy), score(reference)
    old = logprobs if behaviour.lm is policy.lm else score(behaviour)[1]
    values = {"exact": fused_rl.token_kl(logits, ref_logits, temperature=temperature)}
    return values | {k: fused_rl.kl_estimate(logprobs, ref_logprobs, k, old_logprobs=old) for k in ESTIMATORS}


def report(config: KLReportConfig) -> str:
    """The report of two models."""
    values, lengths = collect(config)
    tokens, responses = len(values["exact"]), len(lengths)
    sampled_by = config.model if config.behaviour is None else config.behaviour
    drawn = f"{tokens} tokens in {responses} responses by {sampled_by}"
    rows = [["estimator", "mean per token", "standard error", "sum per response", "smallest token", "largest token"]]
    for name, kl in values.items():
        kl = kl.double()
        error = kl.std() / tokens**0.5
        cells = [kl.mean(), error, kl.sum() / responses, kl.min(), kl.max()]
        rows.append([name, *(f"{cell.item():.6f}" for cell in cells)])
    return "\n".join([f"KL({config.model} || {config.reference}) in nats, {drawn}", "", table(rows)])


def main(argv: list[str] | None = None) -> None:
    """Entry point of `fused-rl kl-report`."""
    with command.around("fused-rl kl-report"):
        config = command.options(KLReportConfig, sys.argv[1:] if argv is None else argv)
        engine.quiet()
        for model in [name for name in (config.model, config.reference, config.behaviour) if name is not None]:
            there.check(model, None, [config.prompts])
        tell(example() if config.model is None else report(config))


if __name__ == "__main__":
    main()

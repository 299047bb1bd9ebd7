"""One step of each trainer, on the CPU or on the device: the same weights, prompts, responses and random numbers.

DeepSpeed's engine does not run on these tensors (its ZeRO copies storages, and its accelerator is chosen once in a
process): `Engine` stands in for it, with the optimizer, clipping and schedule that the trainers give DeepSpeed.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fused_rl.trainers import grpo, ppo, reward, sft
from fused_rl.trainers.base import optim, ranks
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.preferences import Pair
from fused_rl.trainers.models import packing
from fused_rl.trainers.models.language_model import load_lm
from fused_rl.trainers.models.reward_model import Critic, load_reward_model
from fused_rl.trainers.policy import policy as policies
from fused_rl.trainers.policy.reference import Reference
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt
from tests.device import tensors
from tests.trainers import steps as of_cpu
from tests.trainers import tiny

CPU = torch.device("cpu")
NEW_TOKENS = 12


class Engine:
    """A model with its optimizer where DeepSpeed's engine would stand, in fp32 and without ZeRO."""

    def __init__(self, module, config):
        self.module, self.training = module, True
        parameters = [p for p in module.parameters() if p.requires_grad]
        # one tensor at a time: torch's fused and foreach forms take no tensors of other classes
        self.optimizer = torch.optim.AdamW(parameters, lr=config.lr, foreach=False)
        self.clipping = optim.Clipping(self.optimizer, parameters, config.max_grad_norm)
        self.lr_scheduler = optim.schedule(self.optimizer, config, 8)

    def __call__(self, *inputs, **options):
        return self.module(*inputs, **options)

    def parameters(self):
        return self.module.parameters()

    def train(self, mode=True):
        self.module.train(mode)
        return self

    def eval(self):
        return self.train(False)

    def backward(self, loss):
        loss.backward()

    def step(self):
        if ranks.world_size() > 1:
            for parameter in self.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks.world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()


class Sampler(of_cpu.Sampler):
    """Responses that were drawn before, with what each token was drawn from."""

    records_support = True


class Judge:
    """Scores that differ within a group."""

    name, weight, solved_at = "judge", 1.0, 1.0

    def check(self, row):
        pass

    def __call__(self, samples):
        return [float(sum(sample.response.ids) % 2) for sample in samples]


class Found(NamedTuple):
    """What a step gave: its metrics without times, and its model."""

    metrics: dict[str, float]
    modules: tuple[torch.nn.Module, ...]


Step = Callable[[], Found]


def small_config(trainer: str, folder: str, **options):
    settings = {"steps": 4, "lr": 1e-3}
    if trainer in ("grpo", "ppo"):
        settings |= {"prompts_per_step": 4, "group_size": 4, "minibatches": 2}
        settings |= {"micro_batch_size": 4, "max_new_tokens": NEW_TOKENS}
    return tiny.config_of(trainer, folder, **(settings | options))


def placed(module, device):
    return tensors.put_module(module) if device.type == "cuda" else module


def of_rank(items: Sequence) -> Sequence:
    """This rank's share of what all ranks have."""
    return items[ranks.rank() :: ranks.world_size()]


def prompts_of(tokenizer) -> list[Prompt]:
    texts = [f"what is {i} + {i * 7}" for i in range(4)]
    return [Prompt(tokenizer(text)["input_ids"], {}, f"row {i}") for i, text in enumerate(texts)]


def sampling_of(config, tokenizer, lm) -> Sampling:
    stop_ids = tuple(encode.stop_ids(tokenizer, lm.base.saved_generation_config))
    truncation = {"top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p}
    return Sampling(config.temperature, config.max_new_tokens, stop_ids, **truncation)


def sampler_of(config, device) -> tuple[TransformersSampler, list[list[int]], Sampling]:
    """The sampler of a policy, each prompt as often as a group has responses, and how they are drawn."""
    torch.manual_seed(3)
    tokenizer = encode.load_tokenizer(config.model)
    lm = placed(load_lm(config, CPU), device)
    sampler = TransformersSampler(lm.base, pad_id=tokenizer.pad_token_id, batch_size=16)
    prompts = [prompt.ids for prompt in prompts_of(tokenizer) for _ in range(config.group_size)]
    return sampler, prompts, sampling_of(config, tokenizer, lm)


def responses_of(config) -> list:
    """Drawn on the CPU: a device draws other ones."""
    sampler, prompts, sampling = sampler_of(config, CPU)
    return sampler.sample(prompts, sampling)


def policy_of(config, device, responses, **share) -> policies.Policy:
    """As `Inputs.load_policy` makes it; the responses were drawn before."""
    tokenizer = encode.load_tokenizer(config.model)
    lm = load_lm(config, CPU)
    reference = load_lm(config, CPU, trainable=False)
    sampling = sampling_of(config, tokenizer, lm)
    if share:
        words = {"option": "share_prompts", "otherwise": "not shared"}
        costs = packing.packing_costs(lm.base, 64, share["share"], **words)
    else:
        costs = packing.unpadded_costs(lm.base, 64)
    model = Engine(placed(lm, device), config)
    size = config.group_size
    groups = of_rank([responses[i : i + size] for i in range(0, len(responses), size)])
    sampler = Sampler(sum(groups, []))
    made = (
        config,
        model,
        Reference(placed(reference, device)),
        sampler,
        sampling,
        [Judge()],
        tokenizer,
        device,
    )
    return policies.Policy(*made, costs)


def grpo_step(folder, device, responses, **options) -> Step:
    config = small_config("grpo", folder, **options)
    policy = policy_of(config, device, responses, share=options.get("share_prompts"))
    prompts = of_rank(prompts_of(policy.tokenizer))
    return lambda: Found(grpo.train_step(policy, prompts, 1), (policy.model.module,))


def ppo_step(folder, device, responses, critic=None, **options) -> Step:
    config = small_config("ppo", folder, critic=critic, **options)
    policy = policy_of(config, device, responses)
    module = load_reward_model(config.replace(model=critic), CPU, kind=Critic)
    module = placed(module, device)
    judge, modules = Engine(module, config), (policy.model.module, module)
    prompts = of_rank(prompts_of(policy.tokenizer))
    return lambda: Found(ppo.train_step(policy, judge, prompts, 1, 0.1), modules)


def sft_step(folder, device, responses, packed=True, **options) -> Step:
    config = small_config("sft", folder, batch_size=16, micro_batch_size=4, **options)
    tokenizer = encode.load_tokenizer(folder)
    lm = load_lm(config, CPU)
    costs = packing.costs_of(lm.base) if packed else None
    prompts = [prompt.ids for prompt in prompts_of(tokenizer) for _ in range(4)]
    answers = [response.ids for response in responses]
    examples = [
        sft.Example(*pair, "a row") for pair in of_rank([*zip(prompts, answers, strict=True)])
    ]
    model = Engine(placed(lm, device), config)

    def step():
        parts = sft.micro_batches(examples, config, tokenizer.pad_token_id, device, costs)
        return Found(sft.train_step(model, parts, 1), (model.module,))

    return step


def reward_step(folder, device, responses, packed=True, **options) -> Step:
    config = small_config("reward", folder, batch_size=8, micro_batch_size=4, **options)
    tokenizer = encode.load_tokenizer(folder)
    module = load_reward_model(config, CPU)
    costs = packing.costs_of(module.classifier) if packed else None
    prompts = [prompt.ids for prompt in prompts_of(tokenizer) for _ in range(2)]
    sides = [response.ids for response in responses]
    found = zip(prompts, sides[::2], sides[1::2], strict=True)
    pairs = [Pair((prompt, a), (prompt, b), 0.0, "a row") for prompt, a, b in found]
    model = Engine(placed(module, device), config)
    return lambda: Found(reward.train_step(model, pairs, config, 1, costs), (model.module,))


@contextlib.contextmanager
def process_group():
    """Of this process alone, as `engine.setup` makes one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield

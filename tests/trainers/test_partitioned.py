"""Under ZeRO 3 no rank ever holds a whole model, also while models load."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fused_rl.trainers.base import engine
from fused_rl.trainers.data.encode import load_tokenizer
from fused_rl.trainers.models import language_model, scoring
from fused_rl.trainers.policy import critic, setup, teacher
from fused_rl.trainers.scorers import reward_model
from tests.distributed import run_distributed
from tests.trainers import tiny

CPU = torch.device("cpu")
WORLD = 2


class Held:
    """The most elements of weights that this process has held at once, since the last `reset`."""

    def __init__(self):
        import deepspeed

        self.reset()
        self._after(nn.Module, "register_parameter", self.add)
        self._after(deepspeed.zero.GatheredParameters, "__enter__", self.look)
        # Before a module's own hooks release what they have gathered.
        nn.modules.module.register_module_forward_hook(self.look)

    def _after(self, kind, name, look):
        original = getattr(kind, name)

        def method(*args):
            result = original(*args)
            look(*args)
            return result

        setattr(kind, name, method)

    def reset(self):
        self.weights, self.most = [], 0

    def add(self, module, name, weight):
        if weight is not None:
            self.weights.append(weakref.ref(weight))

    def look(self, *_):
        """Count what is alive now; ZeRO 3 keeps a rank's part of a weight beside it."""
        sizes = {}
        alive = [weight for ref in self.weights if (weight := ref()) is not None]
        for tensor in [*alive, *(weight.ds_tensor for weight in alive if hasattr(weight, "ds_id"))]:
            if not tensor.is_meta:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        self.most = max(self.most, sum(sizes.values()))

    def result(self, *models):
        """Return what was held, what may be (a part of all models and the largest weight), and all of the models."""
        self.look()
        named = [named for model in models for named in model.named_parameters()]
        sizes = [weight.ds_numel for _, weight in named]
        # New adapters are small, and whole until there is an engine.
        adapters = sum(weight.ds_numel for name, weight in named if ".lora_" in name)
        # Parts are equally large, so one may end in zeros.
        rounding = len(sizes)
        return self.most, sum(sizes) / WORLD + max(sizes) + adapters + rounding, sum(sizes)


def policy_of(config, **options):
    run = SimpleNamespace(device=CPU)
    tokenizer = load_tokenizer(config.model)
    inputs = setup.Inputs(run, config, tokenizer, [], [None], None)
    return inputs.load_policy(**options)


def hold(rank, world, folder):
    """Load every kind of model as its trainer does; return what `Held.result` says of each."""
    reward = str(folder / "reward")
    device = engine.setup(0)
    held, found = Held(), {}

    def config_of(trainer, **options):
        held.reset()
        return tiny.config_of(trainer, str(folder / "model"), zero_stage=3, steps=4, **options)

    for options in ({}, {"lora_rank": 2}):
        config = config_of("sft", **options)
        trained = engine.initialize(scoring.load_to_score(config, device), config, 4)
        found[f"sft {options}"] = held.result(trained)

    config = config_of("grpo", kl_coef=0.1)
    policy = policy_of(config, packing_option="share_prompts", packing=True)
    found["policy and reference"] = held.result(policy.model, policy.reference.model)
    reference = [*policy.reference.model.parameters()]
    before = [weight.ds_tensor.clone() for weight in reference]
    for weight in policy.model.parameters():
        weight.ds_tensor.mul_(3)
    language_model.sync(policy.reference.model, policy.model, 0.5)
    for weight, old in zip(reference, before, strict=True):
        torch.testing.assert_close(weight.ds_tensor, 2 * old)

    config = config_of("reward")
    trained = engine.initialize(tiny.load_reward_model(config), config, 4)
    found["reward"] = held.result(trained)

    config = config_of("ppo", critic=reward, verifiers=[f"reward_model:{reward}"])
    reading = {"tokenizer": load_tokenizer(config.model), "device": device}
    found["critic"] = held.result(critic.load_critic(config, **reading, updates=4))
    held.reset()
    reading |= {"policy": config, "held": config, "batch_size": 2, "name": "reward model"}
    scorer = reward_model.load_reward_model(reward, **reading)
    found["reward model"] = held.result(scorer.scorer.model)

    config = config_of("distill", teacher=str(folder / "adapters"))
    policy = policy_of(config, packing_option="packing", packing=True, needs_reference=False)
    held.reset()
    teachers = teacher.load_teachers(config, policy)
    found["teacher"] = held.result(teachers[""].model)
    return found


@pytest.mark.slow
def test_no_rank_holds_a_whole_model_while_models_load(tmp_path):
    model = tiny.model_folder(tmp_path / "model", heads=8, pad_is_eos=True)
    tiny.reward_folder(tmp_path / "reward", model)
    adapted = tiny.load_lm(tiny.config_of("sft", model, lora_rank=2))
    adapted.lm.save_pretrained(tmp_path / "adapters")
    load_tokenizer(model).save_pretrained(tmp_path / "adapters")
    for found in run_distributed(hold, WORLD, tmp_path):
        for what, (held, may, whole) in found.items():
            assert whole / WORLD < held <= may < 0.75 * whole, (what, held, may, whole)

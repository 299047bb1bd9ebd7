"""Our SFT, reward model and PPO, one step at a time; GRPO, with the passes that it needs, is in trainer_steps.py."""

from unittest import mock

from bench.trainer_steps import Ours
from fused_rl.trainers import ppo, reward, sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.preferences import PairEncoder
from fused_rl.trainers.data.rows import load_train_eval
from fused_rl.trainers.models import language_model
from fused_rl.trainers.models.packing import agreed_costs
from fused_rl.trainers.models.reward_model import load_reward_model
from fused_rl.trainers.policy.critic import load_critic
from fused_rl.trainers.policy.policy import load_policy
from fused_rl.trainers.policy.prepare import load_prompts
from fused_rl.trainers.scorers.load import load_scorers
from fused_rl.trainers.scorers.reward_model import Reader


class SFT(Ours):
    """Our SFT."""

    op = "sft"
    loss_key = "train/loss"

    def read(self):
        config = self.config
        encoder = encode.Encoder.of(config, self.tokenizer)
        train_rows, _ = load_train_eval(config)
        self.examples = self.whole_steps(sft.encoded(config, train_rows, encoder))
        lm = language_model.load_lm(config.model, config.revision, config, config, self.device)
        told = {"option": "packing", "otherwise": "demonstrations are padded, not packed"}
        self.costs = agreed_costs(lm.base, config.max_length, config.packing, **told)
        self.model = engine.initialize(lm, config, config, config.steps)

    def train(self, number):
        rows = self._examples(number)
        parts = sft.micro_batches(rows, self.config, self.tokenizer.pad_token_id, self.device, self.costs)
        return sft.train_step(self.model, parts, number)

    def _examples(self, number: int) -> list:
        return self.taken(self.examples, number, self.config.batch_size)

    def ids(self, number):
        rows = self._examples(number)
        return [(tuple(row.prompt + row.completion), len(row.completion)) for row in rows]


class Reward(Ours):
    """Our reward model, whose scores nobody normalises: TRL has no such thing."""

    op = "reward"
    loss_key = "train/rm/loss"

    def read(self):
        config = self.config
        encoder = PairEncoder(config, self.tokenizer)
        pairs, self.held_out = (encoder.pairs(rows) for rows in load_train_eval(config))
        self.pairs = self.whole_steps(pairs)
        model = load_reward_model(config.model, config.revision, config, config, self.device)
        longest = config.max_prompt_length + config.max_response_length
        told = {"option": "share_prompts", "otherwise": "prompts are computed once per response"}
        self.costs = agreed_costs(model.classifier, longest, config.share_prompts, **told)
        self.model = engine.initialize(model, config, config, config.steps)

    def train(self, number):
        return reward.train_step(self.model, self._pairs(number), self.config, number, self.costs)

    def _pairs(self, number: int) -> list:
        return self.taken(self.pairs, number, self.config.batch_size)

    def ids(self, number):
        return [(tuple(sum(pair.chosen, [])), tuple(sum(pair.rejected, []))) for pair in self._pairs(number)]


class PPO(Ours):
    """Our PPO."""

    op = "ppo"
    loss_key = "loss/policy_avg"

    def read(self):
        config, tokenizer = self.config, self.tokenizer
        reader = Reader.beside(config, config, tokenizer, self.device, config.rollout_batch_size)
        scorers = load_scorers(config, reader)
        self.prompts, _ = load_prompts(config, tokenizer, scorers)
        updates = config.steps * config.minibatches * config.epochs
        self.critic = load_critic(config, tokenizer, self.device, updates)
        self.policy = load_policy(config, tokenizer, scorers, self.device, updates)
        sampler = self.policy.sampler
        sampler.sample = self.watch.around("rollout", sampler.sample)
        self.policy.roll_out = self.watch.around("score", self.policy.roll_out)

    def train(self, number):
        prompts = self.taken(self.prompts, number, self.config.prompts_per_step)
        with mock.patch.object(ppo, "judge", self.watch.around("measure", ppo.judge)):
            return ppo.train_step(self.policy, self.critic, prompts, number, self.config.kl_coef)

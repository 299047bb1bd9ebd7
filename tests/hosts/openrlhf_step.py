"""One micro-batch through OpenRLHF's actor and PPO trainer, on a tiny Qwen2 without DeepSpeed."""

from types import SimpleNamespace

import torch
from openrlhf.models import Actor, PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB, BATCH, LENGTH, ACTIONS = 96, 3, 9, 6


def actor(temperature=0.8, packing=False, dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    self = Actor(Qwen2ForCausalLM(config).to(dtype), temperature=temperature)
    self.packing_samples = packing
    return self


def sequences():
    """Token ids and attention mask (BATCH, LENGTH); the last row ends in padding."""
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return ids, mask


def experience():
    generator = torch.Generator().manual_seed(2)

    def per_action(mean, scale):
        return mean + scale * torch.randn(BATCH, ACTIONS, generator=generator)

    ids, mask = sequences()
    return Experience(
        sequences=ids,
        attention_mask=mask,
        action_mask=mask[:, -ACTIONS:].bool(),
        action_log_probs=per_action(-4.6, 0.1),
        base_action_log_probs=per_action(-4.6, 0.3),
        rollout_log_probs=per_action(-4.6, 0.1),
        advantages=per_action(0.0, 1.0),
        info={},
    )


def training_step(kl, policy_loss, dtype=torch.float32, **actor_options):
    """Metrics and {parameter: gradient} of the trainer's step under the OpenRLHF that is in force."""
    model = actor(dtype=dtype, **actor_options)
    self = ppo_actor.ActorPPOTrainer.__new__(ppo_actor.ActorPPOTrainer)
    self.actor, self.actor_optim, self.ema_model, self.aux_loss = model, None, None, False
    self.actor_scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
    self.actor_loss_fn = PolicyLoss(**policy_loss)
    self.strategy = SimpleNamespace(
        ring_attn_group=None,
        backward=lambda loss, *_: loss.backward(),
        optimizer_step=lambda *_, **__: None,
        get_grad_norm=lambda _: 0.0,
    )
    self.args = SimpleNamespace(
        actor=SimpleNamespace(entropy_coef=0.01),
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=True, init_coef=0.1, **kl)),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )
    batch = experience()
    totals = {"batch_num_tokens": batch.action_mask.sum(), "global_batch_size": BATCH}
    status = self.training_step(batch, 0.1, 0, loss_batch_info=totals)
    metrics = {name: float(value) for name, value in status["metrics"].items()}
    return metrics, {name: p.grad for name, p in model.named_parameters()}

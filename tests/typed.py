# pyright: strict, reportMissingTypeStubs=false, reportUnnecessaryTypeIgnoreComment=true
# pyright: reportUnknownMemberType=false
"""Uses that a type checker accepts, and mistakes that it finds (`make types`, in strict mode)."""

import torch

import fused_rl
from fused_rl.trainers import grpo, ppo, reward, sft
from fused_rl.trainers.commands.eval import EvalConfig, evaluate
from fused_rl.trainers.run.hooks import Step

X, IDS, MASK = (
    torch.randn(2, 3, 5),
    torch.zeros(2, 3, dtype=torch.int64),
    torch.ones(2, 3, dtype=torch.bool),
)


def score(response: str, row: dict[str, str]) -> float:
    return float(response == row["answer"])


def stop(step: Step) -> dict[str, float] | None:
    if step.metrics["eval/loss"] > step.history[-1]["eval/loss"]:
        step.stop()
        return {"own/step": step.number}
    return None


def halved(update: int, total: int) -> float:
    return 0.5


out = fused_rl.token_logprobs(X, IDS, mask=MASK)
nats: torch.Tensor = out.logprobs + out.entropy
loss, metrics = fused_rl.policy_loss(nats, nats, nats, MASK, preset="dapo", clip_high=0.3)
fused_rl.policy_loss(
    nats, nats, nats, MASK, options=fused_rl.PolicyLossOptions(ratio_level="sequence")
)
fused_rl.token_kl(X, X, direction="forward", mask=MASK)
fused_rl.response_advantages(nats[:, 0], "group-std", group_size=2)
fused_rl.response_advantages(nats[:, 0], "batch-std", group_size=2, std_floor=0.5)
fused_rl.policy_token_loss(nats, nats, mask=MASK, preset="grpo", kl_coef=0.1, ref_logprobs=nats)
fused_rl.kl_estimate(nats, nats, "k3")
grpo.train(
    grpo.GRPOConfig(model="m", output_dir="o", group_size=8),
    dataset=[{"question": "q"}],
    scorers=[score],
)
ppo.train(ppo.PPOConfig(model="m", output_dir="o", critic=None), scorers=["math", score])
sft.train(sft.SFTConfig(model="m", output_dir="o", lr=1e-5, packing=None), dataset="rows.jsonl")
sft.train(sft.SFTConfig(model="m", output_dir="o", lr_schedule=halved, order="file"), on_step=stop)
grpo.train(grpo.GRPOConfig(model="m", output_dir="o", lr_schedule="m:f"), on_step=stop)
reward.train(reward.RewardConfig(model="m", output_dir="o", too_long="truncate"))
accuracy: float = evaluate(EvalConfig(model="m", samples=1))["accuracy_greedy"]

fused_rl.token_logprobs(X, IDS, maks=MASK)  # pyright: ignore
fused_rl.token_logprobs(X, [1, 2])  # pyright: ignore
fused_rl.token_kl(X, X, direction="sideways")  # pyright: ignore
fused_rl.policy_loss(nats, nats, nats, MASK, preset="drgrpo")  # pyright: ignore
fused_rl.policy_loss(nats, nats, nats, MASK, clip_hgih=0.3)  # pyright: ignore
fused_rl.policy_loss(nats, nats, nats, MASK, clip_high="0.3")  # pyright: ignore
fused_rl.policy_token_loss(nats, nats, MASK, loss_agg="token-maen")  # pyright: ignore
fused_rl.response_advantages(nats[:, 0], "opo", group_size=2, std_flor=1.0)  # pyright: ignore
fused_rl.PolicyLossOptions(clip_low="0.2")  # pyright: ignore
fused_rl.PolicyLossOptions(ratio_level="word")  # pyright: ignore
fused_rl.kl_estimate(nats, nats, "k9")  # pyright: ignore
out.logprob.sum()  # pyright: ignore
grpo.GRPOConfig(model="m", output_dir="o", group_size="8")  # pyright: ignore
grpo.GRPOConfig(model="m")  # pyright: ignore
grpo.GRPOConfig(model="m", output_dir="o", beta=0.1)  # pyright: ignore
sft.train(sft.SFTConfig(model="m", output_dir="o"), scorers=[score])  # pyright: ignore
sft.train(sft.SFTConfig(model="m", output_dir="o"), on_step=score)  # pyright: ignore
sft.SFTConfig(model="m", output_dir="o", lr_schedule=score)  # pyright: ignore

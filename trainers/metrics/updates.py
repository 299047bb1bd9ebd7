"""Metrics of updates: of every run, and by the algorithm that computes them."""

from fused_rl.trainers.metrics.metric import Metric


def explained_variance(sums: dict[str, float]) -> float:
    """1 - Var(R - v) / Var(R) from the moments of `fused_rl.value_loss`, added up; NaN where R is constant."""
    error = sums["value_error_square"] - sums["value_error"] ** 2
    spread = sums["return_square"] - sums["return"] ** 2
    return 1 - error / spread if spread > 0 else float("nan")


NO_LESS_THAN_0 = "at least 0; 0 where policy and reference are equal"
RUNS_AWAY = "grows faster than the scores: raise --kl_coef or lower --lr, and read the responses"

RUN = {
    "lr": Metric("1", "learning rate of the update", "whole"),
    "optim/grad_norm": Metric(
        "1",
        "norm of the gradient before clipping",
        "whole",
        outside="far above its own earlier values: --lr too high, or rows unlike the others; 0: nothing is trained",
    ),
    "perf/tokens_per_second": Metric("1/s", "tokens trained on per second of the whole step", "whole"),
    "time/train": Metric("s", "forward, backward and optimizer", "whole"),
    "time/save": Metric("s", "writing the last checkpoint", "whole"),
}
DEMONSTRATIONS = {
    "train/loss": Metric(
        "nats",
        "negative log-likelihood per completion token",
        "sum",
        "loss",
        healthy="below ln V, which guessing among V tokens has, and falling",
        outside="stays: --lr too low, or wrong columns; rises: --lr too high",
    ),
    "train/entropy": Metric(
        "nats",
        "true entropy per completion token",
        "sum",
        "entropy",
        healthy="0 to ln V; near train/loss where the model knows how sure it may be",
        outside="far below eval/loss: too sure of itself, the rows are learned by heart",
    ),
    "train/num_tokens": Metric("tokens", "completion tokens in the step", "sum", healthy="above 0"),
    "eval/loss": Metric(
        "nats",
        "train/loss on held-out rows",
        "sum",
        healthy="near train/loss, and falling",
        outside="rises while train/loss falls: overfitted; fewer steps or passes, more rows",
    ),
    "eval/accuracy": Metric(
        "1",
        "fraction of held-out completion tokens that are the most likely ones",
        "sum",
        healthy="rising",
        outside="stays while train/loss falls: overfitted",
    ),
}
PAIRS = {
    "loss": Metric(
        "nats",
        "Bradley-Terry loss of a pair",
        "sum",
        "loss",
        healthy="below ln 2 = 0.693, which equal scores have (of pairs without a margin)",
        outside="stays at 0.693: nothing learned, --lr too low; above it: surely wrong, --lr too high",
    ),
    "accuracy": Metric(
        "1",
        "fraction of pairs whose chosen score is higher",
        "sum",
        "accuracy",
        healthy="above 0.5, which is chance",
        outside="held-out below 0.5: chosen and rejected may be swapped; in training alone near 1: learned by heart",
    ),
    "reward_margin": Metric(
        "1", "chosen minus rejected score", "sum", "reward_margin", healthy="above 0", outside="below 0: as accuracy"
    ),
    "chosen_rewards": Metric("1", "mean chosen score", "sum", "chosen_rewards", healthy="above rejected_rewards"),
    "rejected_rewards": Metric("1", "mean rejected score", "sum", "rejected_rewards", healthy="below chosen_rewards"),
    "min_reward": Metric("1", "lowest score", "min", "min_reward"),
    "mean_reward": Metric(
        "1",
        "mean score",
        "sum",
        "mean_reward",
        outside="drifts: the loss reads differences alone; --centering holds it",
    ),
    "max_reward": Metric("1", "highest score", "max", "max_reward"),
}
REWARD = {f"train/rm/{name}": metric for name, metric in PAIRS.items()} | {
    f"eval/rm/{name}": metric._replace(definition=f"{metric.definition}, of held-out pairs")
    for name, metric in PAIRS.items()
}
LOSS = {
    "objective/kl": Metric(
        "nats",
        "KL to the reference by kl_estimator, over the responses trained on",
        "sum",
        "kl",
        healthy="0 where policy and reference are equal",
        outside=RUNS_AWAY,
    ),
    "objective/kl1_avg": Metric(
        "nats",
        "KL estimate k1: log-ratio to the reference",
        "sum",
        "kl1",
        healthy="at least 0 but for the noise of sampling",
        outside="far below 0: the responses are not the policy's own; else as objective/kl",
    ),
    "objective/kl2_avg": Metric(
        "nats", "KL estimate k2: half the square of k1's terms", "sum", "kl2", healthy=NO_LESS_THAN_0, outside=RUNS_AWAY
    ),
    "objective/kl3_avg": Metric(
        "nats", "KL estimate k3: expm1(-d) + d of k1's terms d", "sum", "kl3", healthy=NO_LESS_THAN_0, outside=RUNS_AWAY
    ),
    "objective/kl4_avg": Metric(
        "nats",
        "KL estimate k4: k1's terms times the ratio",
        "sum",
        "kl4",
        healthy="at least 0 but for the noise of sampling",
        outside="as objective/kl1_avg",
    ),
    "objective/kl_exact": Metric(
        "nats", "exact KL to the reference, before the update", "sum", healthy=NO_LESS_THAN_0, outside=RUNS_AWAY
    ),
    "objective/entropy": Metric(
        "nats",
        "sampled negative log-likelihood of the response, before the update",
        "sum",
        healthy="at least 0",
        outside="near 0: as policy/entropy_avg",
    ),
    "objective/non_score_reward": Metric(
        "1",
        "- objective/kl_coef times objective/kl",
        "whole",
        healthy="at most 0 but for noise, and small beside objective/scores",
        outside="larger than the scores: the KL is trained on, not the task; lower --kl_coef",
    ),
    "objective/rlhf_reward": Metric(
        "1", "objective/scores plus objective/non_score_reward", "whole", healthy="rising", outside="as its two parts"
    ),
    "objective/scores": Metric(
        "1",
        "reward from the scorers: weighted sum of their scores",
        "sum",
        healthy="rising",
        outside="stays: see frac_reward_zero_std; rises while eval/accuracy_* fall: the scorer is being outwitted",
    ),
    "objective/kl_coef": Metric("1", "weight of the KL", "whole", healthy="constant without --kl_target"),
    "policy/approxkl_avg": Metric(
        "nats",
        "half the squared log-ratio to the sampling policy",
        "sum",
        "approx_kl",
        healthy="0 in the first update of a step; near half of val/ratio_var over all",
        outside="large: a step's updates go too far; lower --lr, --epochs or --minibatches; in PPO --target_kl",
    ),
    "policy/clipfrac_avg": Metric(
        "1",
        "fraction of tokens that the surrogate clips; none where it clips nothing",
        "sum",
        "clipfrac",
        healthy="0 in the first update of a step, and so with a single one",
        outside="large: as policy/approxkl_avg; in a first update: the sampler is not the policy that is trained",
    ),
    "policy/entropy_avg": Metric(
        "nats",
        "true entropy per token, of the distribution sampled from",
        "sum",
        "entropy",
        healthy="0 to ln V",
        outside="falls to 0: responses are all alike and teach nothing; lower --lr, raise --entropy_coef or --kl_coef; "
        "rises without end: --lr too high, or --entropy_coef",
    ),
    "loss/policy_avg": Metric(
        "1",
        "policy surrogate alone, without KL and entropy terms",
        "sum",
        "policy_loss",
        outside="no measure of progress: advantages average to about 0, only its gradient counts",
    ),
    "loss/total_avg": Metric(
        "1",
        "what is differentiated: surrogate, KL and entropy terms",
        "sum",
        "loss",
        outside="no measure of progress: as loss/policy_avg",
    ),
    "val/ratio": Metric(
        "1",
        "mean ratio to the sampling policy",
        "moments",
        lambda sums: 1 + sums["ratio_minus_1"],
        healthy="1 within rounding in the first update of a step, near 1 over all",
        outside="in a first update: the model does not repeat itself, or another one sampled; else as approxkl_avg",
    ),
    "val/first_ratio": Metric(
        "1",
        "mean ratio, in a step's first update, to what was measured before it; 1 where nothing was",
        "sum",
        lambda sums: 1 + sums["drift"],
        healthy="1 within rounding: 1e-6 in fp32, some hundredths in bfloat16",
        outside="the model does not repeat itself (dropout? a non-deterministic kernel?)",
    ),
    "val/ratio_var": Metric(
        "1",
        "variance of that ratio over the tokens of an update",
        "moments",
        lambda sums: sums["ratio_minus_1_square"] - sums["ratio_minus_1"] ** 2,
        healthy="0 within rounding in the first update of a step",
        outside="as policy/approxkl_avg",
    ),
}
# A value per token, and what tokens earn.
CRITIC = {
    "objective/kl": LOSS["objective/kl"]._replace(
        definition="KL to the reference by the estimator in use, before the update", of=None
    ),
    "objective/scores": LOSS["objective/scores"]._replace(
        definition="weighted sum of the scores, with what a missing stop token costs"
    ),
    "loss/value_avg": Metric(
        "1",
        "clipped value loss",
        "sum",
        "value_loss",
        healthy="falling while returns stay as they are",
        outside="grows: --critic_lr too high, or returns of another scale; see val/var_explained",
    ),
    "val/clipfrac_avg": Metric(
        "1",
        "fraction of tokens whose value is clipped",
        "sum",
        "value_clipfrac",
        healthy="0 in the first update of a step",
        outside="large: --value_clip is narrow for returns of this scale, or --critic_lr too high",
    ),
    "val/var_explained": Metric(
        "1",
        "variance of the returns that the values explain, before the update",
        "moments",
        healthy="0 to 1, rising",
        outside="0 or less: no better than a constant; start --critic from a reward model",
    ),
    "val/win_rate": Metric(
        "1",
        "how often a right response to a prompt scores above a wrong one",
        "sum",
        healthy="above 0.5, which is chance",
        outside="falls to 0.5: the policy has found what the scorer pays for besides being right",
    ),
    "optim/updates": Metric(
        "updates",
        "optimizer updates made; fewer than planned where target_kl stopped them",
        "whole",
        healthy="epochs × minibatches",
        outside="fewer: --target_kl stops them; lower --lr",
    ),
    "optim/critic_lr": Metric("1", "learning rate of the critic", "whole"),
    "optim/critic_grad_norm": Metric(
        "1",
        "norm of the critic's gradient before clipping",
        "whole",
        healthy="above 0",
        outside="0: the critic learns nothing",
    ),
    "time/measure": Metric("s", "log-probabilities and values before the update", "whole"),
}

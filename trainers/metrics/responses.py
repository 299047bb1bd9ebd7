"""Metrics of responses: how they were drawn, what they earned, what held-out ones show."""

from fused_rl.trainers.metrics.metric import Metric

ROLLOUT = {
    "episode": Metric("responses", "responses sampled so far", "whole"),
    "time/rollout": Metric("s", "sampling", "whole"),
    "time/score": Metric("s", "the scorers", "whole"),
    "val/num_eos_tokens": Metric("responses", "responses that ended by a stop token", "sum"),
    "val/stop_rate": Metric(
        "1",
        "fraction of responses that ended by a stop token",
        "sum",
        healthy="near 1",
        outside="low: --max_new_tokens is short, or the model never learned to end (warm start with sft)",
    ),
    "completions/mean_length": Metric(
        "tokens",
        "response length",
        "sum",
        outside="grows with the reward and not with eval/accuracy_*: the scorer pays for length",
    ),
    "completions/min_length": Metric("tokens", "shortest response", "min", outside="0: a response that is empty"),
    "completions/max_length": Metric("tokens", "longest response", "max", healthy="at most max_new_tokens"),
    "completions/clipped_ratio": Metric(
        "1",
        "fraction of responses cut at max_new_tokens",
        "sum",
        healthy="near 0",
        outside="near 1: as val/stop_rate",
    ),
}
# Groups of responses to a prompt, and what they pay for their length.
GROUPS = {
    "reward": Metric(
        "1",
        "mean of what the scorers give, less the overlong penalty",
        "sum",
        healthy="rising",
        outside="as objective/scores",
    ),
    "reward_std": Metric(
        "1",
        "standard deviation within a group, averaged over groups",
        "sum",
        healthy="above 0",
        outside="0: as frac_reward_zero_std",
    ),
    "frac_reward_zero_std": Metric(
        "1",
        "fraction of groups whose rewards are all equal: they teach nothing",
        "sum",
        healthy="below 1",
        outside="1: no step teaches; prompts too hard or too easy, or a scorer that judges all alike: read responses",
    ),
    "frac_groups_all_solved": Metric(
        "1",
        "fraction of groups whose responses are all solved",
        "sum",
        healthy="rising",
        outside="near 1: nothing is left to learn from these prompts",
    ),
    "frac_groups_none_solved": Metric(
        "1",
        "fraction of groups of which no response is solved",
        "sum",
        healthy="falling",
        outside="stays near 1: too hard, or the scorer does not know the answers' form; warm start, larger group_size",
    ),
    "groups/drawn": Metric(
        "groups",
        "prompts drawn in the step, refills included",
        "sum",
        healthy="prompts_per_step, without refill",
        outside="far more: most groups teach nothing, and refilling costs as many rollouts",
    ),
    "groups/trained": Metric(
        "groups",
        "prompts drawn that are trained on: with drop and refill those with a signal",
        "sum",
        healthy="near prompts_per_step",
        outside="far fewer: as frac_reward_zero_std",
    ),
    "overlong_penalty": Metric(
        "1",
        "what responses lose for their length, on average",
        "sum",
        healthy="near 0",
        outside="grows: responses press against max_new_tokens",
    ),
    "objective/non_score_reward": Metric(
        "1",
        "- objective/kl_coef times objective/kl, - overlong_penalty",
        "whole",
        healthy="at most 0 but for noise, and small beside objective/scores",
        outside="larger than the scores: KL or length are trained on, not the task",
    ),
}
EVALUATION = {
    "eval/accuracy_greedy": Metric(
        "1",
        "fraction of held-out problems solved by the most likely response",
        "sum",
        healthy="rising; README has the demos'",
        outside="falls while objective/scores rise: the scorer is being outwitted, or the rows are learned by heart",
    ),
    "eval/accuracy_sampled": Metric(
        "1",
        "fraction of responses sampled as in training that solve theirs",
        "sum",
        healthy="rising; README has the demos'",
        outside="as eval/accuracy_greedy",
    ),
    "eval/pass_at_k": Metric(
        "1",
        "fraction of held-out problems that one of k sampled responses solves",
        "sum",
        healthy="at least eval/accuracy_sampled",
        outside="falls while accuracy rises: fewer ways to an answer are left; see eval/entropy",
    ),
    "eval/score": Metric("1", "mean reward of the sampled responses", "sum", healthy="rising"),
    "eval/mean_length": Metric(
        "tokens", "length of the sampled responses", "sum", outside="as completions/mean_length"
    ),
    "eval/mean_length_solved": Metric("tokens", "length of sampled right responses; absent without any", "moments"),
    "eval/mean_length_unsolved": Metric("tokens", "length of sampled wrong responses; absent without any", "moments"),
    "eval/clipped_ratio": Metric(
        "1",
        "fraction of the sampled responses cut at max_new_tokens",
        "sum",
        healthy="near 0",
        outside="as val/stop_rate",
    ),
    "eval/entropy": Metric(
        "nats",
        "true entropy per token of the sampled responses",
        "sum",
        healthy="0 to ln V",
        outside="as policy/entropy_avg",
    ),
    "eval/kl_exact": Metric(
        "nats",
        "exact KL to the reference over a sampled response",
        "sum",
        healthy="at least 0; 0 where policy and reference are equal; README has the demos'",
        outside="as objective/kl_exact",
    ),
}
NONE_STRUCK = {"healthy": "0", "outside": "responses that the scorer cannot take, or its limits are too narrow"}
# Of each scorer by its name; a scorer that works under no limits has none of verifier/.
SCORERS = {
    "rewards/{name}/mean": Metric(
        "1",
        "mean score of the samples that the scorer applies to",
        "moments",
        healthy="rising",
        outside="0 throughout: the scorer does not know the answers' form; look at samples.jsonl",
    ),
    "rewards/{name}/std": Metric(
        "1",
        "standard deviation of these scores",
        "moments",
        healthy="above 0",
        outside="0: it judges all alike, and teaches nothing",
    ),
    "rewards/{name}/none": Metric(
        "1",
        "fraction of the samples that the scorer does not apply to: it returned None",
        "sum",
        healthy="below 1",
        outside="1: it judges nothing; look at the columns that it reads and at the form of the answers",
    ),
    "verifier/{name}/timeouts": Metric(
        "samples", "broke a limit (CPU, memory) and score 0 for it", "sum", **NONE_STRUCK
    ),
    "eval/verifier/{name}/timeouts": Metric("samples", "broke a limit in the evaluation", "sum", **NONE_STRUCK),
}
# k is 1, 2, 4, … below eval_samples, and eval_samples.
PASSES = {
    "eval/pass_at_{k}": Metric(
        "1",
        "probability that k of the sampled responses hold a right one, unbiased",
        "sum",
        healthy="rising, and with k too",
        outside="as eval/pass_at_k",
    ),
}
# Of a sampler that is not the policy itself, where it tells log-probabilities and versions; means over response tokens.
ANOTHER_MODEL = "more than rounding: stale weights, another temperature, or another precision of the head"
SAMPLER = {
    "rollout/logprob_diff_mean": Metric(
        "nats",
        "the sampler's log-probability less the policy's before update",
        "sum",
        healthy="0 but for rounding, which has mean 0",
        outside=ANOTHER_MODEL,
    ),
    "rollout/logprob_diff_abs": Metric(
        "nats",
        "rollout/logprob_diff_mean without the sign of each token's",
        "sum",
        healthy="rounding: 1e-5 in fp32, some hundredths in bfloat16",
        outside=ANOTHER_MODEL,
    ),
    "rollout/logprob_diff_max": Metric("nats", "the largest of rollout/logprob_diff_abs", "max", outside=ANOTHER_MODEL),
    "rollout/kl_k3": Metric(
        "nats",
        "KL of the sampler to the policy, by the estimator k3",
        "sum",
        healthy="at least 0, and near it",
        outside=ANOTHER_MODEL,
    ),
    "rollout/correction_cut": Metric(
        "1",
        "fraction of tokens whose weight rollout_correction cuts or drops",
        "sum",
        healthy="near 0",
        outside="large: much of the rollout is not trained on; mend the sampler",
    ),
    "rollout/weight_version": Metric(
        "steps",
        "the step whose weights were sampled",
        "whole",
        healthy="rising",
        outside="stays: weights do not arrive",
    ),
}

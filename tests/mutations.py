"""Small semantic changes to the code, each of which some test should see: `make test-mutations`.

A mutation is a plausible slip (a sign, a mask, a shift, the world size, a variance divided by n, the wrong token) that
leaves the code running. `old` stands once in its file. One that no test sees is a hole in the tests, not in the code.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A slip, and who should see it."""

    file: str
    old: str
    new: str
    tests: str = ""
    """Arguments of pytest, as one would type them, where the tests that execute the change do not see it."""


ADVANTAGES = "tests/test_advantages.py"
LOSSES = "tests/test_losses.py tests/test_losses_trl.py tests/test_aggregation.py"
SURROGATES = "tests/test_surrogates.py"
METRICS = "tests/test_loss_metrics.py"
KL = "tests/test_hostile.py -k token_kl"
LOGPROBS = "tests/test_hostile.py -k token_logprobs"
LAUNCHES = "-p tests.device.process tests/device/test_launches.py"
PPO_PARTS = "tests/trainers/test_ppo.py"
DEFINITIONS = "tests/trainers/test_metrics.py"
REWARD_MODEL = "tests/trainers/test_reward_model.py"
SAMPLERS = "tests/trainers/test_samplers.py"
SEQUENCES = "tests/trainers/test_sequences.py -m 'not slow'"
ON_DEVICE = "-p tests.device.process tests/device/"
LAG = "tests/trainers/test_lag.py -m 'not slow'"
SFT_SPLITS = "tests/trainers/test_runs.py::test_ranks_micro_batches_and_zero_stages_change_nothing"

MUTATIONS = {
    # The ops.
    "a row's maximum counts once too often": Mutation(
        "fused_rl/cpu/logprob.py",
        "rest = p.scatter(-1, top, 0)",
        "rest = p",
        "tests/test_cpu_logprob.py",
    ),
    "the entropy's gradient has the other sign": Mutation(
        "fused_rl/cpu/logprob.py",
        "dh * inv_t, (dlse - dlp) * inv_t",
        "dh * inv_t, -(dlse - dlp) * inv_t",
        "tests/test_cpu_logprob.py",
    ),
    "lanes merge without a tie": Mutation(
        "kernels/online.py",
        "m == top).to(tl.int32), 0) - 1",
        "m == top).to(tl.int32), 0) * 0",
        "tests/test_kernels.py -k ties",
    ),
    "the kernel forgets the gradient of lse": Mutation(
        "kernels/logprob_gradient.py",
        "a = norm * (dlse - dlogprob",
        "a = norm * (-dlogprob",
        LOGPROBS,
    ),
    "1 - p of the target loses its digits": Mutation(
        "kernels/logprob_gradient.py",
        "one_minus_p = tl.where(y == m, rest * p_m, 1.0 - p)",
        "one_minus_p = 1.0 - p",
        "tests/test_logprobs.py -k next_to_certainty",
    ),
    "a gradient in place overwrites the target's logit before all threads have it": Mutation(
        "kernels/logprob_gradient.py",
        "tl.debug_barrier()  # dx may be x",
        "pass  # dx may be x",
        f"{LAUNCHES} -k 'long_rows and inplace and aligned'",
    ),
    "where a row of advantages begins is counted in 32 bits": Mutation(
        "kernels/gae.py",
        "row = tl.program_id(0).to(tl.int64)",
        "row = tl.program_id(0)",
        f"{LAUNCHES} -k more_than_32_bits",
    ),
    "columns beyond the vocabulary are read": Mutation(
        "kernels/lanes.py",
        'return tl.where(column < vocab, cap(x, softcap), float("-inf"))\n\n\n@triton.jit\ndef load_columns',
        "return cap(x, softcap)\n\n\n@triton.jit\ndef load_columns",
        LOGPROBS,
    ),
    "F moves to a mean that falls by what exp(h) - 1 leaves of it": Mutation(
        "kernels/kl_lanes.py",
        "f_old = tl.fma(grown, f_old, tl.fma(tl.fma(h, LN2, g), a_old * LN2, w_old * g))",
        "f_old += tl.fma(tl.fma(h, LN2, g), tl.fma(a_old, LN2, f_old), w_old * g)",
        "tests/test_kl.py -k mean_that_falls",
    ),
    "large log-ratios keep their rounding": Mutation(
        "fused_rl/cpu/rows.c",
        "if (divergence > 1) {",
        "if (divergence > 1e30) {",
        "tests/test_cpu_kl.py -k beside_a_large_divergence",
    ),
    "a temperature per row is not inverted": Mutation(
        "fused_rl/ops/rows.py",
        "row_temperature.reshape(-1).reciprocal()",
        "row_temperature.reshape(-1)",
        "tests/test_hostile.py -k 'token_kl and cpu and test_ops'",
    ),
    "a scratch tensor has the default dtype": Mutation(
        "fused_rl/cpu/kl.py",
        "kl = x.new_zeros(n, dtype=torch.float32)",
        "kl = torch.zeros(n)",
        "tests/test_architecture.py -k allocation",
    ),
    "verl's option of aggregation is not read": Mutation(
        "fused_rl/integrations/registries.py",
        'mode = "seq-mean-token-mean" if preset in fixed else loss_agg_mode',
        'mode = "seq-mean-token-mean"',
        "tests/integrations/test_registries.py -k verl",
    ),
    "a view of a leaf is overwritten": Mutation(
        "fused_rl/ops/logprobs.py",
        "return logits.is_leaf or (logits._base is not None and logits._base.is_leaf)",
        "return logits.is_leaf",
        "tests/test_checks.py -k overwrite",
    ),
    "gradients are stored as if their rows began where the logits' do": Mutation(
        "kernels/kl_gradient.py",
        "alike = (x_at % VEC == y_at % VEC) & (x_at % VEC == out % VEC)",
        "alike = x_at % VEC == y_at % VEC",
        "tests/test_hostile.py -k token_kl",
    ),
    "the merge of a row's programs forgets its own temperature": Mutation(
        "kernels/kl.py",
        "        inv_t = valid(tl.load(inv_t_ptr + row))\n    x_row = x_ptr",
        "        inv_t = 1.0\n    x_row = x_ptr",
        "tests/test_kl.py -k 'several_programs and reverse-1'",
    ),
    "the merge of a row's log-probability forgets its own temperature": Mutation(
        "kernels/logprob.py",
        "    inv_t, scale, scale_low = row_scale(inv_t_ptr, row, inv_t, scale, scale_low)\n    m, rest",
        "    m, rest",
        "tests/test_kernels.py -k several_programs",
    ),
    "targets are compared with the maximum before the soft cap": Mutation(
        "kernels/targets.py",
        "below += tl.where(cap(x, softcap) < top, d, 0.0)",
        "below += tl.where(x < top, d, 0.0)",
        "tests/test_targets.py -k certainty",
    ),
    "an infinite logit of a kept set is a maximum like any other": Mutation(
        "kernels/support.py",
        "rest += tl.where(x == m, p - 1.0, p)",
        "rest += tl.where(x == m, 0.0, p)",
        "tests/test_support.py -k no_number",
    ),
    "forward is reverse": Mutation(
        "fused_rl/ops/kl.py",
        '(ref_logits, logits) if direction == "forward"',
        '(logits, ref_logits) if direction == ""',
        KL,
    ),
    "a rank of the vocabulary adds its maximum twice": Mutation(
        "fused_rl/ops/vocab_parallel.py",
        "mass = torch.where(holds_maximum, rest, local_mass)",
        "mass = local_mass",
        "tests/test_hostile.py -k 'vocab_parallel_token_logprobs and cpu and test_ops'",
    ),
    "softcap divides by nothing": Mutation(
        "fused_rl/cpu/targets.py",
        "slope = inv_t if softcap is None else inv_t * (1 -",
        "slope = inv_t * (1 + 0 *",
        "tests/test_hostile.py -k 'targets and cpu and test_ops'",
    ),
    "the tail of the K likeliest is left out": Mutation(
        "fused_rl/ops/topk.py",
        "value = _term(p, q, d).sum(-1, dtype=torch.float64) + _term(a, b, d_tail)",
        "value = _term(p, q, d).sum(-1, dtype=torch.float64)",
        "tests/test_topk.py -k enumeration",
    ),
    "masked rows keep their gradient": Mutation(
        "fused_rl/ops/linear.py",
        "return None if len(kept) == mask.numel() else kept",
        "return None if len(kept) else kept",
        "tests/test_hostile.py -k linear",
    ),
    "where the gradient of a divergence begins is counted in 32 bits": Mutation(
        "kernels/kl_gradient.py",
        "out = row.to(tl.int64) * V",
        "out = row * V",
        f"{LAUNCHES} -k a_gradient_of_more",
    ),
    "the gradient of a masked row is never written": Mutation(
        "kernels/kl_gradient.py",
        "_store(dx_ptr, dy_ptr, dx, dy, out + column, inside)",
        "_store(dx_ptr, dy_ptr, dx, dy, out + column, wanted)",
        "tests/test_kl.py -k 'nan_shows and kernel'",
    ),
    "on a device the gradient of a masked row is never written": Mutation(
        "kernels/kl_gradient.py",
        "_store(dx_ptr, dy_ptr, dx, dy, out + column, inside)",
        "_store(dx_ptr, dy_ptr, dx, dy, out + column, wanted)",
        f"{LAUNCHES} -k 'hostile_rows and token_kl and shift'",
    ),
    # The losses.
    "k3 is its mirror image": Mutation(
        "fused_rl/objectives/estimators.py",
        "    x = -d\n",
        "    x = d\n",
        "tests/test_kl_estimate.py",
    ),
    "k4's ratio is upside down": Mutation(
        "fused_rl/objectives/estimators.py",
        "tangent_exp((self.logprobs - self.old_logprobs).detach())",
        "tangent_exp((self.old_logprobs - self.logprobs).detach())",
        "tests/test_kl_estimate.py",
    ),
    "rk3 pushes as k4 does": Mutation(
        "fused_rl/objectives/estimators.py",
        'self.k1 * self.k1.detach() if name == "rk3" else self.k2 + self.k1',
        "self.k2 + self.k1",
        "tests/test_kl_estimate.py",
    ),
    "K targets that tie leave the others out": Mutation(
        "fused_rl/cpu/targets.py",
        "torch.where(rest < 1, m, torch.inf)",
        "m",
        "tests/test_targets.py -k tie",
    ),
    "the clip is optimistic": Mutation(
        "fused_rl/objectives/surrogates.py",
        "-torch.where(bound < gain, bound, gain)",
        "-torch.where(bound > gain, bound, gain)",
        LOSSES,
    ),
    "clip_high is clip_low": Mutation(
        "fused_rl/objectives/surrogates.py",
        "clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)",
        "clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_low)",
        LOSSES,
    ),
    "cispo's weight has a gradient": Mutation(
        "fused_rl/objectives/surrogates.py",
        "weight = tangent_exp(log_ratio.detach())",
        "weight = tangent_exp(log_ratio)",
        LOSSES,
    ),
    "a correction is upside down": Mutation(
        "fused_rl/objectives/surrogates.py",
        "log_ratio = old - rollout",
        "log_ratio = rollout - old",
        LOSSES,
    ),
    "the sampler's policy is forgotten where off-policy sequences are left out": Mutation(
        "fused_rl/objectives/losses.py",
        "behaviour = old if rollout is None else rollout",
        "behaviour = old",
        LOSSES,
    ),
    "the policy is held to the KL with the wrong sign": Mutation(
        "fused_rl/objectives/losses.py",
        "terms = chosen.kl_coef * estimates.chosen",
        "terms = -chosen.kl_coef * estimates.chosen",
        LOSSES,
    ),
    "entropy is punished": Mutation(
        "fused_rl/objectives/losses.py",
        "terms - chosen.entropy_coef * entropy",
        "terms + chosen.entropy_coef * entropy",
        LOSSES,
    ),
    "a long sequence is far however near its tokens are": Mutation(
        "fused_rl/objectives/surrogates.py",
        "gap = sequences.mean(behaviour",
        "gap = sequences.sum(behaviour",
        LOSSES,
    ),
    "dppo's region is open on the side of the advantage": Mutation(
        "fused_rl/objectives/surrogates.py",
        "torch.where(advantages > 0, change > opt",
        "torch.where(advantages < 0, change > opt",
        SURROGATES,
    ),
    "a gate counts tokens": Mutation(
        "fused_rl/objectives/surrogates.py",
        "(old, rollout, sequences.mean)",
        "(old, rollout, sequences.sum)",
        SURROGATES,
    ),
    "lengths of sequences count padding": Mutation(
        "fused_rl/objectives/aggregation.py",
        "self.lengths = mask.sum(1)",
        "self.lengths = mask.sum(1) * 0 + mask.shape[1]",
        LOSSES,
    ),
    "truncated responses count": Mutation(
        "fused_rl/objectives/aggregation.py",
        "Sequences(mask & ~truncated",
        "Sequences(mask | ~truncated",
        LOSSES,
    ),
    "the value's clip makes the error smaller": Mutation(
        "fused_rl/objectives/losses.py",
        "torch.maximum(unclipped, clipped) / 2",
        "torch.minimum(unclipped, clipped) / 2",
        LOSSES,
    ),
    "a bad response is pulled up": Mutation(
        "fused_rl/objectives/preferences.py",
        "torch.where(desirable, scores.new_ones(()), -1)",
        "torch.where(desirable, scores.new_ones(()), 1)",
        "tests/test_preferences.py",
    ),
    "the baseline of a rank is its own": Mutation(
        "fused_rl/objectives/preferences.py",
        "torch.distributed.all_reduce(total_and_count, group=process_group)",
        "pass",
        "tests/test_preferences.py",
    ),
    "a margin is added to the lead": Mutation(
        "fused_rl/objectives/preferences.py",
        "lead = lead - margin",
        "lead = lead + margin",
        LOSSES,
    ),
    "ipo does not divide by the length": Mutation(
        "trainers/dpo.py",
        'LENGTH_NORMALISED = ("ipo", "simpo", "orpo")',
        'LENGTH_NORMALISED = ("simpo", "orpo")',
        "tests/trainers/test_dpo.py -k papers_however",
    ),
    "a pair is held to the reference of another": Mutation(
        "trainers/dpo.py",
        "reference is None else reference[indices]",
        "reference is None else reference[indices].flip(0)",
        "tests/trainers/test_dpo.py -k papers_however",
    ),
    "a resumed run is held to the policy of its checkpoint": Mutation(
        "trainers/run/loop.py",
        "(self.order.first(self.config.total_steps), held_out)",
        "(self.order.first(1), held_out)",
        "tests/trainers/test_resume.py -k dpo-zero0",
    ),
    "a student is corrected at its own temperature": Mutation(
        "trainers/policy/teacher.py",
        "config.distill_temperature",
        "config.temperature",
        "tests/trainers/test_distill.py -k fp64",
    ),
    "a micro-batch is divided by its own tokens": Mutation(
        "trainers/distill.py",
        'terms["kl"] / max(num_tokens, 1)',
        'terms["kl"] / micro.token_counts.sum()',
        "tests/trainers/test_distill.py -k fp64",
    ),
    "responses that make ranks even count": Mutation(
        "trainers/distill.py",
        "samples[:count] + empty",
        "samples",
        SFT_SPLITS,
    ),
    "the teacher and the student are exchanged in the mixture": Mutation(
        "kernels/states.py",
        "Shares(1 - jsd_beta, jsd_beta)",
        "Shares(jsd_beta, 1 - jsd_beta)",
        "tests/test_hostile.py -k token_kl",
    ),
    "smoothed labels are exchanged": Mutation(
        "fused_rl/objectives/preferences.py",
        "(1 - label_smoothing) * loss(lead, chosen, rejected)",
        "(1 - label_smoothing) * loss(-lead, rejected, chosen)",
        LOSSES,
    ),
    "approx_kl is the log-ratio": Mutation(
        "fused_rl/objectives/losses.py",
        '"approx_kl": log_ratio.square() / 2',
        '"approx_kl": log_ratio',
        METRICS,
    ),
    "the variance of whitening is divided by n": Mutation(
        "fused_rl/base/masked.py",
        "squares / (count - 1).clamp(min=1)",
        "squares / count.clamp(min=1)",
        "tests/test_masked.py tests/test_hostile.py -k masked",
    ),
    "the gradient of a capped divergence lacks the slope of the cap": Mutation(
        "fused_rl/cpu/kl.py",
        "gradient *= 1 - ((x_rows, y_rows)[side] / softcap).square()",
        "gradient *= 1",
        "tests/test_hostile.py -k token_kl",
    ),
    "the kernels cap one of the two rows": Mutation(
        "kernels/pair.py",
        "return as_logits(x, mask, softcap), as_logits(y, mask, softcap)",
        "return as_logits(x, mask, softcap), as_logits(y, mask, None)",
        "tests/test_hostile.py -k token_kl",
    ),
    "a masked mean divides by everything": Mutation(
        "fused_rl/base/masked.py",
        "return total / count.clamp(min=1)",
        "return total / (count * 0 + mask.numel())",
        "tests/test_masked.py tests/test_hostile.py -k masked",
    ),
    "leave-one-out has the mean of all": Mutation(
        "fused_rl/objectives/advantages.py",
        "centred * (group_size / (group_size - 1))",
        "centred",
        ADVANTAGES,
    ),
    "a group's deviation is divided by n": Mutation(
        "fused_rl/objectives/advantages.py",
        "groups.std(1, keepdim=True)",
        "groups.std(1, correction=0, keepdim=True)",
        ADVANTAGES,
    ),
    "equal rewards have an advantage": Mutation(
        "fused_rl/objectives/advantages.py",
        "return torch.where(equal, 0, advantages)",
        "return torch.where(equal, advantages, advantages)",
        ADVANTAGES,
    ),
    "epsilon is enlarged for the step before": Mutation(
        "fused_rl/optim.py",
        "return 1 + max(steps, default=0)",
        "return max(1, max(steps, default=0))",
        "tests/test_optim.py -k two_groups",
    ),
    # Both ends, the last step, zero, other ranks, and which rows.
    "a target in the first column of a program is nobody's": Mutation(
        "kernels/logprob_gradient.py",
        "return (column >= first * TILE)",
        "return (column > first * TILE)",
        "tests/test_kernels.py -k first_or_last",
    ),
    "the second segment of a row is left out of Jensen-Shannon": Mutation(
        "kernels/jensen_shannon.py",
        "by_segment[1:]",
        "by_segment[2:]",
        "tests/test_kl.py -k several_programs",
    ),
    "ties are rounded up": Mutation(
        "fused_rl/cpu/rows.c",
        "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        "(bits + 0x8000) >> 16",
        "tests/test_cpu_logprob.py -k even_one",
    ),
    "a divergence keeps the rounding of the sums": Mutation(
        "fused_rl/cpu/rows.c",
        "divergence = sums.excess - (sums.expm1 - shift);",
        "divergence = sums.excess;",
        "tests/test_kl.py -k 'close_distributions and cpu'",
    ),
    "a token at the threshold of entropy is left out": Mutation(
        "fused_rl/objectives/surrogates.py",
        "(entropy.detach() >= threshold)",
        "(entropy.detach() > threshold)",
        "tests/test_losses.py -k bound",
    ),
    "the labels that are ignored are always -100": Mutation(
        "fused_rl/integrations/transformers.py",
        "(targets[:, 1:] if shift else targets) != ignore_index",
        "(targets[:, 1:] if shift else targets) != IGNORED",
        "tests/integrations/test_transformers.py -k by_position",
    ),
    "the rows that are trained on are those that were just sampled": Mutation(
        "trainers/distill.py",
        "for prompt in prompts[num_sampled:]",
        "for prompt in prompts[: len(prompts) - num_sampled]",
        "tests/trainers/test_distill.py -k rows_are_sampled",
    ),
    "a response that stops in its last place was cut": Mutation(
        "trainers/rollouts/generate.py",
        '"stop" if ids and ids[-1] in sampling.stop_ids else',
        '"stop" if len(ids) < sampling.max_new_tokens else',
        "tests/trainers/test_rollout.py -k prompt_alone",
    ),
    "a signal in the last step ends the run without its model": Mutation(
        "trainers/run/loop.py",
        "any(failures) or (any(signalled) and not self.is_last_step)",
        "any(failures) or any(signalled)",
        "tests/trainers/test_endings.py -k signal_in_the_last",
    ),
    "a critic's learning rate of 0 is the policy's": Mutation(
        "trainers/policy/critic.py",
        "if value is not None:",
        "if value:",
        f"{PPO_PARTS} -k own_options",
    ),
    "a judge that does not apply says wrong": Mutation(
        "trainers/rollouts/roll_out.py",
        "wrong |= ~passed & ~scores[scorer.name].isnan()",
        "wrong |= ~passed",
        "tests/trainers/test_verifiers.py",
    ),
    "the shortest response is that of one rank": Mutation(
        "trainers/rollouts/roll_out.py",
        "-ranks.global_max(-lengths.min())",
        "ranks.global_max(lengths.min())",
        DEFINITIONS,
    ),
    "a limit that was broken once is counted in every step": Mutation(
        "trainers/rollouts/roll_out.py",
        "        scorer.broken = []\n",
        "",
        "tests/trainers/test_together.py -k sums",
    ),
    "ranks may train more groups than a step has": Mutation(
        "trainers/policy/groups.py",
        "[: config.prompts_per_step]\n",
        "\n",
        "tests/trainers/test_grpo.py -k agree",
    ),
    "every rank begins with the first server": Mutation(
        "trainers/servers/sampler.py",
        "enumerate(groupby(prompts), ranks.process_index())",
        "enumerate(groupby(prompts))",
        "tests/trainers/test_servers.py -k turn",
    ),
    "a pair is a sequence": Mutation(
        "trainers/data/preferences.py",
        "max(1, micro_batch_size // 2)",
        "max(1, micro_batch_size)",
        "tests/trainers/test_options.py -k arithmetic",
    ),
    # What all trainers share.
    "a completion does not end": Mutation(
        "trainers/data/encode.py",
        '[*self.ids(turn["content"]), end]',
        'self.ids(turn["content"])',
        "tests/trainers/data/test_data.py tests/trainers/test_runs.py -k 'bos or chat or saved_model'",
    ),
    "the response begins a token late": Mutation(
        "trainers/data/batch.py",
        "return (position >= start)",
        "return (position > start)",
        "tests/trainers/test_rollout.py tests/trainers/test_packing.py",
    ),
    "the learning rate is that of the next update": Mutation(
        "trainers/base/engine.py",
        'return {"lr": lr, "optim/grad_norm": norm}',
        'return {"lr": engine.get_lr()[0], "optim/grad_norm": norm}',
        "tests/trainers/test_store.py -k 'new_options or longer_run'",
    ),
    "a gradient that is not finite is trained on": Mutation(
        "trainers/base/engine.py",
        "    if not math.isfinite(norm):",
        "    if math.isinf(norm) and norm < 0:",
        "tests/trainers/test_not_finite.py",
    ),
    "ranks draw the same responses": Mutation(
        "trainers/base/engine.py",
        "set_seed(seed + rank() * 100_003)",
        "set_seed(seed)",
        "tests/trainers/test_runs.py -k every_rank_draws",
    ),
    "a checkpoint forgets the generators": Mutation(
        "trainers/run/store.py",
        'torch.set_rng_state(generators["torch"])',
        '_ = generators["torch"]',
        "tests/trainers/test_resume.py -k grpo-zero0",
    ),
    "packed responses see each other": Mutation(
        "trainers/models/packing.py",
        "== other_owners) | (prefixes[:, :, None] == other_owners)",
        "== other_owners) | (prefixes[:, :, None] >= 0)",
        "tests/trainers/test_packing.py",
    ),
    "packed tokens count positions through the row": Mutation(
        "trainers/models/packing.py",
        "[sequence * len(position) + token, token, owner, prefix_number]",
        "[sequence * len(position) + token, place(sequence, token) % width, owner, prefix_number]",
        "tests/trainers/test_packing.py",
    ),
    # Sampling and measuring.
    "log-probabilities are at temperature 1": Mutation(
        "trainers/policy/policy.py",
        '"temperature": self.config.temperature,',
        '"temperature": 1.0,',
        f"{DEFINITIONS} tests/trainers/test_rollout.py",
    ),
    "the sets of a minibatch are its neighbours'": Mutation(
        "trainers/data/batch.py",
        "support = support.select(shift + torch.arange(len(shift)))",
        "support = support.select((shift + torch.arange(len(shift))).flip(0))",
        DEFINITIONS,
    ),
    "a response loses its stop token": Mutation(
        "trainers/rollouts/generate.py",
        "(stops.cumsum(1) - stops.int() == 0)",
        "(stops.cumsum(1) == 0)",
        "tests/trainers/test_rollout.py",
    ),
    "logits count after the end of a response": Mutation(
        "trainers/rollouts/generate.py",
        "broken[rows.response_index] |= bad & ~ended",
        "broken[rows.response_index] |= bad",
        "tests/trainers/test_sampling.py -k nan",
    ),
    "rows that go on are fed the tokens of those that ended": Mutation(
        "trainers/rollouts/generate.py",
        "token = token[index]",
        "token = token[: len(index)]",
        "tests/trainers/test_sampling.py -k bits",
    ),
    "a rollout is drawn with the weights of one step later": Mutation(
        "trainers/rollouts/lag.py",
        "range(step, min(step + self.lag, last) + 1)",
        "range(step, min(step + self.lag - 1, last) + 1)",
        LAG,
    ),
    "new weights do not wait for the rollout of the old ones": Mutation(
        "trainers/rollouts/lag.py",
        "for pending in self.pending.values():\n",
        "for pending in ():\n",
        LAG,
    ),
    "a checkpoint forgets what was drawn ahead": Mutation(
        "trainers/policy/setup.py",
        '({"rollouts": sampler} if config.lag else {})',
        "{}",
        "tests/trainers/test_resume.py -k grpo-lag1",
    ),
    "the copy that is sampled stays as it was": Mutation(
        "trainers/rollouts/lag.py",
        "copied.copy_(original)",
        "copied.copy_(copied)",
        f"{LAG} -k follows",
    ),
    "a thread draws from the process's generator": Mutation(
        "trainers/rollouts/generate.py",
        "generator = self.generator(prompts, sampling)",
        "generator = None",
        f"{LAG} -k drawn_from",
    ),
    "log-probabilities are reported of the first token alone": Mutation(
        "trainers/rollouts/generate.py",
        "logprobs[step].scatter_(",
        "logprobs[0].scatter_(",
        f"{LAG} -k drawn_from",
    ),
    "sets are recorded after the stop": Mutation(
        "trainers/rollouts/sampling.py",
        "rows = order[token < torch.tensor(lengths)[response]]",
        "rows = order[: sum(lengths)]",
        "tests/trainers/test_sampling.py -k recorded",
    ),
    "a window is a token short": Mutation(
        "trainers/rollouts/past.py",
        "layer.sliding_window - 1",
        "layer.sliding_window - 2",
        "tests/trainers/test_sampling.py -k bits",
    ),
    "a captured step masks what it saw at its capture": Mutation(
        "trainers/rollouts/past.py",
        "return self.past.column if self.past.is_fixed else self.past.width",
        "return self.past.width",
        "tests/trainers/test_sampling.py -k captured",
    ),
    "the comparison is the last to write the past": Mutation(
        "trainers/rollouts/generate.py",
        "            graph.replay()\n",
        "            graph.replay()\n            _ = expected is None or self._next_logits(is_fixed=False)\n",
        "tests/trainers/test_sampling.py -k compared",
    ),
    "min_p is never applied": Mutation(
        "trainers/rollouts/sampling.py",
        "if sampling.min_p > 0:",
        "if sampling.min_p > 1:",
        "tests/trainers/test_truncated.py",
    ),
    # Servers.
    "a refused request is sent again": Mutation(
        "trainers/servers/inference.py",
        "if 0 < status < 500 or",
        "if 0 < status < 400 or",
        "tests/trainers/test_servers.py -k faults",
    ),
    "an update's error gives way to that of the resume after it": Mutation(
        "trainers/servers/inference.py",
        "contextlib.suppress(InputError)",
        "contextlib.suppress()",
        "tests/trainers/test_servers.py -k not_repeated",
    ),
    "a server that sleeps is paused, and loads into no memory": Mutation(
        "trainers/servers/kinds.py",
        "if not self.asleep:",
        "if True:",
        "tests/trainers/test_servers.py -k until_new_weights",
    ),
    "SGLang gets a request that never stops": Mutation(
        "trainers/servers/kinds.py",
        '"ignore_eos": not sampling.stop_ids,',
        '"ignore_eos": True,',
        "tests/trainers/test_servers.py -k option_of_sampling",
    ),
    "differences of both signs cancel": Mutation(
        "trainers/rollouts/mismatch.py",
        "    sizes = differences.abs()\n",
        "    sizes = differences\n",
        "tests/trainers/test_samplers.py -k cancel",
    ),
    "responses of other log-probabilities are trained on": Mutation(
        "trainers/rollouts/mismatch.py",
        "    if not apart <= bound:",
        "    if apart > 1000 * bound:",
        "tests/trainers/test_servers.py -k has_a_bound",
    ),
    # Who draws.
    "what another said counts one id late": Mutation(
        "trainers/data/batch.py",
        "pad(rows, 0, width=input_ids.shape[1])[:, 1:].bool()",
        "pad(rows, 0, width=input_ids.shape[1])[:, :-1].bool()",
        DEFINITIONS,
    ),
    "ids that another said count in the denominator": Mutation(
        "trainers/grpo.py",
        "tokens = (batch.token_counts * trained)",
        "tokens = (batch.response_lengths * trained)",
        DEFINITIONS,
    ),
    "a log-probability that is NaN passes": Mutation(
        "trainers/rollouts/returned.py",
        "value is None or not MINUS_INFINITY < value <= ROUNDING",
        "value is None or value > ROUNDING",
        "tests/trainers/test_rollout.py -k breaks_its_promises",
    ),
    "the sampler's distance has the other sign": Mutation(
        "trainers/rollouts/mismatch.py",
        "torch.where(mask, reported - old_logprobs, 0)",
        "torch.where(mask, old_logprobs - reported, 0)",
        SAMPLERS,
    ),
    "an evaluation draws from the run's seeds": Mutation(
        "trainers/policy/evaluate.py",
        "policy.sampling, k, Seeds(seed)",
        "policy.sampling, k",
        "tests/trainers/test_resume.py -k grpo-lag1",
    ),
    "seeds are not in the checkpoint": Mutation(
        "trainers/run/store.py",
        "rank_state[name].load_state_dict(state_of_rank)",
        "_ = rank_state[name], state_of_rank",
        "tests/trainers/test_resume.py -k grpo-lag1",
    ),
    # GRPO.
    "GRPO's gradient is divided by the ranks": Mutation(
        "trainers/policy/policy.py",
        "self.model.backward(loss * ranks.processes())",
        "self.model.backward(loss)",
        DEFINITIONS,
    ),
    "GRPO counts its own tokens alone": Mutation(
        "trainers/base/ranks.py",
        "return global_sum(stacked_on_cpu(counts)).tolist()",
        "return stacked_on_cpu(counts).tolist()",
        DEFINITIONS,
    ),
    "dropped groups keep their place in the denominator": Mutation(
        "trainers/grpo.py",
        "groups.included[minibatch].sum(), trained",
        "torch.tensor(len(minibatch)), trained",
        "tests/trainers/test_grpo_step.py -k dropped_group",
    ),
    "ranks that leave nothing out meet once less": Mutation(
        "trainers/grpo.py",
        "    return Included(mask, trained, *counts)\n",
        "    _ = trained.all() or ranks.global_sum(trained.sum())\n    return Included(mask, trained, *counts)\n",
        "tests/trainers/test_grpo_step.py -k equally_often",
    ),
    "the KL in the reward is paid twice": Mutation(
        "trainers/grpo.py",
        "rewards = rewards - config.kl_coef * kl_of_responses",
        "rewards = rewards - 2 * config.kl_coef * kl_of_responses",
        "tests/trainers/test_grpo_step.py tests/trainers/test_grpo_runs.py -k 'kl_in_the_reward or less_by_the_kl'",
    ),
    # Sequences divided over processes.
    "each part has the gradient of all": Mutation(
        "trainers/models/sequences.py",
        "return dtotal, None",
        "return dtotal * dist.get_world_size(), None",
        SEQUENCES,
    ),
    "each part begins at the first position": Mutation(
        "trainers/models/sequences.py",
        "position_ids=positions.clamp(max=last)",
        "position_ids=(positions - begin).clamp(max=last)",
        SEQUENCES,
    ),
    "pads have positions past those that the model knows": Mutation(
        "trainers/models/sequences.py",
        "position_ids=positions.clamp(max=last)",
        "position_ids=positions",
        SEQUENCES,
    ),
    "a rope that depends on the length of a sequence is taken": Mutation(
        "trainers/models/sequences.py",
        "if length < longest:",
        "if False:",
        SEQUENCES,
    ),
    "a model that keeps options to itself is taken": Mutation(
        "trainers/models/sequences.py",
        "if not self.calls:",
        "if False:",
        SEQUENCES,
    ),
    # PPO.
    "PPO's gradient is divided by the ranks": Mutation(
        "trainers/policy/policy.py",
        "self.model.backward(loss * ranks.processes())",
        "self.model.backward(loss)",
        DEFINITIONS,
    ),
    "the critic's gradient is divided by the ranks": Mutation(
        "trainers/ppo.py",
        "critic.backward(value_loss * processes())",
        "critic.backward(value_loss)",
        DEFINITIONS,
    ),
    "the score is added at the first token": Mutation(
        "trainers/policy/critic.py",
        "remaining = mask.flip(1).cumsum(1).flip(1)",
        "remaining = mask.cumsum(1)",
        DEFINITIONS,
    ),
    "the KL is a reward": Mutation(
        "trainers/policy/critic.py",
        "return -kl_coef * kl + torch.where",
        "return kl_coef * kl + torch.where",
        DEFINITIONS,
    ),
    "whitened rewards lose their mean": Mutation(
        "trainers/policy/critic.py", "shift_mean=False", "shift_mean=True", PPO_PARTS
    ),
    "the controller pulls the other way": Mutation(
        "trainers/policy/critic.py",
        "max(kl / self.target - 1, -LARGEST_ERROR)",
        "max(1 - kl / self.target, -LARGEST_ERROR)",
        PPO_PARTS,
    ),
    "values after a response are fitted": Mutation(
        "trainers/models/reward_model.py",
        "return torch.where(mask, self.score_states(hidden), 0)",
        "return self.score_states(hidden)",
        PPO_PARTS,
    ),
    # Reward and SFT.
    "a reward is read one token early": Mutation(
        "trainers/models/reward_model.py",
        "lengths - 1]",
        "(lengths - 2).clamp(min=0)]",
        REWARD_MODEL,
    ),
    "chosen and rejected are exchanged": Mutation(
        "trainers/reward.py",
        "chosen, rejected = both.view(-1, 2).unbind(1)",
        "rejected, chosen = both.view(-1, 2).unbind(1)",
        "tests/test_golden.py -k reward-zero0",
    ),
    "a saved score is multiplied by its deviation": Mutation(
        "trainers/models/reward_model.py",
        "return (raw - self.score_mean) / self.score_std",
        "return (raw - self.score_mean) * self.score_std",
        REWARD_MODEL,
    ),
    "SFT's gradient is divided by the ranks": Mutation(
        "trainers/sft.py",
        "rows.loss * (ranks.processes() / num_tokens)",
        "rows.loss / num_tokens",
        SFT_SPLITS,
    ),
    "held-out accuracy is of the token before": Mutation(
        "trainers/sft.py",
        "rows.likeliest == micro_batch.batch.input_ids[:, 1:]",
        "rows.likeliest == micro_batch.batch.input_ids[:, :-1]",
        "tests/trainers/test_runs.py -k saved_model",
    ),
    # Scorers and what is printed.
    "pass@k is with putting back": Mutation(
        "trainers/rollouts/solved.py",
        "1 - math.comb(n - c, k) / num_subsets",
        "1 - ((n - c) / n) ** k",
        "tests/trainers/test_solved.py",
    ),
    "a mean over sequences counts micro-batches": Mutation(
        "trainers/run/metrics.py",
        "global_sum(sum(columns, torch.zeros(())))",
        "global_sum(columns[-1])",
        DEFINITIONS,
    ),
    "a gradient next to its limit is not clipped": Mutation(
        "trainers/base/optim.py",
        "elif norm + 1e-6 > 0.99 * self.limit:",
        "elif norm > self.limit:",
        "tests/trainers/test_optimizer.py -k clipped",
    ),
    "a finding is printed at every step": Mutation(
        "trainers/run/rules.py",
        "rule.name in self.reports or is_excused",
        "is_excused",
        "tests/trainers/test_doctor.py",
    ),
    "a resumed run forgets what it has printed": Mutation(
        "trainers/run/logger.py",
        '            self.watch.update(entry, by_row.get(entry["step"], EMPTY))\n\n',
        "            pass\n\n",
        "tests/trainers/test_doctor.py -k resumed",
    ),
    # What a device would not compute, and where the host would wait for it.
    "a score stays on the CPU": Mutation(
        "trainers/policy/critic.py",
        "scores[:, None].to(kl.device, non_blocking=True)",
        "scores[:, None]",
        ON_DEVICE + "test_trainers.py -k ppo",
    ),
    "the places of tokens are looked for on the device": Mutation(
        "trainers/policy/policy.py",
        '"places": batch.places(), ',
        "",
        ON_DEVICE + "test_trainers.py -k that_of_the_cpu[grpo]",
    ),
    "a buffer of a head is made on the CPU": Mutation(
        "fused_rl/ops/linear_support.py",
        "x = hidden.new_zeros(len(ids), dtype=torch.float32)",
        "x = torch.zeros(len(ids))",
        ON_DEVICE + "test_ops.py -k 'linear and support'",
    ),
    "the sum of a lane cancels as its centre falls": Mutation(
        "kernels/kl_lanes.py",
        "f_old = tl.fma(grown, f_old, ",
        "f_old = f_old + tl.fma(grown - 1, f_old, ",
        "tests/test_kl.py -k all_but_dropped",
    ),
    "a second derivative is left out": Mutation(
        "fused_rl/base/checks.py",
        "refusing.apply(d, *inputs)",
        "refusing.apply(d)",
        "tests/test_checks.py -k second_derivative",
    ),
    "an option that nothing reads": Mutation(
        "fused_rl/objectives/presets.py",
        "if surrogate not in readers]",
        "if surrogate in readers]",
        "tests/test_presets.py -k does_not_read",
    ),
    # Spread over all rooms; the tests that see them are found by what they execute.
    "the padding of a run is that of all its steps": Mutation(
        "trainers/data/micro_batches.py",
        "        self.computed = self.tokens = 0\n        return",
        "        return",
    ),
    "samples after a checkpoint stay in a resumed run": Mutation(
        "trainers/run/logger.py",
        '        _cut(self.folder / "samples.jsonl", start)\n',
        "",
    ),
    "incidents of refills are lost": Mutation(
        "trainers/policy/groups.py",
        "{name: sum(rollout.incidents[name] for rollout in rollouts) for name in incidents},",
        "dict(incidents),",
    ),
    "a packed sequence without a token that counts is no sequence": Mutation(
        "fused_rl/objectives/aggregation.py",
        "present.index_fill(0, sequence_ids.flatten() + 1, True)",
        "present.index_fill(0, torch.where(mask, sequence_ids, -1).flatten() + 1, True)",
    ),
    "a pair whose scores tie is wrong": Mutation(
        "trainers/models/scoring.py",
        "scores.new_full((), 0.5)",
        "scores.new_full((), 0.0)",
    ),
    "a row's accuracy is divided by the number of rows": Mutation(
        "trainers/kto.py",
        'right.append(row_metrics["accuracy"].item() * len(rows))',
        'right.append(row_metrics["accuracy"].item())',
    ),
    "truncated responses stay in GRPO's loss": Mutation(
        "trainers/grpo.py",
        "        trained = trained & groups.rollout.stopped\n",
        "        trained = trained | groups.rollout.stopped\n",
    ),
    "the KL of GRPO is a mean over responses that are left out": Mutation(
        "trainers/grpo.py",
        "kl * (num_sequences / num_trained)",
        "kl * (num_trained / num_trained)",
    ),
    "the KL in GRPO's reward is added": Mutation(
        "trainers/grpo.py",
        "rewards = rewards - config.kl_coef * kl_of_responses",
        "rewards = rewards + config.kl_coef * kl_of_responses",
    ),
    "the reference follows the policy one step late": Mutation(
        "trainers/grpo.py",
        "step % config.ref_sync_every == 0",
        "step % config.ref_sync_every == 1 % config.ref_sync_every",
    ),
    "the policy follows the reference": Mutation(
        "trainers/grpo.py",
        "language_model.sync(synced_reference.model, policy.model, config.ref_mixup_alpha)",
        "language_model.sync(synced_reference.model, policy.model, 1 - config.ref_mixup_alpha)",
    ),
    "episodes are prompts": Mutation(
        "trainers/grpo.py",
        'metrics["episode"] = run.order.position * config.group_size',
        'metrics["episode"] = run.order.position',
    ),
    "tokens per second count responses that are left out": Mutation(
        "trainers/grpo.py",
        "groups.rollout.lengths[groups.included].sum()",
        "groups.rollout.lengths.sum()",
    ),
    "a refill asks for a whole step": Mutation(
        "trainers/policy/groups.py",
        "more(wanted - with_signal) if rollouts",
        "more(wanted) if rollouts",
    ),
    "one refill too many": Mutation(
        "trainers/policy/groups.py",
        "len(rollouts) <= refills)",
        "len(rollouts) <= refills + 1)",
    ),
    "the overlong penalty begins at the limit": Mutation(
        "trainers/policy/groups.py",
        "lengths - (config.max_new_tokens - config.overlong_buffer)",
        "lengths - config.max_new_tokens",
    ),
    "seconds of refills are lost": Mutation(
        "trainers/policy/groups.py",
        "{name: sum(rollout.seconds[name] for rollout in rollouts) for name in seconds},",
        "dict(seconds),",
    ),
    "all solved means any solved": Mutation(
        "trainers/policy/groups.py",
        '"frac_groups_all_solved": solved.all(1)',
        '"frac_groups_all_solved": solved.any(1)',
    ),
    "the missing EOS is paid by responses that ended": Mutation(
        "trainers/ppo.py",
        "torch.where(rollout.stopped, rollout.rewards, cut_rewards - config.missing_eos_penalty)",
        "torch.where(rollout.stopped, rollout.rewards, cut_rewards + config.missing_eos_penalty)",
    ),
    "a score for a missing EOS replaces every score": Mutation(
        "trainers/ppo.py",
        "cut_rewards = torch.full_like(cut_rewards, config.missing_eos_score)",
        "cut_rewards = cut_rewards + config.missing_eos_score",
    ),
    "a schedule stops where updates were skipped": Mutation(
        "trainers/ppo.py",
        "    for _ in updates[len(history) :]:",
        "    for _ in updates[len(history) + 1 :]:",
        "tests/trainers/test_ppo.py -k schedule_goes_on",
    ),
    "the rate of PPO is that of its first update": Mutation(
        "trainers/ppo.py",
        'history[-1][key] for key in ("lr"',
        'history[0][key] for key in ("lr"',
    ),
    "the critic has the policy's rate": Mutation(
        "trainers/policy/critic.py",
        "        if value is not None:\n            start = start.replace(**{option: value})",
        "        if value is None:\n            start = start.replace(**{option: value})",
    ),
    "the likelihood of the rejected holds DPO up": Mutation(
        "trainers/dpo.py",
        "nll = -logprobs[:, 0].sum()",
        "nll = -logprobs[:, 1].sum()",
    ),
    "ipo's margin is 1 / beta": Mutation(
        "trainers/dpo.py",
        "(0.5 / config.beta if",
        "(1.0 / config.beta if",
    ),
    "a pair's own margin is forgotten": Mutation(
        "trainers/dpo.py",
        "[pair.margin + least for pair in pairs]",
        "[least for pair in pairs]",
    ),
    "KTO's KL is in scores": Mutation(
        "trainers/kto.py",
        '{"kl": baseline / config.beta}',
        '{"kl": baseline}',
        "tests/trainers/test_dpo.py -k step_of_kto",
    ),
    "the mean of undesirable scores is divided by the desirable": Mutation(
        "trainers/kto.py",
        '"undesirable": 1 - means["desirable"]',
        '"undesirable": means["desirable"]',
    ),
    "SFT counts rows that fill a share up": Mutation(
        "trainers/sft.py",
        "trained=[False] * len(one.completion)",
        "trained=None",
    ),
    "two epochs have one order": Mutation(
        "trainers/data/order.py",
        "self.seed * 1_000_003 + epoch",
        "self.seed * 1_000_003",
    ),
    "neighbouring seeds share epochs": Mutation(
        "trainers/data/order.py",
        "self.seed * 1_000_003 + epoch",
        "self.seed + epoch",
    ),
    "a lag draws the rows of the next step": Mutation(
        "trainers/data/order.py",
        "self.position += (batches - 1) * self.batch_size",
        "self.position += batches * self.batch_size",
    ),
    "the first ratio of a step is that of its last update": Mutation(
        "trainers/run/metrics.py",
        "return means | {key: values[key][0] for",
        "return means | {key: values[key][-1] for",
    ),
    "the mean of updates counts those without the metric": Mutation(
        "trainers/run/metrics.py",
        "sum(of_updates) / len(of_updates) for",
        "sum(of_updates) / len(history) for",
    ),
    "a checkpoint before the last step is not resumed at its row": Mutation(
        "trainers/run/loop.py",
        '{"position": self.order.position, "inputs"',
        '{"position": self.order.position - self.order.batch_size, "inputs"',
    ),
    "win rates forget ties": Mutation(
        "trainers/rollouts/solved.py",
        "(lead > 0).double().sum() + ties / 2",
        "(lead > 0).double().sum()",
    ),
    "pass@k is of the k solved ones": Mutation(
        "trainers/rollouts/solved.py",
        "1 - math.comb(n - c, k) / num_subsets",
        "math.comb(c, k) / num_subsets",
    ),
    "what stopped is truncated": Mutation(
        "trainers/rollouts/solved.py",
        '"truncated": (~stopped).sum()',
        '"truncated": stopped.sum()',
    ),
    "what scorers log of greedy responses is lost": Mutation(
        "trainers/policy/evaluate.py",
        "greedy.logged + sampled.logged",
        "sampled.logged",
    ),
    "weights of scorers are forgotten": Mutation(
        "trainers/rollouts/roll_out.py",
        "rewards = rewards + scorer.weight * scorer_values",
        "rewards = rewards + scorer_values",
    ),
    "one judge is enough": Mutation(
        "trainers/rollouts/roll_out.py",
        "return solved & ~wrong",
        "return solved",
    ),
    "held-out KL is of k responses": Mutation(
        "trainers/policy/evaluate.py",
        "measured.kl[first].sum().cpu() / k",
        "measured.kl[first].sum().cpu()",
    ),
    "by-row figures of sampled responses are those of any": Mutation(
        "trainers/policy/evaluate.py",
        "view(len(greedy.samples), -1)[:count].double().mean(1)",
        "view(len(greedy.samples), -1)[:count].any(1).double()",
    ),
    "rows that fill a share up are in held-out figures": Mutation(
        "trainers/policy/evaluate.py",
        '"score": sampled.rewards[first].sum() / k',
        '"score": sampled.rewards.sum() / k',
    ),
    "the threshold of entropy is one token off": Mutation(
        "trainers/policy/policy.py",
        "math.ceil((1 - options.top_entropy) * (len(entropies) - 1))",
        "math.floor((1 - options.top_entropy) * (len(entropies) - 1))",
    ),
    "time to publish is without the rest": Mutation(
        "trainers/policy/policy.py",
        "time.monotonic() - began + self.rest_seconds",
        "time.monotonic() - began",
    ),
    "gradients of ranks are a mean": Mutation(
        "trainers/policy/policy.py",
        "self.model.backward(loss * ranks.processes())",
        "self.model.backward(loss)",
    ),
    "kept sets of a part are those of the first sequences": Mutation(
        "trainers/data/batch.py",
        "begins = (counts.cumsum(0) - counts)[index]",
        "begins = tokens.cumsum(0) - tokens",
    ),
    "the error of a change is not paired": Mutation(
        "trainers/run/learned.py",
        "error_of([b - a for a, b in zip(*row_residuals, strict=True)])",
        "math.hypot(*map(error_of, row_residuals))",
    ),
    "the error of a ratio forgets its rows' weights": Mutation(
        "trainers/run/learned.py",
        "return [(s - ratio * w) / mean",
        "return [(s - ratio) / mean",
    ),
    "pass-at-k leads by the third": Mutation(
        "fused_rl/objectives/advantages.py",
        "lead = (highest[:, :1] - highest[:, 1:]) / (deviation + 1e-4)",
        "lead = highest[:, :1] / (deviation + 1e-4)",
    ),
    "opo's baseline is unweighted": Mutation(
        "fused_rl/objectives/advantages.py",
        "(weights * responses.groups).sum(1, keepdim=True)",
        "responses.groups.mean(1, keepdim=True)",
    ),
    "gdpo's weights are equal": Mutation(
        "fused_rl/objectives/advantages.py",
        "(weights[:, None] * torch.stack(normal)).sum(0)",
        "torch.stack(normal).sum(0)",
    ),
    "a floor of the deviation is of the variance": Mutation(
        "fused_rl/base/masked.py",
        "variance.clamp(min=std_floor**2)",
        "variance.clamp(min=std_floor)",
    ),
    "kl4 is not weighted by the ratio": Mutation(
        "fused_rl/objectives/losses.py",
        '"kl4": estimates.ratio * estimates.k1',
        '"kl4": estimates.k1',
        METRICS,
    ),
    "GSPO's tokens share the advantage": Mutation(
        "fused_rl/objectives/losses.py",
        'if chosen.ratio_level == "sequence" and advantages.dim() == 2:',
        'if chosen.ratio_level == "sequence" and advantages.dim() == 3:',
    ),
    "a gradient of targets that repeat is stored by the last alone": Mutation(
        "fused_rl/cpu/targets.py",
        "sums.index_add_(0, places, d[rows].double().view(-1))",
        "sums.index_copy_(0, places, d[rows].double().view(-1))",
    ),
    "a kept set that another rank holds begins one column late": Mutation(
        "fused_rl/cpu/support.py",
        "is_local = (columns >= 0) & (columns < vocab)",
        "is_local = (columns > 0) & (columns < vocab)",
    ),
    "rows in tiles are put where gathered ones belong": Mutation(
        "fused_rl/ops/linear_support.py",
        "dhidden.index_copy_(0, short, of_short)\n                dhidden.index_copy_(0, tiled, of_tiled)",
        "dhidden.index_copy_(0, tiled, of_tiled)",
    ),
    "a kept set's logits are read from the first column": Mutation(
        "kernels/support.py",
        "tl.load(logits_ptr + row * x_stride + (ids - first), mask=in_columns",
        "tl.load(logits_ptr + row * x_stride + ids, mask=in_columns",
    ),
    "a row of kept sets that is all -inf has an entropy": Mutation(
        "kernels/support.py",
        "tl.store(entropy_ptr + row, tl.where(banned, 0.0, log1 - t / (1.0 + rest)))",
        "tl.store(entropy_ptr + row, log1 - t / (1.0 + rest))",
    ),
    "equal targets beyond two are lost": Mutation(
        "kernels/targets.py",
        "            ahead += 1",
        "            ahead += 2",
    ),
    "a row beyond fp32's sums has its maximum twice": Mutation(
        "kernels/logprob.py",
        "    more = tl.maximum(tl.sum(ties, 0) - 1, 0).to(tl.float32)\n    return m,",
        "    more = tl.maximum(tl.sum(ties, 0), 0).to(tl.float32)\n    return m,",
    ),
    "the window where a row's tail begins is read from the row's start": Mutation(
        "kernels/logprob.py",
        "carry = load_window(window_ptr, first_masked * K, 0, vocab",
        "carry = load_window(window_ptr, 0, 0, vocab",
    ),
    "the rows of a batch share their random numbers": Mutation(
        "kernels/sampling.py",
        "row = (zero + row).to(tl.uint32)",
        "row = (zero + row * 0).to(tl.uint32)",
        "tests/test_sampling.py",
    ),
    "small waiting times are rounded to 0, and any token may win": Mutation(
        "kernels/sampling.py",
        "tl.where(u < 1 / 16, near,",
        "tl.where(u < 0, near,",
        "tests/test_sampling.py",
    ),
    "advantages forget what lies behind a block": Mutation(
        "kernels/gae.py",
        "(tl.cumsum(b, 0, reverse=True) + behind) / weight",
        "tl.cumsum(b, 0, reverse=True) / weight",
    ),
    "the target's gradient is written by two programs or by none": Mutation(
        "kernels/logprob_gradient.py",
        "return beyond // LANES % programs == program",
        "return beyond // LANES % programs == 0",
    ),
    "a soft cap is not in the gradient beside the target": Mutation(
        "kernels/logprob_gradient.py",
        "        g = tl.exp2(d) * tl.fma(b, d, a)\n    return g if softcap is None else g * uncap(y, softcap)",
        "        g = tl.exp2(d) * tl.fma(b, d, a)\n    return g",
    ),
    "sums are added to a head stored by columns as if it were stored by rows": Mutation(
        "kernels/support.py",
        "(0, 1) if dweight is None else dweight.stride()",
        "(width, 1)",
    ),
    "PPO trains on what is cut": Mutation(
        "trainers/ppo.py",
        "    if config.mask_truncated:",
        "    if False:",
    ),
}

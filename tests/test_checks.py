"""Every public op names in one short line what was passed in place of a tensor."""

import inspect
import typing

import pytest
import torch

import fused_rl
from fused_rl.base import checks
from tests.distributed import run_distributed
from tests.marks import slow
from tests.one_process import in_one_process

LOGITS = torch.zeros(2, 3, 50)
TARGETS = torch.zeros(2, 3, dtype=torch.int64)
HIDDEN, HEAD = torch.zeros(2, 3, 4), torch.nn.Linear(4, 50)
ROWS, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
SCORES = torch.zeros(4)


CAME = {
    "TokenLogprobs, whose .logprobs is a tensor": fused_rl.token_logprobs(LOGITS, TARGETS),
    "Linear, whose .weight is a tensor": HEAD,
    "Sequential Sequential( ": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    "list [[[0.0": LOGITS.tolist(),
    "ndarray array([[[0": LOGITS.numpy(),
    "NoneType None": None,
}
OF_HEAD = {"hidden": HIDDEN, "weight": HEAD.weight, "targets": TARGETS}
OF_TOKENS = {"logprobs": ROWS, "old_logprobs": ROWS, "mask": MASK}
# What each takes: a new function of `fused_rl.__all__` needs a row.
TAKES = {
    "token_logprobs": {"logits": LOGITS, "targets": TARGETS},
    "linear_token_logprobs": OF_HEAD,
    "linear_token_loss": OF_HEAD | {"token_loss": lambda logprobs, entropy: -logprobs},
    "linear_cross_entropy": OF_HEAD,
    "token_kl": {"logits": LOGITS, "ref_logits": LOGITS},
    "linear_token_kl": {
        "hidden": HIDDEN,
        "weight": HEAD.weight,
        "ref_hidden": HIDDEN,
        "ref_weight": HEAD.weight,
    },
    "topk_kl": {"logprobs": ROWS - 9, "ref_logprobs": ROWS - 9},
    "vocab_parallel_token_logprobs": {"local_logits": LOGITS, "targets": TARGETS, "vocab_start": 0},
    "vocab_parallel_token_kl": {"local_logits": LOGITS, "local_ref_logits": LOGITS},
    "sample_token": {"logits": LOGITS[0], "philox_state": torch.tensor([1, 0])},
    "kl_estimate": {"logprobs": ROWS, "ref_logprobs": ROWS},
    "importance_ratio": OF_TOKENS,
    "policy_loss": OF_TOKENS | {"advantages": ROWS, "skip_impossible": True},
    "policy_token_loss": {"old_logprobs": ROWS, "advantages": ROWS, "mask": MASK},
    "value_loss": {"values": ROWS, "old_values": ROWS, "returns": ROWS, "mask": MASK},
    "entropy_bonus": {"entropy": ROWS, "mask": MASK, "entropy_coef": 1.0},
    "preference_loss": {"chosen_scores": SCORES, "rejected_scores": SCORES},
    "unpaired_preference_loss": {"scores": SCORES, "desirable": SCORES > 0, "baseline": 0.5},
    "kl_baseline": {"scores": SCORES},
    "group_advantages": {"rewards": SCORES, "group_size": 2},
    "response_advantages": {"rewards": SCORES, "advantage": "batch-std", "group_size": 2},
    "gae": {"rewards": ROWS, "values": ROWS, "mask": MASK, "gamma": 1.0, "gae_lambda": 1.0},
    **{f"masked_{what}": {"values": ROWS, "mask": MASK} for what in ("mean", "sum", "var")},
    "whiten": {"values": ROWS, "mask": MASK},
}
FUNCTIONS = {name for name in fused_rl.__all__ if inspect.isfunction(getattr(fused_rl, name))} - {
    "tf_adam_epsilon",
    "judge",
}


def tensors_of(name):
    """Parameter -> whether it may be None, of those that take a tensor."""
    hints = typing.get_type_hints(getattr(fused_rl, name))
    # A function, and what is named by its place: below.
    apart = {
        "return",
        "token_loss",
        "per_token",
    }
    kinds = {
        parameter: {hint, *typing.get_args(hint)}
        for parameter, hint in hints.items()
        if parameter not in apart
    }
    return {p: type(None) in kind for p, kind in kinds.items() if torch.Tensor in kind}


PLACES = [
    (name, parameter, optional)
    for name in TAKES
    for parameter, optional in tensors_of(name).items()
]


def test_every_function_has_a_row():
    assert set(TAKES) == FUNCTIONS


@pytest.mark.parametrize(("name", "parameter", "optional"), PLACES)
def test_what_is_no_tensor_is_one_short_line(name, parameter, optional):
    for came, given in CAME.items():
        if given is None and optional:
            continue
        assert_named(
            lambda given=given: getattr(fused_rl, name)(**{**TAKES[name], parameter: given}),
            parameter,
            came,
        )


SHARDED = {"weight", "bias", "ref_weight", "ref_bias"}  # gathered


def named_dtensors(rank, world):
    """(function, parameter, what was said) of each place that took a DTensor as if it were none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, wrong = init_device_mesh("cpu", (world,)), []
    for name, parameter, _ in PLACES:
        if parameter in SHARDED:
            continue
        taken = TAKES[name].get(parameter)
        taken = taken if isinstance(taken, torch.Tensor) else ROWS
        given = distribute_tensor(taken, mesh, [Shard(0)])
        try:
            said = getattr(fused_rl, name)(**{**TAKES[name], parameter: given})
        except Exception as error:
            said = error
        shown = f"{parameter.removeprefix('local_')} must be "
        if not (
            isinstance(said, ValueError)
            and str(said).startswith(shown)
            and "got DTensor" in str(said)
        ):
            wrong.append((name, parameter, repr(said)))
    return wrong


@pytest.mark.slow
def test_a_dtensor_is_named_and_never_read():
    """Such as a tensor-parallel layer's: it has no memory of its own, and reading it ended the process."""
    assert run_distributed(named_dtensors, 1) == [[]]


def assert_named(call, parameter, came):
    with pytest.raises(ValueError, match="must be") as refused:
        call()
    said = str(refused.value)
    assert said.startswith((f"{parameter} must be", f"{parameter.removeprefix('local_')} must be"))
    assert f", got {came}" in said
    assert "\n" not in said and len(said) < 240


NAN, INF = float("nan"), float("inf")
HALF, BF16 = torch.ones(2, dtype=torch.bool), torch.bfloat16


def refused(name, said, **given):
    with pytest.raises(ValueError, match=said) as error:
        getattr(fused_rl, name)(**{**TAKES.get(name, {}), **given})
    assert "\n" not in str(error.value)


# What the arguments beside the first may be, where none of `TAKES` is given; else ROWS.
MAY_BE = {"mask": MASK, "truncated": HALF, "group_lengths": torch.ones(2), "margin": SCORES}
MAY_BE |= {"class_weight": torch.ones(50), "sequence_ids": TARGETS, "ids": TARGETS}
# These have shapes of their own, are sharded, or may be a number.
APART = "hidden weight bias ref_hidden ref_weight ref_bias targets temperature baseline num_tokens "
APART += "num_sequences lengths weights philox_state"
CHANGES = {
    "its device": lambda x: x.to("meta"),
    "its layout": lambda x: x.to_sparse(),
    "a row less": lambda x: x[1:],
    "a dimension more": lambda x: x[..., None],
    "its dtype": lambda x: x.long() if x.is_floating_point() else x.double(),
}
BESIDE = [
    (name, parameter)
    for name, parameter, _ in PLACES
    if parameter not in APART.split()
    and parameter != ("mask" if name == "policy_token_loss" else next(iter(TAKES[name])))
]


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("name", "parameter"), BESIDE)
def test_a_tensor_that_does_not_fit_the_first_is_named(name, parameter):
    """Broadcasting would count wrongly."""
    usual = TAKES[name].get(parameter)
    usual = MAY_BE.get(parameter, ROWS) if usual is None else usual
    for change in CHANGES.values():
        refused(name, f"^{parameter.removeprefix('local_')} must ", **{parameter: change(usual)})


# What the numbers among the options are; those of policy_loss are fields.
WORDS = {
    "a finite number": "margin entropy_coef clip_cov_low",
    "a finite number above 0": "softcap workspace_mb delta aspo_cap sapo_temperature_pos "
    "sapo_temperature_neg",
    "a finite number, 0 or more": "centering desirable_weight undesirable_weight eps std_floor "
    "z_loss vocab_start num_tokens num_sequences max_length clip_low kl_coef kl_cov_coef "
    "dro_beta ipo_tau ipo_threshold entropy_threshold off_policy_threshold rollout_low "
    "rollout_gate_low rollout_gate_high vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg",
    "a number, 0 or more, or inf": "clip_high value_clip dppo_cap clip_cov_high rollout_high",
    "a number from 0 to (1|below 0.5)": "label_smoothing gamma gae_lambda",
    "a number above 0, at most 1": "top_entropy cov_fraction",
    "a number from 1e-06 to 1e\\+06": "temperature",
    "a whole number": "group_size",
}
WORDS = {name: words for words, names in WORDS.items() for name in names.split()}


def other_than(hint):
    """What no option of this type may be."""
    kinds = {hint, *typing.get_args(hint)}
    if kinds & {int, float}:
        return NAN, "0.2", True, [0.2], -INF
    if bool in kinds:
        return 1, "no"
    if torch.distributed.ProcessGroup in kinds:
        return "world", -100
    return ["no such"] * any(typing.get_origin(kind) is typing.Literal for kind in kinds)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", [*TAKES, "PolicyLossOptions"])
def test_an_option_of_another_kind_is_named(name):
    for option, hint in typing.get_type_hints(getattr(fused_rl, name)).items():
        for given in () if option in ("dim", "ignore_index", "jsd_beta") else other_than(hint):
            refused(name, f"^{option} must be {WORDS.get(option, '')}", **{option: given})


BOUNDS = {
    "a finite number": ([-1e9], [INF]),
    "a finite number above 0": ([1e-9], [0, INF]),
    "a finite number, 0 or more": ([0], [-1e-9, INF]),
    "a number, 0 or more, or inf": ([0, INF], [-1e-9]),
    "a number from 0 to 1": ([0, 1], [-1e-9, 1.01]),
    "a number above 0, at most 1": ([1], [0, 1.01]),
    "a number above 0, below 1": ([0.5], [0, 1]),
    "a number from 0 to below 0.5": ([0], [-1e-9, 0.5]),
}


@pytest.mark.parametrize("words", checks.RANGES)
def test_a_range_is_its_words(words):
    inside, outside = BOUNDS[words]
    for number in inside:
        checks.check_range("x", number, words)
    for number in outside:
        with pytest.raises(ValueError, match=f"^x must be {words}, got {number}$"):
            checks.check_range("x", number, words)


COUNTS = [
    (name, count)
    for name in TAKES
    for count in inspect.signature(getattr(fused_rl, name)).parameters
    if count in ("num_tokens", "num_sequences") and name != "linear_cross_entropy"
]


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_a_denominator_is_a_number_or_is_refused(name, count):
    for given in (-2, [5, 5], [5], True):
        refused(name, f"^{count} must be a ", **{count: torch.tensor(given)})
    for zero in (0, torch.tensor(0)):
        refused(name, f"^{count} is 0, but [0-9]+ places of the mask count", **{count: zero})


def test_a_denominator_of_the_whole_step_may_be_below_1_and_where_nothing_counts_0():
    # As of 4 tokens on 8 ranks.
    for half in (0.5, torch.tensor(0.5)):
        assert fused_rl.value_loss(ROWS + 1, ROWS, ROWS, MASK, num_tokens=half)[0] == 6
    none = TAKES["policy_loss"] | {"mask": ~MASK}
    for zero in (0, torch.tensor(0), None):
        assert fused_rl.policy_loss(**none, num_tokens=zero, num_sequences=zero)[0] == 0
        assert fused_rl.preference_loss(*torch.zeros(2, 0), num_sequences=zero)[0] == 0
    nothing = torch.zeros(2, 0)
    empty = nothing, nothing, torch.ones(2), nothing == 0
    assert fused_rl.policy_loss(*empty, preset="dr_grpo")[0] == 0


SEVERAL = torch.zeros(2, 3, 4, dtype=torch.int64)
LEAF = torch.zeros(2, 3, 50, requires_grad=True)
FAR = TARGETS.clone().index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(50))
LAST = torch.tensor([[False, False], [False, True]])
ONE_BAD = torch.tensor([[1.0, 2, 0], [1, 1, 1]])
EVEN = torch.log_softmax(torch.zeros(2, 3, 5), -1)[..., :4]
UNEVEN = EVEN + torch.tensor([0.0, 0.3])[:, None, None]
SETS = fused_rl.TokenSupport.from_lists([[0, 1]] * 6)
PACKED = {"sequence_ids": torch.tensor([[0, 0, 1], [2, 2, -1]])}
# Of functions that share an argument: what is said, and what is given.
OF_SETS = {
    "support must be a TokenSupport or None, got list": {"support": [[0]] * 6},
    r"support has 5 rows, the targets \(2, 3\) have 6; rows stand in": {
        "support": SETS.select(torch.arange(5))
    },
    r"target 2 of logits\[1, 2\] is not in its kept set of 2 ids; 1 of 6": {
        "support": SETS,
        "targets": FAR.clamp(max=2),
    },
    r"logits\[1, 2\] has id 50, outside .* of 50 \(0": {
        "support": fused_rl.TokenSupport.from_lists([[0]] * 5 + [[0, 50]])
    },
    "one target per row": {"support": SETS, "targets": SEVERAL},
}
OF_A_HEAD = {
    r"hidden must be .* got .*2, 3, 4.* and .*50, 3": {"weight": torch.zeros(50, 3)},
    "weight .V, H.": {"weight": torch.zeros(4, 50)},
    r"logits\[1, 2\] is 50, outside .* 50": {"targets": FAR},
    "bias must be .V,. = .50,., got .49,.": {"bias": torch.zeros(49)},
    "one dtype.*torch.float32, torch.bfloat16": {"weight": torch.zeros(50, 4, dtype=BF16)},
    "float32, bfloat16": {"hidden": HIDDEN.double(), "weight": HEAD.weight.double()},
}
OF_LOGITS_DTYPE = {
    f"logits_dtype must be None, torch.float32 or the dtype of hidden and weight.*{d}": {
        "logits_dtype": d
    }
    for d in (BF16, "float32")
}
# function -> what is said (a part of one short line) -> what is given
REFUSED = {
    "preference_loss": {
        "label_smoothing has no effect with loss_type=squared": {
            "loss_type": "squared",
            "label_smoothing": 0.1,
        },
    },
    "token_logprobs": {
        "would overwrite a leaf": {"logits": LEAF, "inplace": True},
        "overwrite a leaf": {"logits": LEAF.flatten().view(2, 3, 50), "inplace": True},
        r"\(\.\.\., V\) with V >= 1, got \(\)": {"logits": torch.tensor(1.0)},
        r"V >= 1, got \(2, 3, 0\)": {"logits": torch.zeros(2, 3, 0)},
        "targets must have the shape of": {"targets": TARGETS[:, 1:]},
        "shift=True takes the targets of all T positions": {
            "targets": TARGETS[:, 1:],
            "shift": True,
        },
        r"target of logits\[1, 2\] is 50, outside the vocabulary of 50 \(0 to 49\); 1 of 6": {
            "targets": FAR
        },
        r"logits\[1, 1\] is -1": {"targets": TARGETS - 1, "shift": True, "mask": LAST},
        r"\(B, T, V\) or \(B, T, H\), got \(3,": {
            "logits": LOGITS[0],
            "targets": TARGETS[0],
            "shift": True,
        },
        r"temperature must .*, got 0.0 for logits\[0, 2\]": {"temperature": ONE_BAD},
        r"temperature must .* got 1e-09": {"temperature": 1e-9},
        r"the outputs, \(2, 2\), .*; shift=True takes mask\[:, 1:\]": {"shift": True, "mask": MASK},
        r"broadcastable .* \(2, 3\), .* \(3, 3\)": {"temperature": torch.ones(3, 3)},
        r"temperature.detach\(\)": {"temperature": torch.ones(3, requires_grad=True)},
        "do not overlap, got strides": {
            "logits": (LEAF * 1)[:, :1].expand(2, 3, 50),
            "inplace": True,
        },
        r"\(\.\.\., K\) must begin with .* \(2, 3\), got \(2, 2, 4\)": {"targets": SEVERAL[:, 1:]},
        r"target 0 of logits\[0, 0\] is 50, outside .* \(0 to 49\); 24 of 24": {
            "targets": SEVERAL + 50
        },
        r"target 0 of logits\[1, 2\] is -100": {"targets": SEVERAL - 100, "mask": FAR > 0},
        r"target 0 of logits\[0, 0\] is 50": {"logits": LOGITS.double(), "targets": SEVERAL + 50},
        "rows of all T targets, the first of": {
            "support": SETS.select(torch.arange(4)),
            "shift": True,
        },
        "one target per row": {
            "logits": LOGITS.double(),
            "support": SETS,
            "targets": SEVERAL[..., :1],
        },
    },
    "token_kl": {
        "ref_logits must be torch.float32 as the logits, got torch.bfloat16": {
            "ref_logits": LOGITS.to(BF16)
        },
        "logits must be a bf16, fp16 or fp32 tensor": {"logits": LOGITS.double()},
        "jsd_beta=0.3 has no meaning with direction='reverse'": {"jsd_beta": 0.3},
        "jsd_beta must be a number above 0, below 1, got 1.0": {
            "direction": "jensen-shannon",
            "jsd_beta": 1.0,
        },
    },
    "linear_token_kl": {
        "the same tokens and vocabulary": {"ref_hidden": HIDDEN[:1]},
        "one dtype and device": {"ref_hidden": HIDDEN.to(BF16), "ref_weight": HEAD.weight.to(BF16)},
    },
    "topk_kl": {
        r"ref_logprobs\[1, 0\] .* probabilities is 1.0798\d+, 0.0799 above 1 .* 4 different tokens.* 3 of 6 rows": {
            "logprobs": EVEN,
            "ref_logprobs": UNEVEN,
        },
        r"logprobs\[0, 0\] has the maximum 0.39\d*, .*no logits": {
            "logprobs": EVEN + 2,
            "ref_logprobs": EVEN,
        },
        r"ref_logprobs\[0, 0\] has the maximum nan": {"logprobs": EVEN, "ref_logprobs": EVEN * NAN},
    },
    "linear_token_loss": {
        r"one value per token, \(\d+,\), unreduced; got torch.float32 \(\)": {
            "token_loss": lambda lp, h: lp.mean()
        },
    },
    "policy_loss": {
        "preset or options, not both": {"preset": "grpo", "options": fused_rl.PolicyLossOptions()},
        "options must be PolicyLossOptions or None, got dict": {"options": {"clip_low": 0.1}},
        "option must be one of .*got 'clip_hi'; did you mean clip_high": {"clip_hi": 0.3},
        "needs ref_logprobs": {"kl_coef": 0.1},
        "need entropy": {"entropy_coef": 0.1},
        r"delta must lie above 1 \+ clip_high": {"delta": 1.1},
        "advantages has 2 sequences, but sequence_ids go to 2": PACKED | {"advantages": SCORES[:2]},
        "sequence_ids must lie below B T = 6, got 100": {"sequence_ids": torch.full((2, 3), 100)},
    },
    "group_advantages": {
        "do not divide into groups of group_size=3": {"group_size": 3},
        "group_size must be a whole number": {"group_size": 2.0},
        "rewards": {"rewards": torch.tensor([0.0, NAN, 1.0, 1.0])},
    },
    "response_advantages": {
        "per token: use fused_rl.gae with a critic's values": {"advantage": "gae"},
    },
    "linear_cross_entropy": {
        "label_smoothing needs logits without a": {"label_smoothing": 0.1, "softcap": 30.0},
        "class_weight requires a gradient": {"class_weight": torch.ones(50).requires_grad_()},
        r"num_tokens must be one number, .*\(2,\)": {"num_tokens": torch.ones(2)},
        "num_tokens must be one number.*bool": {"num_tokens": torch.tensor(True)},
        "num_tokens requires a gradient": {"num_tokens": torch.ones(()).requires_grad_()},
        "num_tokens must be a finite number": {"num_tokens": torch.tensor([NAN])},
        "one target per row": {"targets": SEVERAL},
    },
}
for name, shared in (
    *((name, OF_SETS) for name in ("token_logprobs", "linear_token_logprobs")),
    *((name, OF_A_HEAD) for name in ("linear_token_logprobs", "linear_cross_entropy")),
    *((f"linear_token_{what}", OF_LOGITS_DTYPE) for what in ("loss", "kl")),
):
    REFUSED[name] = REFUSED.get(name, {}) | shared
CELLS = [(name, said) for name, rows in REFUSED.items() for said in rows]


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("name", "said"), CELLS)
def test_what_does_not_fit_is_refused(name, said):
    refused(name, said, **REFUSED[name][said])


make_sets, from_scores = fused_rl.TokenSupport.from_lists, fused_rl.TokenSupport.from_scores
# A float id would be cut to another one, and a logit of NaN or inf, which the sampler may draw, be left out.
NO_SETS = {
    "at row 1: from 2 to 1": lambda: fused_rl.TokenSupport(
        torch.arange(3), torch.tensor([0, 2, 1, 3])
    ),
    "3; got 1 to 3": lambda: fused_rl.TokenSupport(torch.arange(3), torch.tensor([1, 3])),
    "row 1 keeps id 2 more than once; 1 id": lambda: make_sets([[1, 2], [2, 5, 7, 2]]),
    "row 1 keeps id -1; ids start at 0": lambda: make_sets([[1], [4, -1]]),
    "row 1 of lists must be a list of ids, whole numbers": lambda: make_sets([[1], [1.7]]),
    "row 0 of lists .*, got list .True, False.": lambda: make_sets([[True, False]]),
    "row 0 of scores has no": lambda: from_scores(torch.full((2, 4), -torch.inf)),
    "row 0 at step 1 has nan": lambda: from_scores([LOGITS[0], LOGITS[0] / 0]),
    "scores must be finite.* row 0 has nan at id 1": lambda: from_scores(
        torch.tensor([[0.0, NAN]])
    ),
    "row 0 at step 0 has inf at id 0": lambda: from_scores([torch.tensor([[INF, 0.0]])] * 2),
    "scores must be a floating-point tensor": lambda: from_scores(torch.zeros(2, 0)),
    "add up to the 3 rows, got a sum of 4": lambda: make_sets([[1]] * 3).split([2, 2]),
    "bool with 1 True places": lambda: make_sets([[1]]).spread(HALF),
}


@pytest.mark.parametrize("said", NO_SETS)
def test_what_is_no_set_is_refused_and_never_made_one(said):
    with pytest.raises(ValueError, match=said):
        NO_SETS[said]()


PER_TOKEN = {
    r"per_token\[0\] must be a dense tensor, got NoneType None": [None],
    r"per_token\[1\] must start with the targets' shape \(2, 3\), got \(4,\)": [ROWS, SCORES],
    r"per_token\[0\] requires a gradient": [ROWS.clone().requires_grad_()],
}


@pytest.mark.parametrize("said", PER_TOKEN)
def test_values_per_token_of_a_loss_have_its_shape_and_no_gradient(said):
    with pytest.raises(ValueError, match=said):
        fused_rl.linear_token_loss(*OF_HEAD.values(), lambda lp, *_: lp, *PER_TOKEN[said])


# Derivatives that no op has: an error, where the silence would be a term that is missing from somebody's loss.

LEAVES = {
    "token_logprobs": "logits",
    "linear_token_logprobs": "hidden",
    "linear_token_loss": "hidden",
    "linear_cross_entropy": "weight",
    "token_kl": "ref_logits",
    "linear_token_kl": "weight",
    "topk_kl": "logprobs",
    "vocab_parallel_token_logprobs": "local_logits",
    "vocab_parallel_token_kl": "local_logits",
}


def output_of(name, leaf):
    """Of one function of one tensor: what it returns, of fields the first."""
    op = getattr(fused_rl, name)
    op = in_one_process(op) if name.startswith("vocab_parallel") else op
    given = {argument: x for argument, x in TAKES[name].items() if argument != "vocab_start"}
    if name == "linear_token_loss":
        given["token_loss"] = lambda logprobs, entropy: -logprobs.exp()
    found = op(*(given | {LEAVES[name]: leaf}).values())
    return found if isinstance(found, torch.Tensor) else found[0]


# The ranks of a split vocabulary are processes.
@pytest.mark.parametrize("name", [slow(n) if n.startswith("vocab_parallel") else n for n in LEAVES])
def test_a_second_derivative_is_an_error_and_never_left_out(name):
    """A penalty on the gradient, beside the loss: without the error it would add nothing to the second gradient."""
    leaf = TAKES[name][LEAVES[name]].clone().requires_grad_()
    output = output_of(name, leaf)
    (gradient,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
    with pytest.raises(
        RuntimeError, match=f"^{name} is differentiable once.*use fused_rl.reference[^\n]*$"
    ):
        torch.autograd.grad((output * 0).sum() + gradient.square().sum(), leaf)


@pytest.mark.parametrize("name", LEAVES)
def test_a_forward_derivative_is_an_error_and_never_zero(name):
    leaf = TAKES[name][LEAVES[name]]
    said = "^[a-z_]+ supports neither torch.func transforms[^\n]*fused_rl.reference[^\n]*$"
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=said):
        output_of(name, torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf)))
    for transform in (torch.func.grad, torch.vmap):
        with pytest.raises(RuntimeError, match=said):
            transform(lambda x: output_of(name, x).sum())(
                leaf if transform is torch.func.grad else leaf[None]
            )


@pytest.mark.parametrize("name", [name for name in TAKES if name.startswith("linear")])
@pytest.mark.parametrize("gathered", [False, True])
def test_a_head_that_zero_3_has_partitioned_is_named(name, gathered):
    """Before the forward pass, and where a head that was gathered for it alone is needed again."""
    weight = HEAD.weight.detach().clone()
    inputs = TAKES[name] | {"hidden": HIDDEN.clone().requires_grad_(), "weight": weight}
    with pytest.raises(
        ValueError, match=r"^weight has shape \(0,\).*ZeRO 3 has partitioned[^\n]*$"
    ):
        if not gathered:
            weight.data = weight.new_empty(0)
        output = getattr(fused_rl, name)(*inputs.values())
        weight.data = weight.new_empty(0)
        total = output.sum() if isinstance(output, torch.Tensor) else output[0].sum()
        # linear_token_loss has formed its gradients in the forward pass, once
        total.backward(retain_graph=True)
        total.backward()

"""Rows without padding: what flash attention is given, and that a step is the one of padded rows.

Flash attention needs a GPU, so eager functions of its signatures stand in for it: transformers calls them as it does
those of flash_attention_2. flex_attention is torch's own, computed for all pairs, as it is where it is not compiled.
"""

import math

import pytest
import torch

from fused_rl.trainers import dpo
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.data.micro_batches import Padding
from fused_rl.trainers.data.preferences import Pair
from fused_rl.trainers.models import packing
from tests.device import steps
from tests.trainers import tiny
from tests.trainers.steps import Plain
from tests.trainers.test_packing import assert_same, batch, model, scores_and_gradients

CPU = torch.device("cpu")


def attention(q, k, v, scale, window):
    """Causal attention of one sequence: (T, heads, width) each, of fewer keys than queries where these are shared."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    place = torch.arange(len(q))
    distance = place[:, None] - place
    seen = distance >= 0
    if window[0] >= 0:
        seen &= distance <= window[0]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


CALLS: list[dict] = []


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    assert causal and not dropout_p
    rows = zip(q, k, v, strict=True)
    return torch.stack([attention(*row, softmax_scale, window_size) for row in rows])


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    assert causal and not dropout_p and cu_seqlens_q is cu_seqlens_k
    lengths = cu_seqlens_q.diff().tolist()
    CALLS.append(
        {"offsets": cu_seqlens_q, "longest": (max_seqlen_q, max_seqlen_k), "tokens": len(q)}
    )
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([attention(*part, softmax_scale, window_size) for part in parts])


@pytest.fixture
def flash(monkeypatch):
    """flash_attention_2 as eager functions; the arguments of the calls of its varlen form."""
    import transformers
    from transformers import modeling_flash_attention_utils as utils

    functions = flash_attn_func, flash_attn_varlen_func, None, None, None
    process = utils._lazy_define_process_function(flash_attn_varlen_func)
    monkeypatch.setattr(
        utils, "lazy_import_flash_attention", lambda *_, **__: (functions, (process, process))
    )
    # Availability and the GPU are checked when a model is made.
    monkeypatch.setattr(
        transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True
    )
    monkeypatch.setattr(
        transformers.modeling_utils, "lazy_import_flash_attention", lambda *_, **__: None
    )
    CALLS.clear()
    return CALLS


@pytest.fixture
def blocks(monkeypatch):
    """flex_attention without its compiler, on a CPU too; how many tokens the rows of its calls had."""
    from torch.nn.attention import flex_attention as flex
    from transformers.integrations import flex_attention as integration

    calls = []

    def attend(query, key, value, training=False, block_mask=None, **options):
        assert block_mask.shape[-2:] == (query.shape[2], query.shape[2])
        calls.append(query.shape[2])
        return flex.flex_attention(query, key, value, block_mask=block_mask, **options)

    monkeypatch.setattr(packing, "BLOCK_DEVICES", ("cpu",))
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # refuses a backward pass there
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", attend)
    packing._attend_by_blocks()
    return calls


APART = {"share_prompts": False}
BLOCKS = {"in_blocks": True}
FLASH = {"attn_implementation": "flash_attention_2"}


def as_flash(lm):
    lm.config._attn_implementation = "flash_attention_2"
    return lm


@pytest.mark.parametrize("loss_from", ["linear", "logits"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("Llama", {}), ("Qwen3", {}), ("Mistral", {"sliding_window": 4}), ("GPTNeoX", {})],
)
def test_rows_without_padding_give_the_scores_and_gradients_of_padded_ones(
    kind, options, loss_from, flash
):
    given = batch()
    expected = scores_and_gradients(model(kind, **options), loss_from, None, given)
    lm = as_flash(model(kind, **options))
    assert packing.unpadded_costs(lm, 30).masked is False
    flash.clear()
    unpadded = packing.unpad(given, packing.Costs(0, 0, masked=False))
    assert_same(scores_and_gradients(lm, loss_from, unpadded, given), expected, 1e-5)
    fed = given.prompt_lengths + (given.response_lengths - 1).clamp(min=0)
    for call in flash:
        assert call["offsets"].dtype == torch.int32
        assert call["offsets"].tolist() == [0, *fed.cumsum(0).tolist()]
        assert call["longest"] == (fed.max(), fed.max()) and call["tokens"] == fed.sum()
    assert flash


def test_a_model_that_sees_beyond_its_sequence_stays_padded(flash, capsys):
    # Mamba's state goes on through the row.
    import transformers

    assert packing.unpadded_costs(model("Llama"), 30) is None  # sdpa
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    assert packing.unpadded_costs(as_flash(lm), 30) is None
    assert capsys.readouterr().out.startswith("rows are padded: ")


def test_prompts_are_not_shared_without_a_mask(flash):
    lm, words = as_flash(model("Llama")), {"otherwise": "padded"}
    with pytest.raises(InputError, match="share_prompts: attn_implementation=flash_attention_2"):
        packing.packing_costs(lm, 30, True, option="share_prompts", **words)
    assert packing.packing_costs(lm, 30, None, option="share_prompts", **words) is not None
    assert packing.packing_costs(lm, 30, True, option="packing", **words) is not None
    assert packing.packing_costs(lm, 30, False, option="packing", **words) is None


# A step of every trainer, beside one with sdpa on padded rows.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpadded")
    made = tiny.model_folder(folder / "model")
    return made, tiny.reward_folder(folder / "reward", made)


# What makes a step, its options, and those of rows of several sequences.
STEPS = {
    "sft": (steps.sft_step, {"packed": False}, {"packed": True}),
    "reward": (steps.reward_step, {"packed": False}, {"packed": True}),
    "ppo": (steps.ppo_step, {"critic": "reward"}, {}),
    "grpo": (steps.grpo_step, APART, {}),
    "grpo, prompts shared": (steps.grpo_step, {}, {}),
    "gspo": (steps.grpo_step, APART | {"preset": "gspo", "top_entropy": 0.2}, {}),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Llama", {}), ("Qwen3", {}), ("Mistral", {"sliding_window": 40})],
)
def test_rows_of_blocks_share_prompts_and_give_the_scores_and_gradients_of_padded_ones(
    kind, options, blocks
):
    lm, given = model(kind, **options), batch()
    expected = scores_and_gradients(lm, "linear", None, given)
    costs = packing.unpadded_costs(lm, 30)
    assert costs.in_blocks and not costs.masked
    blocks.clear()
    assert_same(
        scores_and_gradients(lm, "linear", packing.unpad(given, costs), given), expected, 2e-5
    )
    # Prompts of 3, 7 and 5 tokens once, and responses without their last tokens; two layers.
    assert blocks == [3 + 5 + 7 + 8 + 5] * 2


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_pairs_are_those_that_the_mask_of_each_pair_gives(seed):
    from torch.nn.attention.flex_attention import create_block_mask

    # Groups of drawn sizes over several blocks, and a response longer than two of them.
    draw = torch.Generator().manual_seed(seed)
    prompts, responses = [], []
    for group in range(3):
        length, count, most = torch.randint(1, 300, (3,), generator=draw).tolist()
        prompts += [[group + 1] * length] * (1 + count % 5)
        while len(responses) < len(prompts):
            responses.append([7] * int(torch.randint(0, most + 300, (), generator=draw)))
    given = make_batch(prompts, responses, 0, "cpu")
    packed = packing.pack(given, None)
    mask = packed.attention["attention_mask"]
    tokens = packed.input_ids.shape[1]
    expected = create_block_mask(mask.mask_mod, 1, 1, tokens, tokens, device="cpu")
    assert torch.equal(mask.to_dense(), expected.to_dense())
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (
            [getattr(m, f"{kind}_{name}") for m in (mask, expected)]
            for name in ("num_blocks", "indices")
        )
        torch.testing.assert_close(*counts)
        for row, count in enumerate(counts[0].flatten().tolist()):
            assert torch.equal(*(listed.flatten(0, 2)[row, :count] for listed in indices))


def test_where_blocks_fail_rows_take_a_mask_or_pads_with_a_line(blocks, capsys):
    from transformers.integrations import flex_attention as integration

    def fails(*_, **__):
        raise RuntimeError("out of resource: shared memory")

    lm, words = model("Llama"), {"option": "share_prompts", "otherwise": "apart"}
    integration.compile_friendly_flex_attention = fails
    assert packing.packing_costs(lm, 30, None, **words) == packing.costs_of(lm)
    assert packing.unpadded_costs(lm, 30) is None
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["rows take a dense mask", "rows are padded"]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_same_however_its_tokens_lie_in_rows_and_micro_batches(
    name, folders, flash, blocks, monkeypatch
):
    make, options, together = STEPS[name]
    if "critic" in options:
        options = options | {"critic": folders[1]}
    forms = [{}, *({"micro_batch_tokens": most} for most in (1, 60, 10_000))]
    forms.append(together | {"micro_batch_tokens": 60})
    if "shared" not in name:  # for which flash attention has no mask
        forms += [together | FLASH, together | FLASH | {"micro_batch_tokens": 50}]
    if not APART.items() <= options.items():  # which asks for rows of their own
        forms += [together | BLOCKS, together | BLOCKS | {"micro_batch_tokens": 50}]
    found = []
    with steps.process_group():
        responses = steps.responses_of(steps.small_config("grpo", folders[0]))
        for form in forms:
            in_blocks = "in_blocks" in form
            masked = not in_blocks and "attn_implementation" not in form
            costs = packing.Costs(1.0, 0.0, masked=masked, in_blocks=in_blocks)
            monkeypatch.setattr(packing, "costs_of", lambda lm, costs=costs: costs)
            monkeypatch.setattr(packing, "BLOCK_DEVICES", ("cpu",) if in_blocks else ())
            torch.manual_seed(0)
            options_here = {k: v for k, v in (options | form).items() if k != "in_blocks"}
            step = make(folders[0], CPU, responses, **options_here)
            torch.manual_seed(1)
            found.append(step())
    paddings = [step.metrics["perf/padding"] for step in found]
    unpadded = [
        i for i, form in enumerate(forms) if form.keys() & {"attn_implementation", "in_blocks"}
    ]
    assert len(unpadded) >= 2 and {paddings[i] for i in unpadded} == {0}
    assert "shared" in name or paddings[0] > 0
    # One sequence is not padded to the length of another one; the sides of a pair are.
    assert (paddings[1] == 0) == (name != "reward") and bool(CALLS) == ("shared" not in name)
    for other in found[1:]:
        (a,), (b,) = (tiny.untimed([step.metrics]) for step in (found[0], other))
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
        for ours, theirs in zip(other.modules, found[0].modules, strict=True):
            for (key, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=key)


def test_losses_of_whole_responses_are_those_of_padded_rows(folders, flash):
    draw = torch.Generator().manual_seed(4)
    ids = lambda count: torch.randint(5, 90, (count,), generator=draw).tolist()  # noqa: E731
    pairs = []
    for i in range(6):
        prompt = ids(3 + i)
        pairs.append(Pair((prompt, ids(2 + i)), (prompt, ids(9 - i)), 0.0, "a row"))
    found = []
    for attn in ({}, FLASH | {"micro_batch_tokens": 40}):
        config = tiny.config_of("dpo", str(folders[0]), micro_batch_size=4, **attn)
        lm = tiny.load_lm(config)
        lm.unpadded_costs = packing.unpadded_costs(lm.base, 30)
        dpo.measure(Plain(lm), pairs, config, torch.zeros(6, 2), Padding())
        found.append(torch.cat([p.grad.flatten() for p in lm.parameters()]))
    padded, unpadded = found
    assert CALLS and (unpadded - padded).norm() <= 1e-5 * padded.norm()

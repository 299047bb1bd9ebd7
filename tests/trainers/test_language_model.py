"""What a language model's forward returns for its options, and two models whose hidden states meet."""

import pytest
import torch

from fused_rl import TokenSupport
from fused_rl.ops import tiles
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.models import language_model
from fused_rl.trainers.models.language_model import LanguageModel, load_to_sample
from fused_rl.trainers.models.logits import keep_only
from fused_rl.trainers.models.reward_model import RewardModel
from fused_rl.trainers.options import EngineConfig
from fused_rl.trainers.policy.reference import PolicyWithoutAdapters, Reference
from tests.heads import Work
from tests.lazy import transformers
from tests.trainers import tiny
from tests.trainers.steps import EOS, Plain

CPU = torch.device("cpu")
LOSS = {"token_loss": lambda logp, _: -logp}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, and a teacher of the same vocabulary and other weights."""
    folder = tmp_path_factory.mktemp("models")
    return tiny.model_folder(folder / "policy"), tiny.model_folder(folder / "teacher", seed=3)


def load(folders, name: str, **options):
    """Any model by the options of a run whose own is another."""
    config = tiny.config_of("grpo", name, **options)
    return language_model.load_lm(config, CPU, trainable=name == folders[0])


def batch():
    return make_batch([[1, 70, 71, 72], [1, 80]], [[90, 91, 3], [92, 93, 94, 95, 96]], 0, "cpu")


def test_every_token_that_is_read_has_a_gradient_also_the_one_that_the_model_pads_with(tmp_path):
    folder = tiny.model_folder(tmp_path / "model", pad_is_eos=True)
    lm, classifier = load((folder,), folder), RewardModel.from_pretrained(folder)
    given = make_batch([[1, EOS, 71]], [[72, 73]], 0, "cpu")
    loss = lm(given.input_ids, given.response_mask).logprobs.sum()
    score = classifier(given.input_ids, torch.ones_like(given.input_ids))
    for value, base in ((loss, lm.base), (score, classifier.base)):
        assert base.config.pad_token_id == EOS
        value.backward()
        assert base.get_input_embeddings().weight.grad[EOS].abs().max() > 0


def compared(policy, reference, **options):
    """What a step measures: both models' scores of a batch, and their exact KL."""
    given = batch()
    inputs = {"input_ids": given.input_ids, "mask": given.response_mask, "temperature": 0.7}
    inputs |= {"places": given.places(), "packed": None, "support": None} | options
    with torch.no_grad(), reference.states_for(inputs) as states:
        return policy(**inputs, reference=states)


def logits_of(lm):
    """The logits (N, V) of a batch, of the model itself and in fp64."""
    given = batch()
    return lm.base(input_ids=given.input_ids).logits[:, :-1][given.response_mask].double()


SETS = [[90, 5, 7], None, [3], [*range(60), 92], [92, 93, 90], None, [95, 2], [96, 4]]


@pytest.mark.parametrize("support", [None, TokenSupport.from_lists(SETS)], ids=["all", "sets"])
@pytest.mark.parametrize("loss_from", ["linear", "logits"])
@pytest.mark.parametrize("rows", [1, 3, 8])
@torch.no_grad()
def test_the_exact_kl_is_that_of_whole_logits_in_any_tiles(
    folders, monkeypatch, rows, loss_from, support
):
    """Soft cap, bias and kept sets included; of the two models' logits no more than the rows of a tile exist."""
    lms = [load(folders, folder, loss_from=loss_from) for folder in folders]
    for lm in lms:
        lm.head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(lm.head.weight)))
        lm.softcap = None if loss_from == "logits" else 1.5
    monkeypatch.setattr(tiles, "tile_rows", lambda *_: rows)
    found = compared(lms[0], Reference(lms[1]), support=support)

    pair = []
    for lm in lms:
        logits = logits_of(lm)
        pair.append(logits if lm.softcap is None else lm.softcap * (logits / lm.softcap).tanh())
    assert_compared(found, pair, support)


def assert_compared(found, pair, support):
    """`found` is what the definitions say of the logits (N, V) of both models, at temperature 0.7."""
    given = batch()
    mask = given.response_mask
    targets = given.input_ids[:, 1:][mask]
    for logits in pair:
        keep_only(logits, support)
    logp, ref_logp = ((logits / 0.7).log_softmax(-1) for logits in pair)
    terms = torch.where(logp.isinf(), 0, logp.exp() * (logp - ref_logp))
    expected = {
        "kl": terms.sum(-1),
        "entropy": -torch.where(logp.isinf(), 0, logp.exp() * logp).sum(-1),
        "logprobs": logp.gather(1, targets[:, None])[:, 0],
        "ref_logprobs": ref_logp.gather(1, targets[:, None])[:, 0],
    }
    for name, values in expected.items():
        scores = getattr(found, name)
        torch.testing.assert_close(scores[mask].double(), values, atol=2e-6, rtol=1e-5)
        assert (scores[~mask] == 0).all()


# What is special in a pass with a loss beside the exact KL.
PASSES = {
    "one pass": {},
    "in two": {"in_two": True},
    "a frozen head": {"is_frozen": True},
    "a soft cap": {"softcap": 1.5},
    "logits": {"loss_from": "logits"},
    "sets": {"support": TokenSupport.from_lists(SETS)},
}


def loss_and_gradients(lm, inputs, **options):
    """What a pass returns with the loss ratio * entropy of each token, where the ratio is that to a reference."""
    scored = lm(**inputs, token_loss=lambda p, h, q: (p - q).exp() * h, **options)
    lm.zero_grad()
    scored.loss.backward()
    gradients = [x.grad.clone() for x in lm.parameters() if x.grad is not None]
    return scored, [scored.loss, scored.logprobs, scored.entropy, *gradients]


@pytest.mark.parametrize("case", PASSES)
def test_the_tiles_of_the_loss_serve_the_exact_kl(folders, monkeypatch, case):
    """Beside a token loss the reference costs one product with its head, in tiles smaller than those of the loss."""
    special = PASSES[case]
    lms = [load(folders, x, loss_from=special.get("loss_from", "linear")) for x in folders]
    for lm in lms:
        lm.head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(lm.head.weight)))
        lm.softcap = special.get("softcap")
    lm, reference = lms[0], Reference(lms[1])
    lm.head.requires_grad_("is_frozen" not in special)
    vocab, width = lm.head.weight.shape
    # A tile of the loss has 4 of the 8 rows, and one of the reference has one.
    monkeypatch.setattr(tiles, "CPU_WORKSPACE_MB", 2 * 5 * vocab * 4 / 2**20)
    if "in_two" in special:
        monkeypatch.setattr(tiles, "one_pass_rows", lambda *_: 0)

    given = batch()
    inputs = {"input_ids": given.input_ids, "mask": given.response_mask, "temperature": 0.7}
    inputs |= {"places": given.places(), "packed": None, "support": special.get("support")}
    expected = compared(lm, reference, support=inputs["support"])
    with Work() as alone:
        known = loss_and_gradients(lm, inputs, per_token=[expected.ref_logprobs])[1]
    with reference.states_for(inputs) as states, Work() as beside:
        found, values = loss_and_gradients(lm, inputs, reference=states)
    for name in ("ref_logprobs", "kl"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert len(values) == len(known) and all(map(torch.equal, values, known))
    if case not in ("logits", "sets"):
        assert beside.flop - alone.flop == 2 * 8 * width * vocab


@pytest.mark.parametrize("loss_from", ["linear", "logits"])
def test_the_reference_of_adapters_is_the_model_below_them(loss_from, folders):
    lm = load(folders, folders[0], loss_from=loss_from, lora_rank=2)
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    below = Reference(load(folders, folders[0], loss_from=loss_from))
    found, expected = (
        compared(Plain(lm), reference) for reference in (PolicyWithoutAdapters(Plain(lm)), below)
    )
    assert expected.kl.max() > 0.01
    for name in ("kl", "ref_logprobs"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


# Scales and caps under names of all kinds, a backbone that its model calls by another way, and more than a product.
GRIFFIN = {"lru_width": 16, "block_types": ("recurrent", "attention"), "num_hidden_layers": 2}
MAMBA = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4}
HEADS = [
    ("Cohere", {"logit_scale": 0.37}, "linear"),
    ("Granite", {"logits_scaling": 3.0}, "linear"),
    ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8}, "linear"),
    ("RecurrentGemma", {"logits_soft_cap": 3.0, **GRIFFIN}, "linear"),
    ("FalconH1", {"lm_head_multiplier": 0.3, "mamba_chunk_size": 4, **MAMBA}, "linear"),
    ("OPT", {"word_embed_proj_dim": 8, "ffn_dim": 16}, "linear"),
    ("ModernBertDecoder", {"cls_token_id": 1, "sep_token_id": 2}, "logits"),
]


def model_of(kind: str, seed: int = 0, **options):
    """A causal language model of transformers with large logits."""
    sizes = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 16, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    lm = transformers.AutoModelForCausalLM.from_config(config).eval()
    lm.get_output_embeddings().weight.data.normal_()
    return lm


@pytest.mark.parametrize("support", [None, TokenSupport.from_lists(SETS)], ids=["all", "sets"])
@pytest.mark.parametrize(("kind", "options", "loss_from"), HEADS, ids=[row[0] for row in HEADS])
@torch.no_grad()
def test_a_head_does_what_its_model_does_to_hidden_states(kind, options, loss_from, support):
    lms = [LanguageModel(model_of(kind, seed, **options), "linear") for seed in (0, 1)]
    assert lms[0].loss_from == loss_from
    found = compared(lms[0], Reference(lms[1]), support=support)
    pair = [logits_of(lm) for lm in lms]
    likeliest = pair[0].argmax(-1)
    assert_compared(found, pair, support)

    given = batch()
    inputs = {"input_ids": given.input_ids, "mask": given.response_mask, "temperature": 0.7}
    loss = lms[0](**inputs, **LOSS, support=support).loss
    torch.testing.assert_close(loss, -found.logprobs.sum())
    read = lms[0](**inputs, want_likeliest=True).likeliest
    assert torch.equal(read[given.response_mask], likeliest)


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("CausalLM", lambda name: load((name,), name)),
        ("CausalLM", lambda name: load((name,), name, loss_from="logits")),
        ("CausalLM", lambda name: load_to_sample(name, device=CPU, dtype=torch.float32)),
        ("SequenceClassification", RewardModel.from_pretrained),
    ],
    ids=["a policy", "from logits", "eval", "a reward model"],
)
def test_a_model_that_reads_later_tokens_is_refused(kind, read, tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    sizes = {
        "vocab_size": 100,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_labels=1)
    getattr(transformers, f"AutoModelFor{kind}").from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="expected a causal language model"):
        read(str(tmp_path))


def test_a_gpu_that_only_emulates_bf16_takes_fp32(monkeypatch):
    config = EngineConfig(dtype="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert engine.torch_dtype(config) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert engine.torch_dtype(config) == torch.bfloat16

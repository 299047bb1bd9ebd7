"""`fused-rl kl-report`: the worked example as it is printed, and two small models against their own enumeration."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fused_rl.trainers.commands import kl_report

TABLE = """\
as a loss  E on-policy  E[gradient] on-policy    E off-policy  E[gradient] off-policy
k1         0.306993     all zero                 0.146296      cosine with the KL's -0.953
k2         0.283445     the KL's                 0.320773      cosine with the KL's +0.983
k3         0.306993     that of KL(ref||policy)  0.387491      cosine with the KL's +0.896
k4         0.306993     the KL's                 0.306993      the KL's
rk3        0.306993     the KL's                 0.306993      the KL's
"""


def test_the_example_is_the_table(capsys):
    kl_report.main([])
    printed = capsys.readouterr().out
    assert TABLE in printed
    assert "KL(policy||ref) = 0.306993, gradient [-0.016429, -0.138725, 0.193046, -0.104465, 0.066574]" in printed
    assert "KL(ref||policy) = 0.361676, gradient [0.057778, -0.161311, 0.204647, -0.194707, 0.093593]" in printed


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three small models with one tokenizer, and prompts: (folder of the models, prompts file)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("kl")
    words = ["<eos>", "<unk>", *"abcdefgh"]
    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", unk_token="<unk>")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), **shape, eos_token_id=0, bos_token_id=None, initializer_range=1.0)
    for seed, name in enumerate(("policy", "reference", "behaviour")):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("a b", "c", "d e f", "g h a b")))
    return folder, prompts


def config_of(models, **changes):
    folder, prompts = models
    options = {"model": str(folder / "policy"), "reference": str(folder / "reference"), "prompts": str(prompts)}
    options |= {"samples": 64, "max_new_tokens": 6, "batch_size": 32}
    return kl_report.KLReportConfig(**{**options, **changes})


def test_the_estimates_of_two_models_agree_with_the_exact_kl(models):
    """Unbiased ones within five standard errors of the exact KL at the same positions; k1 off-policy is not."""
    values, lengths = kl_report.collect(config_of(models))
    count = len(values["exact"])
    assert count == lengths.sum() and len(lengths) == 4 * 64

    def standard_errors(values, name):
        gap = values[name].double() - values["exact"].double()
        return (gap.mean() / (gap.std() / count**0.5)).abs().item()

    assert (values["exact"] >= 0).all() and values["exact"].mean() > 0.1
    for name in ("k1", "k3", "k4", "rk3"):
        assert standard_errors(values, name) < 5, name
    torch.testing.assert_close(values["rk3"], values["k3"])  # on-policy the ratio is 1
    folder, _ = models
    # Flatter than at 1, where a few ratios of thousands are the whole mean and no standard error says so.
    values, _ = kl_report.collect(config_of(models, behaviour=str(folder / "behaviour"), temperature=3.0))
    count = len(values["exact"])
    for name in ("k4", "rk3"):
        assert standard_errors(values, name) < 5, name
    assert standard_errors(values, "k1") > 5


def test_the_report_of_two_models_prints_every_estimator(models, capsys):
    folder, prompts = models
    argv = ["--model", str(folder / "policy"), "--reference", str(folder / "policy"), "--prompts", str(prompts)]
    kl_report.main([*argv, "--samples", "2", "--max_new_tokens", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["exact", *kl_report.ESTIMATORS]
    assert lines[3].split()[1] == "0.000000", "a model has no KL to itself"


def test_bad_arguments_say_what_is_missing(models, tmp_path, capsys):
    folder, prompts = models
    with pytest.raises(SystemExit):
        kl_report.main(["--model", str(folder / "policy")])
    assert "missing: --reference, --prompts" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="reference=.*nowhere is neither there, nor can it be"):
        argv = ["--model", str(folder / "policy"), "--prompts", str(prompts)]
        kl_report.main([*argv, "--reference", str(tmp_path / "nowhere")])


def test_a_model_that_a_run_would_refuse_is_refused(models, tmp_path):
    """Weights that transformers would draw at random, and more tokens than positions."""
    folder, prompts = models
    argv = ["--model", str(folder / "policy"), "--prompts", str(prompts)]
    lacking = shutil.copytree(folder / "policy", tmp_path / "lacking")
    kept = load_file(lacking / "model.safetensors")
    del kept["model.norm.weight"]
    save_file(kept, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit, match="reference='.*lacking' has 1 missing weights .*: model.norm.weight"):
        kl_report.main([*argv, "--reference", str(lacking)])
    with pytest.raises(
        SystemExit, match=r"line 1: up to \d+ tokens, but the model has \d+ positions; lower max_new_tokens"
    ):
        kl_report.main([*argv, "--reference", str(folder / "policy"), "--max_new_tokens", "100000"])

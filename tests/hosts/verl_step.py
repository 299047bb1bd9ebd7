"""One micro-batch through verl's FSDP engine and PPO loss, on a tiny Qwen2 that no process group shards."""

import functools
import types

import torch
import verl
import verl.utils.torch_functional as verl_F
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.models.transformers import dense_common
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

K3 = ("low_var_kl", "k3", "low_var_kl+", "k3+")
KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "kl+", "k1+", "abs+", "mse+", "k2+", *K3)
VOCAB = 96
PROMPTS, RESPONSES = (2, 2, 3), (5, 3, 6)
NOT_LOSS = {"remove_padding": True, "entropy": True, "temperature": 0.8, "fused_kernels": False}


def tiny_model():
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
    return Qwen2ForCausalLM(config)


def jagged(tensors):
    return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)


def batch(temperature, remove_padding, entropy, fused_kernels):
    generator = torch.Generator().manual_seed(1)
    lengths = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    ids = [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]

    def per_response(mean, scale):
        return jagged(mean + scale * torch.randn(n, generator=generator) for n in RESPONSES)

    data = {
        "input_ids": jagged(ids),
        "position_ids": jagged(torch.arange(n) for n in lengths),
        "prompts": jagged(row[:n] for row, n in zip(ids, PROMPTS, strict=True)),
        "responses": jagged(row[n:] for row, n in zip(ids, PROMPTS, strict=True)),
        "old_log_probs": per_response(-4.6, 0.1),
        "ref_log_prob": per_response(-4.6, 0.3),
        "advantages": per_response(0.0, 1.0),
        "response_mask": jagged(torch.ones(n) for n in RESPONSES),
        # verl 0.7 looks these up.
        "loss_mask": jagged(torch.ones(n) for n in lengths),
        "attention_mask": jagged(torch.ones(n) for n in lengths),
    }
    # verl 0.7's loss reads what is per response as padded already.
    if verl.__version__.startswith("0.7."):
        for name in ("old_log_probs", "ref_log_prob", "advantages", "response_mask"):
            data[name] = data[name].to_padded_tensor(0.0)
    options = {
        "use_remove_padding": remove_padding,
        "calculate_entropy": entropy,
        "use_fused_kernels": fused_kernels,
        "temperature": temperature,
        "dp_size": 1,
        "batch_num_tokens": sum(RESPONSES),
        "global_batch_size": len(RESPONSES),
    }
    return tensordict_utils.get_tensordict(data, non_tensor_dict=options)


def engine(model, options):
    """The engine without its constructor, which wants a process group; what follows is what that one sets."""
    self = transformer_impl.FSDPEngineWithLMHead.__new__(transformer_impl.FSDPEngineWithLMHead)
    self.engine_config = FSDPEngineConfig(strategy="fsdp", **options)
    chunked = self.engine_config.entropy_from_logits_with_chunking
    entropy = verl_F.entropy_from_logits_with_chunking if chunked else verl_F.entropy_from_logits
    compiled = options.get("use_torch_compile", False)
    self.compute_entropy_from_logits = torch.compile(entropy, dynamic=True) if compiled else entropy
    self.module = model
    self.pad_to_length = self.use_ulysses_sp = False
    self.get_data_parallel_group = lambda: None
    return self


def step(
    monkeypatch, loss=None, engine_options=None, autocast=torch.float32, backend="torch", **options
):
    """Loss, metrics, {parameter: gradient} of one micro-batch under the verl that is in force."""
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cpu")
    options = NOT_LOSS | options
    model = tiny_model()
    if options["fused_kernels"]:
        model.forward = types.MethodType(
            getattr(dense_common, f"forward_with_{backend}_backend"), model
        )
    config = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
        "entropy_coeff": 0.01,
    }
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **(config | (loss or {}))
    )
    runner = engine(model, engine_options or {})
    runner._autocast_dtype = autocast
    if verl.__version__.startswith("0.7."):
        # Its autocast is bf16 in any case.
        given = functools.partial(torch.autocast, "cpu", autocast, autocast != torch.float32)
        monkeypatch.setattr(transformer_impl.torch, "autocast", lambda *_, **__: given())
    torch.manual_seed(0)  # clip_cov draws the tokens that it leaves out
    value, output = runner.forward_step(
        batch(**options), functools.partial(ppo_loss, config=config), False
    )
    value.backward()
    metrics = {name: _number(metric) for name, metric in output["metrics"].items()}
    return value.detach(), metrics, {name: p.grad for name, p in model.named_parameters()}


def _number(metric):
    value = metric.aggregate() if hasattr(metric, "aggregate") else metric
    return float(value)

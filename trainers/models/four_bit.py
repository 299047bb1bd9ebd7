"""Weights of 4 bits under adapters (QLoRA, arXiv:2305.14314): NF4 with double quantisation, by bitsandbytes.

Left out: 8 bits, other formats, paged optimizers; reward models and critics, which are saved whole.
"""

from typing import Any

import torch

from ..base.text import InputError, check_installed
from ..options import RunConfig


def check_options(config: RunConfig, *, adapters: bool) -> None:
    """Refuse options that weights of 4 bits cannot have."""
    if not adapters:
        raise InputError(
            "load_in_4bit: weights of 4 bits are not trained, only adapters to them; give --lora_rank"
        )
    if config.zero_stage == 3:
        raise InputError(
            "load_in_4bit: ZeRO 3 would split the weights, and 4 bits cannot be split; use zero_stage 2"
        )
    # Merging would round the sum to 4 bits again, or write weights that were never those that were
    # trained on.
    if config.save_merged:
        raise InputError(
            "save_merged: weights of 4 bits cannot be merged; save the adapters, and merge them later"
        )


def quantized(
    dtype: torch.dtype, device: torch.device, option: str = "load_in_4bit"
) -> dict[str, object]:
    """Return the arguments of `from_pretrained` for weights of 4 bits, which an option requests."""
    check_installed(option, "bitsandbytes", "'fused-rl[bnb]'")
    from transformers import BitsAndBytesConfig

    # NF4, double quantisation and products in the dtype of the run, as in the paper, section 3.
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    # Weights are quantised as they reach their device, so reading has to know which it is.
    return {"quantization_config": quantization, "device_map": {"": device}}


def keep_trainable(lm: Any) -> None:
    """Keep the layout of 4-bit weights, for a CPU's other one has no gradient, and make checkpoints restore them."""
    import bitsandbytes

    for module in lm.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
            module.register_load_state_dict_pre_hook(_restore)


def _restore(module, state: dict, prefix: str, *_) -> None:
    """Restore the scales from a state: bitsandbytes writes them there, and does not read them."""
    from bitsandbytes.functional import QuantState

    # Left in the state they would be unexpected keys.
    names = [name for name in state if name.startswith(f"{prefix}weight.")]
    scales = {name.removeprefix(f"{prefix}weight."): state.pop(name) for name in names}
    module.weight.quant_state = QuantState.from_dict(scales, device=module.weight.device)
    module.quant_state = module.weight.quant_state

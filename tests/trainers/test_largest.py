"""The largest tensor of a whole run of every trainer: none holds the logits of all tokens of a micro-batch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_rl.ops import tiles
from fused_rl.trainers.policy import teacher
from tests.trainers import divided, figures, tiny

VOCAB = 4096
# Micro-batches have 100 tokens or more. The weights, flattened by ZeRO, are as large as the logits of 40.
MOST = 64 * VOCAB
BUCKET = 500_000_000  # elements that DeepSpeed sets aside for gradients, whatever the model


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operator returns, forward and backward."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.what = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(output):
            elements = value.numel() if isinstance(value, torch.Tensor) else 0
            if self.elements < elements != BUCKET:
                self.elements = elements
                self.what = f"{func} {tuple(value.shape)}"
        return output


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model with a large vocabulary beside its width, and rows of every form."""
    import transformers

    files = divided.make_files(tmp_path_factory.mktemp("largest"))
    model = tiny.model_folder(files["model"])
    config = transformers.AutoConfig.from_pretrained(model)
    config.update({"vocab_size": VOCAB, "tie_word_embeddings": False})
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(model)
    return files | {"teacher": model, "reward": tiny.reward_folder(files["reward"], model)}


def largest(name: str, files, output, **options) -> Largest:
    given = {"steps": 1, "micro_batch_size": 16}
    if name in ("grpo", "ppo", "distill"):
        given |= {"sampler": None, "eval_size": 0, "temperature": 0.7, "max_new_tokens": 16}
    config = divided.config_of(name, files, output, **given | options)
    with figures.drawn(), Largest() as found:
        divided.module_of(name).train(config)
    return found


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", divided.OPTIONS)
def test_no_tensor_has_the_logits_of_all_tokens(name, zero_stage, files, tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "CPU_WORKSPACE_MB", 8 * VOCAB * 4 / 2**20)
    monkeypatch.setattr(teacher, "ROWS", 8)
    found = largest(name, files, tmp_path / "run", zero_stage=zero_stage)
    assert found.elements <= MOST, found.what

"""A policy of a few thousand weights, and servers that are to sample it, without a run around them."""

import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from fused_rl.trainers.grpo import GRPOConfig
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers import inference
from fused_rl.trainers.servers.sampler import ServerSampler, logprobs_of
from fused_rl.trainers.servers.verify import Expected
from tests.trainers import tiny

SAMPLING = Sampling(0.9, 1, ())
PROMPT = [1, 70, 71]
DRAWN = Sampling(0.7, 5, (3, 260))
QUICK = {"seconds": 0, "timeout": 20, "between": 0, "patience": 0}  # of a connection that waits for nobody


def model_of(folder: str):
    """transformers' own."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(lm, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(T,) fp64 of a response's tokens."""
    logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


class Policy:
    """What a trainer has of its policy: the model as an engine holds it, and how it is written."""

    def __init__(self, folder: str):
        self.folder = folder
        self.module = tiny.load_lm(GRPOConfig(model=folder, dataset="", output_dir=""), trainable=False)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.left_out: tuple[str, ...] = ()

    def __call__(self, *args, **options):
        return self.module(*args, **options)

    def change(self, seed: int) -> None:
        """All of its weights, by a tenth of their size."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.1 * noise * parameter.abs().mean()

    def save(self, folder: Path) -> None:
        """As `Policy.publish` hands it over; without the tensors `left_out`."""
        self.module.base.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        kept = {name: value for name, value in tensors.items() if name not in self.left_out}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    def expected(self, **other) -> Expected:
        """What servers are held to."""
        known = {"tokenizer": self.tokenizer, "vocab": self.module.base.config.vocab_size, "longest": 64}
        known |= {"exact": True, "sampling": SAMPLING, "score": self.score}
        return Expected(**known | other)

    def score(self, *args):
        return logprobs_of(self, *args)


def hurry(monkeypatch) -> None:
    """No server is waited for."""
    monkeypatch.setattr(inference, "STARTS_WITHIN", 0.0)


def sampler_of(fakes, policy: Policy, folder: Path, **other) -> ServerSampler:
    """Of these servers, with its weights in `folder`, a run's, as `published`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sampler = ServerSampler([fake.url for fake in fakes], folder / "published", policy.expected(**other))
    for server in sampler.servers:
        server.connection.between = server.connection.patience = 0.0
    return sampler

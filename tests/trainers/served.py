"""A policy of a few thousand weights, and servers that sample it, without a run around them."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fused_rl.trainers.grpo import GRPOConfig
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.inference import Http, Server
from fused_rl.trainers.servers.probe import TEXT, Probe
from fused_rl.trainers.servers.sampler import ServerSampler, connect
from tests.lazy import transformers
from tests.trainers import tiny


def connected(fake, *, timeout: float = 20.0, **options) -> Server:
    """Return a server that waits for nobody; it may be asleep."""
    http = Http(timeout, **options)
    http.pause = 0.0
    return connect(http, fake.url, sleeps=True)


def sampled(server: Server, prompt: list[int], sampling: Sampling, *seeds: int | None):
    """Return a response for each seed."""
    return server.http.run(server.sample(prompt, sampling, seed) for seed in seeds)


@torch.no_grad()
def logprobs(lm, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(T,) fp64 nats of a response's tokens."""
    logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


class Policy:
    """The policy as a trainer has it: the model as an engine holds it, and how it is saved."""

    def __init__(self, folder: str):
        self.folder = folder
        self.module = tiny.load_lm(
            GRPOConfig(model=folder, dataset="", output_dir=""), trainable=False
        )
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.left_out: tuple[str, ...] = ()

    def zero_optimization_stage(self) -> int:
        """Return that of the engine."""
        return 2

    def __call__(self, *args, **options):
        return self.module(*args, **options)

    def change(self, seed: int) -> None:
        """Change all weights by a tenth of their size."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.1 * noise * parameter.abs().mean()

    def save(self, folder: Path) -> None:
        """Save it, without the tensors `left_out`."""
        self.module.base.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        kept = {name: value for name, value in tensors.items() if name not in self.left_out}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    def probe(self, sampling: Sampling, exact: bool = True) -> Probe:
        """Return the probe of servers that sample this policy."""
        ids = self.tokenizer.encode(TEXT, add_special_tokens=False)
        return Probe(self, ids, exact, sampling)


def sampler_of(
    urls, policy: Policy, folder: Path, *, sampling=None, exact=True, longest=64, sleeps=False
) -> ServerSampler:
    """Return a sampler of these servers, with its weights in `folder`, a run's, as `published`."""
    http = Http(20.0)
    http.pause = 0.0
    folder.mkdir(parents=True, exist_ok=True)
    probe = policy.probe(sampling or Sampling(0.9, 1, ()), exact)
    return ServerSampler(urls, http, folder / "published", probe, longest, sleeps=sleeps)

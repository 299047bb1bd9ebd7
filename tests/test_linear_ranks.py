"""The ops of a head, also with kept sets, in the forward of a module whose weights are sharded: ZeRO and FSDP2."""

import itertools

import pytest
import torch

import fused_rl
from fused_rl import TokenSupport, reference
from tests.distributed import ragged_batches, run_distributed
from tests.heads import MORE_TOKENS, token_loss


def sets_of(targets):
    """Of each target four ids, of every third all."""
    near = ((targets[..., None] + 17 * torch.arange(4)) % 131).flatten(0, 1)
    return TokenSupport.from_lists([row if i % 3 else [] for i, row in enumerate(near.tolist())])


class Policy(torch.nn.Module):
    """Embedding, one layer and the head, with both ops in the forward of the module that is sharded."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(131, 16)
        self.layer = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 131, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, module, tokens, advantages):
        hidden = self.layer(self.embed(tokens[:, :-1])).tanh()
        options = {
            "bias": self.head.bias,
            "mask": tokens[:, 1:] % 3 > 0,
            "workspace_mb": MORE_TOKENS[1],
        }
        weights = torch.stack([advantages, advantages.square()], -1)
        args = hidden, self.head.weight, tokens[:, 1:]
        loss = module.linear_token_loss(*args, token_loss, advantages, weights, **options).loss
        logprobs, entropy, _ = module.linear_token_logprobs(*args, **options)
        del options["workspace_mb"]
        kept = module.linear_token_logprobs(
            *args, **options, support=sets_of(tokens[:, 1:])
        ).logprobs
        return loss - (logprobs * advantages + 0.1 * entropy.square() + 0.2 * kept).sum()


BATCHES = ragged_batches([[12, 7, 9], [5, 12, 8]])


def plain_training(tied):
    """Two steps on the whole batch with the reference, in fp64: in fp32 it rounds more than the ops do."""
    model = Policy(tied).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        for tokens, advantages in itertools.chain(*BATCHES):
            (model(reference, tokens, advantages.double()) / 50).backward()
        optimizer.step()
    return {name: p.detach().float() for name, p in model.named_parameters()}


def fsdp_training(rank, world, cases):
    from torch.distributed.fsdp import fully_shard

    trained = []
    for head_alone, tied in cases:
        model = Policy(tied)
        if head_alone:  # its own group: inside the root's forward the weight is still a shard
            fully_shard(model.head)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            for batch in BATCHES[rank]:
                (model(fused_rl, *batch) / 50 * world).backward()
            optimizer.step()
        trained.append(
            {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}
        )
    return trained


def assert_trained_alike(results, cases):
    start = dict(Policy(False).named_parameters())
    for rank in results:
        for (_, tied), trained in zip(cases, rank, strict=True):
            expected = plain_training(tied)
            assert trained.keys() == expected.keys()
            for name, p in expected.items():
                assert (p - start[name]).abs().max() > 1e-2
                torch.testing.assert_close(
                    torch.from_numpy(trained[name]), p, rtol=0, atol=3e-6, msg=name
                )


@pytest.mark.usefixtures("cpu")
@pytest.mark.slow
def test_fsdp():
    """FSDP2 over two processes, the head in the root's group and in one of its own."""
    cases = [(True, False), (False, False), (False, True)]  # a head of its own group, tied
    assert_trained_alike(run_distributed(fsdp_training, 2, cases), cases)

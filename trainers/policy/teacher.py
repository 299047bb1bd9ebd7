"""The teachers of a distillation: frozen models in the process, or vLLM servers that tell their K likeliest tokens."""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

import fused_rl
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.text import InputError, in_a_line
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.batch import Batch, on_device
from fused_rl.trainers.models import four_bit, language_model
from fused_rl.trainers.models.packing import Costs, arrange, pack_whole, packing_costs, price
from fused_rl.trainers.policy.policy import Policy
from fused_rl.trainers.policy.setup import http_of
from fused_rl.trainers.rollouts.types import shortened
from fused_rl.trainers.servers.inference import Http
from fused_rl.trainers.servers.probe import TEXT

ROWS = 256  # whose logits exist at once to find the likeliest token
COMPARED = 8  # in training the likeliest tokens are compared at every eighth token of a response


class Teacher(NamedTuple):
    """A frozen `LanguageModel`, and weight (V, H) and bias (V,) or None of its head, whole under ZeRO 3 too."""

    model: Any
    head: tuple[torch.Tensor, torch.Tensor | None]
    packs: bool
    """True if its rows may hold several sequences."""

    @torch.no_grad()
    def read(self, inputs: dict, part: Batch) -> tuple[torch.Tensor, ...]:
        """Return the hidden states (N, H) that predict the part's tokens that count."""
        return (self.model(**inputs, under_head=lambda hidden, _: hidden),)

    def compare(self, config, student, own, some, states) -> dict[str, torch.Tensor]:
        """Return sums over N tokens of hidden states `own`: of the divergence, and of metrics of those at `some`."""
        weight, bias = _first(len(self.head[0]), student.head.weight, student.head.bias)
        agrees = _likeliest(own[some], weight, bias) == _likeliest(states[some], *self.head)
        operands, biases = (
            (own, weight, states, self.head[0]),
            {"bias": bias, "ref_bias": self.head[1]},
        )
        options = {"temperature": config.distill_temperature, "softcap": student.softcap} | biases
        options["logits_dtype"] = student.head_dtype
        options |= {"direction": config.direction, "jsd_beta": config.jsd_beta}
        kl = fused_rl.linear_token_kl(*operands, **options)
        return {"kl": kl.sum(), "agrees": agrees.sum(), "mass": torch.ones_like(agrees).sum()}


class ServedTeacher(NamedTuple):
    """The model of a vLLM server, which tells the `count` likeliest tokens at every place of a sequence."""

    http: Http
    url: str
    name: str
    count: int
    packs: bool = True

    def read(self, inputs: dict, part: Batch) -> tuple[torch.Tensor, ...]:
        """Return the likeliest tokens at each of the part's N tokens that count, (N, K), and their log-probabilities"""
        ends = (part.prompt_lengths + part.response_lengths).tolist()
        sequences = [ids[:end] for ids, end in zip(part.input_ids.tolist(), ends, strict=True)]
        body = {
            "model": self.name,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self.count,
        }
        url = f"{self.url}/v1/completions"
        answers = self.http.run(
            self.http.call("POST", url, body | {"prompt": ids}) for ids in sequences
        )
        try:
            places = [answer["choices"][0]["prompt_logprobs"] for answer in answers]
            rows, columns = part.response_tokens()
            told = [
                places[i][j + 1] for i, j in zip(rows.tolist(), columns.tolist(), strict=True)
            ]  # of token j + 1
            # Beside the K likeliest it tells the token that is there.
            ranked = [
                sorted(at.items(), key=lambda token: token[1]["rank"])[: self.count] for at in told
            ]
            ids = torch.tensor([[int(token) for token, _ in at] for at in ranked]).view(
                -1, self.count
            )
            logprobs = torch.tensor([[about["logprob"] for _, about in at] for at in ranked]).view(
                ids.shape
            )
        except Exception as error:
            remedy = (
                f"start vLLM with --max-logprobs {self.count} or more, or lower --teacher_top_k"
            )
            came = f"{in_a_line(error)}: {shortened(answers[0])}"
            raise InputError(
                f"teacher {self.url}: an answer of an unknown form ({came}); {remedy}"
            ) from error
        return ids.to(part.input_ids.device), logprobs.to(part.input_ids.device)

    def compare(self, config, student, own, some, ids, ref_logprobs) -> dict[str, torch.Tensor]:
        """Return the sums that `Teacher.compare` does; all tokens but the K are one outcome."""
        head = student.head
        options = {
            "bias": head.bias,
            "softcap": student.softcap,
            "logits_dtype": student.head_dtype,
        }
        logprobs = fused_rl.linear_token_logprobs(own, head.weight, ids, **options).logprobs
        kl = fused_rl.topk_kl(logprobs, ref_logprobs, direction=config.direction)
        agrees = _likeliest(own[some], head.weight, head.bias) == ids[some, 0]
        return {"kl": kl.sum(), "agrees": agrees.sum(), "mass": ref_logprobs[some].exp().sum()}


def load_teachers(config, policy: Policy) -> dict[str, Teacher | ServedTeacher]:
    """Return the teachers by name, "" for a single one; refuse one of other tokens than the student's."""
    named = config.teachers.items()
    return {
        name: (_served if is_url(model) else _loaded)(config, model, policy)
        for name, model in named
    }


def is_url(teacher: str) -> bool:
    """Return True for a teacher behind a server."""
    return teacher.startswith(("http://", "https://"))


def _loaded(config, name: str, policy: Policy) -> Teacher:
    tokens = set(policy.tokenizer.get_vocab().items())
    others = set(encode.load_tokenizer(name).get_vocab().items())
    if differing := sorted({token for token, _ in tokens ^ others}):
        what = f"teacher={name} has {len(others)} tokens and model={config.model} {len(tokens)}"
        some = ", ".join(map(repr, differing[:4]))
        raise InputError(
            f"{what}, and {len(differing)} differ: {some}; choose a teacher with the student's tokenizer"
        )
    reading = {
        "dtype": engine.torch_dtype(config),
        "attn_implementation": config.attn_implementation,
    }
    if config.teacher_in_4bit:
        reading |= four_bit.quantized(reading["dtype"], policy.device, "teacher_in_4bit")
    lm = language_model.load_to_sample(name, device=policy.device, **reading).requires_grad_(False)
    teacher = language_model.LanguageModel(lm, "linear")
    student = policy.model.module
    if teacher.softcap != student.softcap:
        what = f"caps its logits at {teacher.softcap}, and the student at {student.softcap}"
        raise InputError(f"teacher={name} {what}; choose a teacher of the student's family")

    rows = {"option": "packing", "otherwise": f"sequences are padded for teacher={name}"}
    packs = (
        packing_costs(lm, config.max_prompt_length + config.max_new_tokens, config.packing, **rows)
        is not None
    )

    # One of the heads may be padded to more rows. ZeRO 3 partitions the parameters, and these tensors stay whole.
    vocab = student.base.config.get_text_config().vocab_size
    bias = None if teacher.head.bias is None else teacher.head.bias.detach()
    head = _first(vocab, teacher.head.weight.detach(), bias)
    return Teacher(engine.initialize_frozen(teacher, config), head, packs)


def _served(config, url: str, policy: Policy) -> ServedTeacher:
    url, http = url.rstrip("/"), http_of(config)
    (models,) = http.run([http.call("GET", f"{url}/v1/models", tries=float("inf"))])
    name = models["data"][0]["id"]
    body = {"model": name, "prompt": TEXT, "add_special_tokens": False}
    (answer,) = http.run([http.call("POST", f"{url}/tokenize", body)])
    if answer["tokens"] != policy.tokenizer.encode(TEXT, add_special_tokens=False):
        raise InputError(
            f"teacher={url} has other tokens than model={config.model}; choose a model with its tokenizer"
        )
    return ServedTeacher(http, url, name, config.teacher_top_k)


def corrected(
    policy: Policy, teachers: list, part: Batch, chosen: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return sums over the tokens of a micro-batch: of the divergence from the teachers, in nats, and of metrics.

    `chosen` (b,) int64 says which of the `teachers`, as `load_teachers` returns them, each sequence has.
    """
    costs = policy.costs if all(teacher.packs for teacher in teachers) else None
    row, column = part.response_tokens()
    every = COMPARED if torch.is_grad_enabled() else 1
    some = (column + 1 - part.prompt_lengths[row]) % every == 0

    # Each teacher reads its own sequences. One that has none here reads another, as ZeRO 3 needs all ranks to read.
    inputs = inputs_of(part, costs)
    tokens, read = [], []
    for number, teacher in enumerate(teachers):
        tokens.append((chosen[row] == number).nonzero()[:, 0])
        own_part, own_inputs = part, inputs
        if len(teachers) > 1:
            mine = (chosen == number).nonzero()[:, 0]
            own_part = part.rows(mine if len(mine) else torch.tensor([0]))
            own_inputs = inputs_of(own_part, costs)
        read.append([values[: len(tokens[-1])] for values in teacher.read(own_inputs, own_part)])

    def meet(hidden, student):
        """In the student's forward pass, where its head is whole."""
        sums = []
        for teacher, at, values in zip(teachers, tokens, read, strict=True):
            own = hidden[on_device(at, policy.device)] if len(teachers) > 1 else hidden
            compared = on_device(some[at].nonzero()[:, 0], policy.device)
            sums.append(teacher.compare(policy.config, student, own, compared, *values))
        return {name: sum(found[name] for found in sums) for name in sums[0]}

    return policy.model(**inputs, under_head=meet) | {
        "compared": some.sum().to(policy.device, non_blocking=True)
    }


def inputs_of(part: Batch, costs: Costs | None) -> dict[str, Any]:
    """Return the inputs of student and teacher, packed where that is cheaper."""
    inputs = {"input_ids": part.input_ids, "mask": part.response_mask, "places": part.places()}
    if costs is None:
        return inputs
    lengths = (part.prompt_lengths + (part.response_lengths - 1).clamp(min=0)).tolist()
    rows = arrange(lengths, costs)
    is_cheaper = price(lengths, rows, costs) < costs.causal_flop(*part.input_ids.shape)
    return inputs | {"packed": pack_whole(part, rows) if is_cheaper else None}


def _first(vocab: int, weight, bias):
    """Return the first rows of a head; itself where it has no more, as the gradient of a slice is a copy."""
    return (
        (weight, bias)
        if len(weight) <= vocab
        else (weight[:vocab], None if bias is None else bias[:vocab])
    )


@torch.no_grad()
def _likeliest(hidden, weight, bias) -> torch.Tensor:
    """Return the likeliest token of each hidden state, (n,)."""
    return torch.cat([linear(rows, weight, bias).argmax(-1) for rows in hidden.split(ROWS)])

"""The teachers of a distillation: frozen models in this process, or vLLM servers that report their likeliest tokens."""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.nn.functional import linear

import fused_rl
from fused_rl.ops.kl import Direction

from ..base import engine
from ..base.screen import print_rank0
from ..base.text import InputError
from ..data.batch import Batch, on_device
from ..models import language_model
from ..models.packing import Costs, input_lengths, packing_costs, unpad
from ..models.reward_model import check_reads_policy
from ..rollouts.types import one_line
from .policy import Policy
from .setup import http_of

if TYPE_CHECKING:
    from ..servers.inference import Http

ROWS = 256  # the rows whose logits exist at once while the likeliest tokens are found
COMPARED = 8  # in training the likeliest tokens are compared at every eighth token of a response


class TeacherOptions(Protocol):
    """The options of teachers, which distill.py declares; all others are read from the policy's."""

    teacher_in_4bit: bool
    teacher_top_k: int
    direction: Direction
    jsd_beta: float
    distill_temperature: float
    packing: bool | None

    @property
    def teachers(self) -> dict[str, str]: ...


class Comparison(NamedTuple):
    """What a student and a teacher have in common at N tokens, n of which are compared by their likeliest tokens."""

    kl: torch.Tensor
    """(N,) the divergence in nats, differentiable."""
    agrees: torch.Tensor
    """(n,) bool: student and teacher have the same likeliest token."""
    mass: torch.Tensor
    """(n,) the teacher's probability that the comparison uses."""


class Teacher(NamedTuple):
    """A frozen model in this process."""

    model: Any
    """A `LanguageModel`, or under ZeRO 3 an engine around it."""
    head: tuple[torch.Tensor, torch.Tensor | None]
    """Weight (V, H) and bias (V,) or None of its LM head, which are whole under ZeRO 3, too."""
    reads_packed: bool
    """True if one row of its input may hold several sequences."""

    @torch.no_grad()
    def read(self, inputs: dict, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the hidden states (N, H) that predict the N tokens of the batch that count."""
        # Hidden states are kept instead of logits, which are V / H times as large.
        return (self.model(**inputs, under_head=lambda hidden, _: hidden),)

    def compare(
        self, config: TeacherOptions, student, student_hidden, compared, states
    ) -> Comparison:
        """Compare student and teacher at N tokens.

        Args:
            config: the options, such as `direction` and `distill_temperature`.
            student: the student's `LanguageModel`, whose head is whole here.
            student_hidden: (N, H) its hidden states.
            compared: (n,) int64, the indices of the tokens at which the likeliest tokens are compared.
            states: (N, H') hidden states of the teacher, from `read`.
        """
        # Heads may be padded to different numbers of rows; the rows that both have are compared.
        weight, bias = _first(len(self.head[0]), student.head.weight, student.head.bias)
        likeliest = _likeliest(student_hidden[compared], weight, bias)
        agrees = likeliest == _likeliest(states[compared], *self.head)
        # The op works in tiles of tokens, so the logits of neither model exist as a whole.
        options = student.head_options(config.distill_temperature) | {"bias": bias}
        kl = fused_rl.linear_token_kl(
            student_hidden,
            weight,
            states,
            self.head[0],
            ref_bias=self.head[1],
            direction=config.direction,
            jsd_beta=config.jsd_beta,
            **options,
        )
        return Comparison(kl, agrees, torch.ones_like(agrees))


class ServedTeacher(NamedTuple):
    """The model of a vLLM server, which reports its `count` likeliest tokens at every position of a sequence."""

    http: "Http"
    url: str
    name: str
    """The server's name for the model."""
    count: int
    """K, the number of likeliest tokens."""
    reads_packed: bool = True

    def read(self, inputs: dict, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the teacher's K likeliest tokens at each of the N tokens that count, and their log-probabilities.

        Returns:
            (N, K) int64 and (N, K) fp32 in nats, the likeliest token first.
        """
        # A server would read pads as text, so the sequences are sent without them.
        ends = (batch.prompt_lengths + batch.response_lengths).tolist()
        padded = batch.input_ids.tolist()
        sequences = [ids[:end] for ids, end in zip(padded, ends, strict=True)]
        # A server generates at least one token, which is ignored here.
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
        reported = [answer["choices"][0]["prompt_logprobs"] for answer in answers]
        rows, columns = batch.response_tokens()
        ids = []
        logprobs = []
        for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
            # Column j predicts token j + 1. The server also reports the token that stands there, if it is not one of
            # the K likeliest.
            tokens = sorted(reported[i][j + 1].items(), key=lambda token: token[1]["rank"])
            ids.append([int(token) for token, _ in tokens[: self.count]])
            logprobs.append([about["logprob"] for _, about in tokens[: self.count]])
        shape = (len(rows), self.count)
        device = batch.input_ids.device
        return torch.tensor(ids).view(shape).to(device), torch.tensor(logprobs).view(shape).to(
            device
        )

    def compare(
        self, config: TeacherOptions, student, student_hidden, compared, ids, ref_logprobs
    ) -> Comparison:
        """Return what `Teacher.compare` returns, with all tokens but the teacher's K likeliest as one outcome.

        `ids` and `ref_logprobs` (N, K) are from `read`; `mass` is the probability of the K tokens.
        """
        weight, bias = student.head.weight, student.head.bias
        options = student.head_options(1.0)
        scored = fused_rl.linear_token_logprobs(student_hidden, weight, ids, **options)
        # A sum over the K tokens alone could be negative, so all other tokens together are one more outcome.
        kl = fused_rl.topk_kl(scored.logprobs, ref_logprobs, direction=config.direction)
        agrees = _likeliest(student_hidden[compared], weight, bias) == ids[compared, 0]
        return Comparison(kl, agrees, ref_logprobs[compared].exp())


def load_teachers(config: TeacherOptions, policy: Policy) -> dict[str, Teacher | ServedTeacher]:
    """Return the teachers by name, which is "" if there is only one.

    Raises:
        InputError: a teacher has another tokenizer or logit cap than the student, or its server is not a vLLM server.
    """
    named = config.teachers.items()
    return {
        name: (_connect_teacher if is_url(model) else _load_teacher)(config, model, policy)
        for name, model in named
    }


def is_url(teacher: str) -> bool:
    """Return True if the teacher is the URL of a server."""
    return teacher.startswith(("http://", "https://"))


def _load_teacher(config: TeacherOptions, name: str, policy: Policy) -> Teacher:
    """Load a teacher into this process."""
    check_reads_policy("teacher", name, policy.tokenizer, policy.config.model)
    reading = {
        "dtype": engine.torch_dtype(policy.config),
        "attn_implementation": policy.config.attn_implementation,
        "held": policy.config,
    }
    if config.teacher_in_4bit:
        from ..models import four_bit

        reading |= four_bit.quantized(reading["dtype"], policy.device, "teacher_in_4bit")
    lm = language_model.load_to_sample(name, device=policy.device, **reading).requires_grad_(False)
    teacher = language_model.LanguageModel(lm, "linear")
    student = policy.model.module
    for option, model in ((f"teacher={name}", teacher), (f"model={policy.config.model}", student)):
        if model.unfused_reason is not None:
            raise InputError(f"{option} {model.unfused_reason}, which distill cannot compare")
    # The divergence applies one cap to the logits of both models, so their caps must be the same. So must be their
    # scales, unless there is no cap: the teacher's head then takes its own (Granite's sizes have several).
    scale = student.head_temperature / teacher.head_temperature
    if teacher.softcap != student.softcap or (scale != 1 and student.softcap is not None):
        problem = f"caps its logits at {teacher.softcap}, and the student at {student.softcap}"
        raise InputError(f"teacher={name} {problem}; choose a teacher of the student's family")

    # Student and teacher read the same packed rows, so both must keep the sequences of a row apart.
    rows = {"option": "packing", "otherwise": f"sequences are padded for teacher={name}"}
    costs = packing_costs(lm, policy.config.longest_sequence, config.packing, **rows)
    reads_packed = False
    if costs is not None and policy.costs is not None:
        reads_packed = costs.form == policy.costs.form

    # A head may be padded to more rows than the vocabulary has. ZeRO 3 partitions parameters, but not these tensors.
    vocab = student.base.config.get_text_config().vocab_size
    with engine.gathered(*teacher.head.parameters(recurse=False)):
        weight_and_bias = [
            None if tensor is None else tensor.detach() if scale == 1 else tensor.detach() * scale
            for tensor in (teacher.head.weight, teacher.head.bias)
        ]
    head = _first(vocab, *weight_and_bias)
    # No token has a row that the student alone has. The divergence leaves such rows out, and so does sampling, which
    # alone calls the head.
    rows = len(head[0])
    student.head.register_forward_hook(lambda head, inputs, logits: logits[..., :rows])
    return Teacher(engine.initialize_frozen(teacher, policy.config), head, reads_packed)


def _connect_teacher(config: TeacherOptions, url: str, policy: Policy) -> ServedTeacher:
    """Wait for a teacher's server, and check that its model has the student's tokenizer."""
    from ..servers.probe import TEXT

    url, http = url.rstrip("/"), http_of(policy.config)
    if policy.config.dry_run:
        return ServedTeacher(http, url, "", config.teacher_top_k)  # no server is asked
    print_rank0(f"waiting at most {http.timeout:g} s for teacher={url}")
    # The server may still be loading its model, so this call is repeated until it answers.
    answer = http.ask("GET", f"{url}/v1/models", tries=float("inf"))
    try:
        name = answer["data"][0]["id"]
        # Sequences are sent as token ids, which mean other text to another tokenizer.
        body = {"model": name, "prompt": TEXT, "add_special_tokens": False}
        answer = http.ask("POST", f"{url}/tokenize", body)
        tokens = answer["tokens"]
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"teacher={url} answered {one_line(answer)}; expected a vLLM server"
        ) from error
    if tokens != policy.tokenizer.encode(TEXT, add_special_tokens=False):
        raise InputError(
            f"teacher={url} has other tokens than model={policy.config.model}; choose a model with its tokenizer"
        )
    return ServedTeacher(http, url, name, config.teacher_top_k)


def teacher_divergence(
    policy: Policy, teachers: list, batch: Batch, teacher_of: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return sums over the tokens of a micro-batch, of the divergence from the teachers and of metrics.

    Args:
        policy: the student.
        teachers: the teachers of `load_teachers`, in a list.
        batch: b sequences.
        teacher_of: (b,) int64, the number of each sequence's teacher in that list.

    Returns:
        The sums of a `Comparison` by name, of which `kl` (nats) is differentiable; `compared`, the number of tokens
        at which the likeliest tokens are compared; and `kl_of_sequences` (b,) fp64, the divergence of each sequence in
        nats, detached.
    """
    costs = policy.costs if all(teacher.reads_packed for teacher in teachers) else None
    row, column = batch.response_tokens()
    # To find the likeliest tokens takes products with the heads, so training does it at some tokens only.
    stride = COMPARED if torch.is_grad_enabled() else 1
    compared = (column + 1 - batch.prompt_lengths[row]) % stride == 0

    # Each teacher reads its own sequences. A teacher without any in this batch reads the first one, because under
    # ZeRO 3 all ranks must run each model.
    inputs = inputs_of(batch, costs)
    if torch.is_grad_enabled():
        policy.padding.add(inputs["packed"] or batch)
    tokens_of = []
    readings = []
    for index, teacher in enumerate(teachers):
        tokens = (teacher_of[row] == index).nonzero()[:, 0]
        teacher_batch, teacher_inputs = batch, inputs
        if len(teachers) > 1:
            sequences = (teacher_of == index).nonzero()[:, 0]
            teacher_batch = batch.rows(sequences if len(sequences) else torch.tensor([0]))
            teacher_inputs = inputs_of(teacher_batch, costs)
        reading = teacher.read(teacher_inputs, teacher_batch)
        tokens_of.append(tokens)
        # Nothing is kept of a sequence that was read only for the sake of the other ranks.
        readings.append([values[: len(tokens)] for values in reading])

    def compare_under_head(hidden, student):
        """Compare with each teacher; this runs in the student's forward pass, because there its head is whole."""
        sums = []
        sequence_kl = hidden.new_zeros(len(teacher_of), dtype=torch.float64)
        for teacher, tokens, reading in zip(teachers, tokens_of, readings, strict=True):
            student_hidden = hidden
            if len(teachers) > 1:
                student_hidden = hidden[on_device(tokens, policy.device)]
            places = on_device(compared[tokens].nonzero()[:, 0], policy.device)
            compared_to = teacher.compare(policy.config, student, student_hidden, places, *reading)
            sequences = on_device(row[tokens], policy.device)
            sequence_kl.index_add_(0, sequences, compared_to.kl.detach().double())
            sums.append([values.sum() for values in compared_to])
        totals = map(sum, zip(*sums, strict=True))
        named: dict[str, Any] = dict(zip(Comparison._fields, totals, strict=True))
        return named | {"kl_of_sequences": sequence_kl}

    sums = policy.model(**inputs, under_head=compare_under_head)
    return sums | {"compared": compared.sum().to(policy.device, non_blocking=True)}


def inputs_of(batch: Batch, costs: Costs | None) -> dict[str, Any]:
    """Return the inputs with which student and teacher read a batch, packed into fewer rows where that is cheaper."""
    if costs is None:
        return batch.inputs()
    if not costs.masked:
        return batch.inputs(unpad(batch, costs))
    from ..models.masked_rows import cheapest_rows, pack_sequences, rows_cost

    lengths = input_lengths(batch).tolist()
    rows = cheapest_rows(lengths, costs)
    is_cheaper = rows_cost(lengths, rows, costs) < costs.causal_flop(*batch.input_ids.shape)
    return batch.inputs(pack_sequences(batch, rows) if is_cheaper else None)


def _first(vocab: int, weight, bias):
    """Return the first `vocab` rows of a head, or the head itself if it has no more.

    A slice is avoided then, because its gradient would be a copy of the whole head.
    """
    if len(weight) <= vocab:
        return weight, bias
    return weight[:vocab], None if bias is None else bias[:vocab]


@torch.no_grad()
def _likeliest(hidden, weight, bias) -> torch.Tensor:
    """Return the likeliest token of each hidden state (n, H), as (n,) int64."""
    return torch.cat([linear(rows, weight, bias).argmax(-1) for rows in hidden.split(ROWS)])

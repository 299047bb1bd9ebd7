"""One source of hostile rows of logits, and every public op that takes logits or hidden states beside its reference.

`cases()` draws what a batch is made of, `build` makes the tensors, `OPS` lists the ops: a new op, or a new form of
one, is one row there. tests/test_hostile.py runs every row on the kernels and the CPU path, values and all gradients,
against the reference in fp64.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

import fused_rl
from fused_rl import TokenSupport, reference
from tests.drawn import Strategy, st
from tests.one_process import in_one_process

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One column, less than a block of either path, a block and one more, with or without a tail, several segments of a row.
VOCABULARIES = (100, 1, 2, 7, 33, 513, 1024, 1025, 2100, 4096, 4097, 9001, 50257)
WIDTHS = (1, 64, 65, 257)  # of hidden states; at least the number of rows

# What a row looks like: of x ~ N(0, 3^2) (V,) and some(n), which draws n of its columns.
LOOKS = {
    "ordinary": lambda x, some: x,
    "twice as wide": lambda x, some: 2 * x,
    "tie of two at the maximum": lambda x, some: x.index_fill(0, some(2), x.max() + 1),
    "tie of five": lambda x, some: x.index_fill(0, some(5), x.max()),
    "all equal": lambda x, some: torch.full_like(x, x[0].item()),
    "nearly equal": lambda x, some: 1e-2 * x,
    "two peaks of 30 nats": lambda x, some: x.index_fill(0, some(2), x.max() + 30),
    **{
        f"peak of {n} nats": lambda x, some, n=n: x.index_add(0, some(1), torch.tensor([1.0 * n]))
        for n in (10, 60)
    },
    **{f"peak of {n} nats": lambda x, some, n=n: x.index_fill(0, some(1), n) for n in (300, 600)},
    "offset 1e4": lambda x, some: x + 1e4,
    "offset -1e4": lambda x, some: x - 1e4,
    "one-hot": lambda x, some: torch.full_like(x, -torch.inf).index_fill(0, some(1), 0.0),
}
# And the reference's row, from the policy's and one drawn like it.
OTHERS = {
    "another": lambda x, y: y,
    "near": lambda x, y: x + 1e-3 * torch.where(y.isinf(), 0, y),
    "half a nat away": lambda x, y: x + 0.2 * torch.where(y.isinf(), 0, y),
    "equal": lambda x, y: x.clone(),
    "8 nats higher": lambda x, y: x + 8,
}
# Where a row is filled, and with what: (V,) bool from V and some(n).
PLACES = {
    "nowhere": lambda v, some: _columns(v, []),
    "a column": lambda v, some: _columns(v, some(1)),
    "the first": lambda v, some: _columns(v, [0]),
    "a lane of 32": lambda v, some: _columns(v, some(1).item() % 32, 32),
    "a lane of 512": lambda v, some: _columns(v, some(1).item() % 512, 512),
    "every second": lambda v, some: _columns(v, 1, 2),
    "a block": lambda v, some: _columns(
        v, slice(some(1).item() // 512 * 512, some(1).item() // 512 * 512 + 512)
    ),
    "first half": lambda v, some: _columns(v, slice(0, v // 2)),
    "last 60 %": lambda v, some: _columns(v, slice(v * 2 // 5, v)),
    "30 %": lambda v, some: _columns(v, some(v * 3 // 10)),
    "99 %": lambda v, some: _columns(v, some(v * 99 // 100)),
    "all but five": lambda v, some: ~_columns(v, some(5)),
}
FILLS = ("-inf", "-1e4", "-1e9", "lowest")
# Apart: the reference everywhere else, so that nothing is shared.
SIDES = (
    "policy",
    "reference",
    "both",
    "apart",
)
VIEWS = {
    "contiguous": lambda x: x.clone(),
    "odd stride": lambda x: torch.nn.functional.pad(x, (1, 2))[:, 1:-2],
    "columns apart": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(x.shape),
}
TEMPERATURES = (1.0, 0.7, 1.3, 0.05, "per row")


def _columns(vocab, which, stride=None):
    at = torch.zeros(vocab, dtype=torch.bool)
    at[slice(which, None, stride) if stride else which] = True
    return at


class Row(NamedTuple):
    look: str
    other: str
    place: str
    fill: str
    side: str


# One side alone bans what one segment or shard alone has.
RARE = [
    Row("ordinary", "another", place, "-inf", side)
    for place in ("the first", "first half")
    for side in SIDES[:2]
]


class Case(NamedTuple):
    """What is drawn: small, and readable in a failure."""

    rows: tuple[Row, ...]
    vocab: int
    dtype: torch.dtype
    view: str
    temperature: float | str
    softcap: float | None
    masked: float  # the share of the rows; 0 is no mask, 1 leaves none that counts
    direction: str
    count: int  # K
    seed: int
    jsd_beta: float = 0.5
    compiled: bool = False
    width: int = 1  # of hidden states
    tiled: bool = (
        False  # hidden states, whose logits come in tiles of as few rows as can be, and in fp32
    )
    unsplit: int | None = None  # of the kernels' rows; those after them have a program per segment
    biased: bool = True  # a head, which without a bias bans nothing
    constant: int | None = None  # the leaf without a gradient


def cases(vocabularies=VOCABULARIES):
    choice = st.sampled_from
    rows = st.builds(
        Row, choice([*LOOKS]), choice([*OTHERS]), choice([*PLACES]), choice(FILLS), choice(SIDES)
    )
    rows = Strategy(lambda source: source.choice([choice(RARE), rows, rows]).draw(source))
    return st.builds(
        Case,
        rows=st.lists(rows, max_size=4).map(tuple),
        vocab=choice(vocabularies),
        dtype=choice(DTYPES),
        view=choice([*VIEWS]),
        temperature=choice(TEMPERATURES),
        softcap=choice([None, None, 30.0]),
        masked=choice([0.0, 0.0, 0.3, 0.3, 1.0]),
        direction=choice(["reverse", "forward", "jensen-shannon"]),
        count=choice([2, 0, 1, 5, 40]),
        seed=st.integers(0, 10**6),
        jsd_beta=choice([0.5, 0.5, 0.1, 0.6, 0.98]),
        # A compilation takes a second, so that few are.
        compiled=st.integers(1, 25).map(lambda number: number == 1),
        width=choice(WIDTHS),
        tiled=st.booleans(),
        unsplit=choice([None, 0, 1, 2]),
        biased=st.booleans(),
        constant=choice([None, None, None, 0, 1]),
    )


class Batch(NamedTuple):
    """The tensors of a case: n rows."""

    logits: torch.Tensor  # (n, V) in the dtype of the case, as the next
    ref_logits: torch.Tensor
    targets: torch.Tensor  # (n,) int64
    several: torch.Tensor  # (n, K) int64: the largest logits first, one that comes again, and any
    distinct: torch.Tensor  # (n, K') int64
    support: TokenSupport
    mask: torch.Tensor | None  # (n,) bool
    temperature: float | torch.Tensor
    weights: torch.Tensor  # (2, n) fp32
    softcap: float | None
    direction: str
    jsd_beta: float
    view: str
    width: int
    biased: bool


def build(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(case.seed)

    def some(n):
        return torch.randperm(case.vocab, generator=generator)[: max(n, 0)]

    x, y = torch.empty(2, len(case.rows), case.vocab, dtype=case.dtype)
    for i, row in enumerate(case.rows):
        x[i], y[i] = _pair(row, case.vocab, case.dtype, some, generator)
    if case.view == "expanded":
        x, y = (z[:1].expand(z.shape).clone() for z in (x, y))
    # targets: the likeliest, where ties are; one of these again; any
    n, ranked = len(x), x.float().argsort(descending=True, stable=True)
    any_id = torch.randint(case.vocab, (n, case.count + 1), generator=generator)
    mixed = torch.cat([ranked[:, :3], ranked[:, :1], any_id], 1)
    targets = mixed[:, (0, 1, -1)[case.seed % 3]]
    kept = [
        {
            *some(i * (2, 2, 400)[case.seed % 3]).tolist(),
            *ranked[i, :i].tolist(),
            int(targets[i]),
            case.vocab // 3,
        }
        if i != case.seed % 4
        else []
        for i in range(n)
    ]
    per_row = 0.5 + torch.rand(n, generator=generator)
    jsd_beta = case.jsd_beta if case.direction == "jensen-shannon" else 0.5
    return Batch(
        *(x, y),
        *(targets, mixed[:, : case.count], ranked[:, : min(case.count, case.vocab // 2)]),
        support=TokenSupport.from_lists(map(list, kept)),
        mask=torch.rand(n, generator=generator) < 1 - case.masked if case.masked else None,
        temperature=per_row if case.temperature == "per row" else case.temperature,
        weights=torch.randn(2, n, generator=generator),
        jsd_beta=jsd_beta,
        **{
            name: getattr(case, name)
            for name in ("softcap", "direction", "view", "width", "biased")
        },
    )


def placed(batch: Batch, device: str) -> Batch:
    """The batch on a device, with all that is drawn: what is made of it later has the strides of its view there."""
    moved = {
        name: x.to(device)
        for name, x in batch._asdict().items()
        if isinstance(x, (torch.Tensor, TokenSupport))
    }
    return batch._replace(**moved)


def _pair(row, vocab, dtype, some, generator):
    """(V,), (V,) in a dtype: the policy's logits and the reference's."""
    x, y = (LOOKS[row.look](3 * torch.randn(vocab, generator=generator), some) for _ in range(2))
    y = OTHERS[row.other](x, y)
    x, y = x.to(dtype), y.to(dtype)
    at = PLACES[row.place](vocab, some)
    fill = (
        torch.finfo(dtype).min
        if row.fill == "lowest"
        else max(float(row.fill), torch.finfo(dtype).min)
    )
    fill = -torch.inf if row.fill == "-inf" else fill
    of_x = at & (row.side != "reference")
    of_y = {"policy": at & False, "apart": ~at & bool(at.any())}.get(row.side, at)
    return x.masked_fill(of_x, fill), y.masked_fill(of_y, fill)


# The leaves of ops on logits and on hidden states. Masked rows hold NaN, which must reach nothing.


def _viewed(batch, *logits):
    nowhere = torch.zeros_like(batch.targets, dtype=torch.bool)
    hidden = nowhere if batch.mask is None else ~batch.mask
    return tuple(
        VIEWS[batch.view](x.masked_fill(hidden[:, None] & (batch.view != "expanded"), torch.nan))
        for x in logits
    )


def one(batch):
    return _viewed(batch, batch.logits)


def two(batch):
    return _viewed(batch, batch.logits, batch.ref_logits)


def as_products(batch):
    """The batch with logits that hidden states and a head have exactly: what row 0 bans, all ban, and no other."""
    found = {}
    for name in ("logits", "ref_logits"):
        x = getattr(batch, name)
        banned = (x == -torch.inf) & batch.biased
        # Gradients fit.
        finite = x.masked_fill(banned, 0).clamp(min=max(-1e30, torch.finfo(x.dtype).min))
        found[name] = finite.masked_fill(banned[:1].any(0), -torch.inf)
    return batch._replace(**found)


def head(batch, name="logits"):
    """hidden (n, H), weight (V, H), bias (V,) whose product is the logits, exactly: beyond n, hidden is 0."""
    logits = getattr(batch, name)
    banned = logits == -torch.inf
    hidden = torch.eye(len(logits), max(len(logits), batch.width)).to(logits)
    weight = logits.new_full((logits.shape[1], hidden.shape[1]), 0.5)
    weight[:, : len(logits)] = logits.masked_fill(banned, 0).t()
    bias = logits.new_zeros(len(weight)).masked_fill(banned.any(0), -torch.inf)
    if batch.mask is not None:
        hidden = hidden.masked_fill(~batch.mask[:, None], torch.nan)
    # rows that are all one would be another product
    view = VIEWS["contiguous" if batch.view == "expanded" else batch.view]
    return view(hidden), view(weight), bias


def two_heads(batch):
    return *head(batch), *head(batch, "ref_logits")


# How an op is called, ours and the reference alike: (op, batch, *leaves) -> outputs.


def _given(batch, like, *names):
    """The options of these names, a tensor of temperatures in the precision of the leaves."""
    options = {name: getattr(batch, name) for name in names}
    if isinstance(options.get("temperature"), torch.Tensor):
        options["temperature"] = batch.temperature.to(
            torch.promote_types(like.dtype, torch.float32)
        )
    return options


ROWS = ("temperature", "mask", "softcap")
PAIRS = ("temperature", "mask", "softcap", "direction", "jsd_beta")


def _next(batch, like, *names):
    """As `_given`, for `shift`: mask and temperatures of all rows but the last."""
    options = _given(batch, like, *names)
    for name in ("mask", "temperature"):
        if isinstance(options[name], torch.Tensor):
            options[name] = options[name][None, :-1]
    return options | {"shift": True}


def _form(batch, states, *, targets="targets", shift=False, support=False, **more):
    """States, targets and options of a form; with `shift` a row scores the next target: its own, as ties need."""
    ids = getattr(batch, targets)
    options = (_next if shift else _given)(batch, states, *ROWS) | more
    if support:
        rolled = torch.arange(len(ids)).roll(1)
        options["support"] = batch.support.select(rolled) if shift else batch.support
    return (states[None], ids.roll(1, 0)[None], options) if shift else (states, ids, options)


def of_logits(op, batch, logits, **form):
    if form.get("inplace"):
        logits = logits.clone(memory_format=torch.contiguous_format)
    logits, ids, options = _form(batch, logits, **form)
    return op(logits, ids, **options)


def _bias(batch, bias):
    return bias if batch.biased else None


def of_head(op, batch, hidden, weight, bias, **form):
    hidden, ids, options = _form(batch, hidden, **form)
    return op(hidden, weight, ids, bias=_bias(batch, bias), **options)


def loss_of_head(op, batch, hidden, weight, bias, **form):
    def token_loss(logprobs, entropy, a, b):
        logprobs = torch.where(logprobs == -torch.inf, 0, logprobs)
        return a * (logprobs if logprobs.dim() == a.dim() else logprobs.sum(-1)) + b * entropy

    per_token = batch.weights.to(torch.promote_types(hidden.dtype, torch.float32))
    if form.get("shift"):
        per_token = per_token[:, None, :-1]
    hidden, ids, options = _form(batch, hidden, **form)
    return op(hidden, weight, ids, token_loss, *per_token, bias=_bias(batch, bias), **options)


def cross_entropy_of_head(op, batch, hidden, weight, bias, **form):
    """Smoothing needs logits without a cap. Every third target does not count."""
    hidden, ids, options = _form(batch, hidden, **form)
    counts = torch.arange(ids.numel(), device=weight.device) % 3 < 2
    classes = torch.arange(len(weight), device=weight.device)
    options["label_smoothing"] = 0.0 if batch.softcap else 0.2
    options["class_weight"] = 0.5 + (classes % 3).float() / 2
    # The sum: a mean without tokens is NaN.
    options |= {"z_loss": 1e-3, "num_tokens": 1, "bias": _bias(batch, bias)}
    return (op(hidden, weight, torch.where(counts.view(ids.shape), ids, -100), **options),)


def of_pair(op, batch, logits, ref_logits, shift=False):
    if not shift:
        return (op(logits, ref_logits, **_given(batch, logits, *PAIRS)),)
    value = op(logits[None], ref_logits[None], **_next(batch, logits, *PAIRS))[0]
    return (torch.nn.functional.pad(value, (0, len(logits) - len(value))),)


def of_two_heads(op, batch, hidden, weight, bias, ref_hidden, ref_weight, ref_bias, shift=False):
    """The reference is a constant: ours gives it no gradient, and the definition is told to give none."""
    options = (_next if shift else _given)(batch, hidden, *PAIRS)
    options |= {"bias": _bias(batch, bias), "ref_bias": _bias(batch, ref_bias.detach())}
    if op is divergence_of_heads:
        ref_hidden = ref_hidden.detach()
        ref_weight = ref_weight.detach()
    if not shift:
        return (op(hidden, weight, ref_hidden, ref_weight, **options),)
    value = op(hidden[None], weight, ref_hidden[None], ref_weight, **options)[0]
    return (torch.nn.functional.pad(value, (0, len(hidden) - len(value))),)


def of_top_ids(op, batch, logits, ref_logits):
    """The chain that a distillation from K ids is: `op` is the pair of its two ops."""
    logprobs, divergence = op
    options = _given(batch, logits, "temperature", "mask", "softcap")
    given = (logprobs(x, batch.distinct, **options).logprobs for x in (logits, ref_logits))
    return (divergence(*given, direction=batch.direction, mask=batch.mask),)


# References where the definition needs the conventions that an op documents.


def divergence(
    logits,
    ref_logits,
    *,
    direction,
    temperature,
    mask,
    softcap=None,
    shift=False,
    jsd_beta=0.5,
):
    """`reference.token_kl` with what it leaves open: -1e20 and below are -inf, p with no q is infinite, empty rows."""
    options = {"direction": direction, "temperature": temperature, "mask": mask}
    options["jsd_beta"] = jsd_beta
    if softcap is not None:  # nothing is banned
        return reference.token_kl(logits, ref_logits, **options, softcap=softcap, shift=shift)
    if shift:
        logits, ref_logits = logits[:, :-1], ref_logits[:, :-1]
    x, y = (torch.where(z <= -1e20, -torch.inf, z) for z in (logits, ref_logits))
    first, second = (y, x) if direction == "forward" else (x, y)
    empty = (first == -torch.inf).all(-1)
    infinite = ((second == -torch.inf) & (first > -torch.inf)).any(-1) & (
        direction != "jensen-shannon"
    )
    known = ~(empty | (second == -torch.inf).all(-1) | infinite)[..., None]
    x, y = (torch.where(known, z, 0) for z in (x, y))
    value = reference.token_kl(x, y, **options)
    value = torch.where(infinite & ~empty, torch.inf, value)
    return value if mask is None else torch.where(mask, value, 0)


def divergence_of_heads(hidden, weight, ref_hidden, ref_weight, *, bias, ref_bias, mask, **options):
    kept = (
        torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
        if mask is None
        else mask
    )
    if kept.shape != hidden.shape[:-1]:
        kept = torch.nn.functional.pad(kept, (0, 1))
    heads = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
    return divergence(
        *(torch.nn.functional.linear(torch.where(kept[..., None], h, 0), *z) for h, *z in heads),
        mask=mask,
        **options,
    )


def outcomes(logprobs, ref_logprobs, *, direction, mask):
    """`reference.topk_kl`; where the second distribution alone has probability 0, infinite."""
    first, second = (ref_logprobs, logprobs) if direction == "forward" else (logprobs, ref_logprobs)
    infinite = ((second == -torch.inf) & (first > -torch.inf)).any(-1) & (
        direction != "jensen-shannon"
    )
    given = (
        torch.where(infinite[..., None], math.log(0.25 / max(1, logprobs.shape[-1])), z)
        for z in (first, second)
    )
    first, second = given
    logprobs, ref_logprobs = (second, first) if direction == "forward" else (first, second)
    value = torch.where(
        infinite,
        torch.inf,
        reference.topk_kl(logprobs, ref_logprobs, direction=direction, mask=mask),
    )
    return value if mask is None else torch.where(mask, value, 0)


# What docs/numerics.md promises of values: (batch, exact outputs) -> allowed errors, inf where nothing is promised.


def logprobs_promise(batch, exact):
    logprobs, entropy, lse = exact
    per_row = lse.abs().clamp(min=1)
    scale = (per_row if logprobs.dim() == lse.dim() else per_row[..., None]).maximum(logprobs.abs())
    blur = blurred(batch)
    allowed = (1e-6 + blur) * scale, (2e-6 + blur) * entropy + 1e-12, (1e-6 + blur) * per_row
    return tuple(torch.where(x.isinf(), 0, y) for x, y in zip(exact, allowed, strict=True))


def blurred(batch):
    """A capped logit is known to an ulp of the cap, over T."""
    return (
        0.0
        if batch.softcap is None
        else 2**-23 * batch.softcap / min(_per_row(batch).tolist(), default=1.0)
    )


def loss_promise(batch, exact):
    loss, logprobs, entropy = exact
    lse = next(_scaled(batch)).logsumexp(-1)
    lse = lse.nan_to_num(0, 0, 0) if batch.mask is None else torch.where(batch.mask, lse, 0)
    lse = lse[: entropy.numel()].view(entropy.shape)  # with `shift` the last row scores nothing
    of_logprobs, of_entropy, _ = logprobs_promise(batch, (logprobs, entropy, lse))
    finite = of_logprobs.nan_to_num(0, 0, 0).sum() + of_entropy.sum()
    return 4 * finite, of_logprobs, of_entropy  # a weight of N(0, 1) each


def cross_entropy_promise(batch, exact):
    """Of rows whose log-sum-exp is known: what a row that is -inf throughout has is left open."""
    (loss,) = exact
    x = next(_scaled(batch))
    largest = x.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True).clamp(min=1) if x.numel() else x
    allowed = (8e-6 + 8 * blurred(batch)) * largest.square().sum()
    return (torch.where(loss.isfinite(), allowed, torch.inf),)


def kl_promise(batch, exact):
    (value,) = exact
    x, y = (z.amax(-1) for z in _capped(batch))
    distance = ((x - y).abs() / batch.temperature).nan_to_num(torch.inf, torch.inf)
    allowed = (
        (5e-6 if batch.direction == "jensen-shannon" else 3e-6) * value + 1e-7 * distance + 1e-13
    )
    blur = blurred(batch)
    # As a capped logit is known.
    allowed = allowed + 4 * blur * (value + value.clamp(min=0).sqrt()) + 4 * blur**2
    allowed = torch.where(value.isinf(), 0, allowed)
    unknown = (distance > 1e7) & (value < distance / 100)
    return (torch.where(unknown | empty_rows(batch), torch.inf, allowed),)


def empty_rows(batch):
    """Rows that are -inf throughout on a side: of Jensen-Shannon nothing is promised but that it is no NaN."""
    x, y = ((z <= -1e20).all(-1) for z in _capped(batch))
    return x | y


def topk_promise(batch, exact):
    """A tail below the rounding of the log-probabilities is unknown: nothing is promised where one is below
    1e-3, nor where a product of two ends fp32."""
    (value,) = exact
    tails = [1 - z.softmax(-1).gather(-1, batch.distinct).sum(-1) for z in _scaled(batch)]
    known = (torch.stack(tails).nan_to_num(0, 0, 0).amin(0) > 1e-3) & (value < 1e38)
    return (torch.where(known, 1e-6 * (1 + value) / torch.stack(tails).amin(0).sqrt(), torch.inf),)


def _capped(batch):
    """Both logits in fp64, as they count."""
    for x in (batch.logits.double(), batch.ref_logits.double()):
        yield x if batch.softcap is None else batch.softcap * torch.tanh(x / batch.softcap)


def _scaled(batch):
    for x in _capped(batch):
        yield x / _column(batch)


def _per_row(batch):
    """(n,) temperatures."""
    per_row = torch.as_tensor(batch.temperature, dtype=torch.float64, device=batch.targets.device)
    return per_row.expand(len(batch.targets))


def _column(batch):
    return _per_row(batch)[:, None]


# The sizes of the terms that a gradient is a sum of: (batch, exact gradients, leaves) -> one of each gradient's shape.


def _doubt(batch):
    """Of each side p |log p| (1 - max p) / T: what terms that cancel, as those of equal logits do, are made of."""
    for x in _scaled(batch):
        p = x.softmax(-1).nan_to_num(0)
        yield p * (1 - p.log().clamp(min=-100)) * (1 - p.amax(-1, keepdim=True)) / _column(batch)


def sizes_of_logits(batch, gradients, leaves):
    return [g.abs() + terms for g, terms in zip(gradients, _doubt(batch), strict=False)]


def _doubt_of_divergence(batch):
    """Of each side's Jensen-Shannon p (log(p / mean) - JS), which cancels also where one token has the mass; of a KL's
    first side p (log(p / q) - KL), where a KL of 1e9 nats leaves 1e-7 of it, and of the second nothing: q - p."""
    options = {"temperature": batch.temperature, "direction": batch.direction, "mask": None}
    terms = [1.0, 1.0]
    if batch.direction != "jensen-shannon" and batch.softcap is None:
        value = divergence(*_capped(batch), **options)
        of_first = 0.1 * value.nan_to_num(0, 0)[:, None]
        terms = [0.0, of_first] if batch.direction == "forward" else [of_first, 0.0]
    for x, term in zip(_scaled(batch), terms, strict=True):
        yield term * x.softmax(-1).nan_to_num(0) / _column(batch)


def sizes_of_pair(batch, gradients, leaves):
    return [
        g.abs() + terms for g, terms in zip(gradients, _doubt_of_divergence(batch), strict=True)
    ]


def sizes_of_head(batch, gradients, leaves):
    """As the hidden states are rows of the identity, the head's gradient is that of the logits."""
    doubts = [*_doubt(batch)]
    if len(leaves) > 3:
        doubts = [a + b for a, b in zip(doubts, _doubt_of_divergence(batch), strict=True)]
    found = []
    for i, doubt in zip(range(0, len(leaves), 3), doubts, strict=False):
        weight, terms = leaves[i + 1], gradients[i + 1].abs()
        terms = terms + torch.finfo(weight.dtype).smallest_normal
        of_rows = terms[:, : len(doubt)]
        of_rows += doubt.t()
        found += [of_rows.t() @ weight.abs().double(), terms, of_rows.sum(1)]
    return found


def sizes_of_cross_entropy(batch, gradients, leaves):
    """The probabilities, the targets and the shares of all classes, of which the sum may be 0."""
    found = sizes_of_head(batch, gradients, leaves)
    weight = leaves[1]
    for x in _scaled(batch):
        p = x.softmax(-1).nan_to_num(0)
        lse = x.logsumexp(-1, keepdim=True).nan_to_num(0, 0, 0).abs()
        terms = 2 * p * (1 + 2e-3 * lse) + 0.5 / max(1, p.shape[1])
        terms = (terms.scatter_add(-1, batch.targets[:, None], 2 + 0 * terms)) / _column(batch)
        found[0] = found[0] + terms @ weight.abs().double()
        found[1][:, : len(terms)] += terms.t()
        found[2] = found[2] + terms.sum(0)
        break
    return found


class Op(NamedTuple):
    """One form of a public op."""

    ours: Callable
    reference: Callable
    leaves: Callable
    call: Callable
    promise: Callable
    floor: float = 2**-22  # of a gradient, as a part of the largest of its row
    sizes: Callable = sizes_of_logits
    prepare: Callable = lambda batch: batch


HEAD = {"sizes": sizes_of_head, "prepare": as_products}
LOGPROBS = fused_rl.token_logprobs, reference.token_logprobs, one
LINEAR = fused_rl.linear_token_logprobs, reference.linear_token_logprobs, head
LOSS = fused_rl.linear_token_loss, reference.linear_token_loss, head
CROSS_ENTROPY = fused_rl.linear_cross_entropy, reference.linear_cross_entropy, head
OF_CROSS_ENTROPY = {"sizes": sizes_of_cross_entropy, "prepare": as_products}
SPLIT = in_one_process(fused_rl.vocab_parallel_token_logprobs), reference.token_logprobs, one
SPLIT_KL = in_one_process(fused_rl.vocab_parallel_token_kl), divergence, two
KL = fused_rl.token_kl, divergence, two
LINEAR_KL = fused_rl.linear_token_kl, divergence_of_heads, two_heads
CHAIN = (fused_rl.token_logprobs, fused_rl.topk_kl), (reference.token_logprobs, outcomes), two

SEVERAL, KEPT, SHIFT, INPLACE = (
    {"K targets": {"targets": "several"}},
    {"support": {"support": True}},
    {"shift": {"shift": True}},
    {"inplace": {"inplace": True}},
)


def forms(name, op, alone, *others):
    """Return the op by "its name, the form": with each option of `alone`, and with and without each of the others."""
    found = {}
    for chosen in itertools.product([{}, *alone], *[[{}, one] for one in others]):
        form = {key: value for option in chosen for key, value in option.items()}
        arguments = {key: value for option in form.values() for key, value in option.items()}
        label = ", ".join([name, " and ".join(form)]) if form else name
        found[label] = op._replace(call=functools.partial(op.call, **arguments))
    return found


# A public op without a row fails a test.
OPS = {
    **forms(
        "token_logprobs",
        Op(*LOGPROBS, of_logits, logprobs_promise),
        [SEVERAL, KEPT],
        SHIFT,
        INPLACE,
    ),
    **forms(
        "linear_token_logprobs",
        Op(*LINEAR, of_head, logprobs_promise, **HEAD),
        [SEVERAL, KEPT],
        SHIFT,
    ),
    **forms("linear_token_loss", Op(*LOSS, loss_of_head, loss_promise, **HEAD), [SEVERAL], SHIFT),
    **forms(
        "linear_cross_entropy",
        Op(*CROSS_ENTROPY, cross_entropy_of_head, cross_entropy_promise, **OF_CROSS_ENTROPY),
        [],
        SHIFT,
    ),
    **forms(
        "vocab_parallel_token_logprobs",
        Op(*SPLIT, of_logits, logprobs_promise, 1e-6),
        [SEVERAL, KEPT],
        SHIFT,
    ),
    **forms("token_kl", Op(*KL, of_pair, kl_promise, 1e-6, sizes_of_pair), [], SHIFT),
    **forms("linear_token_kl", Op(*LINEAR_KL, of_two_heads, kl_promise, 1e-6, **HEAD), [], SHIFT),
    **forms(
        "vocab_parallel_token_kl",
        Op(*SPLIT_KL, of_pair, kl_promise, 1e-5, sizes_of_pair),
        [],
        SHIFT,
    ),
    "topk_kl, of token_logprobs": Op(*CHAIN, of_top_ids, topk_promise, 2e-5),
}

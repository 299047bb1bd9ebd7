"""Models in transformers' format: reading them whole, checking that they can be trained, saving them."""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import whole_folder
from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.options import InputError


@contextlib.contextmanager
def readable(what: str, attention: str | None = None):
    """Turn errors of transformers reading `what` into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # OSError, RuntimeError, JSON and safetensors errors: as many as ways to be broken
        problem = f"{what} is neither a local folder with a model nor on the Hub, or it is damaged"
        if attention is not None and (isinstance(error, ImportError) or "attn_implementation" in str(error)):
            problem = f"attn_implementation={attention} cannot be used for {what}"
        raise InputError(f"{problem}: {in_a_line(error)}") from error


def check_dtypes(name: str, what: str) -> None:
    """Refuse a folder with weights of 8 bits: without their scales they would be trained as plain numbers."""
    from safetensors import safe_open

    for file in sorted(Path(name).glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            dtypes = {weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118
        quantised = sorted(dtype for dtype in dtypes if dtype in ("I8", "U8") or dtype.startswith("F8"))
        if quantised:
            raise InputError(f"{what} has {quantised[0]} weights in {file.name}; give the model in bfloat16 or float32")


def check_weights(model: nn.Module, what: str) -> None:
    """Refuse weights that are not finite."""
    broken = [key for key, weight in model.named_parameters() if not weight.isfinite().all()]
    if broken:
        shown = ", ".join(broken[:5])
        raise InputError(f"{what}: {len(broken)} weights hold NaN or infinite values, among them {shown}")


@torch.no_grad()
def check_causal(lm: nn.Module, what: str) -> None:
    """Refuse a model in which a token sees its successors: its log-probabilities are not those of generation."""
    if lm.config.is_encoder_decoder:
        raise InputError(f"{what} is an encoder-decoder ({lm.config.model_type}); a causal LM is needed")
    training = lm.training
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])
    ids = ids % lm.config.get_text_config().vocab_size
    scored = lm.eval()(input_ids=ids.to(lm.device), use_cache=False)
    logits = scored.logits[:, :3].float()
    lm.train(training)
    if (logits[0] - logits[1]).abs().max() > 0.02 * logits.std():  # rounding moves them less, a token seen far more
        kind = f"({lm.config.model_type}) is not causal"
        raise InputError(f"{what} {kind}: a token's logits change with the tokens after it")


def check_fits(
    lm: nn.Module,
    tokenizer,
    rows: Iterable[tuple[list[int], str]],
    more: int,
    remedy: str,
) -> None:
    """Refuse token ids that have no embedding, and sequences longer than the model has positions.

    `rows` are the token ids of all that a run reads, and where they are from; `more` tokens may follow each, and the
    options in `remedy` make them fewer.
    """
    embedded = lm.get_input_embeddings().num_embeddings
    limit = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    if tokenizer.vocab_size > embedded:
        what = f"the tokenizer has {tokenizer.vocab_size} tokens, but the model embeds {embedded}"
        raise InputError(f"{what}: they do not belong together, or model.resize_token_embeddings was forgotten")
    special = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for ids, where in itertools.chain([(special, "the tokenizer")], rows):
        largest = max(ids)
        length = len(ids) + more
        if largest >= embedded:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise InputError(
                f"{where}: token {token!r} has id {largest}, but the model embeds ids 0 to {embedded - 1}: is "
                "tokenizer_config.json missing, or model.resize_token_embeddings forgotten?"
            )
        if limit is not None and length > limit and ids is not special:
            tokens = f"up to {length}" if more else length
            raise InputError(f"{where}: {tokens} tokens, but the model has {limit} positions; lower {remedy}")


def switch_off_dropout(model: nn.Module) -> None:
    """Set every dropout and layer-drop probability in a model to 0."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)


def save(trained, tokenizer, folder: Path, write: Callable[[Path, dict | None], None]) -> None:
    """Have rank 0 write the model in an engine, and its tokenizer, complete or not at all. Call on all ranks.

    `write` takes a folder and, where ZeRO 3 has partitioned the model's own state, the whole one.
    """
    state = trained._zero3_consolidated_16bit_state_dict() if trained.zero_optimization_stage() == 3 else None
    if ranks.rank() == 0:
        with whole_folder(folder) as unfinished:
            write(unfinished, state)
            tokenizer.save_pretrained(unfinished)
    ranks.barrier()

"""What fits into a model: token ids that it embeds, and sequences that are no longer than its positions."""

from collections.abc import Sequence

from ..base.files import weights_below
from ..base.text import InputError
from ..data.examples import Examples
from ..options import LoadConfig

# Options of the length of a sequence.
LIMITS = ("max_new_tokens", "max_length", "max_prompt_length", "max_response_length")


def check_fits(
    config: LoadConfig, tokenizer, kinds_of_rows: Sequence[Examples], sampled: int = 0
) -> None:
    """Refuse token ids without an embedding, and sequences that are longer than the model's positions.

    It reads the model's config alone, so that a run ends before weights are read.

    Args:
        config: the options, with the name of the model.
        tokenizer: the tokenizer.
        kinds_of_rows: the examples, of each kind.
        sampled: the most tokens that are sampled after a prompt without a response.
    """
    from transformers import AutoConfig

    try:
        base = weights_below(config.model)
        revision = config.revision if base is None else None
        text = AutoConfig.from_pretrained(base or config.model, revision=revision).get_text_config()
    except (OSError, ValueError):
        return  # loading says it better
    embedded = text.vocab_size
    limit = getattr(text, "max_position_embeddings", None) or float("inf")
    highest = max(tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size - 1)
    # On a GPU an id without an embedding is an assertion in a kernel that names nothing.
    if highest >= embedded:
        raise InputError(
            f"the tokenizer has ids up to {highest}, but the model embeds {embedded}: is tokenizer_config.json "
            "missing, or model.resize_token_embeddings forgotten?"
        )
    limits = " or ".join(name for name in LIMITS if name in type(config).model_fields)
    for examples in filter(len, kinds_of_rows):
        largest, tokens = examples.column("largest"), examples.column("tokens")
        # A prompt without a response has the longest one still to come.
        still_sampled = sampled * (examples.column("response") == 0)
        i, longest = int(largest.argmax()), int((tokens + still_sampled).argmax())
        if largest[i] >= embedded:
            token = tokenizer.convert_ids_to_tokens(int(largest[i]))
            raise InputError(
                f"{examples.where(i)}: token {token!r} has id {largest[i]}, but the model embeds ids below {embedded}"
            )
        if tokens[longest] + still_sampled[longest] > limit:
            text = f"{tokens[longest]} tokens"
            text += f" and up to {still_sampled[longest]} more" if still_sampled[longest] else ""
            where = examples.where(longest)
            raise InputError(
                f"{where}: {text}, but the model has {limit} positions; lower {limits}"
            )

"""The causal language model that the trainers share: loading, scoring its own input, saving in the Hub format."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fused_rl
from fused_rl.ops import tiles

from ..base import engine, ranks
from ..base.files import atomic_folder, check_exists
from ..base.screen import print_rank0
from ..base.text import InputError, in_a_line
from ..options import RunConfig
from . import lora
from .head import WideHead, causal_states, trace_head
from .logits import ReferenceStates, Scored, compare, read_likeliest
from .packing import Costs, InRows, padded_states

if TYPE_CHECKING:
    from .sequences import SequenceParts


class LanguageModel(nn.Module):
    """A causal LM whose forward scores its own input, inside of which ZeRO 3 gathers the head's weight."""

    lm: Any
    """A causal language model of transformers, or peft's wrapper of one."""

    def __init__(
        self,
        lm: Any,
        loss_from: str,
        *,
        lora: bool = False,
        head_dtype: torch.dtype | None = None,
        sequence_parts: "SequenceParts | None" = None,
    ):
        super().__init__()
        self.lm = lm
        self.loss_from = loss_from
        self.lora = lora
        self.head_dtype = head_dtype
        self.sequence_parts = sequence_parts
        self.unpadded_costs: Costs | None = None  # where a trainer pads no row
        # The logits are those of `head` with this cap, divided by this temperature.
        self.softcap: float | None = None
        self.head_temperature = 1.0
        self.unfused_reason: str | None = None  # why logits are read though `linear` was requested
        # A dry run has no numbers to compare.
        if loss_from == "linear" and not engine.is_without_weights(self.base):
            traced = trace_head(self.base)
            if isinstance(traced, str):
                self.loss_from, self.unfused_reason = "logits", traced
                return
            self.softcap, self.head_temperature = traced.softcap, traced.temperature
            weight = self.head.weight
            logits_dtype = head_dtype or tiles.default_logits_dtype(weight.dtype, weight.device)
            if logits_dtype != weight.dtype:
                # Sampling and measuring use the distribution that is trained.
                self.base.set_output_embeddings(WideHead(self.head))

    @property
    def base(self) -> Any:
        """The transformers model without LoRA's wrapper."""
        return self.lm.get_base_model() if self.lora else self.lm

    @property
    def head(self) -> nn.Linear:
        """The linear layer from hidden states to logits."""
        return self.base.get_output_embeddings()

    def trial_inputs(self, input_ids: torch.Tensor) -> dict[str, Any]:
        """Return the inputs of a training pass over sequences (B, T) without pads, by which memory is measured."""
        mask = torch.ones_like(input_ids[:, 1:], dtype=torch.bool)
        return {"input_ids": input_ids, "mask": mask, "token_loss": lambda logprobs, _: -logprobs}

    def forward(self, *inputs, under_head: Callable | None = None, **options):
        """Score the input, or compute `under_head`: only inside of this call ZeRO 3 gathers the weights for either."""
        if under_head is not None:
            return self.compute_under_head(under_head, *inputs, **options)
        return self.score(*inputs, **options)

    def score(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        temperature: float = 1.0,
        *,
        packed: InRows | None = None,
        places: torch.Tensor | None = None,
        support: fused_rl.TokenSupport | None = None,
        token_loss: Callable | None = None,
        per_token: Sequence[torch.Tensor] = (),
        reference: ReferenceStates | None = None,
        want_likeliest: bool = False,
    ) -> Scored:
        """Score each token by those before it: row t of (B, T - 1) is token t + 1.

        Args:
            input_ids: (B, T) int64, padded on the right: a causal model never sees a pad, so there is no other mask.
            mask: (B, T - 1) bool, True where token t + 1 counts.
            temperature: of the softmax.
            packed: the same sequences, several in a row (packing.py): what the model is run on instead.
            places: (N,) int64, the tokens that count in the flattened mask; giving them spares a wait for the device.
            support: the set that each of the mask.sum() tokens was sampled from; the softmax is over these sets.
            token_loss: a loss of single tokens, as `fused_rl.linear_token_loss` takes it; requests `loss`.
            per_token: (B, T - 1) tensors that `token_loss` takes.
            reference: what it computed for the same tokens; requests its log-probabilities and the exact KL, which
                have no gradient. `token_loss` takes its log-probabilities after all `per_token`.
            want_likeliest: request the likeliest token at each place; nothing then has a gradient.
        """
        places = mask.flatten().nonzero()[:, 0] if places is None else places
        if self.sequence_parts is not None:
            # The tokens that this process's part of the sequences predicts.
            mine = self.sequence_parts.my_places(places, input_ids.shape[1])
            places, support = places[mine], None if support is None else support.select(mine)
        targets = input_ids[:, 1:].flatten()[places]
        states = self._states(input_ids, places, packed)

        def at_places(values):
            """(N,) -> (B, T - 1), 0 where masked; all parts then have the scores of whole sequences."""
            nothing = values.new_zeros(mask.numel())
            scores = nothing.index_copy(0, places, values).view(mask.shape)
            return scores if self.sequence_parts is None else self.sequence_parts.sum(scores)

        # What is read beside the scores of the policy, or while these are computed.
        found = {}
        visit = None
        if reference is not None:
            given = targets, temperature, support, reference
            found, visit = compare(self, states.detach(), *given)

        # The scores of the N tokens that count, each by the way that gives what was requested.
        loss = None
        # The fused loss keeps no logits, and knows whole vocabularies alone.
        if token_loss is not None and support is None and self.loss_from == "linear":
            weights = [tensor.flatten()[places] for tensor in per_token]
            if reference is not None:
                weights.append(found["ref_logprobs"])
            options = self.head_options(temperature)
            operands = states, self.head.weight, targets
            rows = fused_rl.linear_token_loss(
                *operands, token_loss, *weights, visit=visit, **options
            )
            loss = rows.loss if self.sequence_parts is None else self.sequence_parts.sum(rows.loss)
        elif want_likeliest:
            rows = read_likeliest(self, states, targets, temperature)
            found["likeliest"] = rows.likeliest
        else:
            rows = self.rows_of(states, targets, temperature, support, visit)
        logprobs, entropy = at_places(rows.logprobs), at_places(rows.entropy)
        extra_scores = {name: at_places(values) for name, values in found.items()}
        # Where nothing was fused the loss is formed here; what stands beside it has no gradient.
        if token_loss is not None and loss is None:
            if reference is not None:
                per_token = *per_token, extra_scores["ref_logprobs"]
            token_losses = token_loss(logprobs, entropy, *per_token)
            loss = fused_rl.masked_sum(token_losses, mask)
            logprobs, entropy = logprobs.detach(), entropy.detach()
        return Scored(logprobs, entropy, loss, **extra_scores)

    def compute_under_head(
        self,
        function: "Callable[[torch.Tensor, LanguageModel], Any]",
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        *,
        packed: InRows | None = None,
        places: torch.Tensor | None = None,
    ) -> Any:
        """Return function(states, self), where the head is whole under ZeRO 3 too.

        Args:
            function: takes the hidden states (N, H) that predict the tokens that count, of divided sequences those of
                this process's part, and this model; with loss_from=logits it takes their logits (N, V).
            input_ids, mask, packed, places: as in `score`.
        """
        places = mask.flatten().nonzero()[:, 0] if places is None else places
        if self.sequence_parts is not None:
            places = places[self.sequence_parts.my_places(places, input_ids.shape[1])]
        return function(self._states(input_ids, places, packed), self)

    def rows_of(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        support: fused_rl.TokenSupport | None,
        visit: Callable | None = None,
    ) -> fused_rl.TokenLogprobs:
        """Return log-probability and entropy of `targets` (N,) at states (N, ·), differentiable.

        `visit` is that of `fused_rl.linear_token_logprobs`.
        """
        if self.loss_from == "logits":
            if visit is not None:
                visit(slice(0, len(states)), states.detach())
            # The model itself scales and caps them, if it does.
            return fused_rl.token_logprobs(
                states, targets, temperature=temperature, support=support
            )
        options = self.head_options(temperature)
        operands = states, self.head.weight, targets
        return fused_rl.linear_token_logprobs(*operands, support=support, visit=visit, **options)

    def head_options(self, temperature: float) -> dict[str, Any]:
        """Return how the head makes logits, for the functions of hidden states."""
        return {
            "bias": self.head.bias,
            "softcap": self.softcap,
            "temperature": temperature * self.head_temperature,
            "logits_dtype": self.head_dtype,
        }

    def _states(self, input_ids, places, packed) -> torch.Tensor:
        """Return what the model puts out at the N positions that predict the tokens that count, which alone meet the
        head: hidden states (N, H), or with loss_from=logits the logits (N, V).
        """
        module, output = self.base.base_model, "last_hidden_state"
        if self.loss_from == "logits":
            module, output = self.base, "logits"
        if packed is not None:
            return packed.states_of(self.base, module, output)
        if self.sequence_parts is not None:
            return self.sequence_parts.states_of(module, output, input_ids, places)
        states = padded_states(module, input_ids, output)
        # Place t of the flattened mask is position t of the states, which have one column more in
        # every row.
        row = places // max(1, states.shape[1] - 1)
        return states.flatten(0, 1)[places + row]


@contextlib.contextmanager
def readable(name: str, attention: str | None = None):
    """Turn errors of transformers reading the model `name` into one line."""
    check_exists(name)
    try:
        yield
    except InputError:
        raise
    # OSError, RuntimeError, JSON and safetensors errors: as many as ways to be broken.
    except Exception as error:
        problem = f"model={name!r} is neither a local folder with a model nor on the Hub, or it is damaged"
        is_about_attention = isinstance(error, ImportError) or "attn_implementation" in str(error)
        if attention is not None and is_about_attention:
            problem = f"attn_implementation={attention} cannot be used for model={name!r}"
        raise InputError(f"{problem}: {in_a_line(error)}") from error


def prepare_modules(model: nn.Module) -> None:
    """Set every dropout and layer-drop probability in a model to 0, and give every row of an embedding a gradient."""
    # By name, as models keep them in attributes of many names, also apart from nn.Dropout.
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # Pads are never read here, and many models pad with EOS, which is read.
            module.padding_idx = None
        for name, value in vars(module).items():
            is_dropout = "drop" in name or (name == "p" and isinstance(module, nn.Dropout))
            if isinstance(value, float) and is_dropout:
                setattr(module, name, 0.0)


def prepare_layers(model: Any, config: RunConfig, *, trainable: bool = True):
    """Have a transformers model recompute, compile and divide what the options say; return its `SequenceParts`."""
    if trainable and config.gradient_checkpointing:
        from .checkpointing import checkpoint_activations

        checkpoint_activations(model, config.checkpoint_activations_on)
    # A frozen model is compiled too, so that a policy which has not moved has its reference's bits.
    if config.torch_compile:
        from .compiled import compile_layers

        compile_layers(model)
    if ranks.sequence_group() is None:
        return None
    from .sequences import SequenceParts

    return SequenceParts(model, config.longest_sequence)


def read(
    kind: Any,
    name: str,
    device: torch.device | str,
    held: engine.EngineConfig | None = None,
    **options,
) -> tuple[Any, Mapping]:
    """Return a model of one of transformers' auto classes, and which weights it lacks.

    On the meta device, as in a dry run, no numbers are read, and of a model on the Hub nothing but its config. `held`
    says how an engine will hold it: under ZeRO 3 it is partitioned while it is read, on all ranks together.
    """
    from transformers import AutoConfig

    options |= {"output_loading_info": True, "trust_remote_code": False}
    if torch.device(device).type == "meta":
        options.pop("quantization_config", None)
        options["device_map"] = "meta"
        if not Path(name).is_dir():
            config = options.get("config") or AutoConfig.from_pretrained(name, **options)
            with torch.device("meta"):
                model = kind.from_config(config)
            engine.models_on_paper.add(model)
            return model, defaultdict(tuple)
    is_whole = options.keys() & {"device_map", "quantization_config"}
    if held is None or held.zero_stage < 3 or is_whole:
        model, report = kind.from_pretrained(name, **options)
        if model.device.type == "meta":
            engine.models_on_paper.add(model)
        return model, report
    # Partitioned, transformers does not say which weights are unexpected, and one rank alone raises errors.
    report = kind.from_pretrained(name, **options, device_map="meta")[1]
    _kept = engine.partitioning(held)
    return kind.from_pretrained(name, **options)[0], report


def _read_lm(name: str, revision: str | None, adapters, device: torch.device, **options) -> Any:
    """Return a causal LM on its device, without its own sampling defaults: of `adapters`, where `name` holds such, the
    weights that they belong to. Refuse weights that are missing.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    if adapters is not None:
        name, revision = adapters.base_model_name_or_path, adapters.revision
    with readable(name, options.get("attn_implementation")):
        lm, report = read(AutoModelForCausalLM, name, device, revision=revision, **options)
    hint = ""
    if "score.weight" in report["unexpected_keys"]:
        hint = "; it is a reward model: a causal LM is needed"
    # transformers draws weights that are missing at random, with no more than a warning.
    for kind in ("missing", "unexpected", "mismatched"):
        if keys := sorted(map(str, report[f"{kind}_keys"])):
            problem = f"{len(keys)} {kind} weights for {type(lm).__name__}: {', '.join(keys[:5])}"
            raise InputError(f"model={name!r} has {problem}{hint}")
    if "quantization_config" in options:
        from . import four_bit

        four_bit.keep_trainable(lm)

    # The Hub's sampling defaults (top_k, repetition_penalty, ...) would bias the rollout: `save_lm`
    # puts them back.
    lm.saved_generation_config = lm.generation_config
    lm.generation_config = GenerationConfig()
    lm = lm.to(device)
    if not engine.is_without_weights(lm):
        causal_states(lm)
    return lm


def load_lm(config: RunConfig, device: torch.device, *, trainable: bool = True) -> LanguageModel:
    """Return the causal LM of a run, without dropout; frozen, and without its adapters, unless trainable."""
    # Its weights.
    adapters = lora.find(config.model, config.revision)
    with_adapters = trainable and (adapters is not None or config.lora_rank > 0)
    reading = {
        "dtype": engine.torch_dtype(config),
        "attn_implementation": config.attn_implementation,
        "held": config,
    }
    if trainable:
        lora.check_options(config, adapters)
        if config.load_in_4bit:
            from . import four_bit

            four_bit.check_options(config, adapters=with_adapters)
            reading |= four_bit.quantized(reading["dtype"], device)
    lm = _read_lm(config.model, config.revision, adapters, device, **reading)

    # What of it is trained.
    if not trainable:
        lm.requires_grad_(False).eval()
    elif adapters is not None:
        from .adapters import with_saved_adapters

        with readable(config.model):
            lm = with_saved_adapters(lm, config.model, config.revision, adapters)
    elif with_adapters:
        from .adapters import with_new_adapters

        lm = with_new_adapters(lm, config)
    # With dropout the ratio of an unchanged policy would not be 1.
    prepare_modules(lm)
    base_lm = lm.get_base_model() if with_adapters else lm
    sequence_parts = prepare_layers(base_lm, config, trainable=trainable)
    head_dtype = None if config.head_dtype == "auto" else getattr(torch, config.head_dtype)
    model = LanguageModel(
        lm,
        config.loss_from,
        lora=with_adapters,
        head_dtype=head_dtype,
        sequence_parts=sequence_parts,
    )
    if trainable and model.unfused_reason is not None:
        print_rank0(f"loss_from=logits: {type(model.base).__name__} {model.unfused_reason}")
    return model


def load_to_sample(
    name: str, *, device: torch.device, revision: str | None = None, **options
) -> Any:
    """Return a transformers causal LM to sample from, adapters merged in, without sampling defaults.

    Its `options` are a dtype, attn_implementation, and those of `read`.
    """
    adapters = lora.find(name, revision)
    if adapters is not None and "quantization_config" in options:
        raise InputError(
            f"{name!r} are adapters, which cannot be merged into weights of 4 bits; merge and save them"
        )
    lm = _read_lm(name, revision, adapters, device, **options)
    if adapters is not None:
        from .adapters import merged_in_place, with_saved_adapters

        with readable(name):
            lm = merged_in_place(with_saved_adapters(lm, name, revision, adapters))
    return lm.eval()


def save(trained, tokenizer, folder: Path, write: Callable[[Path, dict | None], None]) -> None:
    """Have rank 0 `write` a model, and its tokenizer, complete or not at all. Call on all ranks."""
    state = None
    # All ranks gather, and rank 0 has the whole.
    if trained.zero_optimization_stage() == 3:
        state = engine.collected_state(trained.module)
    if ranks.process_index() == 0:
        with atomic_folder(folder) as unfinished:
            write(unfinished, state)
            tokenizer.save_pretrained(unfinished)
    # No rank goes on, or ends the run, before the folder is complete.
    ranks.barrier()


def save_lm(trained, tokenizer, folder: Path, *, merged: bool = False) -> None:
    """Save a `LanguageModel` and its generation config in the Hub format: of adapters these alone, unless merged."""
    model = trained.module

    def write(unfinished: Path, state: dict | None) -> None:
        base, lm = model.base, model.lm
        merges = merged and model.lora
        if state is not None:
            # The gathered weights have the names of the wrapper's, and the file those of the model.
            prefix = "lm.base_model.model." if merges else "lm."
            state = {name.removeprefix(prefix): value for name, value in state.items()}
        if merges:
            from .adapters import merge

            lm, state = merge(base, state), None
        # The Hub's sampling defaults, which training leaves out, belong to the saved model.
        written = lm if merges else base
        training_config = base.generation_config
        written.generation_config = base.saved_generation_config
        lm.save_pretrained(unfinished, state_dict=state)
        base.generation_config = training_config

    save(trained, tokenizer, folder, write)


# A reference that moves to the policy, wholly or by a fraction (arXiv:2404.09656), and is part of
# checkpoints.


@torch.no_grad()
def sync(reference, policy, alpha: float) -> None:
    """Set reference = alpha * policy + (1 - alpha) * reference, in fp32; alpha=1 copies. Call on all ranks."""
    # One weight at a time is whole, so ZeRO 3 needs memory for one more.
    weights = dict(without_engine(policy).named_parameters())
    for name, reference_weight in without_engine(reference).named_parameters():
        with engine.gathered(weights[name]), engine.gathered(reference_weight, written=True):
            new = weights[name].float()
            reference_weight.copy_(torch.lerp(reference_weight.float(), new, alpha))


def without_engine(model) -> LanguageModel:
    """Return the model in an engine, or the model itself: a frozen one has an engine under ZeRO 3 alone."""
    return model if isinstance(model, LanguageModel) else model.module


class SavedReference:
    """A reference as a part of checkpoints: it saves and loads as an engine does."""

    optimizer = None  # nothing optimises it

    def __init__(self, model):
        self.model = without_engine(model)

    def save_checkpoint(self, folder: str, *, tag: str, save_latest: bool) -> None:
        """Write `folder/tag/reference.safetensors`, whatever the ZeRO stage. Call on all ranks."""
        from safetensors.torch import save_file

        weights = engine.collected_state(self.model)
        if ranks.process_index() == 0:
            path = Path(folder) / tag / "reference.safetensors"
            path.parent.mkdir()
            # A weight of two names is listed once.
            save_file({name: weights[name] for name, _ in self.model.named_parameters()}, path)

    @torch.no_grad()
    def load_checkpoint(self, folder: str, *, tag: str) -> None:
        """Restore what was written. Call on all ranks."""
        from safetensors import safe_open

        with safe_open(Path(folder) / tag / "reference.safetensors", framework="pt") as weights:
            for name, parameter in self.model.named_parameters():
                with engine.gathered(parameter, written=True):
                    parameter.copy_(weights.get_tensor(name))

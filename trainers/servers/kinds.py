"""vLLM 0.32 and 0.33, and SGLang 0.5.23, as servers; docs/rollouts.md says how to start each."""

from pathlib import Path

from ..rollouts.sampling import Sampling
from .inference import Server


def common_options(sampling: Sampling) -> dict:
    """Return the options that servers name alike, all of them: a model's generation config has other defaults."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # the model's own end of sequence is no stop token
    }


class VLLM(Server):
    """A vLLM server; the paths that change it exist only under VLLM_SERVER_DEV_MODE=1."""

    kind = "vLLM"
    ready = "/health"
    resume = "/resume"
    is_paused = "/is_paused"  # also of a server that is asleep
    wake = "/wake_up"  # which ends a pause, too
    sleep = "/sleep?level=2"  # drops weights and cache: new weights come in any case
    flags = (
        "start it with VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs and a --max-model-len for prompt and "
        "response; seeds need VLLM_BATCH_INVARIANT=1 on a GPU; kept sets need --enable-scale-out "
        "--return-sampling-mask, this run's --top_k and a GPU (vLLM on a CPU reports none)"
    )
    without_cache = "--no-enable-prefix-caching"

    def request(
        self, prompt_ids: list[int], sampling: Sampling, seed: int | None
    ) -> tuple[str, dict]:
        """Return path and body; one path alone reports kept sets."""
        chosen = {
            "max_tokens": sampling.max_new_tokens,
            "top_k": sampling.top_k,
            "seed": seed,
            "logprobs": 0,
        }
        chosen |= common_options(sampling)
        if sampling.truncates:
            body = {"model": self.model, "token_ids": prompt_ids, "sampling_params": chosen}
            return "/inference/v1/generate", body
        return "/v1/completions", chosen | {
            "model": self.model,
            "prompt": prompt_ids,
            "return_token_ids": True,
        }

    def parse(self, answer: dict, sampling: Sampling) -> tuple:
        (choice,) = answer["choices"]
        if sampling.truncates:
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        else:
            logprobs = choice["logprobs"]["token_logprobs"]
        return choice["token_ids"], logprobs, choice.get("sampling_mask"), choice["finish_reason"]

    def update(self, weights: Path | dict) -> list[tuple[str, dict | None]]:
        if isinstance(weights, Path):
            arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
            load = [("/collective_rpc", arguments)]
        else:
            load = [
                ("/init_weight_transfer_engine", {"init_info": {"packed": False}}),
                ("/start_weight_update", None),
                ("/update_weights", {"update_info": weights}),
                ("/finish_weight_update", None),
            ]
        empty = ("/reset_prefix_cache", None)
        if not self.asleep:
            return [("/pause?mode=wait", None), *load, empty]
        # The cache comes back last: until then its memory is free for the weights that are read.
        awake, cache = (f"{self.wake}?tags={tag}" for tag in ("weights", "kv_cache"))
        return [(awake, None), *load, (cache, None), empty]


class SGLang(Server):
    """An SGLang server."""

    kind = "SGLang"
    ready = "/ready"
    resume = "/continue_generation"
    margin = 2  # it cuts max_new_tokens to context - 2 - prompt, without an error
    flags = (
        "start it with --enable-deterministic-inference, SGLANG_RETURN_ORIGINAL_LOGPROB unset and a --context-length "
        "for prompt, response and 2; kept sets need --sampling-mask-max-tokens and this run's --top_k"
    )
    without_cache = "--disable-radix-cache"

    def request(
        self, prompt_ids: list[int], sampling: Sampling, seed: int | None
    ) -> tuple[str, dict]:
        """Return path and body."""
        chosen = (
            common_options(sampling)
            | {
                "max_new_tokens": sampling.max_new_tokens,
                "top_k": sampling.top_k or -1,  # -1 is the whole vocabulary
                "sampling_seed": seed,
                "ignore_eos": not sampling.stop_ids,  # with True it stops at none of stop_token_ids either
                "no_stop_trim": True,
            }
        )
        masks = {"return_sampling_mask": True} if sampling.truncates else {}
        return "/generate", {
            "input_ids": prompt_ids,
            "sampling_params": chosen,
            "return_logprob": True,
        } | masks

    def parse(self, answer: dict, sampling: Sampling) -> tuple:
        about = answer["meta_info"]
        sets = about.get("output_token_sampling_mask") if sampling.truncates else None
        if sets is None:
            logprobs = [
                token[0] for token in about["output_token_logprobs"]
            ]  # [log-probability, id, text]
        else:  # the log-probabilities over the sets have a field of their own
            logprobs = about["output_token_sampling_logprobs"]
        return answer["output_ids"], logprobs, sets, about["finish_reason"]["type"]

    def update(self, weights: Path | dict) -> list[tuple[str, dict | None]]:
        load = {"model_path": str(weights), "flush_cache": True}
        return [("/pause_generation", {"mode": "retract"}), ("/update_weights_from_disk", load)]

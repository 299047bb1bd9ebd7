"""SGLang 0.5.23 as a server: `python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference`."""

from pathlib import Path

from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.inference import Server, common_options


class SGLang(Server):
    """An SGLang server."""

    kind = "SGLang"
    ready = "/ready"
    resume = "/continue_generation"
    margin = 2  # it cuts max_new_tokens to context - 2 - prompt, without an error
    flags = {
        "logprobs": "SGLANG_RETURN_ORIGINAL_LOGPROB unset",
        "seeds": "with --enable-deterministic-inference",
        "sets": "with --sampling-mask-max-tokens above the sets' sizes, and this run with --top_k",
        "push": "version 0.5.23 or later",
        "cache": "--disable-radix-cache",
        "length": "--context-length",
    }

    def request(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> tuple[str, dict]:
        """Return path and body."""
        chosen = common_options(sampling) | {
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": 0,
            "top_k": (sampling.truncates and sampling.top_k) or -1,  # -1 is the whole vocabulary
            "sampling_seed": seed,
            "ignore_eos": not sampling.stop_ids,  # with True it stops at none of stop_token_ids either
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        body = {"input_ids": prompt_ids, "sampling_params": chosen, "return_logprob": True, "stream": False}
        return "/generate", body | ({"return_sampling_mask": True} if sampling.truncates else {})

    def parse(self, answer: dict, sampling: Sampling) -> tuple:
        """Return the fields; with kept sets the log-probabilities over them have a field of their own."""
        about = answer["meta_info"]
        sets = about.get("output_token_sampling_mask") if sampling.truncates else None
        if sets is None:
            logprobs = [token[0] for token in about["output_token_logprobs"]]  # [log-probability, id, text]
        else:
            logprobs = about["output_token_sampling_logprobs"]
        return answer["output_ids"], logprobs, sets, about["finish_reason"]["type"], about.get("weight_version")

    def update(self, folder: Path, version: int) -> list[tuple[str, dict | None]]:
        """Return paths and bodies."""
        loaded = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        return [("/pause_generation", {"mode": "retract"}), ("/update_weights_from_disk", loaded)]

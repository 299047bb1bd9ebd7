"""vLLM 0.32 and 0.33 as a server: `vllm serve MODEL --logprobs-mode processed_logprobs`, VLLM_SERVER_DEV_MODE=1."""

from pathlib import Path

from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.inference import Server, common_options


class VLLM(Server):
    """A vLLM server; the paths that change it exist only under VLLM_SERVER_DEV_MODE=1."""

    kind = "vLLM"
    ready = "/health"
    resume = "/resume"
    flags = {
        "logprobs": "--logprobs-mode processed_logprobs",
        "seeds": "without speculative decoding, and on a GPU with VLLM_BATCH_INVARIANT=1",
        "sets": "with --enable-scale-out --return-sampling-mask, and this run with --top_k",
        "push": "VLLM_SERVER_DEV_MODE=1 in its environment",
        "cache": "--no-enable-prefix-caching",
        "length": "--max-model-len",
    }

    def request(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> tuple[str, dict]:
        """Return path and body; one path alone reports kept sets."""
        top_k = sampling.top_k if sampling.truncates else 0
        chosen = {"max_tokens": sampling.max_new_tokens, "min_tokens": 0, "top_k": top_k, "seed": seed, "logprobs": 0}
        chosen |= common_options(sampling)
        body = {"model": self.model, "stream": False}
        if sampling.truncates:
            return "/inference/v1/generate", body | {"token_ids": prompt_ids, "sampling_params": chosen}
        reported = {"return_token_ids": True, "return_weight_versions": True, "echo": False}
        return "/v1/completions", body | chosen | reported | {"prompt": prompt_ids}

    def parse(self, answer: dict, sampling: Sampling) -> tuple:
        """Return the fields; 0.32 reports no version."""
        (choice,) = answer["choices"]
        if sampling.truncates:
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        else:
            logprobs = choice["logprobs"]["token_logprobs"]
        spans = choice.get("weight_versions") or [{"version": None}]
        sets = choice.get("sampling_mask")
        return choice["token_ids"], logprobs, sets, choice["finish_reason"], spans[-1]["version"]

    def update(self, folder: Path, version: int) -> list[tuple[str, dict | None]]:
        """Return paths and bodies."""
        return [
            ("/pause?mode=wait", None),
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}),
            ("/reset_prefix_cache", None),
            ("/update_weight_version", {"new_version": str(version)}),
        ]

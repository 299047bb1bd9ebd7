"""SGLang 0.5.23 as a server: `python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference`.

Its log-probabilities are those after the temperature unless it is told otherwise, and kept sets come by request.
"""

from dataclasses import replace
from pathlib import Path

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.connection import Refused
from fused_rl.trainers.servers.inference import Answer, Flags, Server

ALL = -1  # its top_k for the whole vocabulary


class SGLang(Server):
    """An SGLang server."""

    kind = "SGLang"
    flags = Flags(
        logprobs="SGLANG_RETURN_ORIGINAL_LOGPROB unset in its environment",
        seeds="--enable-deterministic-inference",
        sets="--sampling-mask-max-tokens above what top_p, top_k and min_p leave (0.5.23 or later), "
        "and this run with --top_k",
        push="an SGLang that has /update_weights_from_disk (0.5.23)",
        dtype="--dtype",
        head="--enable-fp32-lm-head",
        no_cache="--disable-radix-cache",
        length="--context-length",
        tokenizer="--tokenizer-path",
    )

    def label(self) -> str | None:
        """GET /model_info."""
        answer = self.connection.get("/model_info")
        return answer.get("weight_version") if isinstance(answer, dict) else None

    def digests(self) -> dict[str, str] | None:
        """Of each tensor on each of its ranks."""
        ranks = self._told_of("ranks", list, "/weights_checker", {"action": "checksum"})
        if ranks is None:
            return None
        found = {}
        for rank, told in enumerate(ranks):
            sums = told.get("checksums") if isinstance(told, dict) else None
            if not isinstance(sums, dict):
                raise self._missing("checksums", ranks)
            found |= {f"rank{rank}/{name}": digest for name, digest in sums.items()}
        return found

    def _tokenized(self, text: str) -> dict:
        return {"prompt": text, "add_special_tokens": False}

    def why_no_sets(self, sampling: Sampling) -> str | None:
        """Asked for one token."""
        try:
            answer = self.connection.ask("/generate", _asked([0], replace(sampling, max_new_tokens=1), 0))
        except Refused as error:
            return str(error)
        told = self._told(answer)
        names = ("output_token_sampling_mask", "output_token_sampling_logprobs")
        missing = [name for name in names if told.get(name) is None]
        return f"its answers have no {missing[0]}" if missing else None

    def _answer(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> Answer:
        answer = self.connection.ask("/generate", _asked(prompt_ids, sampling, seed))
        told, ids = self._told(answer), answer.get("output_ids")
        drawn = told.get("output_token_logprobs")  # [log-probability, id, text]
        logprobs, sets = None, None
        if drawn is not None:
            logprobs = [token[0] for token in drawn]
            if [token[1] for token in drawn] != ids:
                raise self._missing("the log-probabilities of its own tokens", answer)
        if sampling.truncates:  # those above are of the whole vocabulary
            logprobs, sets = told.get("output_token_sampling_logprobs"), told.get("output_token_sampling_mask")
        finish = told.get("finish_reason")
        finish = finish.get("type") if isinstance(finish, dict) else finish
        return Answer(ids, logprobs, finish, sets, told.get("weight_version"))

    def _told(self, answer: object) -> dict:
        """What an answer says of its response."""
        told = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(told, dict):
            raise self._missing("meta_info", answer)
        return told

    def _pause(self) -> None:
        self.connection.tell("/pause_generation", {"mode": "retract"})

    def _load(self, folder: Path, version: int) -> None:
        asked = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        answer = self.connection.tell("/update_weights_from_disk", asked)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            said = answer.get("message") if isinstance(answer, dict) else answer
            raise InputError(
                f"{self}: it did not read the weights in {folder}: {said}; does it see that folder, and does nobody "
                "else sample from it?"
            )

    def _resume(self) -> None:
        self.connection.tell("/continue_generation", {})


def _asked(prompt_ids: list[int], sampling: Sampling, seed: int | None) -> dict:
    """Every option that a server, or a model's generation config, might have another default for."""
    options = {
        "n": 1,
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.truncates else 1.0,
        "top_k": sampling.top_k if sampling.truncates and sampling.top_k else ALL,
        "min_p": sampling.min_p if sampling.truncates else 0.0,
        "sampling_seed": seed,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": [],
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": not sampling.stop_ids,  # true, it would stop at none of stop_token_ids either
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    asked = {"input_ids": prompt_ids, "sampling_params": options, "return_logprob": True, "stream": False}
    return asked | {"return_sampling_mask": True} if sampling.truncates else asked

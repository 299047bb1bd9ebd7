"""vLLM 0.32 and 0.33 as a server: `vllm serve MODEL --logprobs-mode processed_logprobs`, VLLM_SERVER_DEV_MODE=1.

Of the two ways to sample only /inference/v1/generate tells kept sets, so that truncated sampling takes that one.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.connection import Refused
from fused_rl.trainers.servers.inference import UNKNOWN, Answer, Flags, Server

OF_NOTHING = hashlib.sha256().hexdigest()  # on a CPU vLLM keeps a packed copy of a matrix, and nothing of itself
DRAWN = "token_id:"  # before the id of a token, where the server writes it as text


class VLLM(Server):
    """A vLLM server; its endpoints that change something need VLLM_SERVER_DEV_MODE=1."""

    kind = "vLLM"
    flags = Flags(
        logprobs="--logprobs-mode processed_logprobs",
        seeds="without speculative decoding, and on a GPU with VLLM_BATCH_INVARIANT=1",
        sets="--enable-scale-out --return-sampling-mask --logprobs-mode processed_logprobs, and this run with --top_k",
        push="VLLM_SERVER_DEV_MODE=1 in its environment",
        dtype="--dtype",
        head='--hf-overrides \'{"head_dtype": "float32"}\'',
        no_cache="--no-enable-prefix-caching",
        length="--max-model-len",
        tokenizer="--tokenizer",
    )

    def label(self) -> str | None:
        """GET /weight_info."""
        with self._known_to_push():
            answer = self.connection.get("/weight_info")
        return answer.get("weight_version") if isinstance(answer, dict) else None

    def digests(self) -> dict[str, str] | None:
        """SHA-256 of each tensor as it was loaded, where it is kept so: some are several of the model's in one."""
        told = self._told_of("checksums", dict, "/weight_checker", {"action": "checksum"})
        return None if told is None else {name: digest for name, digest in told.items() if digest != OF_NOTHING}

    def _tokenized(self, text: str) -> dict:
        return {"model": self.model, "prompt": text, "add_special_tokens": False}

    def why_no_sets(self, sampling: Sampling) -> str | None:
        """Asked for one token."""
        asked = self._generate([0], replace(sampling, max_new_tokens=1), 0)
        try:
            answer = self.connection.ask("/inference/v1/generate", asked)
        except Refused as error:
            return str(error)
        choice = self._choice(answer)
        return None if choice.get("sampling_mask") is not None else "its answers have no sampling_mask"

    def _answer(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> Answer:
        if sampling.truncates:
            return self._with_sets(prompt_ids, sampling, seed)
        asked = _drawn_as(sampling, seed) | {
            "model": self.model,
            "prompt": prompt_ids,
            "return_token_ids": True,
            "return_weight_versions": True,
            "echo": False,
            "stream": False,
        }
        choice = self._choice(self.connection.ask("/v1/completions", asked))
        read = choice.get("prompt_token_ids")
        if read is not None and read != prompt_ids:
            raise self._missing(f"the prompt of {len(prompt_ids)} tokens that was sent", {"prompt_token_ids": read})
        told = choice.get("logprobs") or {}
        version = self._version_of(choice)
        return Answer(choice.get("token_ids"), told.get("token_logprobs"), choice.get("finish_reason"), version=version)

    def _with_sets(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> Answer:
        asked = self._generate(prompt_ids, sampling, seed)
        choice = self._choice(self.connection.ask("/inference/v1/generate", asked))
        ids, tokens = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
        told = None
        if isinstance(tokens, list):
            told = [token.get("logprob") for token in tokens]
            drawn = [_id_of(token) for token in tokens]
            if drawn != ids:
                raise self._missing("the log-probabilities of its own tokens", {"token_ids": ids, "logprobs": drawn})
        sets, version = choice.get("sampling_mask"), self._version_of(choice)
        return Answer(ids, told, choice.get("finish_reason"), sets, version)

    def _generate(self, prompt_ids: list[int], sampling: Sampling, seed: int | None) -> dict:
        asked = {"model": self.model, "token_ids": prompt_ids, "stream": False}
        return asked | {"sampling_params": _drawn_as(sampling, seed)}

    def _choice(self, answer: object) -> dict:
        """The one choice of an answer."""
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._missing("one choice", answer)
        return choices[0]

    def _version_of(self, choice: dict) -> str | None:
        """The label of the weights that drew all of a choice; None where the server does not tell (0.32)."""
        spans = choice.get("weight_versions")
        if not spans:
            return None
        labels = list(dict.fromkeys(span["version"] for span in spans))
        if len(labels) > 1:
            raise InputError(
                f"{self}: its weights changed from version {labels[0]!r} to {labels[-1]!r} in the middle of a "
                "response; a server samples for one run alone"
            )
        return labels[0]

    def _pause(self) -> None:
        self.connection.tell("/pause?mode=wait")

    def _load(self, folder: Path, version: int) -> None:
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            self.connection.tell("/collective_rpc", asked)
        except InputError as error:
            if getattr(error, "status", 0) in UNKNOWN:
                raise
            raise InputError(f"{error}: it did not read the weights in {folder}; does it see that folder?") from error
        answer = self.connection.tell("/reset_prefix_cache")
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise InputError(
                f"{self}: it did not empty its prefix cache ({answer}), which holds values of the old weights; start "
                f"it with {self.flags.no_cache}"
            )
        self.connection.tell("/update_weight_version", {"new_version": str(version)})

    def _resume(self) -> None:
        self.connection.tell("/resume")


def _drawn_as(sampling: Sampling, seed: int | None) -> dict:
    """Every option that a server, or a model's generation config, might have another default for."""
    return {
        "n": 1,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.truncates else 1.0,
        "top_k": sampling.top_k if sampling.truncates else 0,
        "min_p": sampling.min_p if sampling.truncates else 0.0,
        "seed": seed,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": [],
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # else the model's own end of sequence would stop it too
        "logprobs": 0,  # of the token alone
    }


def _id_of(token: dict) -> object:
    """Of a token in a list of log-probabilities, as a number or as text."""
    if "token_id" in token:
        return token["token_id"]
    text = str(token.get("token"))
    return int(text.removeprefix(DRAWN)) if text.removeprefix(DRAWN).isdecimal() else text

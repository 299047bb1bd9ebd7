"""An inference server in a thread, as vLLM and SGLang answer, with a real model of a few thousand weights in it.

    with fake_server.serving("vllm", folder) as fake:
        …  fake.url, fake.asked, fake.script, fake.flaws

It samples with seeds, tells log-probabilities of what was drawn from and kept sets, keeps prompts until a
reset, and reads weights from a folder into those that it has. `script` makes single calls go wrong, `flaws` are
what is wrong with all of them. What is not asked for is what the model's generation config says, or a server's default.
"""

import contextlib
import copy
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from fused_rl.trainers.rollouts.sampling import Sampling, truncated

BLOCK = 16  # tokens of a prompt from which on it is kept
WRONG = ("cut", "hang", "no json", "close")
"""What `script` may say beside an HTTP status, or a function of the right answer."""


class Refusal(Exception):
    """HTTP status and message."""


class Fake:
    """One server.

    Attributes:
        asked: (path, body) of every request, in their order.
        script: (path, what) of requests to come: the first of its path is taken, and happens once.
        flaws: raw, stale, clones, unseeded, deaf, mute, old version, no success, no reset, no sets, no logprobs.
    """

    def __init__(self, kind: str, folder: str, *, max_model_len: int = 128, tells_versions: bool = True, owner=None):
        self.kind, self.max_model_len, self.tells_versions = kind, max_model_len, tells_versions
        self.owner = owner or kind
        self.lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.defaults = transformers.GenerationConfig.from_pretrained(folder).to_dict()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.label, self.paused = "default", False
        self.asked: list[tuple[str, dict | None]] = []
        self.script: list[tuple[str, object]] = []
        self.flaws: set[str] = set()
        self.kept: dict[tuple[int, ...], object] = {}
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.answers = VLLM if kind == "vllm" else SGLANG

    def bodies(self, path: str) -> list[dict]:
        """Of the requests to a path."""
        return [body for asked, body in self.asked if asked == path]

    def answer(self, path: str, body: dict | None) -> object:
        """What to answer; raises Refusal."""
        with self.lock:
            self.asked.append((path, body))
        if path not in self.answers:
            raise Refusal(404, "Not Found")
        with torch.no_grad(), self.lock:
            return self.answers[path](self, body)

    def scripted(self, path: str) -> object:
        """What goes wrong with this request; None where nothing does."""
        with self.lock:
            for entry in self.script:
                if entry[0] == path:
                    self.script.remove(entry)
                    return entry[1]
        return None

    def draw(self, ids: list[int], chosen: dict, most: int, *, mask: bool = False) -> dict:
        """One response: its ids, log-probabilities, finish reason and sets; `chosen` as vLLM names it."""
        if max(ids, default=0) >= self.lm.config.vocab_size:
            raise Refusal(400, f"Token id {max(ids)} is out of vocabulary")
        if len(ids) >= self.max_model_len:
            raise Refusal(400, f"the prompt has {len(ids)} tokens; at most {self.max_model_len} fit")
        if chosen.get("n", 1) > 1 and chosen["temperature"] == 0:
            raise Refusal(400, "n must be 1 when using greedy sampling")
        temperature = chosen.get("temperature", self.defaults.get("temperature", 1.0))
        top_k = max(0, chosen.get("top_k", self.defaults.get("top_k") or 0))
        sampling = Sampling(temperature or 1.0, most, (), chosen.get("top_p", 1.0), top_k, chosen.get("min_p", 0.0))
        stops = set(chosen.get("stop_token_ids") or [])
        if not chosen.get("ignore_eos"):
            stops |= {self.tokenizer.eos_token_id}
        elif self.kind == "sglang":  # which looks at no stop token then
            stops = set()
        seed = 0 if "clones" in self.flaws else chosen.get("seed")
        generator = torch.Generator()
        if seed is None or "unseeded" in self.flaws:
            generator.seed()
        else:
            generator.manual_seed(seed)

        # Token by token, of a past that may be kept from another request.
        most = min(most, self.max_model_len - len(ids))  # without a word
        past, feed, drawn, told, sets, finish = *self._past(ids), [], [], [], "length"
        for _ in range(most):
            output = self.lm(input_ids=torch.tensor([feed]), past_key_values=past, use_cache=True)
            past, logits = output.past_key_values, output.logits[:, -1].float()
            scores = truncated(logits / sampling.temperature, sampling)
            logprobs = scores.log_softmax(-1)
            greedy = temperature == 0
            token = int(logits.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator))
            of_model = logits.log_softmax(-1) if "raw" in self.flaws else logprobs
            feed = [token]
            drawn.append(token)
            told.append(float(of_model[0, token]))
            sets.append(scores[0].isfinite().nonzero()[:, 0].tolist())
            if token in stops:
                finish = "length" if self.kind == "sglang" and len(drawn) == most else "stop"
                break
        return {"ids": drawn, "logprobs": told, "finish": finish, "sets": sets if mask else None, "version": self.label}

    def _past(self, ids: list[int]) -> tuple[object, list[int]]:
        """What is kept of a prompt, and what of it is still to be read."""
        key = tuple(ids)
        if len(ids) < BLOCK:
            return transformers.DynamicCache(config=self.lm.config), ids
        if key not in self.kept:
            past = transformers.DynamicCache(config=self.lm.config)
            self.lm(input_ids=torch.tensor([ids[:-1]]), past_key_values=past, use_cache=True)
            self.kept[key] = past
        return copy.deepcopy(self.kept[key]), ids[-1:]

    def load(self, folder: str) -> None:
        """Read weights into those that are there: what the folder lacks stays."""
        if not Path(folder).is_dir():
            raise Refusal(500, f"no folder {folder}")
        if "deaf" not in self.flaws:
            self.lm = copy.deepcopy(self.lm)
            self.lm.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)

    def reset(self) -> None:
        """Forget prompts."""
        if "stale" not in self.flaws:
            self.kept.clear()

    def digests(self) -> dict[str, str]:
        """Of its tensors, where queries, keys and values are one, and gates and what they gate."""
        found, joined = {}, {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
        joined |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        for name, value in self.lm.state_dict().items():
            name = ".".join(joined.get(part, part) for part in name.split("."))
            found.setdefault(name, hashlib.sha256()).update(value.numpy().tobytes())
        return {name: digest.hexdigest() for name, digest in found.items()}

    def named(self, label: str) -> None:
        """The version of its weights."""
        self.label = "1234" if "old version" in self.flaws else label


def _card(fake: Fake, body) -> dict:
    return {"data": [{"id": "policy", "max_model_len": fake.max_model_len, "owned_by": fake.owner}]}


def _tokenize(fake: Fake, body: dict) -> dict:
    return {"tokens": fake.tokenizer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))}


def _refuse_while_paused(fake: Fake) -> None:
    if fake.paused:
        raise Refusal(503, "The server is paused")


def _completions(fake: Fake, body: dict) -> dict:
    _refuse_while_paused(fake)
    choices, seed = [], body.get("seed")
    for k in range(body.get("n", 1)):
        own = body | {"seed": None if seed is None else seed + k}
        drawn = fake.draw(body["prompt"], own, body.get("max_tokens", 16))
        told = {"token_logprobs": drawn["logprobs"]} if "logprobs" in body and "no logprobs" not in fake.flaws else None
        choice = {"index": k, "text": "", "finish_reason": drawn["finish"], "logprobs": told}
        if body.get("return_token_ids"):
            choice |= {"token_ids": drawn["ids"], "prompt_token_ids": body["prompt"]}
        if body.get("return_weight_versions") and fake.tells_versions:
            choice["weight_versions"] = [{"version": drawn["version"], "start": 0, "end": len(drawn["ids"])}]
        choices.append(choice)
    return {"id": "cmpl-1", "object": "text_completion", "choices": choices}


def _tokens_out(fake: Fake, body: dict) -> dict:
    _refuse_while_paused(fake)
    if "no sets" in fake.flaws:
        raise Refusal(404, "Not Found")
    chosen = body["sampling_params"]
    drawn = fake.draw(body["token_ids"], chosen, chosen.get("max_tokens", 16), mask=True)
    pairs = zip(drawn["ids"], drawn["logprobs"], strict=True)
    content = [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]
    choice = {"index": 0, "token_ids": drawn["ids"], "finish_reason": drawn["finish"], "logprobs": {"content": content}}
    masked = chosen.get("top_k", 0) > 0 and "no masks" not in fake.flaws  # none under top_p or min_p alone
    choice["sampling_mask"] = drawn["sets"] if masked else None
    if fake.tells_versions:
        choice["weight_versions"] = [{"version": drawn["version"], "start": 0, "end": len(drawn["ids"])}]
    return {"request_id": "generate-tokens-1", "choices": [choice]}


def _pause(fake: Fake, body) -> dict:
    fake.paused = True
    return {"status": "paused"}


def _resume(fake: Fake, body) -> dict:
    fake.paused = False
    return {"status": "resumed"}


def _rpc(fake: Fake, body: dict) -> dict:
    if body["method"] != "reload_weights":
        raise Refusal(500, f"no method {body['method']}")
    fake.load(body["kwargs"]["weights_path"])
    return {"results": [None]}


def _reset(fake: Fake, body) -> dict:
    fake.reset()
    return {"success": "no reset" not in fake.flaws}


def _rename(fake: Fake, body: dict) -> dict:
    fake.named(body["new_version"])
    return {"success": True, "new_version": body["new_version"]}


def _checker(fake: Fake, body: dict) -> dict:
    if "mute" in fake.flaws:
        raise Refusal(404, "Not Found")
    if fake.paused:
        raise Refusal(409, "weight_checker requires an awake, unpaused engine")
    told = fake.digests()
    if "packed" in fake.flaws:  # as on a CPU, where matrices that are multiplied with are kept in another form
        nothing = hashlib.sha256().hexdigest()
        told |= {name: nothing for name in told if "_proj." in name or "lm_head." in name}
    return {"checksums": told}


def _generate(fake: Fake, body: dict) -> dict:
    chosen = dict(body["sampling_params"])
    chosen["seed"] = chosen.get("sampling_seed")
    mask = body.get("return_sampling_mask", False) and "no sets" not in fake.flaws
    if body.get("return_sampling_mask"):
        mask = mask and "no masks" not in fake.flaws
    drawn = fake.draw(body["input_ids"], chosen, chosen.get("max_new_tokens", 128), mask=mask)
    finish = {"type": drawn["finish"]}
    finish |= {"matched": drawn["ids"][-1]} if drawn["finish"] == "stop" else {"length": len(drawn["ids"])}
    told = {"id": "1", "finish_reason": finish, "weight_version": drawn["version"]}
    pairs = zip(drawn["logprobs"], drawn["ids"], strict=True)
    if body.get("return_logprob") and "no logprobs" not in fake.flaws:
        told["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
    if mask:
        told["output_token_sampling_mask"] = drawn["sets"]
        told["output_token_sampling_logprobs"] = drawn["logprobs"]
    return {"text": "", "output_ids": drawn["ids"], "meta_info": told}


def _from_disk(fake: Fake, body: dict) -> dict:
    if "no success" in fake.flaws:
        return {"success": False, "message": "Failed to update weights"}
    fake.load(body["model_path"])
    if body.get("flush_cache", True):
        fake.reset()
    fake.named(body["weight_version"])
    return {"success": True, "message": "Succeeded to update model weights."}


def _ranks(fake: Fake, body: dict) -> dict:
    if "mute" in fake.flaws:
        raise Refusal(404, "Not Found")
    return {"success": True, "message": "", "ranks": [{"checksums": fake.digests()}]}


def _nothing(fake: Fake, body) -> None:
    return None


SHARED = {"/health": _nothing, "/v1/models": _card, "/tokenize": _tokenize}
VLLM = SHARED | {
    "/weight_info": lambda fake, body: {"weight_version": fake.label},
    "/is_paused": lambda fake, body: {"is_paused": fake.paused},
    "/v1/completions": _completions,
    "/inference/v1/generate": _tokens_out,
    "/pause?mode=wait": _pause,
    "/resume": _resume,
    "/collective_rpc": _rpc,
    "/reset_prefix_cache": _reset,
    "/update_weight_version": _rename,
    "/weight_checker": _checker,
}
SGLANG = SHARED | {
    "/model_info": lambda fake, body: {"model_path": "policy", "weight_version": fake.label},
    "/generate": _generate,
    "/pause_generation": _pause,
    "/continue_generation": _resume,
    "/update_weights_from_disk": _from_disk,
    "/weights_checker": _ranks,
}


def _as_json(answer: object) -> bytes:
    return b"" if answer is None else json.dumps(answer).encode()


class Handler(BaseHTTPRequestHandler):
    """Requests to `server.fake`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """A question."""
        self._serve(None)

    def do_POST(self) -> None:
        """A question with a body."""
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._serve(json.loads(text) if text else None)

    def _serve(self, body: dict | None) -> None:
        fake = self.server.fake
        wrong = fake.scripted(self.path)
        try:
            if isinstance(wrong, int):
                fake.asked.append((self.path, body))
                raise Refusal(wrong, "as the script says")
            found = fake.answer(self.path, body)
            status, text = (
                200,
                b"" if found is None else json.dumps(wrong(found) if callable(wrong) else found).encode(),
            )
        except Refusal as refusal:
            status, text = refusal.args[0], json.dumps({"error": refusal.args[1]}).encode()
        if wrong == "hang":
            fake.ended.wait(30)
        if wrong == "no json":
            text = b"<html>"
        with contextlib.suppress(OSError):
            if wrong == "close":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text[: len(text) // 2] if wrong == "cut" else text)
        self.close_connection = True


class Listener(ThreadingHTTPServer):
    """Takes many connections at once."""

    daemon_threads, request_queue_size = True, 512

    def handle_error(self, request, client_address) -> None:
        """A client that has gone."""


@contextlib.contextmanager
def serving(kind: str, folder: str, *, port: int = 0, **options) -> Iterator[Fake]:
    """A fake of that kind, "vllm" or "sglang", until the block ends; options as of `Fake`."""
    fake = Fake(kind, folder, **options)
    listener = Listener(("127.0.0.1", port), Handler)
    listener.fake, fake.listener = fake, listener
    fake.url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.ended.set()
        listener.shutdown()
        listener.server_close()
        thread.join()

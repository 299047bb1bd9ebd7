"""An inference server in a thread that answers as vLLM or SGLang does, with a real model of a few thousand weights.

    with fake_server.serving("vllm", folder) as fake:
        …  fake.url, fake.calls, fake.script, fake.flaws

It samples with seeds, reports log-probabilities of what it samples from and kept sets, keeps prompts until a reset, and
loads weights from a folder. `script` makes single calls fail, `flaws` are wrong with all of them.
"""

import contextlib
import copy
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file

from fused_rl.trainers.rollouts.sampling import Sampling, processed_scores
from tests.lazy import transformers
from tests.trainers.weight_transfer import Transfer

BLOCK = 16  # tokens of a prompt from which on it is kept


class Refusal(Exception):
    """HTTP status and message."""


class Fake:
    """One server.

    Attributes:
        calls: (path, body) of each, in their order.
        script: (path, what) of requests to come: the first of its path is taken once. `what` is an HTTP status, a
            function of the right answer, bytes to send in its place, or "hang", "close".
        flaws: raw, stale, unseeded, deaf, warm, unfinished, no sets.
        connections: how many have been opened.
        loaded: (folder, its tensors) of each update.
        asleep: what of its memory is freed: weights, kv_cache.
        transfer: how it takes weights by CUDA IPC, if it was started to.
    """

    def __init__(self, kind: str, folder: str, *, max_model_len: int = 128, key=None):
        self.kind, self.max_model_len, self.key = kind, max_model_len, key
        self.folder, self.can_sleep = folder, True
        self.asleep: set[str] = set()
        self.transfer: Transfer | None = None
        self.loaded: list[tuple[Path, dict[str, torch.Tensor]]] = []
        self.lm = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.eos = self.lm.config.eos_token_id
        self.paused, self.connections = False, 0
        self.calls: list[tuple[str, dict | None]] = []
        self.script: list[tuple[str, object]] = []
        self.flaws: set[str] = set()
        self.kept: dict[tuple[int, ...], object] = {}
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.answers = VLLM if kind == "vllm" else SGLANG

    def bodies(self, path: str) -> list[dict]:
        """Return the bodies of the requests to a path."""
        return [body for called, body in self.calls if called == path]

    def answer(self, path: str, body: dict | None, key: str | None) -> object:
        """Return what to answer; raises Refusal."""
        with torch.no_grad(), self.lock:
            self.calls.append((path, body))
            if self.key is not None and key != f"Bearer {self.key}":
                raise Refusal(401, f"Incorrect API key: {key}")
            if path not in self.answers:
                raise Refusal(404, "Not Found")
            return self.answers[path](self, body)

    def scripted(self, path: str) -> object:
        """Return what goes wrong with this request, or None."""
        with self.lock:
            for entry in self.script:
                if entry[0] == path:
                    self.script.remove(entry)
                    return entry[1]
        return None

    def draw(self, ids: list[int], chosen: dict, most: int) -> dict:
        """Sample one response; `chosen` has vLLM's names."""
        if self.paused:
            raise Refusal(503, "The server is paused")
        if max(ids) >= self.lm.config.vocab_size:
            raise Refusal(400, f"Token id {max(ids)} is out of vocabulary")
        temperature = chosen.get("temperature", 1.0)
        if "warm" in self.flaws:
            temperature *= 1.1
        sampling = Sampling(
            temperature or 1.0,
            most,
            (),
            top_p=chosen.get("top_p", 1.0),
            top_k=max(0, chosen.get("top_k", 0)),
            min_p=chosen.get("min_p", 0.0),
        )
        stops = set(chosen.get("stop_token_ids") or [])
        if not chosen.get("ignore_eos"):
            stops.add(self.eos)
        elif self.kind == "sglang":  # which then looks at no stop token
            stops = set()
        seed = chosen.get("seed")
        generator = torch.Generator()
        if seed is None or ("unseeded" in self.flaws and len(ids) >= BLOCK):
            generator.seed()
        else:
            generator.manual_seed(seed)

        # Token by token, from a past that may be kept from another request; what does not fit is cut.
        most = min(most, self.max_model_len - len(ids) - (2 if self.kind == "sglang" else 0))
        if "unfinished" in self.flaws:
            most = min(most, 2)
        past, feed, drawn, reported, sets, finish = *self._past(ids), [], [], [], "length"
        for _ in range(most):
            output = self.lm(input_ids=torch.tensor([feed]), past_key_values=past, use_cache=True)
            past, logits = output.past_key_values, output.logits[:, -1].float()
            scores = processed_scores(logits, sampling)
            logprobs = scores.log_softmax(-1)
            token = int(logits.argmax())
            if temperature:
                token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            of_model = logits.log_softmax(-1) if "raw" in self.flaws else logprobs
            feed = [token]
            drawn.append(token)
            reported.append(float(of_model[0, token]))
            sets.append(scores[0].isfinite().nonzero()[:, 0].tolist())
            if token in stops:
                finish = "stop"
                break
        return {"ids": drawn, "logprobs": reported, "finish": finish, "sets": sets}

    def _past(self, ids: list[int]) -> tuple[object, list[int]]:
        """Return what is kept of a prompt, and what of it is still to be read."""
        key = tuple(ids)
        if len(ids) < BLOCK:
            return transformers.DynamicCache(config=self.lm.config), ids
        if key not in self.kept:
            past = transformers.DynamicCache(config=self.lm.config)
            self.lm(input_ids=torch.tensor([ids[:-1]]), past_key_values=past, use_cache=True)
            self.kept[key] = past
        return copy.deepcopy(self.kept[key]), ids[-1:]

    def load(self, folder: str) -> None:
        """Load weights into the model: what the folder lacks stays."""
        if not Path(folder).is_dir():
            raise Refusal(500, f"no folder {folder}")
        self.take(tensors_of(folder), Path(folder))

    def take(self, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        """Take tensors into the model."""
        if "weights" in self.asleep:
            raise Refusal(500, "weights are asleep")
        if "deaf" not in self.flaws:
            self.lm = copy.deepcopy(self.lm)
            self.lm.load_state_dict(tensors, strict=False)
            self.loaded.append((folder, tensors))

    def reset(self) -> None:
        """Forget prompts."""
        if "stale" not in self.flaws:
            self.kept.clear()

    def pause(self, paused: bool) -> dict:
        if self.asleep and not paused:
            raise Refusal(500, "it is asleep")
        self.paused = paused
        return {"status": "paused" if paused else "resumed"}

    def sleep(self) -> dict:
        """Drop weights and prompts."""
        self.paused, self.asleep = True, {"weights", "kv_cache"}
        self.kept.clear()
        for weight in self.lm.parameters():
            weight.fill_(float("nan"))
        return {"status": "sleeping"}

    def wake(self, *tags: str) -> dict:
        """Get the memory of these back, without what was in it; the last one ends the pause."""
        self.asleep -= set(tags)
        self.paused = bool(self.asleep)
        return {"status": "sleeping" if self.asleep else "awake"}


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of a folder."""
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        found |= load_file(file)
    return found


def _card(fake: Fake, body) -> dict:
    return {"data": [{"id": "policy", "max_model_len": fake.max_model_len, "owned_by": fake.kind}]}


def _choice(drawn: dict, logprobs: dict, **fields) -> dict:
    """Return vLLM's answer."""
    choice = {
        "token_ids": drawn["ids"],
        "finish_reason": drawn["finish"],
        "logprobs": logprobs,
    } | fields
    return {"choices": [choice]}


def _completions(fake: Fake, body: dict) -> dict:
    drawn = fake.draw(body["prompt"], body, body.get("max_tokens", 16))
    answer = _choice(drawn, {"token_logprobs": drawn["logprobs"]})
    if (count := body.get("prompt_logprobs")) is not None:
        answer["choices"][0]["prompt_logprobs"] = [None, *_likeliest(fake, body["prompt"], count)]
    return answer


def _likeliest(fake: Fake, ids: list[int], count: int) -> Iterator[dict]:
    """Yield of each token after the first the likeliest in its place, and itself, as vLLM orders and names them."""
    logprobs = fake.lm(torch.tensor([ids])).logits[0].log_softmax(-1)
    ranks = logprobs.argsort(-1, descending=True).argsort(-1) + 1
    for t, token in enumerate(ids[1:]):
        told = dict.fromkeys([token, *logprobs[t].topk(count).indices.tolist()])
        yield {str(i): {"logprob": float(logprobs[t, i]), "rank": int(ranks[t, i])} for i in told}


def _tokenize(fake: Fake, body: dict) -> dict:
    ids = fake.tokenizer.encode(
        body["prompt"], add_special_tokens=body.get("add_special_tokens", True)
    )
    return {"count": len(ids), "max_model_len": fake.max_model_len, "tokens": ids}


def _tokens_out(fake: Fake, body: dict) -> dict:
    chosen = body["sampling_params"]
    drawn = fake.draw(body["token_ids"], chosen, chosen.get("max_tokens", 16))
    pairs = zip(drawn["ids"], drawn["logprobs"], strict=True)
    content = [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]
    # None under top_p or min_p alone.
    masked = chosen.get("top_k", 0) > 0 and "no sets" not in fake.flaws
    return _choice(drawn, {"content": content}, sampling_mask=drawn["sets"] if masked else None)


def _rpc(fake: Fake, body: dict) -> dict:
    assert body["method"] == "reload_weights" and fake.paused
    fake.load(body["kwargs"]["weights_path"])
    return {"results": [None]}


def _info(fake: Fake, body) -> dict:
    config = {"model_config": {"enable_sleep_mode": fake.can_sleep}}
    backend = None if fake.transfer is None else {"backend": "ipc"}
    config |= {"device_config": {"device": "cuda"}, "weight_transfer_config": backend}
    return {"vllm_config": config}


def _transfer(path: str):
    def answer(fake: Fake, body: dict | None) -> dict:
        assert fake.paused
        try:
            said = fake.transfer.answer(path, body)
        except AssertionError as error:
            message = f"Call to collective_rpc method failed: {error}"
            raise Refusal(500, message) from error
        if path == "/finish_weight_update":
            fake.take(dict(fake.transfer.weights), Path("by IPC"))
        return said

    return answer


def _reset(fake: Fake, body) -> dict:
    if fake.asleep:
        raise Refusal(500, "the cache is asleep")
    fake.reset()
    return {"success": True}


def _generate(fake: Fake, body: dict) -> dict:
    chosen = body["sampling_params"] | {"seed": body["sampling_params"].get("sampling_seed")}
    drawn = fake.draw(body["input_ids"], chosen, chosen.get("max_new_tokens", 128))
    about = {"finish_reason": {"type": drawn["finish"]}}
    pairs = zip(drawn["logprobs"], drawn["ids"], strict=True)
    has_sets = body.get("return_sampling_mask") and "no sets" not in fake.flaws
    # Beside the sets these are other numbers, of the whole vocabulary.
    about["output_token_logprobs"] = [[value - bool(has_sets), i, None] for value, i in pairs]
    if has_sets:
        about["output_token_sampling_mask"] = drawn["sets"]
        about["output_token_sampling_logprobs"] = drawn["logprobs"]
    return {"text": "", "output_ids": drawn["ids"], "meta_info": about}


def _from_disk(fake: Fake, body: dict) -> dict:
    fake.load(body["model_path"])
    if body.get("flush_cache", True):
        fake.reset()
    return {"success": True, "message": "Succeeded to update model weights."}


def _ready(fake: Fake, body) -> None:
    if fake.paused:
        raise Refusal(503, "paused")


VLLM = {
    "/v1/models": _card,
    "/health": lambda fake, body: None,
    "/v1/completions": _completions,
    "/tokenize": _tokenize,
    "/inference/v1/generate": _tokens_out,
    "/pause?mode=wait": lambda fake, body: fake.pause(True),
    "/resume": lambda fake, body: fake.pause(False),
    "/is_paused": lambda fake, body: {"is_paused": fake.paused},
    "/sleep?level=2": lambda fake, body: fake.sleep(),
    "/wake_up?tags=weights": lambda fake, body: fake.wake("weights"),
    "/wake_up?tags=kv_cache": lambda fake, body: fake.wake("kv_cache"),
    "/wake_up": lambda fake, body: fake.wake("weights", "kv_cache"),
    "/server_info?config_format=json": _info,
    "/collective_rpc": _rpc,
    "/reset_prefix_cache": _reset,
}
TRANSFER = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
VLLM |= {path: _transfer(path) for path in TRANSFER}
SGLANG = {
    "/v1/models": _card,
    "/ready": _ready,
    "/generate": _generate,
    "/pause_generation": lambda fake, body: fake.pause(True),
    "/continue_generation": lambda fake, body: fake.pause(False),
    "/update_weights_from_disk": _from_disk,
}


class Handler(BaseHTTPRequestHandler):
    """Answers the requests to `server.fake`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        """Print nothing."""

    def setup(self) -> None:
        """Count the connection."""
        super().setup()
        self.server.fake.connections += 1

    def do_GET(self) -> None:
        """Answer a question."""
        self._serve(None)

    def do_POST(self) -> None:
        """Answer a question with a body."""
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._serve(json.loads(text) if text else None)

    def _serve(self, body: dict | None) -> None:
        fake = self.server.fake
        wrong = fake.scripted(self.path)
        try:
            if isinstance(wrong, int):
                fake.calls.append((self.path, body))
                raise Refusal(wrong, "as the script says")
            found = fake.answer(self.path, body, self.headers.get("Authorization"))
            found = wrong(found) if callable(wrong) else found
            status, text = 200, b"" if found is None else json.dumps(found).encode()
        except Refusal as refusal:
            status, text = refusal.args[0], json.dumps({"error": refusal.args[1]}).encode()
        text = wrong if isinstance(wrong, bytes) else text
        if wrong == "hang":
            fake.ended.wait(30)
        with contextlib.suppress(OSError):
            if wrong == "close":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)


class Listener(ThreadingHTTPServer):
    """Takes many connections at once."""

    daemon_threads, request_queue_size = True, 512

    def handle_error(self, request, client_address) -> None:
        """A client has gone."""


@contextlib.contextmanager
def serving(kind: str, folder: str, **options) -> Iterator[Fake]:
    """Run a fake of that kind, "vllm" or "sglang", until the block ends; options as of `Fake`."""
    fake = Fake(kind, folder, **options)
    listener = Listener(("127.0.0.1", 0), Handler)
    listener.fake = fake
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
        del listener.fake  # an idle handler must not be the last to hold the model: freeing it as Python exits aborts

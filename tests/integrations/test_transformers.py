"""`integrations.transformers` in runs of transformers' own Trainer, against the same runs without it."""

import contextlib
import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_rl.integrations import patching
from fused_rl.integrations.transformers import UnformedLogits, causal_lm_loss, patch, unpatch
from tests.integrations import tiny_models
from tests.integrations.trainer_runs import assert_equal_runs, train
from tests.marks import slow

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


pytestmark = pytest.mark.usefixtures("cpu", "alone")


@pytest.fixture
def alone(monkeypatch):
    """One process, whatever a run of DeepSpeed has left in this one: else the Trainer wraps its model for several."""
    from accelerate.state import AcceleratorState

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    AcceleratorState._reset_state(True)


def batch(number=4, seed=0):
    return tiny_models.collate(tiny_models.rows(number, seed))


def backward(model, inputs, way="stock"):
    """Loss and gradients in fp64 of one forward and backward."""
    if way == "logits":
        unlabelled = {key: value for key, value in inputs.items() if key != "labels"}
        loss = causal_lm_loss(model(**unlabelled), inputs["labels"])
    else:
        loss = model(**inputs).loss
    loss.backward()
    return loss.detach().double(), {name: p.grad.double() for name, p in model.named_parameters()}


# The micro-batches of a step count different numbers of labels, so that a mean of means is not the mean.
@pytest.mark.parametrize("name", [n if n == "qwen2-tied" else slow(n) for n in tiny_models.MODELS])
def test_training_equals_the_stock_trainer(name, tmp_path):
    options = {"gradient_accumulation_steps": 2}
    stock = train(tiny_models.model(name), tmp_path, "stock", **options)
    for way in ("logits", "fused"):
        if (name, way) != ("mixtral", "logits"):  # refused: test_what_causal_lm_loss_refuses
            assert_equal_runs(train(tiny_models.model(name), tmp_path, way, **options), stock)


def test_a_model_patched_before_peft_wraps_it(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    base = tiny_models.model("qwen2")
    patch(base)
    torch.manual_seed(0)
    ours = peft.get_peft_model(base, config)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(tiny_models.model("qwen2"), config)
    assert isinstance(ours(**batch()).logits, UnformedLogits)
    assert_equal_runs(train(ours, tmp_path), train(theirs, tmp_path))


def test_label_smoothing_and_z_loss():
    model, inputs = tiny_models.model("granite"), batch()
    logits = model(**inputs).logits[:, :-1].flatten(0, 1).double()
    targets = inputs["labels"][:, 1:].flatten()
    squares = logits.logsumexp(-1)[targets >= 0].square()
    smoothed = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.2)
    want = (smoothed + 0.1 * squares.mean()).float()
    options = {"label_smoothing": 0.2, "z_loss": 0.1}
    torch.testing.assert_close(causal_lm_loss(model(**inputs), inputs["labels"], **options), want)
    with patch(model, **options):
        torch.testing.assert_close(model(**inputs).loss, want)
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).loss, want)
        with pytest.raises(ValueError, match="patched with label_smoothing=0.2, and now with 0.3"):
            patch(model, **options | {"label_smoothing": 0.3})
    capped = tiny_models.model("gemma2")
    patch(capped, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"caps its logits.*partial\(causal_lm_loss"):
        capped(**inputs)


PRECISIONS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "fp16 autocast": (torch.float32, torch.float16),
}


def losses_of(model, inputs, count):
    """The loss of a call by way: stock, from logits, patched."""
    labels = inputs["labels"]
    yield "stock", model(**inputs, num_items_in_batch=count).loss
    plain = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    yield "logits", causal_lm_loss(plain, labels, count)
    with patch(model):
        yield "fused", model(**inputs, num_items_in_batch=count).loss


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("length", [9, 1])
def test_a_batch_without_labels_has_stocks_loss_and_adds_no_gradient(precision, length):
    """Alone, and as a micro-batch or a shard beside one that has labels."""
    dtype, autocast = PRECISIONS[precision]
    model = tiny_models.model("qwen2-tied", dtype)
    full, weights = batch(), [*model.parameters()]
    empty = {key: value[:, :length] for key, value in full.items()}
    empty["labels"] = torch.full_like(empty["labels"], -100)

    def gradients(*losses):
        total = sum(1024 * loss.sum() for loss in losses)
        return torch.autograd.grad(total, weights, retain_graph=True)

    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        beside = dict(losses_of(model, full, 30))
        for _ in range(2):  # from the second use of a graph on, a head forms its logits again
            wanted = {way: gradients(loss) for way, loss in beside.items()}
        for count in (None, 0, torch.tensor([0.0]), 7, torch.tensor([7])):
            found = dict(losses_of(model, empty, count))
            for way, loss in found.items():
                torch.testing.assert_close(loss, found["stock"], equal_nan=True, rtol=0, atol=0)
                assert not any(d.any() for d in gradients(loss))
                both = gradients(loss, beside[way])
                torch.testing.assert_close(both, wanted[way], rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The most elements that any tensor made under it has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_the_logits_never_exist_in_a_training_step():
    """Of 8 million, the CPU's row functions hold 0.8."""
    shape = {"vocab_size": 8192, "max_position_embeddings": 64}
    config = transformers.Qwen2Config(**{**tiny_models.MODELS["qwen2"][1], **shape})
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    ids = torch.randint(8192, (16, 64))
    elements = []
    for _ in range(2):
        with Largest() as largest:
            # half of what accelerate wraps a forward in: the other half is autocast
            accelerate.utils.convert_to_fp32(model(input_ids=ids, labels=ids)).loss.backward()
        elements.append(largest.elements)
        patch(model, workspace_mb=4)
    logits = ids.numel() * 8192
    assert elements[0] == logits
    assert elements[1] <= logits // 8


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("without_gradient", [torch.no_grad, torch.inference_mode])
def test_evaluated_logits_are_the_models_own(precision, without_gradient):
    """Of a model that scales, caps and casts them."""
    dtype, autocast = PRECISIONS[precision]
    for name in ("gemma2", "granite"):
        model, inputs, results = tiny_models.model(name, dtype), batch(), []
        for context in (contextlib.nullcontext(), patch(model)):
            with (
                context,
                without_gradient(),
                torch.autocast("cpu", autocast or torch.bfloat16, autocast is not None),
            ):
                results.append(model(**inputs))
        stock, patched = results
        torch.testing.assert_close(patched.logits, stock.logits, rtol=0, atol=0)
        torch.testing.assert_close(patched.loss, stock.loss)


def test_hooks_of_the_head_scale_its_logits_once():
    model = tiny_models.model("qwen2")
    model.lm_head.register_forward_pre_hook(lambda head, hidden: (hidden[0] * 3,))
    model.lm_head.register_forward_hook(lambda head, hidden, logits: logits / 2)
    stock = model(**batch()).loss
    with patch(model):
        torch.testing.assert_close(model(**batch()).loss, stock)


def test_a_model_inside_a_checkpoint_that_is_recomputed():
    model = tiny_models.model("qwen2")
    patch(model)
    inputs = batch()
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()

    def loss_of(embeds):
        return model(inputs_embeds=embeds, **inputs).loss

    expected = torch.autograd.grad(loss_of(embedded), embedded)
    loss = torch.utils.checkpoint.checkpoint(loss_of, embedded, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(loss, embedded), expected)


def test_threads_share_a_patched_model():
    """Training steps, evaluations and generation of one model, each as if alone."""
    model = tiny_models.model("gemma2")
    inputs = [batch(seed=seed) for seed in range(8)]
    wanted = [model(**each) for each in inputs]
    patch(model)

    def call(each):
        unlabelled = {key: value for key, value in each.items() if key != "labels"}
        loss = model(**each).loss
        gradient = torch.autograd.grad(loss, model.lm_head.weight)[0]
        with torch.no_grad():
            return loss.detach(), model(**each).logits + 0, model(**unlabelled).logits, gradient

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, inputs * 4))
    for i, (*outputs, gradient) in enumerate(found):
        loss, logits = (
            wanted[i % len(inputs)].loss.detach(),
            wanted[i % len(inputs)].logits.detach(),
        )
        torch.testing.assert_close(outputs, [loss, logits, logits])
        torch.testing.assert_close(gradient, found[i % len(inputs)][-1], rtol=0, atol=0)


def replica_of(network):
    """What `torch.nn.parallel.replicate` makes of a network on a device: here weights of 0."""
    copies = {module: module._replicate_for_data_parallel() for module in network.modules()}
    for module, made in copies.items():
        for key, child in module._modules.items():
            setattr(made, key, copies[child])
        for key, parameter in module._parameters.items():
            if parameter is None:
                made._parameters[key] = None
            else:
                setattr(made, key, torch.zeros_like(parameter).requires_grad_())
    return copies[network]


@pytest.mark.parametrize("returned", ["a dictionary", "a tuple"])
def test_a_replica_of_data_parallel_runs_itself(returned):
    model = tiny_models.model("qwen2")
    inputs = batch() | ({} if returned == "a dictionary" else {"return_dict": False})
    patch(model)
    replica = replica_of(torch.nn.Sequential(model))[0]
    uniform = torch.tensor(tiny_models.VOCABULARY).log()
    outputs = replica(**inputs)
    # its weights, and no logits that could not be gathered
    torch.testing.assert_close(outputs[0], uniform)
    assert not any(isinstance(value, UnformedLogits) for value in outputs)
    outputs[0].backward()
    assert replica.lm_head.weight.grad is not None
    assert model.lm_head.weight.grad is None
    with torch.no_grad():
        assert not replica(**inputs)[1].any()
    assert isinstance(model(**batch()).logits, UnformedLogits)
    model.forward = functools.partial(model.forward)
    with pytest.raises(RuntimeError, match="nn.DataParallel cannot copy .* torchrun"):
        replica_of(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_patched_and_independent(copied):
    model = tiny_models.model("qwen2-tied")
    patch(model)
    made = copied(model)
    made.lm_head.weight.data.zero_()
    outputs = made(**batch())
    assert isinstance(outputs.logits, UnformedLogits)
    assert outputs.loss.item() == pytest.approx(torch.tensor(tiny_models.VOCABULARY).log().item())
    assert model(**batch()).loss > outputs.loss
    unpatch(made)
    assert "forward" not in vars(made)
    assert "forward" in vars(model)


def test_unpatch_leaves_nothing_behind():
    model = tiny_models.model("qwen2")
    before, head = dict(vars(model)), dict(vars(model.lm_head))
    with patch(model):
        model(**batch())
        assert vars(model.lm_head) == head
        with patch(model):  # twice is once
            pass
        assert isinstance(model(**batch()).logits, UnformedLogits)
    assert vars(model) == before
    assert vars(model.lm_head) == head
    unpatch(model)
    assert type(model(**batch()).logits) is torch.Tensor


def test_accelerate_wraps_and_unwraps_a_patched_model():
    """It makes a method of its forward; unpatched within a wrapper, ours stays and then does nothing."""
    model = tiny_models.model("qwen2")
    stock = model(**batch()).loss
    patch(model)
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    unwrapped = accelerate.utils.extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
    torch.testing.assert_close(unwrapped(**batch()).loss, stock)
    unpatch(model)
    assert type(model(**batch()).logits) is torch.Tensor
    with pytest.raises(ValueError, match="was replaced already"):
        patch(model)


def test_labels_by_position_shifted_labels_and_counts():
    """Whatever way the labels come, and a denominator that is a number, a tensor or none."""
    model = tiny_models.model("llama")
    inputs = batch()
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    other = inputs["labels"].roll(1, 0)
    calls = [
        lambda: model(
            inputs["input_ids"], inputs["attention_mask"], None, None, None, inputs["labels"]
        ),
        lambda: model(**{**inputs, "labels": other}, shift_labels=shifted),
        lambda: model(**inputs, num_items_in_batch=7),
        lambda: model(**inputs, num_items_in_batch=torch.tensor(7)),
        lambda: model(**inputs, return_dict=False),
    ]
    for call in calls:
        want = call()[0]
        with patch(model):
            outputs = call()
        assert isinstance(outputs[1], UnformedLogits)
        torch.testing.assert_close(outputs[0], want)
    plain = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    for count in (None, 7):
        want = model(**inputs, num_items_in_batch=count).loss
        torch.testing.assert_close(causal_lm_loss((plain.logits,), inputs["labels"], count), want)
        found = causal_lm_loss(plain, None, count, shift_labels=shifted)
        torch.testing.assert_close(found, want)
    labels = inputs["labels"].masked_fill(inputs["labels"] < 0, 0)
    found = causal_lm_loss(plain, labels, ignore_index=0)
    logits = plain.logits[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=0)
    torch.testing.assert_close(found, want)


def changed(change, head=torch.nn.Module.__call__, loss_of=None):
    """A Llama that does something to its logits on the way to the loss, and shows what reaches its loss function."""

    class Changed(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = change(head(self.lm_head, hidden))
            loss_function = loss_of or self.loss_function
            loss = None
            if labels is not None:
                loss = loss_function(logits, labels, self.vocab_size, **kwargs)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    torch.manual_seed(0)
    return Changed(tiny_models.config("llama"))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: (3.0 * torch.tanh(x * 0.5 / 2)).float() / 1.5,
        lambda x: 0.5 * x.to(torch.float32).contiguous(),
    ],
)
def test_scales_and_caps_are_followed(change):
    model, inputs = changed(change), batch()
    want, gradients = backward(copy.deepcopy(model).double(), inputs)
    patch(model)
    loss, ours = backward(model, inputs)
    torch.testing.assert_close(loss, want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours, gradients, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        formed = model(**inputs).logits.detach()
    unpatch(model)
    torch.testing.assert_close(formed, model(**inputs).logits.detach())


@pytest.mark.parametrize(
    ("change", "operation"),
    [
        (lambda x: x[..., :50], "getitem"),
        (lambda x: x / torch.tensor(2.0), "a quotient with a tensor"),
        (lambda x: torch.tanh(torch.tanh(x)), "a second tanh"),
    ],
)
def test_a_forward_that_does_anything_else_is_refused(change, operation):
    model = changed(change)
    patch(model)
    with pytest.raises(RuntimeError, match=f"{operation}.*compute_loss_func=causal_lm_loss"):
        model(**batch())
    assert "forward" not in vars(model.lm_head)
    assert "_loss_function" not in vars(model)


def plain_loss(logits, labels, vocab_size, **_):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("loss_of", [None, plain_loss])
def test_a_forward_past_its_head_or_its_loss_function_is_refused(loss_of):
    """Where nothing would be fused, and nobody would notice."""
    model = changed(lambda x: x, lambda head, x: x @ head.weight.t(), loss_of)
    assert model(**batch()).loss.isfinite()
    patch(model)
    with pytest.raises(RuntimeError, match="logits.*use Trainer.compute_loss_func=causal_lm_loss"):
        model(**batch())


def test_logits_of_a_training_step_are_refused_by_name():
    model = tiny_models.model("qwen2")
    patch(model)
    outputs = model(**batch())
    uses = {
        "argmax": lambda x: x.argmax(-1),
        "getitem": lambda x: x[:, -1],
        "iter": list,
        "torch.Tensor.mul": lambda x: torch.ones(2) * x,
    }
    for operation, use in uses.items():
        with pytest.raises(
            (RuntimeError, AttributeError), match=f"not formed, and .*{operation} needs them"
        ):
            use(outputs.logits)


def test_what_patch_refuses():
    base = tiny_models.model("qwen2")
    with pytest.raises(TypeError, match="causal language model of transformers.*got Linear"):
        patch(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Qwen2Model.forward takes no labels"):
        patch(base.model)
    with pytest.raises(ValueError, match="ForSequenceClassificationLoss.*ForCausalLMLoss"):
        patch(transformers.Qwen2ForSequenceClassification(tiny_models.config("qwen2")))
    base.loss_function = print
    with pytest.raises(ValueError, match="print.*ForCausalLMLoss"):
        patch(base)


def test_a_release_that_is_not_known_is_tried(monkeypatch):
    """It is patched if a tiny model's loss and gradients are stock's, and refused if not."""
    monkeypatch.setattr(patching.importlib.metadata, "version", lambda name: "99.0")
    model = tiny_models.model("qwen2")
    with patch(model):
        assert "forward" in vars(model)
    with pytest.raises(ImportError, match="transformers 99.0 is not a release.*install"):
        patch(model, strict=True)
    exact = UnformedLogits.mean_loss
    for i, of_means in enumerate((True, False)):

        def differs(logits, targets, items, of_means=of_means, **options):
            loss = exact(logits, targets, items, **options)
            return loss * (1.01 if (items is None) == of_means else 1)

        monkeypatch.setattr(patching.importlib.metadata, "version", lambda name, i=i: f"99.1.{i}")
        monkeypatch.setattr(UnformedLogits, "mean_loss", differs)
        with pytest.raises(ImportError, match=f"99.1.{i}.*failed in float32: output 0 differs"):
            patch(model)
        assert "forward" not in vars(model)


def test_liger_s_fused_head_is_refused(monkeypatch):
    """Liger may replace the forward of a model's class before the patch or after it."""
    model, patched = tiny_models.model("qwen2"), tiny_models.model("qwen2")
    patch(patched)

    def forward(self, input_ids, labels=None):
        raise AssertionError

    forward.__module__ = "liger_kernel.transformers.model.qwen2"
    monkeypatch.setattr(type(model), "forward", forward)
    batch = {name: tiny_models.rows(1)[0][name][None] for name in ("input_ids", "labels")}
    for late in (lambda: patch(model), lambda: patched(**batch)):
        with pytest.raises(ValueError, match="Qwen2ForCausalLM.forward is Liger's"):
            late()


def test_an_adapter_on_the_head_is_refused_before_and_after():
    peft = pytest.importorskip("peft")
    model = tiny_models.model("qwen2")
    patch(model)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"])
    )
    with pytest.raises(ValueError, match="lora.*nn.Linear"):
        wrapped(**batch())
    unpatch(model)
    with pytest.raises(ValueError, match="lora.*nn.Linear.*target_modules"):
        patch(wrapped)


def test_what_causal_lm_loss_refuses(tmp_path):
    with pytest.raises(ValueError, match="labels=None"):
        causal_lm_loss({"logits": torch.zeros(1, 2, 3)}, None)
    with pytest.raises(ValueError, match="label_smoothing must be a number from 0 to 1"):
        causal_lm_loss(
            {"logits": torch.zeros(1, 2, 3)}, torch.zeros(1, 2).long(), label_smoothing=2
        )
    with pytest.raises(ValueError, match="aux_loss.*patch"):
        train(tiny_models.model("mixtral"), tmp_path, "logits")

"""Names of other libraries that are private or undocumented: each release may drop them.

Each is listed with what it is for, and what a user meets where it is gone. `make test-versions-newest` looks weekly.
"""

import ast

import pytest

from tests.test_architecture import ROOT

STOPS = "an ImportError or AttributeError at the start, before anything is trained"
PRIVATE = {
    # transformers
    "_attn_implementation": "which attention a model has; without it rows are padded",
    "_gradient_checkpointing_func": "inputs of layers on the CPU; without it a line refuses checkpoint_activations_on",
    "_weight_conversions": "names of weights in files, merged or sent to a server; without it models that convert them "
    "are read as damaged",
    "_is_replica": "DataParallel of a patched model; without it a replica returns logits that are not formed",
    "_replicate_for_data_parallel": "DataParallel of a patched model; without it a replica runs the first model",
    # torch
    "_set_pg_timeout": "timeouts of DeepSpeed's groups up to torch 2.13; from 2.14 on set_timeout is public",
    "_version": "whether an output was changed in place; read by PyTorch's own extensions",
    "_dynamo": "graph_break with a message; public as torch._dynamo in PyTorch's pages",
    "_python_dispatch": f"which dispatch modes are on; {STOPS}",
    "_C": f"whether vmap or grad of torch.func is active; {STOPS}",
    "_are_functorch_transforms_active": f"whether vmap or grad of torch.func is active; {STOPS}",
    "_current_level": f"forward-mode AD is active; {STOPS}",
    # deepspeed
    "_get_zero_param_intra_parallel_group": f"groups of zero_hpz_partition_size; {STOPS}",
    # datasets
    "_fingerprint": "names cached ids of a Dataset from Python; without it they are encoded anew",
    # verl
    "_LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY": "its fused head; patch() checks verl's release",
}
SUBMODULES = {
    "datasets.config": "the folder of caches; documented as HF_DATASETS_CACHE",
    "deepspeed.ops": f"no compilation of an op that is unused; {STOPS}",
    "deepspeed.runtime.config": f"what DeepSpeed says of a file of options; {STOPS}",
    "deepspeed.utils": f"groups of zero_hpz_partition_size; {STOPS}",
    "deepspeed.runtime.sequence_parallel.ulysses_sp": f"sequence_parallel; {STOPS}",
    "openrlhf.models.utils": "patch() checks the release of OpenRLHF",
    "transformers.cache_utils": "sampling writes keys and values in place; without it generate samples, with a line",
    "transformers.integrations.deepspeed": f"models that are partitioned while they are read; {STOPS}",
    "transformers.loss.loss_utils": "patch() of a model; an unknown release is tried first",
    "transformers.modeling_layers": f"torch_compile finds the layers by their class; {STOPS}",
    "transformers.masking_utils": "padded passes do not wait; without its function they wait, with the same result",
    "transformers.modeling_utils": f"attention of parts of sequences; {STOPS}",
    "transformers.utils.chat_template_utils": f"schemas of tools; {STOPS}",
    "transformers.utils.hub": f"files of a model in the cache of the Hub; {STOPS}",
    "transformers.utils.peft_utils": f"whether a name holds adapters; {STOPS}",
    "triton.language": "the language, documented",
    "triton.runtime": f"the device's properties; {STOPS}",
    "trl.chat_template_utils": f"how calls of a chat template are read; {STOPS}",
    "trl.trainer.utils": "patch() checks the release of TRL",
    "verl.utils": "patch() checks verl's release",
}
HOSTS = (
    "accelerate",
    "datasets",
    "deepspeed",
    "openrlhf",
    "peft",
    "transformers",
    "triton",
    "trl",
    "verl",
)
# Methods of named tuples.
NAMED_TUPLE = {"_fields", "_asdict", "_replace"}


@pytest.fixture(scope="module")
def trees():
    folders = (ROOT / name for name in ("kernels", "fused_rl", "trainers"))
    files = {file.resolve() for folder in folders for file in folder.rglob("*.py")}
    return [ast.parse(file.read_text()) for file in files]


def test_every_private_name_of_another_library_is_listed(trees):
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {
        node.name
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    defined |= {node.id for node in nodes if isinstance(node, ast.Name)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr != "_fingerprint"
    }
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {
        part
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for part in (node.module or "").split(".")
    }
    # getattr(x, "_name")
    strings = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    used |= strings & PRIVATE.keys()
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private - defined - NAMED_TUPLE | (private & PRIVATE.keys()) == PRIVATE.keys()


def test_every_submodule_of_another_library_is_listed(trees):
    modules = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module)
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
    assert {
        name for name in modules if "." in name and name.split(".")[0] in HOSTS
    } == SUBMODULES.keys()

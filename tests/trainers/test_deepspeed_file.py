"""`--deepspeed FILE`: what the run sets is refused with its name here; DeepSpeed gets and checks the rest."""

import json
import typing

import pytest

from fused_rl.trainers.base import deepspeed_file, engine
from fused_rl.trainers.base.text import InputError
from tests.trainers import test_sums, tiny

# As the files of transformers' tests, and of others: most values are `auto`.
WHOLE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
    "prescale_gradients": False,
    "steps_per_print": 2000,
}
# Section and values -> what the line says.
REFUSED = [
    ({"gradient_accumulation_steps": 4}, "--batch_size or --prompts_per_step"),
    ({"gradient_clipping": 0.5}, "--max_grad_norm"),
    ({"train_batch_size": 8}, "--batch_size"),
    ({"sequence_parallel_size": 2}, "--sequence_parallel"),
    ({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}, "--lr, "),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, "--gradient_checkpointing"),
    ({"bf16": {"enabled": True}}, "--dtype"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "--grad_accum_dtype"),
    ({"zero_optimization": {"stage": 3}}, "--zero_stage"),
    ({"zero_optimization": True}, "it is {"),
    # In DeepSpeed's words.
    ({"zero_optimization": {"stage3_new": 1}}, "stage3_new Extra inputs are not permitted"),
    ({"communication_data_type": "fp17"}, "Invalid communication_data_type"),
    ({"elasticity": {"enabled": True}}, "DeepSpeedConfigError: Elastic training"),
    ({"flops_profiler": {"enabled": "x"}}, "TypeError: "),
]


def config_with(tmp_path, contents, **options):
    """Return a config with a file of these contents."""
    path = tmp_path / "ds.json"
    text = contents if isinstance(contents, str) else json.dumps(contents)
    path.write_text(text, errors="surrogateescape")
    return tiny.config_of("sft", deepspeed=str(path), **{"zero_stage": 2} | options)


def test_a_whole_file_passes_and_auto_leaves_what_is_here(tmp_path):
    theirs = deepspeed_file.read(config_with(tmp_path, WHOLE).deepspeed)
    ours = {"bf16": {"enabled": False}, "zero_optimization": {"stage": 2, "ours": 1}}
    both = deepspeed_file.merged(theirs, ours)
    assert both.pop("zero_optimization") == WHOLE["zero_optimization"] | {"ours": 1}
    passed = {"steps_per_print": 2000, "prescale_gradients": False}
    assert both == passed | {"bf16": {"enabled": False}}


@pytest.mark.parametrize(("contents", "message"), REFUSED, ids=str)
def test_what_is_set_here_or_wrong_is_refused_in_a_line(tmp_path, contents, message):
    with pytest.raises(InputError, match=message) as caught:
        config_with(tmp_path, contents)
    assert "\n" not in str(caught.value)


def test_what_switches_off_an_option_that_is_given_is_refused(tmp_path):
    contents = {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    config_with(tmp_path, contents)
    with pytest.raises(InputError, match="take it out and give --offload false"):
        config_with(tmp_path, contents, offload=True)
    with pytest.raises(InputError, match="give --dtype"):
        config_with(tmp_path, {"bf16": {"enabled": False}}, dtype="bfloat16")


@pytest.mark.parametrize("contents", ["[1]", "{", "\udcff"])
def test_a_file_that_is_none_is_refused_in_a_line(tmp_path, contents):
    with pytest.raises(InputError, match="not JSON|a JSON object"):
        config_with(tmp_path, contents)
    with pytest.raises(InputError, match="No such file"):
        tiny.config_of("sft", zero_stage=2, deepspeed=str(tmp_path / "nowhere.json"))


def test_what_is_passed_on_is_what_deepspeed_has(tmp_path):
    engine.setup(1)
    partition = {"reduce_bucket_size": 12, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": partition}))
    config = test_sums.TrainingConfig(deepspeed=str(tmp_path / "ds.json"))
    model: typing.Any = engine.initialize(test_sums.Tower(), config, 1)
    assert model.zero_reduce_bucket_size() == 12
    assert model.zero_cpu_offload() and model.zero_optimization_stage() == 2

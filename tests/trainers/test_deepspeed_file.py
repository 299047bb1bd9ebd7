"""`--deepspeed FILE`: what the run sets is refused with its name here; DeepSpeed gets and checks the rest."""

import itertools
import json
import re
import typing

import pytest
import torch

from fused_rl.trainers.base import deepspeed_file, engine, ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.grpo import GRPOConfig
from fused_rl.trainers.sft import SFTConfig
from tests.distributed import run_distributed
from tests.trainers import test_sums
from tests.trainers.runs import refused, sft_config

# As the files of transformers' tests, and of others: most values are `auto`.
WHOLE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 2e8,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_quantized_weights": False,
    },
    "prescale_gradients": False,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
# Section and values -> what the line says.
REFUSED = [
    ({"gradient_accumulation_steps": 4}, "--batch_size or --prompts_per_step"),
    ({"gradient_clipping": 0.5}, "--max_grad_norm"),
    ({"sequence_parallel_size": 2}, "--sequence_parallel"),
    ({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}, "--lr, "),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, "--lr_schedule"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, "--gradient_checkpointing"),
    ({"train_batch_size": 8}, "--batch_size"),
    ({"train_micro_batch_size_per_gpu": 8}, "--micro_batch_size"),
    ({"bf16": {"enabled": True}}, "--dtype"),
    ({"fp16": {"enabled": True}}, "--dtype"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "--grad_accum_dtype"),
    ({"zero_optimization": {"stage": 3}}, "--zero_stage"),
    ({"gradient_clipping": False}, "--max_grad_norm"),
    ({"amp": {"enabled": True}}, "--dtype"),
    ({"zero_optimization": True}, "it is {"),
    # In DeepSpeed's words.
    ({"zero_optimization": {"stage3_new": 1}}, "stage3_new Extra inputs are not permitted"),
    ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "reduce_bucket_size .*valid integer"),
    ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}}, "'none', 'cpu' or 'nvme'"),
    ({"communication_data_type": "fp17"}, "Invalid communication_data_type"),
    ({"comms_logger": {"enable": 1}}, "enable Extra inputs"),
]


def config_with(tmp_path, contents, **options):
    """Return a config with a file of these contents."""
    path = tmp_path / "ds.json"
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return SFTConfig(model="m", dataset="d", output_dir="o", deepspeed=str(path), **options)


def test_a_whole_file_passes_and_auto_leaves_what_is_here(tmp_path):
    theirs = deepspeed_file.read(config_with(tmp_path, WHOLE).deepspeed)
    ours = {"bf16": {"enabled": False}, "zero_optimization": {"stage": 2, "ours": 1}}
    both = deepspeed_file.merged(theirs, ours)
    assert both.pop("zero_optimization") == WHOLE["zero_optimization"] | {"ours": 1}
    printed = {"steps_per_print": 2000, "wall_clock_breakdown": False}
    assert both == printed | {"bf16": {"enabled": False}, "prescale_gradients": False}


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


def test_all_reasons_come_at_once(tmp_path):
    contents = {}
    for section, _ in REFUSED[:5]:
        contents |= section
    with pytest.raises(InputError) as caught:
        config_with(tmp_path, contents)
    for section, message in REFUSED[:5]:
        assert message in str(caught.value) and next(iter(section)) in str(caught.value)


@pytest.mark.parametrize("contents", ["", "[1]", "{", "\udcff", "stage: 3"])
def test_a_file_that_is_none_is_refused_in_a_line(tmp_path, contents):
    (tmp_path / "ds.json").write_bytes(contents.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"ds.json: (not JSON|expected a JSON object)"):
        SFTConfig(model="m", dataset="d", output_dir="o", deepspeed=str(tmp_path / "ds.json"))
    with pytest.raises(InputError, match="No such file"):
        SFTConfig(model="m", dataset="d", output_dir="o", deepspeed="nowhere.json")
    with pytest.raises(InputError, match="zero_stage 1 to 3"):
        config_with(tmp_path, WHOLE, zero_stage=0)


def test_the_names_are_options():
    fields = {*SFTConfig.model_fields, *GRPOConfig.model_fields}
    names = itertools.chain.from_iterable(
        re.findall(r"--(\w+)", text) for text in deepspeed_file.NAMES.values()
    )
    assert {*names} <= fields


# Options that divide the same work otherwise, by stage.
SMALL = {"reduce_bucket_size": 500, "allgather_bucket_size": 500}
PARTITIONS = {
    2: [SMALL | {"overlap_comm": True}, {"contiguous_gradients": False}, {"reduce_scatter": False}]
    + [{"round_robin_gradients": True}, {"offload_optimizer": {"device": "cpu"}}],
    3: [{"zero_hpz_partition_size": 2}, {"stage3_prefetch_bucket_size": 100, "overlap_comm": False}]
    + [SMALL | {"sub_group_size": 500, "stage3_max_live_parameters": 1000}]
    + [{"offload_param": {"device": "cpu", "pin_memory": False}}],
}


def weights_after(options):
    """Return the weights after three steps of two micro-batches, whole on every process."""
    import deepspeed

    fixed = {"lr": 1e-2, "lr_schedule": "constant", "dtype": "float32"}
    config = test_sums.TrainingConfig(stage3_param_persistence_threshold=0, **fixed, **options)
    model = engine.initialize(test_sums.Tower(), config, 3)
    share = test_sums.rows().float()[ranks.process() :: ranks.processes()]
    for step in range(3):
        for x in share.split(len(share) // 2):
            model.backward(model(x) * ranks.processes())
        engine.optimizer_step(model, step)
    with deepspeed.zero.GatheredParameters(list(model.module.parameters())):
        return [p.detach().clone() for p in model.module.parameters()]


def different_with(rank, world, folder, stage):
    """Return the options with which weights have other bits than with a file that has none of them."""
    engine.setup(1)
    # One fp32 process without a file would be of stage 0, whose sums have another order.
    plain = folder / f"{stage}-{rank}.json"
    plain.write_text(json.dumps({"wall_clock_breakdown": False}))
    expected = weights_after({"zero_stage": stage, "deepspeed": str(plain)})
    different = []
    for number, partition in enumerate(PARTITIONS[stage]):
        if partition.get("zero_hpz_partition_size", 1) > world:
            continue
        path = folder / f"{stage}-{number}-{rank}.json"
        path.write_text(json.dumps({"zero_optimization": partition}))
        found = weights_after({"zero_stage": stage, "deepspeed": str(path)})
        if not all(map(torch.equal, found, expected)):
            different.append(partition)
    return different


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_passed_on_changes_no_bit(tmp_path, stage, world):
    if world == 1:
        assert different_with(0, 1, tmp_path, stage) == []
    else:
        assert run_distributed(different_with, world, tmp_path, stage, timeout=200) == [[], []]


def test_what_is_passed_on_is_what_deepspeed_has(tmp_path):
    engine.setup(1)
    partition = {"reduce_bucket_size": 12, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": partition}))
    config = test_sums.TrainingConfig(deepspeed=str(tmp_path / "ds.json"))
    model: typing.Any = engine.initialize(test_sums.Tower(), config, 1)
    assert model.zero_reduce_bucket_size() == 12
    assert model.zero_cpu_offload() and model.zero_optimization_stage() == 2


def test_a_resumed_run_has_the_contents_of_before(files, run, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": SMALL}))
    options = {"resume": True, "steps": 6, "deepspeed": str(tmp_path / "ds.json"), "zero_stage": 2}
    refused(sft_config(files, run, **options), r"other options: .*deepspeed \{\} -> \{'zero_opt")

"""TRL's GRPOTrainer beside ours: the same model, rows in the same order, scorers and hyperparameters."""

from collections.abc import Callable

from bench import peers
from bench.trainer_steps import Ours, Watch, seconds
from fused_rl.trainers.rollouts.types import Response, Sample

NAME = peers.TRAINERS[0]


def alone() -> None:
    """Let TRL know of no other process: it would wrap its model for several where a process group of one exists.

    To be called before there is one.
    """
    accelerate = peers.import_peer("accelerate")
    accelerate.PartialState(cpu=True)


def trl_config(trl, ours: Ours, folder: str):
    """Our config in TRL's words; one step of ours is `minibatches` of TRL's."""
    config = ours.config
    local = config.prompts_per_step * config.group_size
    of_the_algorithm = {
        "num_generations": config.group_size,
        "per_device_train_batch_size": local // config.minibatches,
        "steps_per_generation": config.minibatches,
        "gradient_accumulation_steps": 1,
        "num_iterations": config.epochs,
        "max_completion_length": config.max_new_tokens,
        "temperature": config.temperature,
        "beta": config.kl_coef,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "learning_rate": config.lr,
        "lr_scheduler_type": config.lr_schedule,
        "warmup_steps": config.warmup_steps,
        "weight_decay": config.weight_decay,
        "adam_beta2": config.adam_beta2,
        "max_grad_norm": config.max_grad_norm,
        "max_steps": config.steps * config.minibatches,
        "seed": config.seed,
    }
    of_the_run = {
        "output_dir": folder,
        "use_cpu": True,
        "accelerator_config": {"use_configured_state": True},  # of `alone`
        "bf16": config.dtype == "bfloat16",
        "shuffle_dataset": False,
        "gradient_checkpointing": config.gradient_checkpointing,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": config.minibatches,  # ours logs every step
    }
    return trl.GRPOConfig(**of_the_algorithm, **of_the_run)


def reward_of(ours: Ours) -> Callable:
    """Our scorers as TRL calls a reward function."""
    policy = ours.policy

    def reward(prompts, completions, completion_ids, number, **_):
        samples = []
        for text, ids, i in zip(completions, completion_ids, number, strict=True):
            prompt = ours.prompts[i]
            finish = "stop" if ids[-1] in policy.sampling.stop_ids else "length"
            samples.append(Sample(prompt.row, prompt.ids, Response(ids, finish), text))
        columns = [scorer(samples) for scorer in policy.scorers]
        return [sum(scores) for scores in zip(*columns, strict=True)]

    return reward


def run_trl(ours: Ours, folder: str, between: Callable[[dict, object], bool]) -> None:
    """Train as our config says; after each, `between` gets the CPU seconds of its parts and the model.

    Where it returns False, that was the last one.

    Raises:
        peers.Unavailable: where TRL is not installed.
    """
    trl = peers.import_peer("trl")
    import accelerate
    import datasets
    import transformers

    config, watch, minibatches = ours.config, Watch(), ours.config.minibatches
    began, before = [0.0], [0.0]

    class Turns(transformers.TrainerCallback):
        """Between two steps it is the others' turn."""

        def on_train_begin(self, *_, **__):
            began[0] = seconds()
            watch.taken = {}
            watch.inner = 0.0

        def on_pre_optimizer_step(self, *_, **__):
            before[0] = seconds()

        def on_optimizer_step(self, *_, **__):
            watch.taken["optimizer"] = watch.taken.get("optimizer", 0.0) + seconds() - before[0]

        def on_step_end(self, _, state, control, **__):
            # Asked at the end of a step, so that what its log costs falls to the next one.
            if state.global_step % minibatches:
                return
            whole = seconds() - began[0]
            watch.taken["update"] = whole - sum(watch.taken.values())
            more = between(watch.taken, trainer.model)
            control.should_training_stop |= not more
            began[0] = seconds()
            watch.taken = {}
            watch.inner = 0.0

    column = config.prompt_column or "question"
    texts = [prompt.row[column] for prompt in ours.prompts]
    numbers = list(range(len(texts)))
    rows = datasets.Dataset.from_dict({"prompt": texts, "number": numbers})
    accelerate.state.AcceleratorState._reset_state()  # it keeps the precision of the trainer before
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model, padding_side="left")
    trainer = trl.GRPOTrainer(
        model=config.model,
        args=trl_config(trl, ours, folder),
        train_dataset=rows,
        reward_funcs=reward_of(ours),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer._generate_single_turn = watch.around("rollout", trainer._generate_single_turn)
    trainer._calculate_rewards = watch.around("score", trainer._calculate_rewards)
    trainer._generate_and_score_completions = watch.around("measure", trainer._generate_and_score_completions)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()

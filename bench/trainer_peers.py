"""TRL's trainers beside ours: the same model, rows in the same order, scorers and hyperparameters, step by step."""

from collections import Counter
from collections.abc import Callable

import torch

from bench import machine, peers
from bench.stepwise import Stepwise
from bench.trainer_steps import Watch, seconds
from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.rollouts.types import Response, Sample

WATCHED = 2  # steps whose batches and losses are compared with ours


def alone() -> None:
    """Let TRL know of no other process: it would wrap its model for several where a process group of one exists.

    To be called before there is one.
    """
    accelerate = peers.import_peer("accelerate")
    accelerate.PartialState(cpu=True)


class Trainer:
    """A trainer of TRL's that does the job of a run of ours.

    Args:
        ours: the run, before its first step; its config's folder of files is there.
        folder: for what the trainer writes.
        bf16_weights: the weights are bf16 and the optimizer works on these; otherwise they are fp32 under autocast.

    Raises:
        peers.Unavailable: TRL is not installed.
    """

    kind: str
    """The class of TRL's."""
    updates = 1
    """Steps of TRL's trainer to one of ours."""
    what = "loss"
    """That is compared with ours."""

    def __init__(self, ours, folder: str, *, bf16_weights: bool = False):
        self.ours, self.config, self.folder = ours, ours.config, folder
        self.bf16_weights = bf16_weights
        self.name = f"TRL {self.kind}" + (" bf16 weights" if bf16_weights else "")
        self.version = machine.version("trl")
        self.note = "autocast" if ours.config.dtype == "bfloat16" and not bf16_weights else ""
        self.watch = Watch()
        self.seen: list[list[dict]] = []  # of each watched step the inputs of its losses
        self.losses: list[list[torch.Tensor]] = []
        self.trl = peers.import_peer("trl")
        self.trainer = self._made()
        self.lm = self.trainer.model
        self._stepwise = Stepwise(self._train)

    # What differs from one trainer to the other.

    def options(self) -> dict[str, object]:
        """Of the algorithm."""
        raise NotImplementedError

    def rows(self) -> dict[str, list]:
        """Columns of the dataset, in the order of our steps."""
        raise NotImplementedError

    def more(self) -> dict[str, object]:
        """Further arguments of the trainer."""
        return {}

    def watch_parts(self, trainer) -> None:
        """Watch the parts of a step."""

    def ids_of(self, inputs: dict) -> list[tuple]:
        """Token ids of each sequence in a batch, and which of them count."""
        raise NotImplementedError

    def compared(self) -> list[tuple[float, float]]:
        """(ours, TRL's) of figures that are equal where both do the same, from the first step on."""
        theirs = [torch.stack(found).mean().item() for found in self.losses]
        return list(zip(self.ours.losses, theirs, strict=False))

    # The common shape.

    def step(self) -> dict[str, float]:
        """One step of ours; CPU seconds of its parts."""
        self._stepwise.step()
        return self.taken

    def close(self) -> None:
        """End the training."""
        self._stepwise.close()

    def same_ids(self) -> bool:
        """Whether the batches of its first steps were ours, sequence by sequence."""
        for number, batches in enumerate(self.seen, start=1):
            ids = sum(map(self.ids_of, batches), [])
            if Counter(ids) != Counter(self.ours.ids(number)):
                return False
        return bool(self.seen)

    def arguments(self) -> dict[str, object]:
        """Our config in TRL's words."""
        config = self.config
        of_the_optimizer = {
            "learning_rate": config.lr,
            "lr_scheduler_type": config.lr_schedule,
            "warmup_steps": config.warmup_steps,
            "weight_decay": config.weight_decay,
            "adam_beta2": config.adam_beta2,
            "max_grad_norm": config.max_grad_norm,
            "max_steps": config.steps * self.updates,
            "seed": config.seed,
        }
        of_the_run = {
            "output_dir": self.folder,
            "use_cpu": True,
            "accelerator_config": {"use_configured_state": True},  # of `alone`
            "bf16": config.dtype == "bfloat16",
            "gradient_checkpointing": config.gradient_checkpointing,
            "gradient_accumulation_steps": 1,
            "train_sampling_strategy": "sequential",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": self.updates,  # ours logs every step
        }
        if self.bf16_weights:
            of_the_run["model_init_kwargs"] = {"dtype": "bfloat16"}
        return of_the_optimizer | of_the_run | self.options()

    def _made(self):
        """The trainer of TRL's, with its parts watched."""
        import accelerate
        import datasets
        import transformers

        accelerate.state.AcceleratorState._shared_state = {}  # it keeps the precision of the trainer before
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.config.model, padding_side="left")
        trainer = getattr(self.trl, self.kind)(
            model=self.config.model,
            args=getattr(self.trl, self.kind.replace("Trainer", "Config"))(**self.arguments()),
            train_dataset=datasets.Dataset.from_dict(self.rows()),
            processing_class=tokenizer,
            **self.more(),
        )
        self.watch_parts(trainer)
        trainer.compute_loss = self._kept(trainer.compute_loss)
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def _kept(self, compute_loss: Callable) -> Callable:
        """`compute_loss`, of whose first steps inputs and losses are kept."""

        def keeping(model, inputs, *args, **kwargs):
            given = dict(inputs)
            loss = compute_loss(model, inputs, *args, **kwargs)
            number = self.trainer.state.global_step // self.updates
            if number < WATCHED:
                for kept, value in ((self.seen, given), (self.losses, loss.detach())):
                    kept += [[]] * (number >= len(kept))
                    kept[number] = [*kept[number], value]
            return loss

        return keeping

    def _train(self, between: Callable[[], bool]) -> None:
        """The whole training; `between` is called after each step of ours."""
        import transformers

        watch, updates = self.watch, self.updates
        began, before = [0.0], [0.0]

        def begin() -> None:
            began[0] = seconds()
            watch.taken = {}
            watch.inner = 0.0

        class Turns(transformers.TrainerCallback):
            """Between two steps it is the others' turn."""

            def on_train_begin(callback, *_, **__):  # noqa: N805 - `self` is the trainer
                begin()

            def on_pre_optimizer_step(callback, *_, **__):  # noqa: N805
                before[0] = seconds()

            def on_optimizer_step(callback, *_, **__):  # noqa: N805
                watch.taken["optimizer"] = watch.taken.get("optimizer", 0.0) + seconds() - before[0]

            def on_step_end(callback, _, state, control, **__):  # noqa: N805
                # Asked at the end of a step, so that what its log costs falls to the next one.
                if state.global_step % updates:
                    return
                whole = seconds() - began[0]
                watch.taken["update"] = whole - sum(watch.taken.values())
                self.taken = watch.taken
                control.should_training_stop |= not between()
                begin()

        self.trainer.add_callback(Turns())
        self.trainer.train()


def _rows(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """(B, T) -> the ids where the mask is not 0, row by row."""
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


class SFT(Trainer):
    """TRL's SFTTrainer, on our token ids."""

    kind = "SFTTrainer"

    def options(self):
        return {"per_device_train_batch_size": self.config.batch_size, "max_length": None}

    def rows(self):
        examples = self.ours.examples
        ids = [example.prompt + example.completion for example in examples]
        labels = [[-100] * len(example.prompt) + example.completion for example in examples]
        return {"input_ids": ids, "labels": labels}

    def ids_of(self, inputs):
        ids = _rows(inputs["input_ids"], inputs["attention_mask"])
        counted = _rows(inputs["labels"] != -100, inputs["attention_mask"])
        return [(tuple(row), sum(count)) for row, count in zip(ids, counted, strict=True)]


class Reward(Trainer):
    """TRL's RewardTrainer, on our token ids."""

    kind = "RewardTrainer"

    def options(self):
        options = {"per_device_train_batch_size": self.config.batch_size, "max_length": None}
        return options | {"center_rewards_coefficient": self.config.centering or None}

    def rows(self):
        pairs = self.ours.pairs
        chosen = [sum(pair.chosen, []) for pair in pairs]
        rejected = [sum(pair.rejected, []) for pair in pairs]
        return {"chosen_ids": chosen, "rejected_ids": rejected}

    def ids_of(self, inputs):
        ids = map(tuple, _rows(inputs["input_ids"], inputs["attention_mask"]))
        ids = list(ids)
        half = len(ids) // 2
        return list(zip(ids[:half], ids[half:], strict=True))


class GRPO(Trainer):
    """TRL's GRPOTrainer, on our prompts, with our scorers; it draws responses of its own."""

    kind = "GRPOTrainer"
    what = "mean log-probability"

    def __init__(self, ours, folder, **options):
        self.updates = ours.config.minibatches
        self.measured = None
        super().__init__(ours, folder, **options)

    def options(self):
        config = self.config
        return {
            "num_generations": config.group_size,
            "per_device_train_batch_size": config.prompts_per_step * config.group_size // config.minibatches,
            "steps_per_generation": config.minibatches,
            "num_iterations": config.epochs,
            "max_completion_length": config.max_new_tokens,
            "temperature": config.temperature,
            "beta": config.kl_coef,
            "loss_type": "grpo",
            "scale_rewards": "group",
            "shuffle_dataset": False,
        }

    def rows(self):
        column = self.config.prompt_column or "question"
        texts = [prompt.row[column] for prompt in self.ours.prompts]
        return {"prompt": texts, "number": list(range(len(texts)))}

    def more(self):
        return {"reward_funcs": self._reward}

    def _reward(self, prompts, completions, completion_ids, number, **_):
        """Our scorers as TRL calls a reward function."""
        policy = self.ours.policy
        samples = []
        for text, ids, i in zip(completions, completion_ids, number, strict=True):
            prompt = self.ours.prompts[i]
            finish = "stop" if ids[-1] in policy.sampling.stop_ids else "length"
            samples.append(Sample(prompt.row, prompt.ids, Response(ids, finish), text))
        columns = [scorer(samples) for scorer in policy.scorers]
        return [sum(scores) for scores in zip(*columns, strict=True)]

    def watch_parts(self, trainer):
        around = self.watch.around
        trainer._generate_single_turn = around("rollout", trainer._generate_single_turn)
        trainer._calculate_rewards = around("score", trainer._calculate_rewards)
        trainer._get_per_token_logps_and_entropies = self._kept_first(trainer._get_per_token_logps_and_entropies)
        trainer._generate_and_score_completions = around("measure", trainer._generate_and_score_completions)

    def _kept_first(self, score: Callable) -> Callable:
        """Keeps the first call: log-probabilities of the starting model, or of its copy that is the reference."""

        def keeping(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
            found = score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            if self.measured is None:
                self.measured = (input_ids, attention_mask, logits_to_keep, found[0].detach())
            return found

        return keeping

    def ids_of(self, inputs):
        prompts = _rows(inputs["prompt_ids"], inputs["prompt_mask"])
        return [(tuple(prompt), 0) for prompt in prompts]

    def compared(self):
        """The mean log-probability, by the starting model, of the first responses that TRL has drawn.

        The first loss would say nothing: it is 0 whatever the log-probabilities are.
        """
        ids, mask, kept, logprobs = self.measured
        prompts = _rows(ids[:, :-kept], mask[:, :-kept])
        responses = _rows(ids[:, -kept:], mask[:, -kept:])
        batch = make_batch(prompts, responses, self.ours.policy.tokenizer.pad_token_id, "cpu")
        theirs = logprobs[mask[:, -kept:].bool()].float().mean().item()
        return [(self.ours.mean_logprob(batch), theirs)]


KINDS = {"sft": SFT, "reward": Reward, "grpo": GRPO}
NAMES = [*(f"TRL {kind.kind}" for kind in KINDS.values()), "TRL PPOTrainer"]  # as --peers takes them


def name_of(op: str) -> str:
    """What a row of TRL's trainer of this job is called."""
    return f"TRL {KINDS[op].kind}" if op in KINDS else NAMES[-1]


def of(op: str, ours, folder: str, bf16_weights: bool = False) -> Trainer:
    """TRL's trainer of a job.

    Raises:
        peers.Unavailable: TRL is not installed, or has no such trainer.
    """
    if op in KINDS:
        return KINDS[op](ours, folder, bf16_weights=bf16_weights)
    trl = peers.import_peer("trl")
    try:
        peers.import_peer("trl.experimental.ppo")
    except peers.Unavailable as reason:
        raise peers.Unavailable(f"TRL {trl.__version__} has no PPO: {reason}") from reason
    raise peers.Unavailable(f"nothing here drives the PPOTrainer of TRL {trl.__version__}")

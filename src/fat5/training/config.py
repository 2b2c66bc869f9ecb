"""Settings of a pretraining run: what `fat5 pretrain` reads from YAML and the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fat5.data.denoising_config import DenoisingConfig
from fat5.data.text_stream import StreamConfig
from fat5.errors import ConfigError
from fat5.optim import OptimizerConfig, ScheduleConfig
from fat5.training.accounts import AccountsConfig
from fat5.training.compilation import CompileMode
from fat5.training.model_config import ModelConfig

# A resumed run may change these: where and how long it runs and what is watched, not what a step computes. Data folders
# may have moved, and batches may be spread otherwise over GPUs; what they hold is compared on its own.
FREE_ON_RESUME = frozenset(
    {"data.train", "data.validation", "data.tokenizer"}
    | {
        f"training.{name}"
        for name in ("output_dir", "device", "max_steps", "max_tokens", "gradient_accumulation_steps")
    }
    | {f"training.{name}" for name in ("eval_every", "eval_at_start", "eval_batches", "save_every", "save_total_limit")}
    | {f"training.{name}" for name in ("log_every", "num_workers", "report_to", "resume", "compile", "compile_mode")}
    | {"training.profile", "training.gradient_checkpointing", "training.data_parallel_shard_degree"}
    | {"optimizer.foreach", "optimizer.fused"}
)
FREE_SECTIONS = ("accounts.",)


@dataclass(frozen=True)
class DataConfig:
    """Where the text and its tokenizer are.

    Attributes:
        train: Folder of token files made by `fat5 pretokenize`; its `train` folder if it split off validation text.
        stream: Text that is tokenised while training goes on, in the place of `train`.
        validation: Folder of held-out token files made with the same tokenizer; null for no evaluation.
        tokenizer: Folder or hub name of the tokenizer; null for the copy that lies beside the token files.
    """

    train: str | None = None
    stream: StreamConfig | None = None
    validation: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if (self.train is None) == (self.stream is None):
            given = "neither" if self.train is None else "both"
            raise ConfigError(
                f"data takes one of train (token files) and stream (text read while training), got {given}"
            )


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how to train, what to log and to save.

    Attributes:
        output_dir: Folder of the run: checkpoints, logs, the merged configuration, the final model.
        max_steps: Optimiser steps; give this or max_tokens.
        max_tokens: Stop after about so many token slots, encoder and decoder of all GPUs, padding included.
        gradient_accumulation_steps: Batches a step on each GPU; the loss is normalised by all their target tokens.
        init_from: Folder or hub name of a T5, FLAN-T5 or FAT5 checkpoint to start from, in the place of random weights;
            it brings the model's sizes. With precision bf16 and Kahan summation, what rounding takes from its fp32
            weights goes into the compensation.
        precision: "bf16": weights, too, with Kahan summation in the optimiser; "bf16-mixed": fp32 weights, bf16
            arithmetic; "fp32"; "auto": bf16 on GPUs that have it, else fp32.
        device: "auto": the GPU if there is one; "cpu".
        max_grad_norm: Clip the gradients to this norm; 0 for no clipping.
        eval_every: Evaluate every so many steps and at the end.
        eval_at_start: Evaluate the untrained model, too, before the first step.
        eval_batches: Evaluate on at most so many batches a GPU; null for all of the validation text.
        save_every: Save a checkpoint every so many steps and at the end.
        save_total_limit: Checkpoints to keep, the newest.
        log_every: Log every so many steps.
        report_to: Where logs go besides the run's own, such as [tensorboard, wandb]; [] for nowhere.
        num_workers: Processes on each GPU that prepare batches; 0 for the training process itself. The batches of token
            files are the same for any number; those of a stream are not, and a resumed run must keep it.
        data_parallel_shard_degree: GPUs that share one copy of the weights, gradients and optimiser state (FSDP2); 1:
            each has its own (DDP); -1: all share one; a number between: groups of so many, best those of a machine.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
        compile: Compile model and loss with torch.compile, as one graph (a graph a layer where weights are sharded);
            the first step then takes a minute or so.
        compile_mode: torch.compile's mode. "auto": "reduce-overhead", which replays CUDA graphs and so spares the host
            the launches, on a GPU with unsharded weights and batches of one shape; else "default". The start of the log
            says which, and why.
        profile: Steps to profile, behind the first five: a trace is written into output_dir, and the shares of matrix
            products, attention, memory-bound work and idle time are printed; 0 for none.
        seed: Seed of the initialisation and of dropout; the data's is denoising.seed.
        resume: "auto": go on from the newest checkpoint in output_dir if there is one; a checkpoint's path; false:
            refuse an output_dir that holds checkpoints.
    """

    output_dir: str
    max_steps: int | None = None
    max_tokens: int | None = None
    gradient_accumulation_steps: int = 1
    init_from: str | None = None
    precision: Literal["auto", "bf16", "bf16-mixed", "fp32"] = "auto"
    device: Literal["auto", "cpu"] = "auto"
    max_grad_norm: float = 1.0
    eval_every: int = 1000
    eval_at_start: bool = False
    eval_batches: int | None = None
    save_every: int = 1000
    save_total_limit: int = 2
    log_every: int = 50
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    num_workers: int = 2
    data_parallel_shard_degree: int = 1
    gradient_checkpointing: bool = False
    compile: bool = False
    compile_mode: CompileMode = "auto"
    profile: int = 0
    seed: int = 0
    resume: bool | str = "auto"

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise ConfigError("training.output_dir is empty, expected a folder")
        if self.init_from == "":
            raise ConfigError("training.init_from is empty, expected a checkpoint's folder or hub name, or null")
        if (self.max_steps is None) == (self.max_tokens is None):
            given = "neither" if self.max_steps is None else "both"
            raise ConfigError(f"training takes one of max_steps and max_tokens, got {given}")
        least = {
            "gradient_accumulation_steps": 1,
            "eval_every": 1,
            "save_every": 1,
            "save_total_limit": 1,
            "log_every": 1,
        }
        least |= {"max_steps": 1, "max_tokens": 1, "eval_batches": 1, "max_grad_norm": 0, "num_workers": 0, "seed": 0}
        least |= {"profile": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                raise ConfigError(f"training.{name} is {value}, expected at least {bound}")
        if self.compile_mode not in ("auto", "default") and not self.compile:
            raise ConfigError(f"training.compile_mode is {self.compile_mode} without effect; set training.compile=true")
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ConfigError(
                f"training.data_parallel_shard_degree is {self.data_parallel_shard_degree}, expected 1 or more, or -1"
            )
        if self.seed >= 2**32:
            raise ConfigError(f"training.seed is {self.seed}, expected less than 2^32")
        if self.resume is True or self.resume == "":
            raise ConfigError("training.resume is true, expected auto, false or the path of a checkpoint")

    def steps(self, slots_per_step: int) -> int:
        """Return the number of optimiser steps, at least 1, given the token slots that one step takes."""
        if self.max_steps is not None:
            return self.max_steps
        return max(1, -(-(self.max_tokens or 0) // slots_per_step))


@dataclass(frozen=True)
class PretrainConfig:
    """All settings of a pretraining run.

    Attributes:
        data: The text.
        training: The run.
        model: The model.
        denoising: How text becomes inputs and targets.
        optimizer: The optimiser.
        schedule: The learning rate over time.
        accounts: What the run costs.
    """

    data: DataConfig
    training: TrainingConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    denoising: DenoisingConfig = field(default_factory=DenoisingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    accounts: AccountsConfig = field(default_factory=AccountsConfig)

"""What a job is: the document that a tenant writes (YAML, JSON or API), checked field by field."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

# The linear layers of the Llama and Qwen families; embeddings and head are never adapted.
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256)  # what vLLM serves
LEAST_TEMPERATURE = 0.01  # but 0: where less is asked for, vLLM samples at this one


def without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a NUL character")
    return text


Text = Annotated[str, AfterValidator(without_nul)]  # what Postgres can store


class Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraSpec(Spec):
    rank: int = 8
    alpha: float = Field(16.0, gt=0, le=4096)
    target_modules: tuple[str, ...] = LINEAR_LAYERS

    @field_validator("rank")
    @classmethod
    def rank_is_served(cls, rank: int) -> int:
        if rank not in LORA_RANKS:
            raise ValueError(f"must be one of {', '.join(map(str, LORA_RANKS))}")
        return rank

    @field_validator("target_modules")
    @classmethod
    def modules_are_linear(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(modules) - set(LINEAR_LAYERS))
        if unknown or not modules:
            raise ValueError(f"unknown {unknown}; choose from {', '.join(LINEAR_LAYERS)}")
        return tuple(m for m in LINEAR_LAYERS if m in modules)


class SamplingSpec(Spec):
    """Sampling of training rollouts: the full softmax at a temperature, nothing else, so that logprobs are exact."""

    max_tokens: int = Field(64, ge=1, le=32_768, description="most tokens of one turn")
    temperature: float = Field(1.0, ge=LEAST_TEMPERATURE, le=2.0)


class HyperparametersSpec(Spec):
    """GRPO (DeepSeekMath, arXiv 2402.03300) with token-level loss and truncated importance sampling."""

    n_steps: int = Field(10, ge=1, le=100_000, description="training rounds, so committed versions after 0")
    prompts_per_round: int = Field(4, ge=1, le=4096)
    group_size: int = Field(8, ge=2, le=256, description="episodes of one prompt")
    learning_rate: float = Field(1e-4, gt=0, le=1.0)
    weight_decay: float = Field(0.0, ge=0, le=1.0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    advantage_scale: Literal["std", "none"] = Field("std", description="divide by the group's std + 1e-4, or not")
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    kl_coefficient: float = Field(0.0, ge=0, description="KL to the base model, over all loss tokens")
    tis_cap: float | None = Field(2.0, gt=0, description="cap of trainer/engine importance weights; null: off")
    minibatches: int = Field(1, ge=1, le=64, description="optimizer steps a round; groups are split evenly")
    no_signal_patience: int = Field(10, ge=1, description="rounds in a row without signal that fail the job")

    @field_validator("minibatches")
    @classmethod
    def minibatches_have_groups(cls, minibatches: int, info: ValidationInfo) -> int:
        groups = info.data.get("prompts_per_round", minibatches)
        if minibatches > groups:
            raise ValueError(f"must not exceed prompts_per_round, which is {groups}")
        return minibatches


class EnvironmentSpec(Spec):
    type: Text = Field(max_length=128, description="name of a registered environment")
    params: dict[str, Any] = Field(default_factory=dict)
    max_turns: int = Field(1, ge=1, le=64, description="most generations of one episode")
    call_timeout_seconds: float = Field(10.0, gt=0, le=300)

    @field_validator("params")
    @classmethod
    def params_can_be_stored(cls, params: dict[str, Any]) -> dict[str, Any]:
        try:
            text = json.dumps(params, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"must be plain JSON: {error}") from error
        if "\\u0000" in text:
            raise ValueError("must not hold a NUL character")
        return params


class EvalSpec(Spec):
    """Rounds of kind `eval` on held-out prompts; they pin a version and never block a commit."""

    every: int = Field(0, ge=0, description="after every N versions; 0: never")
    prompts: int = Field(64, ge=1, le=4096)
    samples: int = Field(1, ge=1, le=64)


class PreflightSpec(Spec):
    """What a preflight samples: training prompts, answered by the base model before any training."""

    prompts: int = Field(8, ge=1, le=64)
    samples: int = Field(4, ge=2, le=32, description="episodes of one prompt: one alone cannot vary")


class JobSpec(Spec):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    base_model: Text = Field(min_length=1, max_length=128)
    environment: EnvironmentSpec
    sampling: SamplingSpec = SamplingSpec()
    lora: LoraSpec = LoraSpec()
    hyperparameters: HyperparametersSpec = HyperparametersSpec()
    evaluation: EvalSpec = EvalSpec()
    preflight: PreflightSpec = PreflightSpec()
    seed: int = Field(0, ge=0, lt=2**31)
    weight: float = Field(1.0, gt=0, le=100, description="share against the tenant's other jobs")
    metadata: dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=16
    )

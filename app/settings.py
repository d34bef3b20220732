"""All settings, from MARLAAS_* variables (and DATABASE_URL, REDIS_URL as other services name them)."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_STATE_DIR = Path(".marlaas")
ENVIRONMENT_FILE = "environment"  # in the state directory while the embedded stack runs, mode 0600


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="MARLAAS_", env_ignore_empty=True, extra="ignore", populate_by_name=True
    )

    # Where things are
    state_dir: Path = DEFAULT_STATE_DIR  # embedded stack: data, credentials, logs
    models_dir: Path | None = None  # base models; default <state_dir>/models
    cache_dir: Path | None = None  # objects by digest; default <state_dir>/cache
    cache_bytes: int = 4 << 30

    # Services
    database_url: SecretStr = Field(
        SecretStr("postgresql+psycopg://marlaas@127.0.0.1:5432/marlaas"),
        validation_alias=AliasChoices("MARLAAS_DATABASE_URL", "DATABASE_URL"),
    )
    # Each role may have a login of its own; else the owner's login takes the role with SET ROLE.
    database_service_url: SecretStr | None = None
    database_api_url: SecretStr | None = None
    redis_url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        validation_alias=AliasChoices("MARLAAS_REDIS_URL", "REDIS_URL"),
    )
    s3_endpoint_url: str | None = None
    s3_public_endpoint_url: str | None = None  # presigned URLs are signed for this host
    s3_bucket: str = "marlaas"
    s3_region: str = "us-east-1"
    s3_access_key: SecretStr | None = None
    s3_secret_key: SecretStr | None = None
    presign_seconds: int = 900

    # The base model of this worker, and how much of the machine it may use
    base_model: str | None = None  # name of a registered base model; default: the first one
    rollout_threads: int = 1  # torch threads of the engine
    training_threads: int = 1  # of each rank
    training_ranks: int = Field(1, ge=1)  # processes that the trainer's base model is spread over, one a device
    training_device: Literal["cpu", "cuda"] = "cpu"
    cpu_affinity: str | None = None  # e.g. "0" or "0,1": cores this worker process is bound to
    engine: Literal["torch", "vllm"] = "torch"
    engine_slots: int = 32  # rows decoded at once
    engine_adapter_slots: int = 8  # adapters resident at once
    engine_kv_tokens: int = 65_536  # key/value cache, in tokens over all rows
    engine_chat_slots: int = 4  # rows and adapters beside those, for completions that tenants ask for
    max_lora_rank: int = 64
    vllm_tensor_parallel_size: int = 1
    vllm_gpu_memory_utilization: float = 0.9
    vllm_max_cpu_loras: int = 32  # adapters that vLLM keeps in memory, those in slots included
    vllm_float32_head: bool = True  # logits in float32, as the trainer's; slow on a CPU
    vllm_engine_args: dict[str, Any] = {}  # JSON: any argument of vLLM's AsyncEngineArgs, over all else
    train_microbatch_tokens: int = 4096  # most tokens (padding included) of one micro-batch
    max_round_episodes: int = 4096  # a round is in the trainer's memory as a whole
    train_gradient_checkpointing: bool = False  # a third more arithmetic for a tenth of the activations' memory
    train_streaming: bool = True  # an idle trainer computes closed groups of rounds that are still rolled out
    train_streaming_bytes: int = 1 << 30  # most that it keeps of them

    # Deadlines and budgets, seconds
    lease_seconds: float = 30.0
    doorbell_seconds: float = 10.0  # admitted work not claimed this long is rung for again
    heartbeat_seconds: float = 2.0
    worker_dead_seconds: float = 10.0  # a worker silent this long has lost its leases
    sweep_seconds: float = 2.0
    generate_deadline_seconds: float = 600.0
    training_deadline_seconds: float = 3600.0
    tool_deadline_seconds: float = 30.0  # upper bound of one environment call
    infrastructure_retries: int = 5
    losses_before_alone: int = 2  # work lost this often by dying processes runs alone next

    # Retention
    keep_optimizer_states: int = 2  # latest K a job
    keep_adapter_every: int = 1  # every Nth version (the first and the last are always kept)
    keep_rounds_days: float = 30.0  # episodes and turns older than this are dropped
    orphan_seconds: float = 3600.0  # a pending object older than this is an orphan

    # Extra environments: comma-separated module names that register themselves
    environment_modules: str = ""

    # Web: tenant API and console
    web_host: str = "127.0.0.1"
    web_port: int = Field(8000, validation_alias=AliasChoices("MARLAAS_WEB_PORT", "PORT"))  # PORT: honcho, a PaaS
    web_threads: int = 64  # a streamed completion holds one
    public_url: str | None = None  # as tenants and operators reach it; https makes cookies secure
    trusted_proxies: int = 0  # proxies in front whose X-Forwarded-* headers count
    secret_key: SecretStr | None = None  # signs console sessions; without one they end with the process
    metrics_token: SecretStr | None = None  # bearer token that /metrics asks for; none: open
    chat_deadline_seconds: float = 120.0
    chat_waiting: int = 24  # completions at once over all tenants; well below web_threads, as each holds one
    idempotency_hours: float = 24.0  # answers to POST requests are kept this long
    log_json: bool = True
    log_level: str = "INFO"

    @property
    def models_path(self) -> Path:
        return self.models_dir or self.state_dir / "models"

    @property
    def cache_path(self) -> Path:
        return self.cache_dir or self.state_dir / "cache"


@lru_cache
def get_settings() -> Settings:
    """From the variables; where these name no database, from the embedded stack that runs in the state directory."""
    if {"MARLAAS_DATABASE_URL", "DATABASE_URL"} & os.environ.keys():
        return Settings()
    state_dir = Path(os.environ.get("MARLAAS_STATE_DIR", DEFAULT_STATE_DIR))
    return Settings(_env_file=state_dir / ENVIRONMENT_FILE)

"""Engine and trainer say the same of the same tokens: else importance weights hide that they are two policies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from app.specs.job import HyperparametersSpec, LoraSpec
from tests.tiny import tiny_model_folder
from workers.lora import LoraWeights, fresh_adapter, write_adapter
from workers.rollout.engine import GenerationRequest, SamplingParams
from workers.rollout.torch_engine import TorchEngine
from workers.training.grpo import Trajectory
from workers.training.optimizer import initial_state
from workers.training.trainer import Trainer

PROMPTS = [[20 + i, 7, 9, 30, 12][: 3 + i % 3] for i in range(4)]
EPISODES = 8
TOKENS = 24


@dataclass
class Policy:
    """One model with an engine, a trainer and a job's adapter that moves."""

    folder: Path
    dtype: torch.dtype
    engine: TorchEngine
    trainer: Trainer
    adapter: LoraWeights
    temperature: float
    version: int = 0

    def publish(self) -> Path:
        folder = self.folder / f"adapter-{self.version}"
        folder.mkdir()
        write_adapter(folder, self.adapter, "tiny")
        self.engine.load_adapter(f"job:{self.version}", folder)
        return folder

    def roll_out(self) -> list[list[Trajectory]]:
        """Groups whose reward is how often the first token comes again: made up, but of varied rewards."""
        futures = [
            self.engine.generate(
                GenerationRequest(
                    id=f"{self.version}-{g}-{i}",
                    token_ids=prompt,
                    adapter=f"job:{self.version}",
                    sampling=SamplingParams(TOKENS, self.temperature, seed=1000 * self.version + 10 * g + i),
                )
            )
            for g, prompt in enumerate(PROMPTS)
            for i in range(EPISODES)
        ]
        results = [future.result(timeout=60) for future in futures]
        groups: list[list[Trajectory]] = []
        for g, prompt in enumerate(PROMPTS):
            part = results[g * EPISODES : (g + 1) * EPISODES]
            groups.append(
                [
                    Trajectory(
                        token_ids=prompt + r.token_ids,
                        loss_mask=[0] * len(prompt) + [1] * len(r.token_ids),
                        engine_logprobs=[0.0] * len(prompt) + r.logprobs,
                        reward=float(sum(t % 2 for t in r.token_ids)),
                        index=i,
                        truncated=True,
                    )
                    for i, r in enumerate(part)
                ]
            )
        return groups

    def step(self) -> tuple[float, list[list[Trajectory]]]:
        """One round; returns the mean gap between engine and trainer before the update."""
        self.publish()
        groups = self.roll_out()
        result = self.trainer.update(
            self.adapter,
            initial_state(self.adapter.tensors),
            groups,
            HyperparametersSpec(learning_rate=1e-2),
            self.temperature,
        )
        self.adapter = result.adapter
        self.version += 1
        return result.metrics["logprob_gap"], groups


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_trainer_agree_before_and_after_five_updates(
    tmp_path: Path, dtype: torch.dtype, temperature: float
) -> None:
    folder = tiny_model_folder(tmp_path / "model", dtype)
    engine = TorchEngine(folder, dtype, slots=32, adapter_slots=4, kv_tokens=32 * 64, max_lora_rank=16, threads=1)
    try:
        policy = Policy(
            tmp_path,
            dtype,
            engine,
            Trainer(folder, dtype, threads=1, microbatch_tokens=1024),
            fresh_adapter(folder, LoraSpec(rank=8), seed=3),
            temperature,
        )
        first, _ = policy.step()
        for _ in range(4):
            policy.step()
        adapter_folder = tmp_path / f"adapter-{policy.version}"
        last, groups = policy.step()
    finally:
        engine.close()
    if dtype == torch.float32:
        assert first <= 1e-4
        assert last <= 1e-4
    else:
        own = decode_gap(folder, adapter_folder, groups, temperature)
        assert own > 0
        assert last <= 1.5 * own


def decode_gap(folder: Path, adapter: Path, groups: list[list[Trajectory]], temperature: float) -> float:
    """Mean gap between transformers' own cached decode and its own full forward, for the same tokens."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False).eval()
    gaps = []
    with torch.inference_mode():
        for group in groups:
            ids = torch.tensor([t.token_ids for t in group])
            start = len(group[0].token_ids) - TOKENS
            full = logprobs(model(ids).logits[:, start - 1 : -1], ids[:, start:], temperature)
            out = model(ids[:, :start], use_cache=True)
            steps = [out.logits[:, -1]]
            for i in range(start, ids.shape[1] - 1):
                out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
                steps.append(out.logits[:, -1])
            cached = logprobs(torch.stack(steps, 1), ids[:, start:], temperature)
            gaps.append((cached - full).abs().mean())
    return float(torch.stack(gaps).mean())


def logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.float() / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]

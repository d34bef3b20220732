"""vLLM itself: its arguments, the environment of its processes, and the few calls that the engine makes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Read when vLLM is imported.
for _name, _value in {
    "VLLM_NO_USAGE_STATS": "1",  # it reports to its makers otherwise
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # fork is not safe in a process with threads
}.items():
    os.environ.setdefault(_name, _value)

from vllm import SamplingParams as VllmSampling  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError  # noqa: E402
from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: E402
from vllm.v1.metrics.stats import CachingMetrics  # noqa: E402

from app.errors import InfrastructureFault  # noqa: E402
from workers.rollout.engine import FinishReason, GenerationRequest  # noqa: E402
from workers.rollout.vllm_worker import Part  # noqa: E402

CPU_BLOCK = 32  # tokens of a key/value block on the CPU: short prompts share prefixes too
SPARE = 1  # the last slot stays empty: vLLM's CPU kernels give rows without adapter the weights of slot -1
CALL_SECONDS = 120.0  # that reading or freeing a slot may take
HASHING_SECONDS = 0.01  # between two questions whether a slot is hashed

__all__ = ["EngineDeadError", "Vllm", "VllmOptions", "VllmSizes"]


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What an operator may set (`MARLAAS_VLLM_*`)."""

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_cpu_loras: int = 0  # adapters that vLLM keeps in memory; never fewer than there are slots
    float32_head: bool = True  # logits as the trainer computes them
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # over all else


@dataclass(frozen=True, slots=True)
class VllmSizes:
    model: Path
    dtype: torch.dtype
    rows: int
    length: int  # of a request, tokens
    adapters: int  # slots
    max_lora_rank: int
    threads: int  # on the CPU


class Figures(StatLoggerBase):
    """What vLLM's scheduler tells after each step."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.steps, self.kv_usage = 0, 0.0
        self._prefixes = CachingMetrics()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.steps += 1
            self.kv_usage = scheduler_stats.kv_cache_usage
            if scheduler_stats.prefix_cache_stats is not None:
                self._prefixes.observe(scheduler_stats.prefix_cache_stats)

    def log_engine_initialized(self) -> None:
        pass

    @property
    def prefix_hit_rate(self) -> float:
        return self._prefixes.hit_rate


class Vllm:
    """One life of vLLM's processes. Made and called in one event loop; implements `LoraCalls`."""

    def __init__(self, llm: AsyncLLM, figures: Figures) -> None:
        self._llm, self.figures = llm, figures

    @classmethod
    async def start(cls, sizes: VllmSizes, options: VllmOptions) -> Vllm:
        """Returns when it takes requests. Raises InfrastructureFault."""
        figures = Figures()
        try:
            with child_environment(sizes, options):
                llm = AsyncLLM.from_engine_args(
                    engine_args(sizes, options), stat_loggers=[lambda config, index: figures]
                )
            await llm.collective_rpc("marlaas_end_with", CALL_SECONDS, (os.getpid(),))
            if current_platform.is_cpu():
                await llm.collective_rpc("marlaas_keep_cache_finite", CALL_SECONDS)
        except Exception as error:
            raise InfrastructureFault(f"vLLM did not start: {error}") from error
        return cls(llm, figures)

    @property
    def dead(self) -> bool:
        return bool(self._llm.errored)

    def shutdown(self) -> None:
        self._llm.shutdown()

    async def stream(
        self, request: GenerationRequest, adapter: tuple[str, int, Path] | None
    ) -> AsyncGenerator[tuple[list[int], list[float], FinishReason | None], None]:
        """New tokens, their logprobs, and why it ended. Closing it ends the request in vLLM too."""
        sampling = request.sampling
        params = VllmSampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.temperature else 1.0,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # the stop ids are the caller's alone
            logprobs=0,  # of the sampled token
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )
        lora = LoRARequest(adapter[0], adapter[1], str(adapter[2])) if adapter is not None else None
        prompt = tokens_input(list(request.token_ids))
        outputs = self._llm.generate(prompt, params, request.id, lora_request=lora, priority=request.priority)
        try:
            async for output in outputs:
                [completion] = output.outputs
                finish = completion.finish_reason
                yield list(completion.token_ids), list(completion.logprobs.logprobs), finish
        finally:
            await outputs.aclose()

    async def add(self, name: str, adapter_id: int, folder: Path) -> None:
        with failing_as("vLLM did not load the adapter"):
            await self._llm.add_lora(LoRARequest(name, adapter_id, str(folder)))

    async def remove(self, adapter_id: int) -> None:
        await self._llm.remove_lora(adapter_id)

    async def free_slot(self, adapter_id: int) -> None:
        await self._llm.collective_rpc("marlaas_free_slot", CALL_SECONDS, (adapter_id,))

    async def read_slot(self, adapter_id: int, rank: int) -> list[list[Part]]:
        with failing_as("vLLM did not read a slot back"):
            await self._llm.collective_rpc("marlaas_copy_slot", CALL_SECONDS, (adapter_id, rank))
            until = time.monotonic() + CALL_SECONDS
            while None in (ranks := await self._llm.collective_rpc("marlaas_slot_parts", CALL_SECONDS)):
                if time.monotonic() > until:
                    raise TimeoutError(f"not hashed within {CALL_SECONDS:.0f} seconds")
                await asyncio.sleep(HASHING_SECONDS)
        return [[(name, axis, start, stop, hashed) for name, axis, start, stop, hashed in parts] for parts in ranks]


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Errors but the engine's death are faults that do not reach other requests."""
    try:
        yield
    except EngineDeadError:
        raise
    except Exception as error:
        raise InfrastructureFault(f"{what}: {error}") from error


def engine_args(sizes: VllmSizes, options: VllmOptions) -> AsyncEngineArgs:
    cpu: dict[str, Any] = {}
    if current_platform.is_cpu():
        blocks = sizes.rows * -(-sizes.length // CPU_BLOCK)
        cpu = {"block_size": CPU_BLOCK, "num_gpu_blocks_override": blocks + 1, "enforce_eager": True}
        # After a piece of a prompt vLLM turns its request's random stream back, which it cannot do on the CPU: it dies.
        cpu |= {"enable_chunked_prefill": False}
        if options.tensor_parallel_size == 1:
            cpu |= {"distributed_executor_backend": "uni"}
        cpu |= {"kv_cache_memory_bytes": 1 << 30}  # only that vLLM does not weigh the machine's memory
    arguments: dict[str, Any] = {
        "model": str(sizes.model),
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": sizes.length,
        "max_num_seqs": sizes.rows,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "enable_lora": True,
        "max_loras": sizes.adapters + SPARE,
        "max_cpu_loras": max(sizes.adapters, options.max_cpu_loras) + SPARE,
        "max_lora_rank": lora_rank(sizes.max_lora_rank),
        "worker_extension_cls": "workers.rollout.vllm_worker.WorkerExtension",
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "disable_log_stats": True,
        "hf_overrides": {"head_dtype": "float32"} if options.float32_head else {},
    }
    return AsyncEngineArgs(**arguments | cpu | dict(options.engine_args))


def lora_rank(rank: int) -> int:
    """The least maximum that vLLM has kernels for."""
    return next((known for known in (1, 8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)


@contextmanager
def child_environment(sizes: VllmSizes, options: VllmOptions) -> Iterator[None]:
    """What vLLM's processes inherit.

    On the CPU: Intel's OpenMP runtime preloaded, one thread bound to each core, and, where no ranks share the model,
    all in one process: two processes would spin for each other on the cores that compute.
    """
    before = dict(os.environ)
    if current_platform.is_cpu():
        ranks = options.tensor_parallel_size
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))[: sizes.threads * ranks]]
        wanted = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(cores[rank::ranks]) for rank in range(ranks))}
        if ranks == 1:
            wanted |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
            wanted |= {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(cores)}]"}
            os.environ["OMP_NUM_THREADS"] = str(len(cores))
        for name, value in wanted.items():
            os.environ.setdefault(name, value)
        runtime = Path(sys.prefix) / "lib" / "libiomp5.so"
        preloaded = os.environ.get("LD_PRELOAD", "")
        if runtime.exists() and "omp" not in preloaded:
            os.environ["LD_PRELOAD"] = f"{preloaded}:{runtime}".lstrip(":")
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

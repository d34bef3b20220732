"""Both engines behind one fixture: vLLM where it is installed (`make test-vllm`), the embedded one everywhere."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_adapter_folder, tiny_model_folder
from workers.rollout.engine import Engine, GenerationRequest, GenerationResult, Pool, SamplingParams

ENGINES = ("torch", "vllm") if find_spec("vllm") else ("torch",)
SIZES = {"slots": 4, "adapter_slots": 2, "chat_slots": 1, "kv_tokens": 512, "max_lora_rank": 16, "threads": 1}
LENGTH = 128  # of a request: kv_tokens over slots
PROMPT = list(range(4, 24))
WAIT = 60  # seconds; no test needs them


def make_torch_engine(model: Path, dtype: torch.dtype = torch.float32) -> Engine:
    from workers.rollout.torch_engine import TorchEngine

    return TorchEngine(model, dtype, **SIZES)


def make_vllm_engine(model: Path, dtype: torch.dtype = torch.float32, ranks: int = 1) -> Engine:
    """A step takes no more than one request of full length, so that prompts must wait for one another."""
    from workers.rollout.vllm_engine import VllmEngine
    from workers.rollout.vllm_process import VllmOptions

    options = VllmOptions(tensor_parallel_size=ranks, engine_args={"max_num_batched_tokens": LENGTH})
    return VllmEngine(model, dtype, **SIZES, options=options)  # type: ignore[arg-type]


def ask(
    name: str,
    adapter: str | None = None,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 12,
    pool: Pool = "rollout",
    priority: int = 0,
    **sampling: object,
) -> GenerationRequest:
    return GenerationRequest(name, prompt, adapter, SamplingParams(max_tokens, **sampling), priority, pool)  # type: ignore[arg-type]


class Gate:
    """A token callback that reports the first token and then holds the engine's own thread until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, token: int, logprob: float) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT)


class Client:
    """An engine, and the end of whatever a test began with it: one vLLM serves many tests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._requests: list[str] = []
        self._gates: list[Gate] = []
        self._keys: set[str] = set()

    def load(self, key: str, folder: Path) -> str:
        self._keys.add(key)
        return self.engine.load_adapter(key, folder)

    def start(
        self, request: GenerationRequest, on_token: Callable[[int, float], None] | None = None
    ) -> Future[GenerationResult]:
        self._requests.append(request.id)
        return self.engine.generate(request, on_token)

    def run(self, *requests: GenerationRequest) -> list[GenerationResult]:
        futures = [self.start(request) for request in requests]
        return [future.result(WAIT) for future in futures]

    def hold(self, request: GenerationRequest) -> tuple[Future[GenerationResult], Gate]:
        """Starts a request and stops the engine's thread inside it: what is asked next arrives at one time."""
        gate = Gate()
        self._gates.append(gate)
        future = self.start(request, gate)
        assert gate.reached.wait(WAIT)
        return future, gate

    def end(self) -> None:
        for name in self._requests:
            self.engine.abort(name)
        for gate in self._gates:
            gate.opened.set()
        deadline = time.monotonic() + WAIT
        while True:
            stats = self.engine.stats()
            if not stats.running + stats.waiting + stats.chat_running + stats.chat_waiting:
                break
            assert time.monotonic() < deadline, "requests of the test did not end"
            time.sleep(0.005)
        for key in self._keys:
            self.engine.unload_adapter(key)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32, the smallest that vLLM's attention knows."""
    return tiny_model_folder(tmp_path_factory.mktemp("model"), num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Scalings 2, 1.5 (B times that is rounded) and 1; the last one without gate and down."""
    root = tmp_path_factory.mktemp("adapters")
    some = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")
    return [
        tiny_adapter_folder(model, root / "0", 0),
        tiny_adapter_folder(model, root / "1", 1, rank=16, alpha=24.0),
        tiny_adapter_folder(model, root / "2", 2, rank=8, alpha=8.0, target_modules=some),
        tiny_adapter_folder(model, root / "3", 3),
    ]


@pytest.fixture
def folders(adapters: list[Path], tmp_path: Path) -> list[Path]:
    """Copies, for tests that break them."""
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in adapters]


@pytest.fixture(scope="session")
def vllm_engine(model: Path) -> Iterator[Callable[[], Engine]]:
    """Starts vLLM at the first call, once: that takes ten seconds and more."""
    with ExitStack() as stack:
        made: list[Engine] = []

        def get() -> Engine:
            if not made:
                made.append(make_vllm_engine(model))
                stack.callback(made[0].close)
            return made[0]

        yield get


@pytest.fixture(params=ENGINES)
def client(request: pytest.FixtureRequest, model: Path, vllm_engine: Callable[[], Engine]) -> Iterator[Client]:
    """4 rows of 128 tokens and 2 adapter slots for rollouts, 1 of each for chat."""
    with ExitStack() as stack:
        if request.param == "torch":
            engine = make_torch_engine(model)
            stack.callback(engine.close)
        else:
            engine = vllm_engine()
        client = Client(engine)
        stack.callback(client.end)
        yield client


def reference_logprobs(
    model: Path, folder: Path | None, ids: list[int], prompt: int, temperature: float = 1.0
) -> list[float]:
    """Of the ids after the prompt, by transformers and PEFT in float32."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if folder is not None:
        reference = PeftModel.from_pretrained(reference, folder)
    with torch.inference_mode():
        logprobs = (reference(input_ids=torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    return [float(logprobs[i - 1, ids[i]]) for i in range(prompt, len(ids))]


collect_ignore = [] if "vllm" in ENGINES else ["test_vllm.py"]

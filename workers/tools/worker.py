"""The tools stage: resets groups, answers turns, grades; every call under its deadline, every fault its own job's."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError

from app.db import transaction
from app.errors import EnvironmentFault, EnvironmentTimeout, InfrastructureFault, InvalidRequest, JobFault
from app.manager import base_models, episodes, jobs
from app.manager.episodes import Answer, Claim, GroupPrompt
from app.models import Job, Turn
from app.models.job import JobState
from app.models.round import EpisodeState, TurnKind
from app.settings import get_settings
from app.specs.job import EnvironmentSpec, JobSpec
from workers.faults import settle_fault
from workers.once import once
from workers.retry import retried
from workers.rollout.chat import Chat
from workers.runtime import Runtime, runtime
from workers.tools.datasets import with_items
from workers.tools.grader_runs import GraderRuns
from workers.tools.registry import module_names
from workers.tools.runner import EnvironmentRunner

log = structlog.get_logger(__name__)

GATHER_SECONDS = 0.02
CALLS_AT_ONCE = 64

# Faults of one job's environment in a row, seen by this process, that fail it whatever episodes they were of.
STRIKES = 3


class ToolsWorker:
    def __init__(self, this: Runtime) -> None:
        self.runtime = this
        self.runner = EnvironmentRunner(module_names(get_settings().environment_modules))
        self.grader_runs = GraderRuns()
        self.executor = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="call")
        self.calls: set[object] = set()  # under way; threads add and take away
        self.strikes: Counter[uuid.UUID] = Counter()
        this.slots = CALLS_AT_ONCE
        this.load = lambda: {"calls": len(self.calls)}

    def warm(self) -> None:
        """Reads the tokenizers of the registered base models, so that the first job does not wait for that."""
        with transaction() as session:
            folders = [base_models.folder(model) for model in base_models.list_base_models(session)]
        for folder in folders:
            _chat(folder)

    # --- resets

    def reset(self, group_ids: Sequence[int]) -> None:
        """Makes the prompts of groups whose episodes wait for them."""
        with transaction() as session:
            claims = episodes.claim_resets(session, group_ids, self.runtime.claimant, self._lease())
            prompts = episodes.group_prompts(session, {c.group_id for c in claims})
        by_group: dict[int, list[Claim]] = {}
        for claim in claims:
            by_group.setdefault(claim.group_id, []).append(claim)
        started = time.time()

        def work(group_id: int) -> GroupPrompt:
            known, round_ = prompts[group_id], by_group[group_id][0].round
            if known.messages is not None:
                return known
            answer = self._call(round_, "reset", {"index": known.item, "split": round_.split})
            return GroupPrompt(answer["messages"], answer.get("tools"), answer["state"], known.item)

        def record(done: list[tuple[int, GroupPrompt]]) -> None:
            with transaction() as session:
                held = [claim for group_id, _ in done for claim in by_group[group_id]]
                episodes.record_prompts(session, dict(done), held)

        self._run(list(by_group), work, record, lambda group_id, error: self._settle(by_group[group_id], error))
        self._span(claims, started)

    # --- steps

    def step(self, episode_ids: Sequence[int]) -> None:
        """Answers the last turn of each episode that can be claimed: an observation, or the reward."""
        with transaction() as session:
            claims = episodes.claim(session, episode_ids, EpisodeState.ACTING, self.runtime.claimant, self._lease())
            prompts = episodes.group_prompts(session, {c.group_id for c in claims})
            turns = episodes.turns_so_far(session, claims)
        by_id = {c.episode_id: c for c in claims}
        started = time.time()

        def work(episode_id: int) -> Answer:
            claim = by_id[episode_id]
            return self._answer(claim, prompts[claim.group_id], turns[episode_id])

        def record(done: list[tuple[int, Answer]]) -> None:
            with transaction() as session:
                episodes.record_answers(session, [answer for _, answer in done])
            for round_ in {by_id[i].round.id: by_id[i].round for i, _ in done}.values():
                log.info(
                    "answered",
                    tenant=str(round_.tenant_id),
                    job=str(round_.job_id),
                    round=round_.id,
                    episodes=[i for i, _ in done if by_id[i].round.id == round_.id],
                )

        def settle(episode_id: int, error: Exception) -> None:
            self._settle_step(by_id[episode_id], turns[episode_id], error)

        self._run(list(by_id), work, record, settle)
        self._span(claims, started)

    def _answer(self, claim: Claim, prompt: GroupPrompt, turns: list[Turn]) -> Answer:
        last = turns[-1]
        said = [t for t in turns if t.kind == TurnKind.POLICY]
        states = [t.state for t in turns if t.kind == TurnKind.ENVIRONMENT]
        truncated = last.finish_reason == "length"
        started = time.monotonic()
        outcome = self._call(
            claim.round,
            "step",
            {
                "state": states[-1] if states else prompt.state,
                "text": (last.messages or [{"content": ""}])[0]["content"],
                "truncated": truncated,
                "turns_left": claim.round.spec.environment.max_turns - len(said),
            },
        )
        reward = outcome["reward"] if outcome["done"] else None
        passed = outcome.get("passed")
        return Answer(
            claim=claim,
            state=outcome["state"],
            observation=outcome["observation"],
            reward=reward,
            passed=passed if passed is not None or reward is None else reward >= 1,
            flags=tuple(outcome["flags"]),
            truncated=truncated,
            seconds=time.monotonic() - started,
        )

    def _call(self, round_: episodes.RoundContext, method: Any, args: dict[str, Any]) -> dict[str, Any]:
        spec = self._environment(round_.tenant_id, round_.spec)
        deadline = min(spec.call_timeout_seconds, get_settings().tool_deadline_seconds)
        call = object()
        self.calls.add(call)
        try:
            answer = self.runner.call(str(round_.job_id), spec, round_.spec.seed, method, args, deadline)
        finally:
            self.calls.remove(call)
        self.strikes.pop(round_.job_id, None)
        return answer

    def _environment(self, tenant_id: uuid.UUID, spec: JobSpec) -> EnvironmentSpec:
        return with_items(tenant_id, spec.environment)

    def _lease(self) -> float:
        """A call ends by its deadline, opening its environment included, so the lease needs no renewal."""
        return get_settings().tool_deadline_seconds + 60 + get_settings().lease_seconds

    def _run(
        self,
        keys: list[int],
        work: Callable[[int], Any],
        record: Callable[[list[tuple[int, Any]]], None],
        settle: Callable[[int, Exception], None],
    ) -> None:
        """Works on all keys at once; records results as they come, near ones together, and settles faults as they
        come: several in a row are another matter than several in a batch."""
        running: dict[Future[Any], int] = {self.executor.submit(work, key): key for key in keys}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            if len(done) < len(running):
                time.sleep(GATHER_SECONDS)
                done = {future for future in running if future.done()}
            good: list[tuple[int, Any]] = []
            for future in done:
                key = running.pop(future)
                error = future.exception()
                if isinstance(error, (JobFault, InvalidRequest, InfrastructureFault)):
                    settle(key, error)
                else:
                    good.append((key, future.result()))
            if good:
                retried(lambda good=good: record(good), DBAPIError)  # type: ignore[misc]

    def _settle(self, claims: list[Claim], error: Exception) -> None:
        """An environment that raised or hung is asked once more; then it, or several of its like in a row, is the
        job's fault."""
        again = isinstance(error, (EnvironmentFault, EnvironmentTimeout)) and not self._struck_out(claims[0])
        for claim in claims:
            settle_fault(claim, error, second_chance=again)

    def _struck_out(self, claim: Claim) -> bool:
        """Counts a fault of the job's environment; True when there were several without a success in between."""
        self.strikes[claim.round.job_id] += 1
        return self.strikes[claim.round.job_id] >= STRIKES

    def _settle_step(self, claim: Claim, turns: list[Turn], error: Exception) -> None:
        """As `_settle`, but a turn that makes a working environment hang, again when asked again, is the policy's
        doing: it is worth nothing, and trains."""
        if not isinstance(error, EnvironmentTimeout) or claim.retries == 0:
            self._settle([claim], error)
            return
        nothing = Answer(
            claim=claim,
            state={},
            observation=[],
            reward=0.0,
            passed=False,
            flags=(error.code,),
            truncated=turns[-1].finish_reason == "length",
            seconds=0.0,
        )
        with transaction() as session:
            episodes.record_answers(session, [nothing])

    def _span(self, claims: Sequence[Claim], started: float) -> None:
        ended = time.time()
        for round_ in {c.round.id: c.round for c in claims}.values():
            self.runtime.spans.add(round_.tenant_id, round_.id, "environment", started, ended)

    # --- validation

    def validate(self, job_id: uuid.UUID) -> None:
        """Checks a new job's environment and first prompts against the base model: then it may start, or it fails."""
        with transaction() as session:
            job = jobs.begin(session, job_id, JobState.VALIDATING)
            if job is None:
                return
            model = base_models.served_model(session, job.base_model)
        spec = JobSpec.model_validate(job.spec)
        try:
            self._validate(job, spec, _chat(base_models.folder(model)), base_models.context_limit(model))
        except (JobFault, InvalidRequest) as error:
            where = f"{error.param}: " if error.param and not error.message.startswith(error.param) else ""
            with transaction() as session:
                jobs.fail_by_id(session, job_id, error.code, where + error.message)
            return
        with transaction() as session:
            jobs.validated(session, job_id)

    def _validate(self, job: Job, spec: JobSpec, chat: Chat, limit: int) -> None:
        environment = self._environment(job.tenant_id, spec)
        splits = ["train", "eval"] if spec.evaluation.every else ["train"]
        deadline = min(environment.call_timeout_seconds, get_settings().tool_deadline_seconds)
        prompts = self.runner.check(str(job.id), environment, spec.seed, splits, deadline)  # type: ignore[arg-type]
        for prompt in prompts:
            length = len(chat.render_prompt(prompt["messages"], prompt.get("tools")))
            room = limit - base_models.sampled_tokens(spec)
            if length > room:
                raise InvalidRequest(
                    f"a prompt has {length} tokens; with {base_models.sampled_tokens(spec)} sampled ones the limit of"
                    f" {limit} leaves {room}: shorten the prompt or lower sampling.max_tokens",
                    param="environment.params",
                    code="prompt_too_long",
                )


@lru_cache(maxsize=4)
def _chat(folder: Path) -> Chat:
    return Chat.load(folder)


@once
def tools_worker() -> ToolsWorker:
    """This process's tools stage, made at its first use."""
    return ToolsWorker(runtime())

"""The training stage: rounds from the buffer, one update at a time on a copy; upload and commit run beside the next."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import structlog
import torch

from app.db import transaction
from app.errors import InfrastructureFault, InvalidRequest, JobFault, ObjectMissing
from app.manager import base_models, buffer, jobs
from app.manager.buffer import RoundInput, StoredTrajectory, TrainingClaim
from app.manager.commit import LostClaim
from app.models.job import JobState
from app.settings import get_settings
from app.specs.job import JobSpec
from workers.cache import ObjectCache
from workers.lora import LoraWeights, fresh_adapter, parse_adapter, weights_digest
from workers.once import once
from workers.runtime import Runtime, runtime
from workers.training.grpo import Trajectory
from workers.training.holding import Ahead, Hand, Held
from workers.training.optimizer import OptimizerState, read_optimizer
from workers.training.publishing import Publisher
from workers.training.ranks import make_trainer
from workers.training.streaming import Streaming
from workers.training.trainer import UpdateResult, can_stream

log = structlog.get_logger(__name__)

ROOM = 3  # rounds in hand at once, with their results in memory: one that is computed, two that are published


class TrainingWorker:
    def __init__(self, this: Runtime) -> None:
        settings = get_settings()
        assert this.base_model is not None
        self.runtime = this
        self.model = this.base_model
        self.model_path = base_models.folder(self.model)
        self.dtype: torch.dtype = getattr(torch, self.model.dtype)
        self.trainer = make_trainer(
            self.model_path,
            self.dtype,
            threads=settings.training_threads,
            microbatch_tokens=settings.train_microbatch_tokens,
            gradient_checkpointing=settings.train_gradient_checkpointing,
            device=settings.training_device,
            ranks=settings.training_ranks,
        )
        self.cache = ObjectCache()
        self.publisher = Publisher(self.model.name, self.dtype, self.cache)
        self.streaming = Streaming(self.trainer, self.load_adapter, settings.train_streaming_bytes)
        self.hand = Hand(ROOM)
        this.slots = 1
        this.load = self.load
        this.finish = self.finish

    def finish(self) -> None:
        self.hand.wait_until_empty()
        self.trainer.close()

    def load(self) -> dict[str, Any]:
        return self.hand.load()

    # --- version 0

    def start(self, job_id: uuid.UUID) -> None:
        """Publishes the fresh adapter of a job that has none. Twice does nothing the second time."""
        with transaction() as session:
            job = jobs.begin(session, job_id, JobState.RUNNING)
            if job is None or jobs.has_version(session, job_id):
                return
        spec = JobSpec.model_validate(job.spec)
        try:
            adapter = fresh_adapter(self.model_path, spec.lora, spec.seed)
            self.publisher.publish_initial(job.tenant_id, job.id, adapter)
        except JobFault as error:
            with transaction() as session:
                jobs.fail_by_id(session, job_id, error.code, error.message)

    # --- updates

    def train_next(self) -> None:
        """Trains rounds until the buffer is empty; each is published beside what comes next."""
        while not (self.runtime.draining or self.runtime.leaving):
            self.hand.wait_for_room()
            with transaction() as session:
                claim = buffer.claim_next(session, self.model.name, self.runtime.claimant, get_settings().lease_seconds)
            if claim is None:
                return
            self.train(claim, alone=claim.losses >= get_settings().losses_before_alone)

    def train(self, claim: TrainingClaim, alone: bool = True) -> None:
        """One update of one round, committed once or not at all. `alone`: with no other round in hand, to its end;
        otherwise it returns once the update is computed, and upload and commit go on by themselves."""
        held = Held(claim=claim)
        self.hand.add(held)
        result = None
        with self._ends_on_error(held):
            if alone:
                self.hand.wait_until_alone(held)
            result = self._update(held)
        if result is None:
            return
        held.publishing = True
        if alone:
            self._publish(held, result)
        else:
            threading.Thread(target=self._publish, args=(held, result), name="publishing").start()

    def _update(self, held: Held) -> UpdateResult:
        claim = held.claim
        with transaction() as session:
            groups = [list(map(_trajectory, group)) for group in buffer.trajectories(session, claim)]
        known = self.streaming.known(claim, groups)
        result = self.trainer.update(
            self.load_adapter(claim),
            self.load_optimizer(claim),
            groups,
            claim.spec.hyperparameters,
            claim.spec.sampling.temperature,
            progress=held.tick,
            sums={position: k.sums for position, k in known.items()},
        )
        self.streaming.forget(claim.round_id)
        if not known:
            return result
        seconds = result.metrics["seconds"] + sum(k.seconds for k in known.values())
        return replace(result, metrics=result.metrics | {"seconds": seconds, "streamed_groups": float(len(known))})

    def _publish(self, held: Held, result: UpdateResult) -> None:
        torch.set_num_threads(1)  # of this thread: it must not start a team of its own beside the trainer's
        with self._ends_on_error(held):
            version = self.publisher.publish(held.claim, result, held.tick)
            held.committed = True
            _bound(held.claim).info("committed", version=version, seconds=round(time.time() - held.started, 3))
        if held.committed:
            self._end(held)

    @contextmanager
    def _ends_on_error(self, held: Held) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            try:
                settle(held.claim, error)
            finally:
                self._end(held)

    def _end(self, held: Held) -> None:
        self.runtime.spans.add(held.claim.tenant_id, held.claim.round_id, "training", held.started, time.time())
        self.hand.remove(held)

    # --- ahead

    def stream(self, group_id: int) -> None:
        """Computes ahead what a closed group adds to its unfinished round, unless a round is ready: that goes first."""
        self.train_next()
        if self.runtime.draining or self.runtime.leaving or not get_settings().train_streaming:
            return
        with transaction() as session:
            self.streaming.keep_only(buffer.not_trained_yet(session, self.streaming.rounds))
            found = buffer.closed_group(session, self.model.name, group_id)
        if found is None or not can_stream(found[0].spec.hyperparameters):
            return
        source, group = found
        work = Ahead(round_id=source.round_id)
        self.hand.add(work)
        try:
            self.streaming.compute(source, list(map(_trajectory, group)), work.tick)
        except (JobFault, InvalidRequest, InfrastructureFault) as error:  # the update meets it too, and holds a claim
            _bound(source).warning("not_streamed", error=error.message)
        finally:
            self.hand.remove(work)

    # --- files

    def load_adapter(self, source: RoundInput) -> LoraWeights:
        """The float32 masters of the round's version, from the cache or from S3: the same bytes."""
        adapter = parse_adapter(self.cache.read(source.config), self.cache.read(source.adapter))
        if weights_digest(adapter.tensors, self.dtype) != source.weights_digest:
            raise ObjectMissing(f"adapter of version {source.policy_version} is not the one that was published")
        return adapter

    def load_optimizer(self, claim: TrainingClaim) -> OptimizerState:
        if claim.optimizer is None:
            raise ObjectMissing(f"optimizer state of version {claim.policy_version} is gone")
        self.cache.read(claim.optimizer)
        return read_optimizer(self.cache.path(claim.optimizer.sha256))


def settle(claim: TrainingClaim, error: Exception) -> None:
    """Whose fault it was: the job's own fails that job alone, one of ours gives the round back (rule 7). Raises what is
    neither: the lease runs out."""
    bound = _bound(claim)
    match error:
        case LostClaim():
            bound.warning("update_dropped", error=error.message)
        case JobFault() | InvalidRequest():
            bound.warning("job_fault", code=error.code, error=error.message)
            with transaction() as session:
                buffer.fail_job(session, claim, error.code, error.message)
        case InfrastructureFault():
            bound.warning("update_given_back", error=error.message)
            with transaction() as session:
                buffer.give_back(session, claim, error.message)
        case _:
            bound.error("update_lost", error=repr(error))
            raise error


def _bound(source: RoundInput) -> Any:
    return log.bind(tenant=str(source.tenant_id), job=str(source.job_id), round=source.round_id)


def _trajectory(stored: StoredTrajectory) -> Trajectory:
    return Trajectory(
        token_ids=stored.token_ids,
        loss_mask=stored.loss_mask,
        engine_logprobs=stored.logprobs,
        reward=stored.reward,
        index=stored.index,
        truncated=stored.truncated,
    )


@once
def training_worker() -> TrainingWorker:
    """This process's training stage, made at its first use."""
    return TrainingWorker(runtime())

"""Typed errors. Each says what was wrong, where, and what to do; `code` is stable and shown to users."""

from __future__ import annotations


class MarlaasError(Exception):
    """Base of every error that a user or operator may see."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(MarlaasError):
    """The caller's input is wrong; `param` names the field."""

    code = "invalid_request"


class NotFound(MarlaasError):
    code = "not_found"


class Unauthorized(MarlaasError):
    """No key, or one that is unknown, revoked or expired."""

    code = "invalid_api_key"


class Forbidden(MarlaasError):
    """The key is good, but may not do this."""

    code = "forbidden"


class Conflict(MarlaasError):
    """The object is not in a state in which this can be done."""

    code = "conflict"


class QuotaExceeded(MarlaasError):
    """The tenant has as much of something as it may; trying again does not help before something is freed."""

    code = "quota_exceeded"


class RateLimited(MarlaasError):
    """Too many requests of one key; good again after `retry_after` seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class JobFault(MarlaasError):
    """A fault of one job's own making (data, grader, adapter): fails that job alone, is never retried."""

    code = "job_fault"


class EnvironmentFault(JobFault):
    """An environment or grader raised, or returned something that is not a reward."""

    code = "environment_error"


class EnvironmentTimeout(JobFault):
    """An environment call ran past its deadline."""

    code = "environment_timeout"


class AdapterInvalid(JobFault):
    """An adapter file is not finite, or does not fit the base model."""

    code = "adapter_invalid"


class NonFinite(JobFault):
    """Loss, gradient or adapter became NaN or infinite; the update is not committed."""

    code = "non_finite"


class ObjectMissing(JobFault):
    """An object that a job needs is gone from storage, or its content does not match its digest."""

    code = "object_missing"


class InfrastructureFault(MarlaasError):
    """Something of ours failed: retried within a budget."""

    code = "infrastructure"


class EngineUnavailable(MarlaasError):
    """No worker serves the model now, or the one that did is stopping; good again when one is there."""

    code = "engine_unavailable"

"""Everything that can go wrong, in one tree: the only place for codes and statuses.

* ScoreError                              500  internal
  + RequestError                               the client must change the request
    - MalformedRequestError               400  malformed_request
    - InvalidRequestError                 422  invalid_request
    - TooLargeError                       413  too_large
    - UnsupportedMediaTypeError           415  unsupported_media_type
    - NotAcceptableError                  406  not_acceptable
    - RangeNotSatisfiableError            416  range_not_satisfiable
    - UnknownModelError                   404  unknown_model
    - UnauthorizedError                   401  unauthorized
    - ForbiddenError                      403  forbidden
    - IdempotencyConflictError            422  idempotency_key_reused
  + NotFoundError                         404  not_found
    - JobNotFoundError                    404  job_not_found
  + GoneError                             410  gone
  + ConflictError                         409  conflict
    - IllegalTransitionError              409  illegal_transition
    - ResultNotReadyError                 409  result_not_ready       retryable
  + OverloadedError                       429  overloaded             retryable
    - RateLimitedError                    429  rate_limited           retryable
    - QuotaExceededError                  429  quota_exceeded
  + UnavailableError                      503  unavailable            retryable
    - StoreUnavailableError               503  store_unavailable      retryable
    - NoCapacityError                     503  no_capacity            retryable
    - ModelUnavailableError               503  model_unavailable
  + ScoringError                               recorded on an item or a job
    - InputTooLongError                   422  input_too_long
    - NonFiniteScoreError                 500  non_finite_score
    - ForwardError                        500  forward_failed
    - OutOfMemoryError                    500  out_of_memory          retryable
    - DeviceLostError                     500  device_lost            retryable
    - PoisonedError                       500  poisoned
    - DeadlineExceededError               504  deadline_exceeded
  + ModelLoadError                        500  model_load_failed
  + SettingsError                         500  bad_settings
  + SignatureError                        400  bad_signature
  + AddressRefusedError                   422  address_refused
"""

from typing import ClassVar

from contract.policies import RatePolicy

__all__ = [
    "AddressRefusedError",
    "ConflictError",
    "DeadlineExceededError",
    "DeviceLostError",
    "ForbiddenError",
    "ForwardError",
    "GoneError",
    "IdempotencyConflictError",
    "IllegalTransitionError",
    "InputTooLongError",
    "InvalidRequestError",
    "JobNotFoundError",
    "MalformedRequestError",
    "ModelLoadError",
    "ModelUnavailableError",
    "NoCapacityError",
    "NonFiniteScoreError",
    "NotAcceptableError",
    "NotFoundError",
    "OutOfMemoryError",
    "OverloadedError",
    "PoisonedError",
    "QuotaExceededError",
    "RangeNotSatisfiableError",
    "RateLimitedError",
    "RequestError",
    "ResultNotReadyError",
    "ScoreError",
    "ScoringError",
    "SettingsError",
    "SignatureError",
    "StoreUnavailableError",
    "TooLargeError",
    "UnauthorizedError",
    "UnavailableError",
    "UnknownModelError",
    "UnsupportedMediaTypeError",
]


class ScoreError(Exception):
    """Base of every error that we raise on purpose.

    ``param`` is the path of the request field at fault (``items[3]``), where there is one.
    ``retry_after_s`` is a promise-free hint in seconds for retryable errors. ``policy`` is the
    limit that was reached, where it is one.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str = "",
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        policy: RatePolicy | None = None,
    ) -> None:
        super().__init__(message)
        self.policy = policy
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(ScoreError):
    """The client must change the request."""

    code = "bad_request"
    http_status = 400


class MalformedRequestError(RequestError):
    """The body or a header cannot be parsed at all."""

    code = "malformed_request"


class InvalidRequestError(RequestError):
    """The request parses, and asks for something that cannot be done."""

    code = "invalid_request"
    http_status = 422


class TooLargeError(RequestError):
    """The body, the items or the tokens exceed a limit, which the message names."""

    code = "too_large"
    http_status = 413


class UnsupportedMediaTypeError(RequestError):
    """The body is not of a type that the route reads."""

    code = "unsupported_media_type"
    http_status = 415


class NotAcceptableError(RequestError):
    """No representation of the resource is among those that ``Accept`` names."""

    code = "not_acceptable"
    http_status = 406


class RangeNotSatisfiableError(RequestError):
    """``Range`` holds no byte of the file, which has ``size_bytes``."""

    code = "range_not_satisfiable"
    http_status = 416

    def __init__(self, message: str = "", *, size_bytes: int | None = None) -> None:
        super().__init__(message, param="Range")
        self.size_bytes = size_bytes


class UnknownModelError(RequestError):
    """No model of that name is served; the message names those that are."""

    code = "unknown_model"
    http_status = 404


class UnauthorizedError(RequestError):
    """No key, or a key that is not valid."""

    code = "unauthorized"
    http_status = 401


class ForbiddenError(RequestError):
    """The key is valid and lacks the scope."""

    code = "forbidden"
    http_status = 403


class IdempotencyConflictError(RequestError):
    """The idempotency key was used before with another body."""

    code = "idempotency_key_reused"
    http_status = 422


class NotFoundError(ScoreError):
    """There is nothing under that name that this tenant may see."""

    code = "not_found"
    http_status = 404


class JobNotFoundError(NotFoundError):
    """No such job, or a job of somebody else."""

    code = "job_not_found"


class GoneError(ScoreError):
    """It existed; it was deleted or its retention passed."""

    code = "gone"
    http_status = 410


class ConflictError(ScoreError):
    """The resource is not in a state that allows this."""

    code = "conflict"
    http_status = 409


class IllegalTransitionError(ConflictError):
    """A job cannot move from ``current`` to ``wanted``."""

    code = "illegal_transition"

    def __init__(self, *, current: str, wanted: str) -> None:
        super().__init__(f"a job that is {current} cannot become {wanted}")
        self.current = current
        self.wanted = wanted


class ResultNotReadyError(ConflictError):
    """The job has no result yet."""

    code = "result_not_ready"
    retryable = True


class OverloadedError(ScoreError):
    """A limit of the tenant's own is reached: wait, then try again."""

    code = "overloaded"
    http_status = 429
    retryable = True


class RateLimitedError(OverloadedError):
    """The tenant sends more requests than it may."""

    code = "rate_limited"


class QuotaExceededError(OverloadedError):
    """The tenant has all that it may have: waiting alone does not help, deleting does."""

    code = "quota_exceeded"
    retryable = False


class UnavailableError(ScoreError):
    """The service cannot do this now."""

    code = "unavailable"
    http_status = 503
    retryable = True


class StoreUnavailableError(UnavailableError):
    """The database or the blob store does not answer."""

    code = "store_unavailable"


class NoCapacityError(UnavailableError):
    """The queue as a whole is full."""

    code = "no_capacity"


class ModelUnavailableError(UnavailableError):
    """The model is known and could not be loaded; the message says why."""

    code = "model_unavailable"
    retryable = False


class ScoringError(ScoreError):
    """An item or a job could not be scored; recorded there, with its code."""

    code = "scoring_failed"


class InputTooLongError(ScoringError):
    """The input has more tokens than the model's limit, and ``truncation`` is ``error``."""

    code = "input_too_long"
    http_status = 422


class NonFiniteScoreError(ScoringError):
    """The model yielded NaN or infinity for this item."""

    code = "non_finite_score"


class ForwardError(ScoringError):
    """The model raised on this item."""

    code = "forward_failed"


class OutOfMemoryError(ScoringError):
    """The device ran out of memory; smaller batches may fit."""

    code = "out_of_memory"
    retryable = True


class DeviceLostError(ScoringError):
    """The device context is poisoned: the process must end and start again."""

    code = "device_lost"
    retryable = True


class PoisonedError(ScoringError):
    """The job was in the hands of several workers that died."""

    code = "poisoned"


class DeadlineExceededError(ScoringError):
    """The job ran longer than its ``run_timeout_s``."""

    code = "deadline_exceeded"
    http_status = 504


class ModelLoadError(ScoreError):
    """A checkpoint cannot be served; the message says what is wrong and what to do."""

    code = "model_load_failed"


class SettingsError(ScoreError):
    """Settings or the registry file are wrong; the message names every one that is."""

    code = "bad_settings"


class SignatureError(ScoreError):
    """A webhook's signature, timestamp or id does not verify."""

    code = "bad_signature"
    http_status = 400


class AddressRefusedError(ScoreError):
    """A webhook target that must not be called."""

    code = "address_refused"
    http_status = 422

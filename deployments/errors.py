"""Everything that can go wrong with a request, as one tree; knows nothing about HTTP frameworks or Ray.

    SightlineError
    ├── InvalidRequestError          400  the request is wrong; sending it again changes nothing
    │   ├── MediaError               400  a picture or video cannot be used
    │   │   ├── MediaFetchError      400  the URL could not be fetched
    │   │   └── UrlNotAllowedError   400  the URL may not be fetched
    │   └── ContextLengthError       400  the prompt does not fit the model or a budget
    ├── AuthenticationError          401
    ├── PermissionDeniedError        403
    ├── NotFoundError                404
    ├── PayloadTooLargeError         413
    ├── RateLimitError               429  this caller sends too much
    ├── OverloadedError              503  the server has no room right now
    │   └── NotReadyError            503  still starting
    ├── DeadlineError                504  the request's deadline passed
    ├── RequestAbortedError          499  the caller went away
    └── InternalError                500  a fault of ours; its message never leaves the server
        ├── PayloadLostError         500  an object ref can no longer be read; the step can be redone
        └── ReplicaLostError         500  a replica died or hung up; the step can be redone elsewhere

Every error carries what an OpenAI-style error body needs: a plain message that names the field, the limit and the
value seen, `code` for programs and `param` for the field. Instances pickle whole, since they cross processes.
"""

from __future__ import annotations

from typing import ClassVar


class SightlineError(Exception):
    """Base of all errors a stage raises on purpose.

    Args:
        message: One plain sentence for the caller. No paths, addresses, payloads or library texts.
        code: Stable word for programs, such as `image_too_large`; the class's default if None.
        param: The request field at fault, such as `messages[0].content[1].image_url`.
        retry_after_s: Seconds after which a retry makes sense; becomes the `Retry-After` header.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.param, self.retry_after_s))

    def at(self, param: str) -> SightlineError:
        """The same error naming the request field `param`, unless it already names one."""
        if self.param is None:
            self.param = param
        return self


def _rebuild(
    cls: type[SightlineError], message: str, code: str, param: str | None, retry_after_s: float | None
) -> SightlineError:
    return cls(message, code=code, param=param, retry_after_s=retry_after_s)


class InvalidRequestError(SightlineError):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class MediaError(InvalidRequestError):
    default_code = "invalid_image"


class MediaFetchError(MediaError):
    default_code = "media_fetch_failed"


class UrlNotAllowedError(MediaError):
    default_code = "url_not_allowed"


class ContextLengthError(InvalidRequestError):
    default_code = "context_length_exceeded"


class AuthenticationError(SightlineError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(SightlineError):
    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class NotFoundError(SightlineError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class PayloadTooLargeError(SightlineError):
    status = 413
    type = "invalid_request_error"
    default_code = "payload_too_large"


class RateLimitError(SightlineError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class OverloadedError(SightlineError):
    status = 503
    type = "server_error"
    default_code = "overloaded"


class NotReadyError(OverloadedError):
    default_code = "not_ready"


class DeadlineError(SightlineError):
    status = 504
    type = "server_error"
    default_code = "deadline_exceeded"


class RequestAbortedError(SightlineError):
    status = 499
    type = "invalid_request_error"
    default_code = "client_closed_request"


class InternalError(SightlineError):
    """A fault of ours. The message is for the log; callers are told only that the server failed."""


class PayloadLostError(InternalError):
    default_code = "payload_lost"


class ReplicaLostError(InternalError):
    default_code = "replica_lost"

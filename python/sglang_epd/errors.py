"""Every error that crosses a boundary of this package.

EpdError
├── ConfigError              a flag or setting cannot be honoured (start-up)
├── MediaError          400  the user's media is at fault; never retried elsewhere
│   ├── MediaForbiddenError  403  the address or path may not be read
│   ├── MediaTooLargeError   413  over a limit on bytes, pixels or frames
│   └── MediaTypeError       415  a modality or format that the model cannot take
├── ProtocolError       400  a message that cannot be understood or is not allowed
├── DuplicateError      409  the request id is live already
├── OverloadedError     503  over a budget; try again later or elsewhere
├── UnavailableError    503  the peer is down, draining or out of reach
│   ├── EncoderLostError 503  an encoder went away, or broke, while it had the request
│   ├── TokenError       503  an encoder does not take this server's token
│   └── UnreachableError 503  an encoder cannot connect to this server's payload port
├── NamespaceError      503  the two servers do not hold the same encoder
├── RequestCancelledError 499  the caller no longer waits for the result
├── DeadlineError       504  the request's deadline passed
└── EncodeError         500  the encoder failed at something that was its own job

Each class says which HTTP status it becomes and whether another encoder may
succeed where this one failed. Messages never hold media, credentials or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus


class EpdError(Exception):
    """Base of all errors that this package raises on purpose.

    Attributes:
        status: HTTP status for the user.
        retry_elsewhere: whether another encoder may cure it.
        retry_after_s: when the encoder that reported it may be asked again; None if it gave no
            time.
    """

    status = 500
    retry_elsewhere = False
    retry_after_s: float | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def code(self) -> str:
        """The class name, as it crosses the wire."""
        return type(self).__name__

    @property
    def http_status(self) -> HTTPStatus:
        """The status as SGLang takes it: 499 is not in the standard library's list."""
        return HTTPStatus(self.status) if self.status != 499 else HTTPStatus.BAD_REQUEST


class ConfigError(EpdError, ValueError):
    pass


class MediaError(EpdError):
    """The user's media is at fault.

    Attributes:
        reason: of a bounded set, for metrics: what went wrong while it was fetched
            ("dns", "connect", "timeout", "http_4xx", ...); empty where it was not.
    """

    status = 400

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class MediaForbiddenError(MediaError):
    status = 403


class MediaTooLargeError(MediaError):
    status = 413


class MediaTypeError(MediaError):
    status = 415


class ProtocolError(EpdError):
    status = 400


class DuplicateError(EpdError):
    status = 409


class NamespaceError(EpdError):
    status = 503
    retry_elsewhere = True

    @classmethod
    def between(cls, language: str, encoder: str) -> NamespaceError:
        """Of a language server and an encoder with these namespaces."""
        return cls(
            f"encoder identity differs: the language server has {language}, the encoder "
            f"{encoder}; both must serve the same checkpoint, with one --dtype, --quantization, "
            "--mm-process-config and SGLANG_EPD_FINGERPRINT"
        )


class OverloadedError(EpdError):
    status = 503
    retry_elsewhere = True


class UnavailableError(EpdError):
    """The peer is down, draining or out of reach.

    Attributes:
        ended: of a write that a transfer engine was not done with, says whether it is now; None
            where nothing is written any more.
    """

    status = 503
    retry_elsewhere = True
    ended: Callable[[], bool] | None = None


class RequestCancelledError(EpdError):
    status = 499


class DeadlineError(EpdError):
    status = 504


class EncoderLostError(UnavailableError):
    pass


class TokenError(UnavailableError):
    pass


class UnreachableError(UnavailableError):
    pass


class EncodeError(EpdError):
    status = 500
    retry_elsewhere = True


def _tree(cls: type[EpdError]) -> list[type[EpdError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


_BY_CODE = {cls.__name__: cls for cls in _tree(EpdError)}


def from_code(code: str, message: str) -> EpdError:
    """Rebuild the error that a peer reported; an unknown code is a plain EpdError."""
    return _BY_CODE.get(code, EpdError)(message)

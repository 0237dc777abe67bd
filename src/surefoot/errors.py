"""Errors a user can act on: what was given, what is allowed, what to do next.

The command line prints the message of a `SurefootError` on one line and exits with code 2; everything else is a bug and
keeps its traceback.
"""

from __future__ import annotations


class SurefootError(Exception):
    """Base of every error whose message is written for the user."""


class ConfigurationError(SurefootError, ValueError):
    """An option, or a combination of options, that surefoot cannot honour."""


class ModelError(SurefootError):
    """A target that cannot be found, read, or served."""


class DrafterError(SurefootError):
    """A drafter that cannot be found, read, or used with this target."""


class CalibrationError(SurefootError):
    """A calibration file that is malformed or was fitted for another drafter."""


class CostTableError(SurefootError):
    """A cost table that is malformed, or was measured on another engine."""


class RequestError(SurefootError, ValueError):
    """A request whose prompt or sampling parameters cannot be served."""


class PromptError(RequestError, TypeError):
    """A prompt, a conversation, or template arguments in a form that is not understood."""


class EngineError(RuntimeError):
    """A step of the engine failed for no reason of the request it ended; the cause is chained. Also: the engine is closed."""

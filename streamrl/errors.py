"""The errors a user or a caller may have to handle, and what each one means.

Nothing else is raised on purpose: a broken internal invariant is an `AssertionError`, a broken guarantee a
`RuntimeError` that ends the run rather than training on wrong data.
"""

from __future__ import annotations


class StreamrlError(Exception):
    """Base of every error streamrl raises on purpose."""


class ConfigError(StreamrlError, ValueError):
    """A setting, file or argument of the user's is wrong; the message names it, its value, the rule and the remedy.

    The command line exits with code 2.
    """


class DeadlineExceededError(StreamrlError, TimeoutError):
    """A wait reached its deadline; the message says what it waited for, on whom and for how long."""


class ClosedError(StreamrlError):
    """The object was closed while a call waited on it, or before the call."""


class WireError(StreamrlError):
    """A frame does not follow the wire format: counted, logged once and dropped by the receiver."""


class StaleRolloutError(StreamrlError, RuntimeError):
    """A group beyond the staleness bound reached the learner. A broken guarantee: the run ends, nothing is trained."""


class WeightSyncError(StreamrlError, RuntimeError):
    """A weight update could not be applied, or its log-prob probe disagreed with the learner."""


class ProcessDiedError(StreamrlError, RuntimeError):
    """A process of the run ended when it should not have; the message names it and the cause."""


class RewardError(StreamrlError):
    """A reward raised, timed out or returned something that is not a finite number; the member fails with `reason`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # "reward_timeout" | "reward_error" | "reward_not_finite"

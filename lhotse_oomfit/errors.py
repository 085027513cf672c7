"""Every error that this package raises on purpose.

Each error derives from :class:`OomfitError` and from the builtin that fits it, so ``except ValueError`` keeps
working for callers that don't know this package::

    OomfitError
    ├── InvalidBinsError          (ValueError)    bins that are unsorted, repeated, NaN, empty, of mixed dimensions
    ├── InvalidArgumentError      (ValueError)    any other argument with a wrong value
    ├── EmptySourceError          (ValueError)    a source of cuts that yields nothing usable
    ├── MissingTokensError        (ValueError)    a cut without tokens where tokens decide its bucket
    ├── BufferTooSmallError       (ValueError)    batch sizes that the bucket buffer can never hold
    ├── NotCalibratedError        (RuntimeError)  an "auto" sampler iterated before it was calibrated
    ├── ResumeError               (RuntimeError)  a sampler state that can't be continued here
    ├── RanksDisagreeError        (RuntimeError)  ranks of one job with different batch sizes
    ├── ProfileError              (ValueError)    a profile file that can't be read
    │   └── ProfileMismatchError                  a profile that was measured for something else
    └── CalibrationError          (RuntimeError)  a calibration that couldn't finish
        ├── BucketDoesNotFitError                 even a batch of one exceeds the memory budget
        ├── WorstCaseError                        no worst-case batch could be made from the dataset
        ├── UnsupportedStrategyError              a way of training that can't be calibrated
        ├── LockStepMemoryError                   a rank ran out of memory in a step that all ranks run together
        └── RankFailedError                       another rank failed while this one waited for it
"""

from __future__ import annotations

__all__ = [
    "BucketDoesNotFitError",
    "BufferTooSmallError",
    "CalibrationError",
    "EmptySourceError",
    "InvalidArgumentError",
    "InvalidBinsError",
    "LockStepMemoryError",
    "MissingTokensError",
    "NotCalibratedError",
    "OomfitError",
    "ProfileError",
    "ProfileMismatchError",
    "RankFailedError",
    "RanksDisagreeError",
    "ResumeError",
    "UnsupportedStrategyError",
    "WorstCaseError",
]


class OomfitError(Exception):
    """The root of this package's errors."""


class InvalidBinsError(OomfitError, ValueError):
    """Duration bins that don't describe buckets."""


class InvalidArgumentError(OomfitError, ValueError):
    """An argument with a value that can't be honoured."""


class EmptySourceError(OomfitError, ValueError):
    """A source of cuts that yields no cut that could be used."""


class MissingTokensError(OomfitError, ValueError):
    """A cut without tokens, where the number of tokens decides its bucket."""


class BufferTooSmallError(OomfitError, ValueError):
    """Batch sizes that the bucket buffer can never hold."""


class NotCalibratedError(OomfitError, RuntimeError):
    """A sampler with ``bucket_batch_size="auto"`` was iterated before its sizes were known."""


class ResumeError(OomfitError, RuntimeError):
    """A sampler state that can't be continued in this process."""


class RanksDisagreeError(OomfitError, RuntimeError):
    """Ranks of one job that would train with different batch sizes, and so out of step."""


class ProfileError(OomfitError, ValueError):
    """A profile that can't be read."""


class ProfileMismatchError(ProfileError):
    """A profile that was measured for another model, card or configuration."""


class CalibrationError(OomfitError, RuntimeError):
    """A calibration that couldn't finish."""


class BucketDoesNotFitError(CalibrationError):
    """Even a batch of one example of some bucket exceeds the memory budget."""


class WorstCaseError(CalibrationError):
    """No worst-case batch could be made from the user's dataset."""


class UnsupportedStrategyError(CalibrationError):
    """A way of training that can't be calibrated."""


class LockStepMemoryError(CalibrationError):
    """A rank ran out of memory in a trial step that all ranks run together, so none can go on.

    :param bucket, size: the trial.
    """

    def __init__(self, message: str, *, bucket: int, size: int) -> None:
        super().__init__(message)
        self.bucket = bucket
        self.size = size


class RankFailedError(CalibrationError):
    """Another rank failed while this one waited for its result.

    :param rank: which; None if that isn't known.
    :param cause: its error; None if it said nothing.
    """

    def __init__(self, message: str, *, rank: int | None = None, cause: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause

"""Errors about data: what is wrong with a file, in which file, and the exit code the command line gives it.

One class per kind of defect. A caller's own mistake is a ValueError or TypeError instead, and what the operating system
refuses (no such file, no permission, disk full, I/O error) stays the OSError it is, with its path; the command line maps it.
"""

from collections.abc import Iterable
from typing import ClassVar, Self


def counted(number: int, noun: str) -> str:
    """A number of things in words: 1 prompt, 2 prompts."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class KVError(Exception):
    """A file, or the model it meets, is not what it must be.

    Args:
        what: what is wrong, with the numbers.
        path: the file; filled in by whoever knows it.
        hint: one action that helps, or None.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, path: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.path = path
        self.hint = hint

    def __str__(self) -> str:
        return self.what if self.path is None else f"{self.path}: {self.what}"

    def alone(self) -> Self:
        """This error without the frames it went through, and the errors before it: they hold what was in memory, a whole tensor maybe."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class Problems(list[KVError]):
    """The first MOST problems of one input, and then one that says that there are more. None keeps what was in memory when it was met."""

    MOST: ClassVar[int] = 200

    def append(self, problem: KVError) -> None:
        if len(self) < self.MOST:
            super().append(problem.alone())
        elif len(self) == self.MOST:
            super().append(FormatError(f"and more: the first {self.MOST} problems are named"))

    def extend(self, problems: Iterable[KVError]) -> None:
        for problem in problems:
            self.append(problem)


class FormatError(KVError):
    """The bytes do not follow the specification."""

    exit_code = 3


class NotKvtoolError(FormatError):
    """Not a kvtool file at all: a directory, an empty file, another format."""


class HeaderError(FormatError):
    """The header cannot be read: bad length, bad JSON, a duplicate key, too large."""


class TruncatedError(FormatError):
    """The file ends too early."""


class TrailingBytesError(FormatError):
    """The file goes on after its last tensor."""


class LayoutError(FormatError):
    """A tensor lies wrongly: overlap, gap, misaligned, shape x dtype differs from its length, bad name or dtype."""


class VersionError(FormatError):
    """Written for a newer reader: a schema or a required feature that this version does not know."""


class ManifestError(FormatError):
    """A manifest field is missing, of the wrong type or at odds with another; the text starts with its JSON path."""


class IntegrityError(KVError):
    """The bytes are not the ones that were written."""

    exit_code = 4


class DigestError(IntegrityError):
    """A tensor's (or the token list's) digest differs from the recorded one."""


class HeaderDigestError(IntegrityError):
    """The header's digest differs from the recorded one."""


class PaddingError(IntegrityError):
    """Padding that must be zero is not."""


class CompressionError(IntegrityError):
    """A zstd frame is corrupt, or its size is not the recorded one."""


class IncompatibleError(KVError):
    """Sound data that does not fit the model, tokenizer or cache it meets."""

    exit_code = 5


class BackendError(KVError):
    """The back end or model that the data needs is absent."""

    exit_code = 6


class QualityError(KVError):
    """The measured quality is below the policy asked for."""

    exit_code = 7

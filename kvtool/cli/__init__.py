"""The `kvtool` command. Commands are imported when they run, so that `check` and `inspect` need no MLX.

Exit codes: 0 sound, 1 problems found (check, diff) or an I/O error, 2 usage, 3 format, 4 integrity, 5 incompatible, 6 back end absent,
7 quality below the policy asked for, 130 interrupted, 141 the reader of the output went away.
"""

import errno
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from formats.atomic import NOT_REGULAR
from formats.errors import BackendError, KVError
from kvtool.blas import use_openblas
from kvtool.cli._common import first_note, forget_notes, printable
from kvtool.version import __version__

COMMANDS = {
    "calibrate": "kvtool.cli.calibrate",
    "calibrations": "kvtool.cli.calibrations",
    "export": "kvtool.cli.export",
    "import": "kvtool.cli.import_",
    "lm-server": "kvtool.cli.lm_server",
    "recode": "kvtool.cli.recode",
    "fit": "kvtool.cli.fit",
    "profile": "kvtool.cli.profile",
    "join": "kvtool.cli.join",
    "store": "kvtool.cli.store",
    "serve": "kvtool.cli.serve",
    "tenants": "kvtool.cli.tenants",
    "inspect": "kvtool.cli.inspect",
    "explain": "kvtool.cli.explain",
    "check": "kvtool.cli.check",
    "diff": "kvtool.cli.diff",
    "eval": "kvtool.cli.eval",
    "demo": "kvtool.cli.demo",
    "doctor": "kvtool.cli.doctor",
    "selftest": "kvtool.cli.selftest",
    "bench": "kvtool.cli.bench",
}
INTERRUPTED = 130
# 128 + SIGPIPE, as a shell says of `yes | head`.
READER_GONE = 141
USAGE = 2
IO_ERROR = 1
LONG_RUNNING = ("lm-server", "serve")  # where a warning that comes again is news
BACK_END = ("mlx", "mlx_lm")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LogFormatter(logging.Formatter):
    """A warning reads as the notes of the commands do; what -v adds is said by its module."""

    def format(self, record: logging.LogRecord) -> str:
        text = printable(record.getMessage())
        return f"note: {text}" if record.levelno >= logging.WARNING else f"{record.name}: {text}"


class ReaderGone(Exception):
    """The reader of stdout or stderr closed it: click itself would exit with 1, which means problems found."""


@contextmanager
def _noticing_readers() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class LazyGroup(click.Group):
    """A group whose commands are imported by name when asked for."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _noticing_readers():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _noticing_readers():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[name]).command
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("-v", "--verbose", count=True, help="Log what is done; -vv also shows tracebacks.")
@click.version_option(__version__, prog_name="kvtool")
@click.pass_context
def group(ctx: click.Context, verbose: int) -> None:
    """Capture, compress, store and reuse the KV cache of mlx-lm models, in the same model or another one.

    \b
    Example:
      kvtool export --model tiny-a --prompt-file report.txt --codec rvq-2+2 -o report.kv
      kvtool import report.kv --model tiny-a --prompt "In short:"
    """
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    forget_notes()
    if ctx.invoked_subcommand not in LONG_RUNNING:
        handler.addFilter(lambda record: record.levelno < logging.WARNING or first_note(record.getMessage()))
    logging.getLogger("kvtool").addHandler(handler)
    ctx.call_on_close(lambda: logging.getLogger("kvtool").removeHandler(handler))
    logging.getLogger("kvtool").setLevel(level)
    use_openblas()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    _settle_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    sys.exit(run(args))


def _settle_streams() -> None:
    """Fill closed standard descriptors, and print what a terminal's encoding lacks as escapes.

    Else the next file opened takes a closed one's number: MLX cannot read a file numbered 0, and a file numbered 1 takes print's output.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def run(args: list[str]) -> int:
    """Run the command line; returns the exit code, with every error turned into `error:` and `hint:` lines on stderr."""
    try:
        return _run(args)
    except (ReaderGone, BrokenPipeError):
        _discard_output()
        return READER_GONE


def _run(args: list[str]) -> int:
    try:
        code = group.main(args=args, prog_name="kvtool", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        error.show(sys.stderr)
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except KVError as error:
        return _report(args, error, error.hint, error.exit_code)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in BACK_END and "libmlx" not in str(error):
            raise
        return _report(args, error, "kvtool doctor says what to install", BackendError.exit_code)
    except (ValueError, TypeError) as error:
        return _report(args, error, None, USAGE)
    except OSError as error:
        return _report(args, error, _os_hint(error), _os_code(error))
    except (MemoryError, RuntimeError) as error:
        # MLX's own errors, such as memory that it could not get.
        return _report(args, error, None, IO_ERROR)


def _discard_output() -> None:
    """Point what nobody reads at the null device: the interpreter flushes once more when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(null, stream.fileno())
    os.close(null)


def _os_hint(error: OSError) -> str | None:
    if error.strerror == NOT_REGULAR:
        return "a file is written whole and then renamed onto its target, so give a new name or that of a file"
    return "free space or try another disk" if error.errno in FULL else None


def _os_code(error: OSError) -> int:
    """Exit code: a path that cannot be as the caller gave it is usage, anything else the disk's own error."""
    wrong = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | FileExistsError)
    return USAGE if wrong or error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL) else IO_ERROR


def _report(args: list[str], error: Exception, hint: str | None, code: int) -> int:
    if any(a.startswith("-vv") for a in args[:2]):
        traceback.print_exception(error, file=sys.stderr)
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename and error.strerror else str(error)
    lines = (text or type(error).__name__).splitlines()
    # Further lines stand in: what a file says is no second error.
    click.echo("error: " + "\n  ".join(map(printable, lines)), err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)
    return code

"""The commands as one application, and what they share: version, errors in one line, what becomes of a signal.

A command is a module with `register(app)`; adding one is adding its module to `COMMANDS`. Nothing here or at the top of
a command module may import torch or transformers: `surefoot --help` answers at once. Exit codes are listed in `process.py`.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from surefoot.cli import (
    bench,
    calibrate,
    chat,
    demo,
    evaluate,
    generate,
    inspect,
    process,
    profile,
    serve,
    simulate,
    train,
)
from surefoot.cli.report import complain, note
from surefoot.errors import SurefootError
from surefoot.version import __version__

COMMANDS = (generate, chat, serve, demo, inspect, profile, calibrate, simulate, bench, train, evaluate)

EPILOG = (
    "Exit codes: 0 done; 1 done, but the result is not what it must be; 2 not done, one line says why; "
    "130 Ctrl-C, 143 SIGTERM, 141 the reader of the output has gone."
)


class Commands(TyperGroup):
    """Turns what a user can act on into one line and an exit code; a traceback is left for bugs alone."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with process.interruptible():
                result = super().invoke(ctx)
                process.flush_output()
                return result
        except SurefootError as error:
            complain(str(error))
            raise typer.Exit(process.EXIT_USER_ERROR) from None
        except KeyboardInterrupt:
            note("")
            process.end_after_signal(process.EXIT_INTERRUPTED)
            raise typer.Exit(process.EXIT_INTERRUPTED) from None
        except process.Terminated as end:
            process.end_after_signal(end.code)
            raise
        except OSError as problem:
            if (code := _unwritable(problem)) is None:
                raise
            raise typer.Exit(code) from None
        finally:
            process.restore_terminal()


def build_app() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="surefoot",
        cls=Commands,
        help="Speculative decoding that only steps where it is sure: a block drafter, a measured cost table, "
        "an exact target.",
        epilog=EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in COMMANDS:
        command.register(app)
    return app


def main() -> None:
    """The entry point of installations made before there was `entry.py`."""
    process.prepare()
    run()


def run() -> None:
    """Parse the command line and run the command; never returns."""
    warnings.showwarning = _one_line_warning
    logging.getLogger("surefoot").addHandler(_OneLineRecords(logging.WARNING))
    try:
        try:
            app()
        finally:  # help and version are printed without a command
            process.flush_output()
    except OSError as problem:
        if (code := _unwritable(problem)) is None:
            raise
        raise SystemExit(code) from None


def _unwritable(problem: OSError) -> int | None:
    """The exit code after an output that cannot be written, which is said; None where the error is another one."""
    if (found := process.output_error(problem)) is None:
        return None
    code, message = found
    if message is not None:
        complain(message)
    process.discard_output()
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"surefoot {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # Read by transformers and tokenizers when they are imported, which is later.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _one_line_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if not issubclass(category, (DeprecationWarning, FutureWarning)):
        complain(str(message), kind="warning")


class _OneLineRecords(logging.Handler):
    """What the library logs, in the form of every other message."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(self.format(record), kind=record.levelname.lower())


app = build_app()

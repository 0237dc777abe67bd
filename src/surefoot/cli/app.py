"""`surefoot`: the entry point, and what all commands share: version, one-line errors, a clean Ctrl-C.

A command is a module with `register(app)`; adding one is adding its module to `COMMANDS`. Nothing here or at the top of
a command module may import torch or transformers: `surefoot --help` answers at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from surefoot.cli import bench, calibrate, chat, demo, evaluate, generate, inspect, profile, simulate, train
from surefoot.errors import SurefootError
from surefoot.version import __version__

COMMANDS = (generate, chat, demo, inspect, profile, calibrate, simulate, bench, train, evaluate)

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class Commands(TyperGroup):
    """Turns what a user can act on into one line and an exit code; a traceback is left for bugs alone."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SurefootError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from None
        except KeyboardInterrupt:
            typer.echo(err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None


def build_app() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="surefoot",
        cls=Commands,
        help="Speculative decoding that only steps where it is sure: a block drafter, a measured cost table, "
        "an exact target.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in COMMANDS:
        command.register(app)
    return app


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
        print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


app = build_app()


def main() -> None:
    """Run the command line; never returns."""
    warnings.showwarning = _one_line_warning
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows a mark instead
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()

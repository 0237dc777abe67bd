"""Where the command line begins: signals and streams first, then the imports."""

from __future__ import annotations

from surefoot.cli import process


def main() -> None:
    """Run the command line; never returns."""
    process.prepare()
    from surefoot.cli.app import run

    run()

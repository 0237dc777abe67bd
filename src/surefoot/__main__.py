"""`python -m surefoot`: the command line."""

from surefoot.cli.entry import main

main()

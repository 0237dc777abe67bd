"""`python -m surefoot`: the command line."""

from surefoot.cli.app import main

main()

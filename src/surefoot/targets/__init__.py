"""Targets: causal language models of transformers on flat tokens. `load_target` is where to start reading."""

from surefoot.targets.loading import TargetDescription, describe_target, load_target
from surefoot.targets.optimise import optimise
from surefoot.targets.target import Target, TargetOutput

__all__ = ["Target", "TargetDescription", "TargetOutput", "describe_target", "load_target", "optimise"]

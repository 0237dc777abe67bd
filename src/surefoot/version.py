"""The version of this package, where every module can read it without importing the package's own exports."""

__version__ = "0.1.0"

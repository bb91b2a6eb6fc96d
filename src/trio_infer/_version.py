"""The one place that holds the version (hatch reads it; `--version` and `/v2` say it)."""

__version__ = "0.1.0"

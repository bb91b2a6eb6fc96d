"""Watching requests' lives: counters and logs."""

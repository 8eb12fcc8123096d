"""Seconds and bytes: what a plan costs on a cluster. Each formula carries its source."""

"""Reads of a forward beside its arguments, and the state that it keeps for its next call."""

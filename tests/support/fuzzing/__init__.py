"""Odd inputs, and what a command answers to them."""

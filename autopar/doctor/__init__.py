"""Findings that keep a model from a plan, or a plan from being good, which `autopar doctor` lists before any plan is made.

Start at `examine.py`; `findings.py` has one function per kind of finding. Imports capture, rules and the registry of the user.
"""

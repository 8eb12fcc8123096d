"""The commands on other software: ``plan --for``, ``fit`` and ``compare-clusters``, which print what ``autopar.software`` says."""

"""The commands on other software: ``plan --for``, ``fit`` and ``compare-clusters``. They print what ``autopar.software`` says."""

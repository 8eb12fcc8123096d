"""What tests use: models, plans, oracles to compare with, and the harness that runs programs on forked ranks."""

"""Why a plan is as it is: what its step and its memory are made of, and what one change would do."""

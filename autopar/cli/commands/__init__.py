"""The subcommands of `autopar`: one module per command, whose `run(arguments, console)` returns the exit status.

`cli/parser.py` names the module of each command, which is imported only when it runs; `models` and `clusters` share `listing`,
and `trace` and `compare` are in `report`. Commands call `autopar.planning`, `explain`, `dryrun`, `validate` and `cost_models`,
and print with `cli/tables`.
"""

"""Communication costs: collectives on network links (start at `collectives.collective_seconds`), placement conversions, and the
process groups of sharded state and experts. Prices come from the formulas in `formulas`, links from `hardware`. Imports
`formulas`, `hardware`, `tensors`, and `autopar.rules` for which collective a conversion runs."""

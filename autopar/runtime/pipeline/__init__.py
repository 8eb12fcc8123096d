"""Pipeline parallelism: base classes of the generated stages and the text of a schedule (`stage_modules`), what runs it
(start at `executor`), gradient reductions, and steps with two weight versions. A *stage* is one rank of the pipeline axis; it
holds one or more *model chunks*. Imports all other rooms."""

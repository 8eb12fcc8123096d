"""Operations whose sharded form is another algorithm than the local one: attention (`attention`), mixtures of
experts (`experts`, `expert_parallel`), vocabulary-parallel losses and tables (`functions`), and linear layers with a split
backward. Imports `device` and `compat`."""

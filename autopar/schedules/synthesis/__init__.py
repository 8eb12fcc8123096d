"""The parts of schedule synthesis beside its CP-SAT model: the task (chunk times, memory limits), a lower bound of the makespan,
the known schedules and a greedy list scheduler as first solutions, and the merge of split backwards. Start in `task`. It imports
the rooms `ir` and `schedules`; the solver's model is `autopar.solve.pipeline.synthesize`."""

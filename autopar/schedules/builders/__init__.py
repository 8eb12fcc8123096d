"""Files of the named schedules, each with a `ScheduleBuilder` called ``BUILDER``: its name, its actions, and what the search has
to know of it. `autopar.schedules.pipeline_schedule` lists this folder, so that a new schedule is a new file and no other edit.
Files import `schedules.builder`, which has the orders that several share, and never each other."""

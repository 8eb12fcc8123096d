"""The library that a generated program runs on: collectives, state, pipeline schedules. It needs torch and the standard library
only, so that `autopar export` can copy the folder beside the program.

Start at `parallel` (the user's nn.Module, whose `calls` find their program in `variants`) and `module` (base classes of the
generated text); `collectives` is the namespace ``C`` of that text; `patches` is what is changed in torch. Rooms import in this
order: `device`, `comm`, `ops`, `state`, `experts`, `step`, `pipeline`, `plain`; imports are relative."""

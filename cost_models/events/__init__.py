"""The description of a training step: the events at which memory may peak, and the transfers of parameter state in each pass.

It is data, without numbers. Three kinds of code interpret it: the evaluator (`cost_models.step`) plays it with the bytes and
seconds of one plan, the integer program (``solve.ilp``) sums the same terms as linear expressions, and bounds (``solve.bounds``)
leave terms out. Imports `state` beside it.
"""

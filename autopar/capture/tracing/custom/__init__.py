"""Custom ``autograd.Function``s of a model: `functions` traces their forward and their backward (start there), in the mode of
`backward_mode`; `linear` refuses backwards of the exported program that are not linear in the gradient."""

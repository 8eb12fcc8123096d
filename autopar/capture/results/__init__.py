"""The results of a captured call. `returned` takes a model's result apart into its loss and the tensors beside it, and is where
to start; `loss_name` reads in the model's source which of several scalars is called the loss. Imports nothing of the tracing.
"""

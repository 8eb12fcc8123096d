"""Questions that a forward asks of the data of tensors, and of their sizes, while it is traced: what can be answered, what need
not be asked, and for which batches an answer holds."""

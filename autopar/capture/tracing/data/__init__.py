"""Questions that a forward asks of the data of tensors while it is traced: what can be answered, and what need not be asked."""

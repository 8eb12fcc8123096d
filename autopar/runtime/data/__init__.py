"""The sampler of a parallel model (`samplers`): batches of like lengths (`length_sampler`), and rows of packed documents
(`packed_sampler`), with one place in the data (`epoch_sampler`)."""

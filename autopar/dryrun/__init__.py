"""One rank of any cluster on fake tensors: the peak memory and the collectives of the very program that would run there."""

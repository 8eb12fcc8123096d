"""This rank's place: the device mesh and its axes (start at `mesh`), host memory for offloading, and random streams that agree
between replicas. Imports only `compat` and `errors`."""

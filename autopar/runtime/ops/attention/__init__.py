"""Attention on shards. Start in `sharded` (queries of some heads or rows against all keys) or `ring` (keys and values travel);
`rectangles` cuts what is visible, `kernels` attends to one rectangle, `merge` puts results together."""

"""Attention on shards. Start in `sharded` (queries of some heads or rows against all keys) or `ring` (keys and values travel);
`rectangles` cuts what is visible, `merge` attends to each rectangle and puts results together."""

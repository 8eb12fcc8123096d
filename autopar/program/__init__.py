"""The lowered program as readable Python: text, module, exported folder."""

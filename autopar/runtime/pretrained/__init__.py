"""Weights in Hugging Face's layout of safetensors files: `export` writes them from shards (`parallel.save_pretrained`), `load`
reads them into shards (`parallel.load_pretrained`, ``parallelize(state=folder)``): each rank reads its own part.

`weight_files` reads a folder, `layout` says how an export is divided into files and finished.
`conversions` is what transformers renames and stacks when it loads, `stacked` a weight that is several of the files. Nothing is
unpickled. Imports device, comm, state and checkpoint."""

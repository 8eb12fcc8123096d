"""Graphs, programs and models that tests plan and train: written by hand, small ones, and Hugging Face and diffusers families."""

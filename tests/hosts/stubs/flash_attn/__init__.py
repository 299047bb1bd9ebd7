"""In place of flash-attn, which needs a GPU to build: what OpenRLHF imports of it, without its loss kernel."""
